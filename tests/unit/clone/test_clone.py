import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from fakes.domain_xml import DiskSpec
from fakes.hooks import failing
from fakes.images import qcow2

from snaporch.bundle.manifest import Role
from snaporch.bundle.store import replace_manifest
from snaporch.clone.clone import (
    CloneRequest,
    check_clone,
    check_parts,
    clone,
    clone_dataset,
    dataset_name,
)
from snaporch.clone.delete import delete_clone
from snaporch.clone.find_clones import Purpose, new_clone, remove, remove_unfinished
from snaporch.errors import (
    AttentionError,
    BusyError,
    InterruptedRunError,
    NotFoundError,
    RefusedError,
    RunFailedError,
    UsageError,
)
from snaporch.hypervisor import HypervisorError
from snaporch.hypervisor.clone_xml import SharedError, clone_of
from snaporch.hypervisor.domain_xml import disks, parse, tpm_state
from snaporch.model import DatasetKind, DomainState, TpmState
from snaporch.restore.source import (
    IncompleteError,
    complete_source,
    find_records,
    image_path_in_dataset,
)
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import BlockingMount, MountedError, PoolError
from snaporch.zfs_names import quoted


def source(world, text="web@s1"):
    return complete_source(world.context, find_records(world.context, text)[-1])


def make(world, name="test", *, resumed=True, text="web@s1", network="none", **more):
    request = CloneRequest(name, resumed=resumed, network=network, **more)
    check_clone(world.context, source(world, text), request)
    return clone(world.context, source(world, text), request)


def datasets(world):
    return sorted(dataset.name for dataset in world.pool.datasets())


def nothing_of_it(world):
    """Whether nothing of a clone is left, only the original."""
    names = [guest.name for guest in world.hypervisor.guests.values()]
    files = list(world.paths.clones.glob("*")) if world.paths.clones.exists() else []
    locks = [
        path for path in world.paths.runtime.glob("*.lock") if world.domain_uuid not in str(path)
    ]
    return (names, datasets(world), files, locks) == (["web"], ["flash/web", "tank/web"], [], [])


@pytest.fixture(autouse=True)
def original(story, world):
    world.domain_uuid = story.domain.uuid
    return story


# -- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("origin", "name", "made"),
    [
        ("tank/vm/web", "test", "tank/vm/web-test"),
        ("tank/web/data", "test", "tank/web/data-test"),
        ("tank", "test", "tank/tank-test"),
    ],
)
def test_a_clone_lies_beside_its_origin(origin, name, made):
    assert dataset_name(origin, name) == made


def test_names_that_zfs_does_not_allow_give_different_datasets():
    first, second = dataset_name("tank/web", "a b"), dataset_name("tank/web", "a@b")
    assert first != second
    assert all(re.fullmatch(r"tank/web-a_b-[0-9a-f]{8}", name) for name in (first, second))


# -- without failures ---------------------------------------------------------------------------


def test_a_resumed_clone_is_where_the_original_was(original, world):
    made = make(world)
    guest = world.guest("test")
    assert guest.ram == original.ram
    assert guest.state is DomainState.RUNNING
    assert guest.uuid == made.uuid != original.domain.uuid
    assert made.datasets == {"flash/web": "flash/web-test", "tank/web": "tank/web-test"}
    assert {world.pool.read(name) for name in made.datasets.values()} == {b"first"}


def test_it_has_no_file_of_the_original(original, world):
    make(world)
    for xml in (world.guest("test").live, world.guest("test").inactive):
        assert xml is not None
        paths = {disk.source for disk in disks(parse(xml))}
        assert all(Path(path).is_file() for path in paths)
        assert not paths & {disk.source for disk in original.domain.disks}


def test_the_original_is_left_alone(original, world):
    before = world.guest("web").live, world.guest("web").inactive
    make(world)
    assert (world.guest("web").live, world.guest("web").inactive) == before
    assert world.guest("web").state is DomainState.RUNNING
    assert original.content() == {b"now"}


def test_nothing_is_rolled_back_while_a_snapshot_is_cloned(original, world):
    tried = original.refused_rollbacks("hypervisor.restore")
    make(world)
    assert tried


def test_a_cold_clone_is_defined_and_off(world):
    made = make(world, resumed=False)
    guest = world.guest("test")
    assert (guest.live, guest.state) == (None, DomainState.OFF)
    assert clone_of(guest.inactive) == "web@s1"
    assert not made.resumed


