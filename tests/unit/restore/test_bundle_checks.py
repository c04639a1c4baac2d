from pathlib import Path

import pytest

from snaporch.errors import RefusedError
from snaporch.restore.bundle_checks import check_bundle
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot


def plan(world, name="s1", **more):
    return make_restore_plan(world.context, "web", name, discard_newer=True, **more)


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_flipped_bit_in_ram_is_found_before_anything_is_touched(story, world):
    flip(Path(story.record.bundle) / "ram.save")
    with pytest.raises(RefusedError, match=r"damaged; boot from the disks with --cold"):
        check_bundle(world.context, plan(world))
    assert world.hooks.log == []


def test_a_cold_restore_does_not_need_ram(story, world):
    flip(Path(story.record.bundle) / "ram.save")
    check_bundle(world.context, plan(world, cold=True))
    assert "damaged" in world.heard.notes[-1]


@pytest.mark.parametrize("part", ["domain.xml", "nvram.fd"])
@pytest.mark.parametrize("how", [{"cold": True}, {"disks_only": True}])
def test_a_damaged_part_that_would_be_put_back_is_refused_without_despite_damage(
    world, tmp_path, part, how
):
    (tmp_path / "vars.fd").write_bytes(b"boot order")
    world.add_guest(nvram=str(tmp_path / "vars.fd"))
    domain = world.hypervisor.domain("web")
    record = take_snapshot(world.context, domain, SnapshotRequest("s1"))
    flip(Path(record.bundle) / part)
    world.hooks.log.clear()
    with pytest.raises(RefusedError, match=r"damaged; .* --despite-damage"):
        check_bundle(world.context, plan(world, **how))
    assert world.hooks.log == []
    checked = check_bundle(world.context, plan(world, **how), despite_damage=True)
    assert part not in {each.name for each in checked.parts}
    assert f"{part}: its SHA-256" in world.heard.notes[-1]
    assert world.heard.notes[-1].endswith("it is not put back")


def test_a_definition_that_is_not_put_back_may_be_damaged(story, world):
    flip(Path(story.record.bundle) / "domain.xml")
    check_bundle(world.context, plan(world, cold=True, keep_definition=True))


def test_ram_is_not_resumed_despite_damage(story, world):
    flip(Path(story.record.bundle) / "domain.xml")
    with pytest.raises(RefusedError, match="--cold"):
        check_bundle(world.context, plan(world), despite_damage=True)


def test_a_complete_bundle_passes(story, world):
    check_bundle(world.context, plan(world))
    assert world.hooks.log == []


def test_the_bytes_of_the_checksums_and_of_the_safety_copy_are_reported(story, world):
    check_bundle(world.context, plan(world))
    size = sum(part.bytes for part in plan(world).manifest.parts)
    assert world.heard.amounts[-1] == (size, size)
    world.heard.amounts.clear()
    restore(world.context, plan(world), safety=True)
    assert len(world.heard.amounts) >= len(story.datasets), "one for each dataset's stream"
