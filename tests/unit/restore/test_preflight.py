"""What the host must have, and where files may be put."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from snaporch.errors import RefusedError, SnaporchError
from snaporch.model import DatasetKind, DomainState
from snaporch.restore import preflight
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.preflight import is_read_only
from snaporch.restore.run import check_bundle, restore
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import resolver
from snaporch.zfs.resolver import NotOnZfsError

NOTHING = "MemAvailable:       1024 kB\n"


def plan(world, **how):
    return make_restore_plan(world.context, "web", "s1", **how)


def refusal(world, **how):
    with pytest.raises(RefusedError) as caught:
        plan(world, **how)
    assert world.hooks.log == []
    return str(caught.value)


@pytest.fixture
def memory(world, monkeypatch):
    """Sets what the host says of its memory."""

    def tell(meminfo, arcstats=""):
        for name, text in (("_MEMINFO", meminfo), ("_ARCSTATS", arcstats)):
            path = world.root / name
            path.write_text(text)
            monkeypatch.setattr(preflight, name, path)

    return tell


def test_a_machine_that_is_not_here(story, world):
    world.hypervisor.machines = {"pc"}
    world.hypervisor.guests.clear()
    said = refusal(world)
    assert "this host cannot run it: the machine 'pc-q35-9.2' is not supported" in said
    assert "--cold" in said
    assert "--cold" not in refusal(world, cold=True)
    assert plan(world, disks_only=True)


def test_a_cpu_that_is_not_here(story, world):
    world.hypervisor.cpu_misfit = "the CPU is incompatible: avx512f"
    world.hypervisor.guests.clear()
    assert "avx512f" in refusal(world)


def test_a_guest_that_saw_the_host_s_cpu_is_not_resumed_on_another(world, tell):
    """It would fail after the rollback; that it runs here now, from its disks, says nothing."""
    guest = world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    own = guest.live_xml.replace("</os>", "</os><cpu mode='host-passthrough'/>")
    world.add_guest = lambda **_: replace(guest, live_xml=own)
    world.guest().live = world.guest().inactive = own
    tell()
    assert plan(world).ram
    world.hypervisor.cpu = "<cpu><model>Opteron_G5</model></cpu>"
    said = refusal(world)
    assert "this host cannot run it" in said
    assert "boot it from its disks with --cold" in said
    assert plan(world, cold=True).boot
    assert plan(world, disks_only=True)


def test_a_guest_with_a_cpu_of_its_own_goes_anywhere(story, world):
    world.hypervisor.cpu = "<cpu><model>Opteron_G5</model></cpu>"
    assert plan(world).ram


def test_what_runs_now_fits_whatever_a_comparison_says(story, world):
    world.hypervisor.cpu_misfit = "the CPU is incompatible: avx512f"
    assert plan(world).ram
    world.guest().live = world.guest().live.replace("pc-q35-9.2", "pc")
    assert "avx512f" in refusal(world)


def test_memory_that_is_not_there(story, world, memory):
    memory(NOTHING)
    world.hypervisor.guests.clear()
    assert "needs 16 MiB of memory, 1 MiB can be had; stop other guests" in refusal(
        world, cold=True
    )
    assert plan(world, disks_only=True)


def test_a_resumed_guest_needs_what_is_in_its_image(story, world, memory):
    """20 000 bytes, and not the 16 MiB of its definition."""
    memory(NOTHING)
    world.hypervisor.guests.clear()
    assert plan(world).ram


def test_the_memory_of_the_guest_that_is_stopped_counts(story, world, memory):
    memory(NOTHING)
    world.guest().ram = bytes(16 << 20)
    assert plan(world, cold=True).boot


def test_what_zfs_would_cede_counts(memory):
    memory(NOTHING, "size  4  5368709120\nc_min 4  1073741824\nname type data\n")
    assert preflight.available_memory() == (4 << 30) + (1 << 20)


def test_without_an_arc_the_kernels_figure_counts(memory, world, monkeypatch):
    memory(NOTHING)
    monkeypatch.setattr(preflight, "_ARCSTATS", world.root / "absent")
    assert preflight.available_memory() == 1 << 20


# -- huge pages -------------------------------------------------------------------------------


@pytest.fixture
def huge(world, monkeypatch, memory):
    """The guest is on huge pages, and the host has so many of them free."""
    memory(NOTHING + "Hugepagesize:       2048 kB\n")
    monkeypatch.setattr(preflight, "_HUGE_PAGES", world.root / "hugepages")

    def tell(backing, free, reserved=0, surplus=(0, 0), size=2048):
        place = world.root / "hugepages" / f"hugepages-{size}kB"
        place.mkdir(parents=True, exist_ok=True)
        figures = ("free_hugepages", "resv_hugepages", "surplus_hugepages")
        for name, value in zip(figures, (free, reserved, surplus[0]), strict=True):
            (place / name).write_text(f"{value}\n")
        (place / "nr_overcommit_hugepages").write_text(f"{surplus[1]}\n")
        guest = world.guest()
        for name in ("live", "inactive"):
            text = re.sub("<memoryBacking>.*</memoryBacking>", "", getattr(guest, name))
            text = text.replace("<os>", f"<memoryBacking>{backing}</memoryBacking><os>")
            setattr(guest, name, text)
        take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("huge"))
        return make_restore_plan(world.context, "web", "huge", cold=True, discard_newer=True)

    return tell


TWO_MIB = "<hugepages><page size='2048' unit='KiB'/></hugepages>"


@pytest.mark.parametrize("backing", ["<hugepages/>", TWO_MIB])
@pytest.mark.parametrize("resumed", [True, False])
def test_memory_of_huge_pages_is_counted_in_huge_pages(story, world, huge, backing, resumed):
    """The kernel does not count them as available; the host has 1 MiB besides."""
    world.guest().state = DomainState.RUNNING
    huge(backing, 8)
    world.hypervisor.guests.clear()
    how = {"cold": not resumed}
    assert make_restore_plan(world.context, "web", "huge", **how)
    (world.root / "hugepages" / "hugepages-2048kB" / "free_hugepages").write_text("7")
    with pytest.raises(RefusedError, match="needs 8 huge pages of 2048 KiB, 7 can be had"):
        make_restore_plan(world.context, "web", "huge", **how)


def test_huge_pages_of_the_guest_that_is_stopped_count(story, world, huge):
    assert huge(TWO_MIB, 0)


def test_huge_pages_that_are_promised_to_others_do_not_count(story, world, huge):
    huge(TWO_MIB, 9, reserved=2)
    world.hypervisor.guests.clear()
    with pytest.raises(RefusedError, match="8 huge pages of 2048 KiB, 7 can be had"):
        make_restore_plan(world.context, "web", "huge", cold=True)


def test_huge_pages_that_the_kernel_makes_when_asked_count(story, world, huge):
    huge(TWO_MIB, 0, surplus=(2, 10))
    world.hypervisor.guests.clear()
    assert make_restore_plan(world.context, "web", "huge", cold=True)


def test_what_is_not_on_huge_pages_is_counted_as_ever(story, world, huge):
    """One node of two."""
    half = TWO_MIB.replace("/>", " nodeset='0'/>", 1)
    cells = "<cpu><numa><cell id='0' memory='8192'/><cell id='1' memory='8192'/></numa></cpu>"
    guest = world.guest()
    guest.live, guest.inactive = (
        text.replace("<os>", f"{cells}<os>") for text in (guest.live, guest.inactive)
    )
    huge(half, 4)
    world.hypervisor.guests.clear()
    with pytest.raises(RefusedError, match="needs 8 MiB of memory, 1 MiB can be had"):
        make_restore_plan(world.context, "web", "huge", cold=True)


# -- places -------------------------------------------------------------------------------------


@pytest.fixture
def firmware(world, tell):
    """A guest with UEFI variables and a TPM."""
    nvram, tpm = world.root / "vars.fd", world.root / "tpm2"
    nvram.write_bytes(b"then")
    tpm.mkdir()
    (tpm / "tpm2-00.permall").write_bytes(b"secret")
    return tell(nvram=str(nvram), tpm=str(tpm))


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_what_is_no_regular_file_is_not_replaced(firmware, world, kind):
    place = world.root / "vars.fd"
    place.unlink()
    match kind:
        case "link":
            place.symlink_to("/etc/hostname")
        case "directory":
            place.mkdir()
        case "pipe":
            os.mkfifo(place)
    assert "vars.fd is not a regular file" in refusal(world)


@pytest.mark.parametrize("kind", ["device", "other"])
def test_the_disks_alone_come_back_where_variables_have_no_place(firmware, world, kind):
    """Of an earlier snaporch there are copies of UEFI variables on a volume."""
    place, manifest = world.root / "zvol", Path(firmware.record.bundle) / "manifest.json"
    place.symlink_to("/dev/null")
    if kind == "device":
        variables = str(world.root / "vars.fd")
        manifest.write_text(manifest.read_text().replace(variables, str(place)))
    else:
        world.add_guest("mail", {"vda": "tank/mail"}, nvram=str(world.root / "vars.fd"))
    world.hooks.log.clear()
    for way in ({}, {"cold": True}):
        assert "or restore with --disks-only, which leaves it as it is" in refusal(world, **way)
    made = check_bundle(world.context, plan(world, disks_only=True))
    assert any("nvram.fd stays as it is" in line for line in made.losses(world.context))
    assert any("nvram.fd stays as it is" in text for text in world.heard.notes)
    (world.root / "vars.fd").write_bytes(b"now")
    (world.root / "tpm2" / "tpm2-00.permall").write_bytes(b"now")
    restore(world.context, made, safety=True)
    assert firmware.content() == {b"first"}
    assert (world.root / "vars.fd").read_bytes() == b"now"
    assert (world.root / "tpm2" / "tpm2-00.permall").read_bytes() == b"secret"
    assert place.is_symlink()


def test_a_file_that_is_gone_may_be_put_back(firmware, world):
    (world.root / "vars.fd").unlink()
    assert plan(world).ram


def test_variables_that_another_domain_uses(firmware, world):
    world.add_guest("mail", {"vda": "tank/mail"}, nvram=str(world.root / "vars.fd"))
    assert "is used by the domain mail" in refusal(world)


def test_a_tpm_that_another_domain_uses(firmware, world):
    world.add_guest("mail", {"vda": "tank/mail"}, tpm=str(world.root / "tpm2"))
    assert "is used by the domain mail" in refusal(world)


def test_a_place_that_the_definition_does_not_name(firmware, world):
    """A manifest may say anything; what libvirt would run decides."""
    path = Path(firmware.record.bundle) / "manifest.json"
    path.write_text(path.read_text().replace(str(world.root / "vars.fd"), "/etc/passwd"))
    assert "its nvram belongs to /etc/passwd, which is not what" in refusal(world)


def test_a_dataset_that_is_not_mounted(story, world, monkeypatch):
    """As it is without its key: it could be rolled back, and the guest not be started."""

    def nowhere(dataset):
        raise NotOnZfsError(dataset, "is not mounted", "")

    monkeypatch.setattr(resolver, "mount_point_of", nowhere)
    said = refusal(world)
    assert "is not mounted; zfs mount -l " in said
    assert plan(world, disks_only=True, also_roll_back=True)


def test_a_volume_without_a_node(story, world):
    for name in story.datasets:
        world.pool._datasets[name].kind = DatasetKind.VOLUME
    assert plan(world)
    (world.root / "zfs/tank/web/web-vda.img").unlink()
    assert "the volume tank/web is not at" in refusal(world, cold=True)


@pytest.fixture
def read_only(monkeypatch):
    """Makes the file system of a directory read-only, in the eyes of who asks."""
    places, ask = set(), os.statvfs

    def answer(path):
        found = ask(path)
        flag = os.ST_RDONLY if any(Path(path).is_relative_to(place) for place in places) else 0
        return SimpleNamespace(f_flag=found.f_flag | flag)

    monkeypatch.setattr(preflight.os, "statvfs", answer)
    return places


@pytest.mark.parametrize("how", [{}, {"cold": True}])
def test_a_dataset_that_was_made_read_only(story, world, read_only, how):
    """A rollback does not mind; the guest could not be started after it."""
    assert plan(world, **how)
    read_only.add(world.root / "zfs/flash/web")
    said = refusal(world, **how)
    assert "flash/web is read-only" in said
    assert "zfs set readonly=off flash/web, or use --disks-only" in said
    assert plan(world, disks_only=True)


@pytest.mark.parametrize("told", ["0", "1"])
def test_a_device_says_itself_whether_it_is_read_only(monkeypatch, tmp_path, told):
    """The numbers of /dev/null stand for a volume's."""
    (tmp_path / "1:3").mkdir()
    (tmp_path / "1:3" / "ro").write_text(f"{told}\n")
    monkeypatch.setattr(preflight, "_BLOCK_DEVICES", tmp_path)
    monkeypatch.setattr(preflight.stat, "S_ISBLK", lambda _mode: True)
    assert is_read_only(Path("/dev/null")) is (told == "1")