def test_every_dataset_of_a_clone_has_its_properties(world):
    made = make(world)
    names = ["snaporch:clone", "snaporch:clone-name", "snaporch:clone-of", "mountpoint"]
    found = world.pool.local_properties(names)
    assert set(found) == set(made.datasets.values())
    for index, name in enumerate(made.datasets.values()):
        assert found[name] == {
            "snaporch:clone": made.uuid,
            "snaporch:clone-name": "test",
            "snaporch:clone-of": "web@s1",
            "mountpoint": str(world.paths.clones / made.uuid / f"disk{index}"),
        }


def test_no_copy_of_the_ram_and_no_mark_stay(world):
    made = make(world)
    left = sorted(path.name for path in (world.paths.clones / made.uuid).iterdir())
    assert left == ["disk0", "disk1"]


def came_back(world, snapshot="s1"):
    """The snapshots came from a replica."""
    names = [f"tank/web@{snapshot}", f"flash/web@{snapshot}"]
    world.pool.set_properties(names, {"snaporch:copy": "nas"})


def test_files_of_another_host_cannot_be_run(world):
    came_back(world)
    make(world)
    found = world.pool.local_properties(["exec", "setuid", "devices"])
    assert found["tank/web-test"] == {"exec": "off", "setuid": "off", "devices": "off"}


@pytest.mark.parametrize(
    ("above", "element"),
    [
        ("os", "<kernel>/etc/shadow</kernel>"),
        ("devices", "<interface type='user'><rom file='/etc/shadow'/></interface>"),
    ],
)
def test_a_clone_of_what_came_from_another_host_names_no_file_of_this_one(world, above, element):
    """The definition may be forged: the guest would read the file."""
    text = world.guest().inactive.replace(f"</{above}>", f"{element}</{above}>")
    world.guest().inactive = text
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s2"))
    assert make(world, "own", text="web@s2", resumed=False).uuid
    came_back(world, "s2")
    with pytest.raises(SharedError) as caught:
        make(world, text="web@s2", resumed=False)
    said = caught.value.line()
    assert "its XML names '/etc/shadow', which would be of this host" in said
    assert said.endswith("restore it, which names what of this host you would have to accept")
    assert not any(guest.name == "test" for guest in world.hypervisor.guests.values())


def with_own(world, above, element):
    """Take ``web@s2`` of a guest whose definition has an element with a file of its dataset."""
    own = world.image("tank/web", "own")
    text = world.guest().inactive.replace(f"</{above}>", f"{element.format(own)}</{above}>")
    world.guest().inactive = text
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s2"))
    return own


def test_a_copy_that_boots_a_file_of_its_own_may_count_as_this_hosts_own(world):
    own = with_own(world, "os", "<kernel>{}</kernel>")
    assert make(world, "own", text="web@s2", resumed=False).uuid
    came_back(world, "s2")
    with pytest.raises(SharedError) as caught:
        make(world, text="web@s2", resumed=False)
    said = caught.value.line()
    assert f"its XML names {quoted(str(own))}, which would be of this host" in said
    assert "which retention may delete then" in said
    assert said.endswith("zfs inherit snaporch:copy flash/web@s2 tank/web@s2")


def test_what_else_a_definition_names_is_not_to_count_as_this_hosts_own(world):
    """The drive is emptied for a copy, and the clone is refused for another reason."""
    world.guest().inactive = world.guest().inactive.replace(
        "</devices>",
        "<disk type='file' device='cdrom'><source file='/etc/shadow'/><target dev='sda'/>"
        "<readonly/></disk></devices>",
    )
    with_own(world, "os", "<kernel>{}</kernel>")
    came_back(world, "s2")
    with pytest.raises(SharedError, match="which would be of this host") as caught:
        make(world, text="web@s2", resumed=False)
    assert "snaporch:copy" not in caught.value.line()


def test_a_link_out_of_its_dataset_is_not_to_count_as_this_hosts_own(world):
    """libvirt would follow it as root."""
    own = with_own(world, "os", "<kernel>{}</kernel>")
    came_back(world, "s2")
    link = world.snapshot_files("tank/web", "s2") / Path(own).name
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to("/etc/shadow")
    with pytest.raises(SharedError, match="which would be of this host") as caught:
        make(world, text="web@s2", resumed=False)
    assert "snaporch:copy" not in caught.value.line()


def test_no_mark_is_to_be_removed_where_that_would_not_help(world):
    """The mark also keeps retention from what came back."""
    text = world.guest().inactive.replace("</domain>", "<later path='/x'/></domain>")
    world.guest().inactive = text
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s2"))
    with pytest.raises(SharedError, match="which may belong to the host"):
        make(world, "own", text="web@s2", resumed=False)
    came_back(world, "s2")
    with pytest.raises(SharedError, match="which may belong to the host") as caught:
        make(world, text="web@s2", resumed=False)
    assert "snaporch:copy" not in caught.value.line()


def test_a_file_system_that_is_not_mounted_has_no_copy_count_as_this_hosts_own(world):
    """It has no disks, such as one of which another was cloned."""
    with_own(world, "os", "<kernel>{}</kernel>")
    came_back(world, "s2")
    world.image("tank/more", "x")
    world.pool.snapshot(["tank/more@s2"], {"snaporch:copy": "nas"})
    world.resolver.mount_points["tank/more"] = None
    found = source(world, "web@s2")
    more = [each for each in world.pool.snapshots() if each.full_name == "tank/more@s2"]
    found = replace(found, members=(*found.members, *more))
    with pytest.raises(SharedError, match="which would be of this host") as caught:
        check_clone(world.context, found, CloneRequest("test", resumed=False))
    assert "snaporch:copy" not in caught.value.line()


def test_no_mark_is_to_be_removed_of_a_copy_that_is_refused_with_it_or_without(world):
    memory = "<memory model='nvdimm'><source><path>{}</path></source></memory>"
    with_own(world, "devices", memory)
    came_back(world, "s2")
    with pytest.raises(SharedError, match="memory in a file") as caught:
        make(world, text="web@s2", resumed=False)
    assert "snaporch:copy" not in caught.value.line()


def test_owners_and_modes_of_another_hosts_firmware_are_not_used(world, tmp_path):
    """They may be forged, and root sets them."""
    variables = tmp_path / "web_VARS.fd"
    variables.write_bytes(b"then")
    variables.chmod(0o646)
    world.add_guest("efi", nvram=str(variables))
    with_tpm(world, tmp_path / "state")
    (tmp_path / "state").chmod(0o646)
    modes = {}
    for guest in ("efi", "tpm"):
        domain = world.hypervisor.domain(guest)
        taken = take_snapshot(world.context, domain, SnapshotRequest("s2"))
        for name in ("own", "came"):
            made = make(world, f"{guest}-{name}", text=f"{guest}@s2", resumed=False)
            path = world.paths.clones / made.uuid / "nvram.fd"
            if guest == "tpm":
                path = world.root / "swtpm" / made.uuid / "tpm2" / "state"
            modes[guest, name] = path.stat().st_mode & 0o777
            names = [f"{dataset}@s2" for dataset in taken.datasets]
            world.pool.set_properties(names, {"snaporch:copy": "nas"})
    assert modes == {
        ("efi", "own"): 0o646,
        ("efi", "came"): 0o600,
        ("tpm", "own"): 0o646,
        ("tpm", "came"): 0o600,
    }


def test_a_guest_that_was_paused_is_resumed_paused(world):
    world.add_guest("still", state=DomainState.PAUSED)
    take_snapshot(world.context, world.hypervisor.domain("still"), SnapshotRequest("s1"))
    make(world, text="still@s1")
    assert world.guest("test").state is DomainState.PAUSED


def test_uefi_variables_are_a_copy(world, tmp_path):
    variables = tmp_path / "web_VARS.fd"
    variables.write_bytes(b"then")
    world.add_guest("efi", nvram=str(variables))
    take_snapshot(world.context, world.hypervisor.domain("efi"), SnapshotRequest("s1"))
    variables.write_bytes(b"now")
    made = make(world, text="efi@s1")
    copy = world.paths.clones / made.uuid / "nvram.fd"
    assert copy.read_bytes() == b"then"
    assert str(copy) in world.guest("test").inactive


def test_uefi_variables_that_name_another_file_are_refused(world, tmp_path):
    variables = tmp_path / "web_VARS.fd"
    variables.write_bytes(qcow2(backing="/etc/shadow"))
    world.add_guest("efi", nvram=str(variables))
    take_snapshot(world.context, world.hypervisor.domain("efi"), SnapshotRequest("s1"))
    with pytest.raises(RefusedError, match="needs another file"):
        make(world, text="efi@s1", resumed=False)
    assert not list(world.paths.clones.glob("*"))


def with_tpm(world, place, level=None):
    """The guest ``tpm``, whose TPM had the state ``then`` in its snapshot ``s1``."""
    place.write_bytes(b"then")
    tpm = place if place.suffix != ".permall" else place.parent
    world.add_guest("tpm", tpm=str(tpm))
    domain = world.hypervisor.domain("tpm")
    return take_snapshot(world.context, domain, SnapshotRequest("s1", level))