def test_variables_on_a_file_system_that_was_made_read_only(firmware, world, read_only):
    read_only.add(world.root)
    said = refusal(world, cold=True)
    assert "read-only, and vars.fd has to go there" in said
    made = plan(world, disks_only=True)
    assert any("stays as it is" in line for line in made.losses(world.context))


# -- what the paths lead to ----------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"cold": True}, {"disks_only": True}])
def test_a_path_that_leads_to_another_dataset_now(story, world, how):
    """Rolling back the one that nobody uses any more would restore nothing."""
    image = Path(story.domain.disks[0].source)
    image.unlink()
    image.symlink_to(world.image("flash/moved", "web.img"))
    said = refusal(world, **how)
    assert "was tank/web web-vda.img, and leads to flash/moved web.img now" in said


@pytest.mark.parametrize("how", [{}, {"disks_only": True}])
def test_a_link_that_leads_to_another_file_of_the_dataset_now(story, world, how):
    image = Path(story.domain.disks[0].source)
    image.rename(image.with_name("old.img"))
    image.symlink_to("old.img")
    assert "leads to tank/web old.img now" in refusal(world, **how)


def test_a_path_that_is_not_on_zfs_now(story, world):
    image = Path(story.domain.disks[0].source)
    image.unlink()
    image.symlink_to(world.root / "elsewhere.img")
    (world.root / "elsewhere.img").touch()
    assert "not on ZFS" in refusal(world, disks_only=True)


def test_an_image_that_was_deleted_since_comes_back(story, world):
    Path(story.domain.disks[0].source).unlink()
    assert plan(world)


def test_a_path_to_nothing_that_would_be_elsewhere(story, world):
    image = Path(story.domain.disks[0].source)
    image.unlink()
    image.symlink_to(world.root / "gone.img")
    assert "gone.img now" in refusal(world)


def test_a_bundle_that_does_not_say_which_file_it_was(story, world):
    """One of an older snaporch; its dataset is looked at all the same."""
    path = Path(story.record.bundle) / "manifest.json"
    path.write_text(re.sub(r'"inside": *"[^"]*",', "", path.read_text()))
    assert plan(world)
    image = Path(story.domain.disks[0].source)
    image.unlink()
    image.symlink_to(world.image("flash/moved", "web.img"))
    assert "leads to flash/moved web.img now" in refusal(world)


# -- a guest that has other disks now -----------------------------------------------------------


@pytest.fixture
def moved(story, world):
    """It was moved to another dataset, and its old image stayed."""
    world.add_guest(disks={"vda": "tank/moved", "vdb": "flash/web"})
    world.hooks.log.clear()
    return story


@pytest.mark.parametrize("how", [{"cold": True}, {"disks_only": True}])
def test_a_guest_that_stays_defined_with_other_disks(moved, world, how):
    """What nobody uses would be rolled back, and the guest be booted from what was not."""
    assert check_bundle(world.context, plan(world, **how))
    (Path(moved.record.bundle) / "domain.xml").write_text("<damaged/>")
    with pytest.raises(RefusedError, match=r"that stays does not name .*web-vda[.]img"):
        check_bundle(world.context, plan(world, **how), despite_damage=True)
    world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    assert check_bundle(world.context, plan(world, **how), despite_damage=True)