def test_tpm_state_is_a_copy(world, tmp_path):
    (tmp_path / "tpm").mkdir()
    with_tpm(world, tmp_path / "tpm" / "tpm2-00.permall")
    made = make(world, text="tpm@s1")
    copy = world.root / "swtpm" / made.uuid / "tpm2" / "tpm2-00.permall"
    assert copy.read_bytes() == b"then"
    delete_clone(world.context, "test")
    assert not (world.root / "swtpm" / made.uuid).exists()
    assert (tmp_path / "tpm" / "tpm2-00.permall").read_bytes() == b"then"


@pytest.mark.parametrize("resumed", [True, False])
def test_tpm_state_in_one_file_is_a_copy(world, tmp_path, resumed):
    original = tmp_path / "state"
    with_tpm(world, original)
    original.write_bytes(b"now")
    made = make(world, text="tpm@s1", resumed=resumed)
    copy = world.root / "swtpm" / made.uuid / "tpm2" / "state"
    assert copy.read_bytes() == b"then"
    for xml in filter(None, (world.guest("test").live, world.guest("test").inactive)):
        assert tpm_state(parse(xml)) == TpmState(str(copy), is_file=True)
    delete_clone(world.context, "test")
    assert not (world.root / "swtpm" / made.uuid).exists()
    assert original.read_bytes() == b"now"


@pytest.mark.parametrize("resumed", [True, False])
def test_a_guest_whose_tpm_cannot_be_redirected_is_not_cloned(world, resumed):
    """Nor if only the definition has it, which a resumed clone boots from later."""
    world.add_guest("tpm")
    take_snapshot(world.context, world.hypervisor.domain("tpm"), SnapshotRequest("s1"))
    there = source(world, "tpm@s1")
    external = "<tpm><backend type='external'><source type='unix' path='/s'/></backend></tpm>"
    text = there.text(Role.INACTIVE_XML).replace("</devices>", f"{external}</devices>")
    (there.directory / "domain.xml").write_text(text)
    parts = [
        part.model_copy(update={"bytes": len(text)}) if part.role is Role.INACTIVE_XML else part
        for part in there.manifest.parts
    ]
    replace_manifest(there.directory, there.manifest.model_copy(update={"parts": tuple(parts)}))
    world.hooks.log.clear()
    with pytest.raises(SharedError, match="state of its TPM cannot be captured"):
        make(world, text="tpm@s1", resumed=resumed)
    assert world.hooks.log == []


@pytest.mark.parametrize("place", ["gone", "elsewhere"])
def test_a_clone_does_not_boot_with_another_tpm(world, tmp_path, place):
    """A bundle of an earlier snaporch has no state of a TPM that keeps it in one file."""
    with_tpm(world, tmp_path / "state")
    there = source(world, "tpm@s1")
    part = there.part(Role.TPM)
    parts = [each for each in there.manifest.parts if each is not part]
    if place == "elsewhere":
        parts.append(part.model_copy(update={"source": "/var/lib/other"}))
    replace_manifest(there.directory, there.manifest.model_copy(update={"parts": tuple(parts)}))
    world.hooks.log.clear()
    with pytest.raises(SharedError, match=r"state of its TPM .*(is not in the bundle|is not from)"):
        make(world, text="tpm@s1", resumed=False)
    assert world.hooks.log == []


def test_a_volume_is_given_by_its_node(world):
    world.pool.create("tank/vol", DatasetKind.VOLUME)
    world.add_guest("vol", {"vda": "tank/vol"})
    take_snapshot(world.context, world.hypervisor.domain("vol"), SnapshotRequest("s1"))
    made = make(world, text="vol@s1")
    assert made.disks == {"vda": str(world.root / "dev/zvol/tank/vol-test")}
    assert (
        "mountpoint" not in world.pool.local_properties(["mountpoint", "volmode"])["tank/vol-test"]
    )


@pytest.mark.parametrize(
    ("purpose", "given"),
    [(Purpose.CLONE, "link"), (Purpose.VERIFY, "node"), (Purpose.EXTRACT, "node")],
)
def test_the_definition_names_the_link_to_its_volume(world, purpose, given):
    """After the host's next boot the node may be another volume's; the link is its own."""
    world.pool.create("tank/vol", DatasetKind.VOLUME)
    world.add_guest("vol", {"vda": "tank/vol"})
    take_snapshot(world.context, world.hypervisor.domain("vol"), SnapshotRequest("s1"))
    found = source(world, "vol@s1")
    made = clone_dataset(world.context, found, "test", purpose, str(uuid4()), "tank/vol")
    link = world.resolver.volume_link(made.name)
    assert made.root == {"link": link, "node": link.resolve()}[given]
    assert link.is_symlink()


def test_the_document(world):
    made = make(world)
    assert made.as_json() == {
        "name": "test",
        "uuid": made.uuid,
        "of": "web@s1",
        "resumed": True,
        "network": "none",
        "datasets": made.datasets,
        "disks": made.disks,
        "missing": [],
    }


# -- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", " x", "x ", "a/b", "-x", "a\nb"])
def test_invalid_names_are_refused(world, name):
    with pytest.raises(UsageError):
        make(world, name)
    assert nothing_of_it(world)


def test_names_in_use_are_refused(world):
    make(world)
    before = datasets(world)
    for name in ("web", "test"):
        with pytest.raises(RefusedError):
            make(world, name)
    world.hypervisor.guests.pop(world.guest("test").uuid)
    with pytest.raises(RefusedError, match="--delete test"):
        make(world)
    assert datasets(world) == before


def test_a_dataset_in_use_is_refused(world):
    world.pool.create("tank/web-test")
    with pytest.raises(RefusedError, match="tank/web-test: exists already"):
        make(world)


def test_a_name_too_long_for_a_dataset_is_refused(world):
    with pytest.raises(RefusedError, match="too long"):
        make(world, "x" * 250)


def test_a_snapshot_without_ram_makes_no_running_clone(world):
    world.add_guest("off", state=DomainState.OFF)
    take_snapshot(world.context, world.hypervisor.domain("off"), SnapshotRequest("s1"))
    world.hypervisor.networks = {"inner": True}
    for network_name in ("none", "inner"):
        with pytest.raises(RefusedError, match="no RAM to resume from"):
            make(world, text="off@s1", network=network_name)
    make(world, text="off@s1", resumed=False)


def test_a_network_that_is_not_isolated_is_for_cold_clones(world):
    world.hypervisor.networks = {"default": False, "inner": True}
    with pytest.raises(RefusedError, match="is not isolated"):
        make(world, network="default")
    with pytest.raises(NotFoundError):
        make(world, network="absent")
    make(world, "one", network="inner")
    make(world, "two", network="default", resumed=False)


@pytest.fixture
def with_a_card(world):
    """The guest of ``web@card`` has a network card."""
    world.hypervisor.networks = {"inner": True, "other": True}
    guest = world.guest()
    card = (
        '<interface type="network"><mac address="52:54:00:AA:bb:01"/><source network="default"/>'
        '<model type="virtio"/></interface></devices>'
    )
    guest.live = guest.live.replace("</devices>", card)
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("card"))


def test_two_that_run_with_one_mac_address_are_not_on_one_network(world, with_a_card):
    """The MAC address is in the guest's RAM, which cannot be changed."""
    make(world, "one", network="inner", text="web@card")
    with pytest.raises(RefusedError, match="one is on the network inner with the same MAC address"):
        make(world, "two", network="inner", text="web@card")
    make(world, "three", network="other", text="web@card")
    make(world, "four", network="isolated", text="web@card")


@pytest.mark.parametrize(
    ("place", "error", "said"),
    [
        ("pool.clone", RefusedError, "two is on the network inner with the same MAC address"),
        ("hypervisor.restore", BusyError, "held by clone"),
    ],
)
def test_of_two_that_start_at_once_with_one_mac_address_one_is_refused(
    world, with_a_card, place, error, said
):
    """The other has ended meanwhile, or finds that this one loads its RAM."""
    refused = []

    def other():
        world.hooks.at.clear()
        try:
            make(world, "two", network="inner", text="web@card", loading_seconds=0)
        except BusyError as busy:
            refused.append(busy)

    world.hooks.at[place] = other
    try:
        make(world, "one", network="inner", text="web@card", loading_seconds=0)
    except RefusedError as late:
        refused.append(late)
    assert [type(each) for each in refused] == [error]
    assert said in refused[0].line()
    clones = [guest.name for guest in world.hypervisor.guests.values() if guest.name != "web"]
    assert clones == [{"pool.clone": "two", "hypervisor.restore": "one"}[place]]


def test_memory_is_checked_first(world):
    world.set_memory(1 << 20)
    with pytest.raises(RefusedError, match="80 MiB of memory, 1 MiB are free"):
        make(world)
    assert nothing_of_it(world)
    make(world, resumed=False)