def test_a_guest_of_which_only_snapshots_are_left_and_that_has_other_disks(story, world):
    shutil.rmtree(story.record.bundle)
    assert plan(world, cold=True)
    world.add_guest(disks={"vda": "flash/web"})
    world.hooks.log.clear()
    assert "is of tank/web, where the guest has no disk any more" in refusal(world, cold=True)


# -- volumes that others use ---------------------------------------------------------------------


@pytest.fixture
def volume(story, world, monkeypatch):
    """``tank/web`` as a volume; what holds its device, and its partitions."""
    world.pool._datasets["tank/web"].kind = DatasetKind.VOLUME
    said = {"holder": "", "partitions": frozenset()}
    monkeypatch.setattr(
        preflight.volume_users,
        "holder_of",
        lambda name: said["holder"] if name == "tank/web" else "",
    )
    monkeypatch.setattr(preflight.volume_users, "partitions", lambda _name: said["partitions"])
    return said


def test_a_volume_that_the_host_uses_is_not_rolled_back(volume, world):
    assert plan(world)
    volume["holder"] = "dm-3"
    for how in ({}, {"cold": True}, {"disks_only": True}, {"also_roll_back": True}):
        assert "tank/web would be rolled back beneath this host, which uses it: dm-3" in refusal(
            world, **how
        )