def test_room_for_the_copy_of_ram_is_checked_first(world, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage)
    with pytest.raises(RefusedError, match="no room for a copy"):
        make(world)
    assert nothing_of_it(world)


def test_a_disk_that_was_left_out_is_not_shared(world):
    world.add_guest("more", more=(DiskSpec("vdz", str(world.root / "z.img")),))
    (world.root / "z.img").touch()
    take_snapshot(world.context, world.hypervisor.domain("more"), SnapshotRequest("s1"))
    with pytest.raises(RefusedError, match="vdz"):
        make(world, text="more@s1")
    made = make(world, text="more@s1", resumed=False)
    assert made.missing == ("the disk vdz, which is not in the snapshot",)


def test_a_damaged_part_is_found_before_anything_is_made(original, world):
    image = Path(original.record.bundle) / "ram.save"
    image.write_bytes(image.read_bytes()[:-1] + b"\0")
    with pytest.raises(RefusedError, match="damaged"):
        check_parts(world.context, source(world), ram=True)
    check_parts(world.context, source(world), ram=False)


def test_a_dataset_that_is_mounted_elsewhere_now(world):
    """The manifest does not name the image's path in it, so the path is unknown."""
    disk = source(world).disks[0].model_copy(update={"inside": None})
    world.resolver.mount_points[disk.dataset] = Path("/elsewhere")
    with pytest.raises(RefusedError, match="is not below /elsewhere"):
        image_path_in_dataset(world.resolver, disk)


def test_a_dataset_that_is_not_mounted_is_refused_before_anything_is_made(world):
    """As an encrypted dataset is without its key."""
    world.resolver.mount_points["tank/web"] = None
    with pytest.raises(RefusedError, match="is not mounted"):
        make(world)
    assert nothing_of_it(world)


def test_an_image_that_is_not_in_the_snapshot_is_refused(original, world):
    Path(original.domain.disks[0].source).unlink()
    with pytest.raises(IncompleteError, match="not in the snapshot"):
        make(world)
    assert nothing_of_it(world)


@pytest.mark.parametrize("change", ["gone", "other"])
def test_a_missing_or_replaced_zfs_snapshot_is_refused(world, change):
    if change == "gone":
        world.pool.destroy_snapshots(["flash/web@s1"])
    else:
        world.pool.remake("flash/web@s1")
    with pytest.raises(IncompleteError, match="flash/web@s1"):
        source(world)


# -- failures half way --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("pool.clone", PoolError("zfs", "no")),
        ("hypervisor.define", HypervisorError("xml", "no")),
        ("hypervisor.restore", HypervisorError("ram", "no")),
        ("hypervisor.restore", KeyboardInterrupt()),
    ],
)
def test_a_clone_that_fails_leaves_nothing(world, place, error):
    world.hooks.at[place] = failing(error)
    with pytest.raises(type(error)):
        make(world)
    assert nothing_of_it(world)


def test_a_full_disk_is_an_error_in_words(world, monkeypatch):
    real = os.pwrite

    def full(descriptor, data, place):
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(world.paths.clones)):
            raise OSError(28, "No space left on device")
        return real(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(RunFailedError, match="No space left"):
        make(world)
    assert nothing_of_it(world)


def test_a_signal_ends_a_clone(world):
    def signal():
        world.context.interrupt.signum = 15

    world.hooks.at["pool.clone"] = signal
    with pytest.raises(InterruptedRunError):
        make(world)
    assert nothing_of_it(world)


# -- leftovers of a killed clone ----------------------------------------------------------------


class Killed(BaseException):
    """The process is killed, and cleans nothing up."""


def kill_at(world, place, **request):
    def die():
        world.hooks.at["hypervisor.find"] = failing(Killed())  # nothing is removed
        raise Killed

    world.hooks.at[place] = die
    with pytest.raises(Killed):
        make(world, **request)
    world.hooks.at.clear()


@pytest.mark.parametrize("place", ["pool.clone", "hypervisor.define", "hypervisor.restore"])
def test_leftovers_of_killed_clones_are_removed(original, world, place):
    kill_at(world, place)
    assert not nothing_of_it(world)
    left = datasets(world), sorted(world.hypervisor.guests)
    assert remove_unfinished(world.context, dry_run=True)
    assert (datasets(world), sorted(world.hypervisor.guests)) == left
    done = remove_unfinished(world.context)
    assert all(line.startswith("test: an unfinished clone: ") for line in done)
    assert nothing_of_it(world)
    assert original.content() == {b"now"}
    assert remove_unfinished(world.context) == []


def test_a_finished_clone_is_no_leftover(world):
    make(world)
    assert remove_unfinished(world.context) == []
    assert "tank/web-test" in datasets(world)


def test_a_clone_that_was_finished_between_two_looks_stays(world):
    make(world)
    making = next(world.paths.clones.iterdir()) / "making"
    making.touch()
    looks = []

    def look():
        looks.append(making.exists())
        if len(looks) == 2:
            making.unlink()

    world.hooks.at["pool.local_properties"] = look
    assert remove_unfinished(world.context) == []
    assert looks == [True, True]
    assert "tank/web-test" in datasets(world)


def test_a_clone_that_is_being_made_is_no_leftover(world):
    with new_clone(world.context, "temporary", Purpose.VERIFY, "web@s1") as uuid:
        assert remove_unfinished(world.context) == []
        assert (world.paths.clones / uuid / "making").exists()
    assert nothing_of_it(world)


def test_a_temporary_clone_is_removed_even_if_its_directory_is_lost(world):
    mark = "11111111-2222-3333-4444-555555555555"
    world.pool.clone("tank/web@s1", "tank/web-x", {"snaporch:verify": mark})
    world.pool.snapshot(["tank/web-x@autosnap"], {})
    remove_unfinished(world.context)
    assert nothing_of_it(world)


def test_a_dataset_whose_mark_is_no_uuid_is_no_clone(world):
    world.pool.clone("tank/web@s1", "tank/web-x", {"snaporch:verify": "../../etc"})
    assert remove_unfinished(world.context) == []
    assert "tank/web-x" in datasets(world)


def test_a_dataset_that_is_no_clone_is_never_destroyed(world):
    mark = "11111111-2222-3333-4444-555555555555"
    world.pool.create("tank/precious")
    world.pool.set_properties(["tank/precious"], {"snaporch:verify": mark})
    remove_unfinished(world.context)
    assert "tank/precious" in datasets(world)


def test_a_mark_that_a_crash_left_incomplete_is_removed(world):
    directory = world.paths.clones / "11111111-2222-3333-4444-555555555555"
    directory.mkdir(parents=True)
    (directory / "making").write_text('{"na')
    assert remove_unfinished(world.context)
    assert not directory.exists()


def test_a_domain_that_ends_while_it_is_removed_is_no_error(world):
    with new_clone(world.context, "temporary", Purpose.VERIFY, "web@s1") as uuid:
        world.hypervisor.guests[uuid] = replace(world.guest("web"), uuid=uuid, name="temporary")

        def end():
            raise NotFoundError(uuid, "no such domain")

        def forget():
            world.hypervisor.guests.pop(uuid)

        world.hooks.at["hypervisor.destroy"] = end
        world.hooks.at["hypervisor.undefine"] = forget
    assert nothing_of_it(world)


# -- deleting -----------------------------------------------------------------------------------


@pytest.mark.parametrize("resumed", [True, False])
@pytest.mark.parametrize("by", ["name", "uuid"])
def test_deleting_a_clone_removes_all_of_it(original, world, resumed, by):
    made = make(world, resumed=resumed)
    deleted = delete_clone(world.context, getattr(made, by))
    assert nothing_of_it(world)
    assert deleted.as_json()["removed"] == [
        "removed the domain test",
        "destroyed tank/web-test",
        "destroyed flash/web-test",
    ]
    assert original.content() == {b"now"}


def test_a_clone_that_another_guest_has_mounted_stays_whole(original, world):
    made = make(world)
    world.pool.foreign = [BlockingMount("tank/web-test", "the guest db", "u-db")]
    with pytest.raises(RefusedError, match="tank/web-test is mounted by the guest db"):
        delete_clone(world.context, "test")
    assert world.guest("test").state is DomainState.RUNNING
    world.pool.foreign = [BlockingMount("tank/web-test", "the guest test", made.uuid)]
    world.hooks.at["hypervisor.destroy"] = world.pool.foreign.clear
    delete_clone(world.context, "test")
    assert nothing_of_it(world)


def test_a_clone_that_another_guest_has_mounted_is_not_waited_for(original, world):
    make(world)
    world.hooks.at["hypervisor.destroy"] = lambda: world.pool.foreign.append(
        BlockingMount("tank/web-test", "the guest db", "u-db")
    )
    with pytest.raises(MountedError, match="the guest db"):
        delete_clone(world.context, "test")
    world.hooks.at.clear()
    world.pool.foreign.clear()
    delete_clone(world.context, "test")
    assert nothing_of_it(world)


def test_a_domain_that_is_no_clone_is_not_deleted(original, world):
    with pytest.raises(RefusedError, match="not a clone that snaporch made"):
        delete_clone(world.context, "web")
    with pytest.raises(NotFoundError):
        delete_clone(world.context, "absent")
    assert nothing_of_it(world)
    assert world.guest("web").state is DomainState.RUNNING


def test_an_undefined_clone_is_deleted_by_its_name(world):
    made = make(world, resumed=False)
    world.hypervisor.guests.pop(made.uuid)
    delete_clone(world.context, "test")
    assert nothing_of_it(world)


def test_a_clone_is_deleted_by_the_name_it_has_now(world):
    made = make(world)
    world.guest("test").name = "prod"
    with pytest.raises(RefusedError, match=r"was renamed to prod; .*clone --delete prod"):
        delete_clone(world.context, "test")
    assert world.guest("prod").state is DomainState.RUNNING
    assert "flash/web-test" in datasets(world)
    assert delete_clone(world.context, "prod").uuid == made.uuid
    assert nothing_of_it(world)


def test_a_clone_with_snapshots_stays(world):
    make(world)
    world.pool.snapshot(["tank/web-test@own"], {})
    with pytest.raises(RefusedError, match="tank/web-test@own"):
        delete_clone(world.context, "test")
    assert world.guest("test").state is DomainState.RUNNING
    assert "flash/web-test" in datasets(world)


def test_a_snapshot_of_a_clone_that_is_taken_meanwhile_is_not_destroyed(world):
    """The checks are over by then; ZFS refuses to destroy a dataset that has snapshots."""
    uuid = make(world).uuid
    world.pool.snapshot(["tank/web-test@mine"], {})
    mounted = MountedError("tank/web-test", "is mounted")  # after another error it would try again
    world.hooks.at["pool.destroy_dataset"] = failing(mounted)
    with pytest.raises(MountedError):
        remove(world.context, uuid)
    assert "tank/web-test@mine" in world.pool.names()


def test_files_of_a_file_system_that_is_mounted_in_a_clones_directory_stay(world, monkeypatch):
    uuid = make(world).uuid
    place = world.paths.clones / uuid / "mnt"
    place.mkdir()
    (place / "precious").write_text("not the clone's")
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == place)
    with pytest.raises(AttentionError, match="a file system is mounted there"):
        delete_clone(world.context, "test")
    assert (place / "precious").read_text() == "not the clone's"