@pytest.mark.parametrize("dataset", ["tank/web", "flash/web"])
def test_nor_is_anything_beneath_a_loop_device(volume, world, monkeypatch, dataset):
    """An image that is mounted by hand, say; no process has it open."""
    monkeypatch.setattr(preflight.volume_users, "loops", lambda: iter([("loop7", dataset)]))
    assert f"{dataset} would be rolled back beneath this host, which uses it: loop7" in refusal(
        world
    )


def test_one_that_it_uses_since_the_plan_is_not_either(volume, world):
    made = plan(world, cold=True)
    world.hooks.at["hypervisor.destroy"] = lambda: volume.update(holder="swap")
    before = world.pool.read("tank/web")
    with pytest.raises(SnaporchError, match="which uses it: swap"):
        restore(world.context, made, safety=False)
    assert world.pool.read("tank/web") == before


def test_partitions_beside_the_guests_are_not_rolled_back_unasked(
    volume, story, world, monkeypatch
):
    volume["partitions"] = frozenset({1, 2, 3})
    assert plan(world)  # the guest has all of it
    monkeypatch.setattr(resolver, "partition", lambda _path: 2)
    path = Path(story.record.bundle) / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["disks"][0].pop("inside")
    manifest["disks"][0]["partition"] = 2
    path.write_text(json.dumps(manifest))
    assert "tank/web would be rolled back with partition 1, 3 of it" in refusal(world)
    assert plan(world, also_roll_back=True)
    volume["partitions"] = frozenset({2})
    assert plan(world)