def test_a_clone_with_datasets_below_it_stays(world):
    make(world)
    world.pool.create("tank/web-test/below")
    with pytest.raises(RefusedError, match="tank/web-test/below"):
        delete_clone(world.context, "test")
    assert "flash/web-test" in datasets(world)


def test_a_promoted_clone_stays(world):
    make(world)
    world.pool._datasets["tank/web-test"].origin = None
    with pytest.raises(RefusedError, match="promoted"):
        delete_clone(world.context, "test")
    assert "flash/web-test" in datasets(world)


def test_a_clone_whose_marks_were_removed_stays(world):
    """And its directory: its dataset is mounted elsewhere now."""
    make(world)
    for name in ("tank/web-test", "flash/web-test"):
        world.pool._datasets[name].properties.clear()
    guest, moved = world.guest("test"), world.image("tank/web-test", "web-vda.img")
    (disk, *_) = world.hypervisor.domain("test").disks
    guest.live, guest.inactive = (
        xml.replace(disk.source, str(moved)) for xml in (guest.live, guest.inactive)
    )
    shutil.rmtree(next(world.paths.clones.iterdir()))
    with pytest.raises(RefusedError, match="disks on tank/web-test carry no mark of a clone"):
        delete_clone(world.context, "test")
    assert world.guest("test").state is DomainState.RUNNING


def test_a_clone_that_another_domain_uses_stays(world):
    make(world)
    world.add_guest("mail", {"vda": "tank/web-test"})
    with pytest.raises(RefusedError, match="the domain mail has disks on tank/web-test"):
        delete_clone(world.context, "test")


def test_local_properties_that_matter_are_copied_to_the_clone(story, world):
    world.pool.set_properties(["tank/web"], {"sync": "always", "quota": "1G", "mountpoint": "/x"})
    make(world)
    wanted = ["sync", "quota", "mountpoint"]
    made = world.pool.local_properties(wanted)["tank/web-test"]
    assert made["sync"] == "always"
    assert "quota" not in made
    assert made["mountpoint"] != "/x"
    assert "sync" not in world.pool.local_properties(wanted).get("flash/web-test", {})
