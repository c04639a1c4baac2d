import gc
import hashlib
import io
import json
import os
import re
import shutil
import tarfile
from pathlib import Path
from xml.etree import ElementTree

import pytest
from fakes.archives import VDA, VDB, Opened, exported, in_snapshot, packed, tar_of
from fakes.hooks import KilledError, failing
from fakes.images import qcow2
from fakes.world import World

from snaporch import default_paths
from snaporch.archive.contents import ArchiveError, Member, contents_bytes, pack_map
from snaporch.archive.import_guest import ImportRequest, import_guest
from snaporch.archive.import_place import MARK, ImportPlace
from snaporch.archive.tar_header import header, padding
from snaporch.archive.write_archive import END_MARK
from snaporch.bundle.manifest import Part, Role
from snaporch.errors import (
    AttentionError,
    BusyError,
    InterruptedRunError,
    RefusedError,
    RunFailedError,
    UsageError,
)
from snaporch.hypervisor import HypervisorError
from snaporch.hypervisor.clone_xml import clone_of
from snaporch.hypervisor.domain_xml import parse, sources, text
from snaporch.locks import domain_lock
from snaporch.model import DomainState
from snaporch.reserve import reserve
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

CARD = (
    "<interface type='bridge'><mac address='52:54:00:00:00:01'/><source bridge='br0'/></interface>"
)
EMULATOR = "/usr/bin/qemu-system-x86_64"


@pytest.fixture
def archive(story, world):
    """An archive of ``web@s1``, with RAM."""
    in_snapshot(world, "tank/web", "web-vda.img", VDA)
    in_snapshot(world, "flash/web", "web-vdb.img", VDB)
    return exported(world)


@pytest.fixture
def there(tmp_path, monkeypatch):
    """Another host."""
    made = World(tmp_path / "there")
    made.install(monkeypatch)
    made.images = tmp_path / "images"
    made.images.mkdir()
    yield made
    made.kill_guardians()


def bring(there, archive, **options):
    request = ImportRequest(there.images, **options)
    return import_guest(there.context, io.BytesIO(archive), "x.tar.zst", request)


def nothing_of_it(there):
    """Whether an import left nothing."""
    return (list(there.images.iterdir()), there.hypervisor.guests, there.pool.datasets()) == (
        [],
        {},
        [],
    )


def remove(there):
    there.hypervisor.guests.clear()
    shutil.rmtree(there.images / "web")


def refused(there, archive, words, **options):
    with pytest.raises(ArchiveError, match=words) as caught:
        bring(there, archive, **options)
    assert "\n" not in caught.value.line()
    assert nothing_of_it(there)


# -- what works ---------------------------------------------------------------------------------


def test_a_guest_is_resumed_from_ram_on_another_host(archive, there, story):
    made = bring(there, archive)
    guest = there.guest("web")
    assert (made.state, made.cold_reason, made.missing) == ("resumed", "", ())
    assert (guest.ram, guest.state) == (story.ram, DomainState.RUNNING)
    assert (guest.uuid, made.uuid) == (story.domain.uuid, story.domain.uuid)
    place = there.images / "web"
    expected = {"vda": str(place / "vda.raw"), "vdb": str(place / "vdb.raw")}
    assert sources(guest.live) == sources(guest.inactive) == made.disks == expected
    assert ((place / "vda.raw").read_bytes(), (place / "vdb.raw").read_bytes()) == (VDA, VDB)
    assert (place / "vda.raw").stat().st_blocks * 512 < len(VDA)
    assert sorted(os.listdir(place)) == ["vda.raw", "vdb.raw"]
    assert place.stat().st_mode & 0o777 == 0o711
    assert (place / "vda.raw").stat().st_mode & 0o777 == 0o600
    assert clone_of(guest.inactive) is None


def test_it_boots_from_its_disks(archive, there):
    made = bring(there, archive, cold=True)
    assert (made.state, made.cold_reason) == ("booted", "")
    assert there.guest("web").running_reason != "restored"


def test_it_is_only_defined(archive, there):
    assert bring(there, archive, starts=False).state == "defined"
    assert there.guest("web").live is None


def test_a_guest_without_ram_boots(story, world, there):
    in_snapshot(world, "tank/web", "web-vda.img", VDA)
    in_snapshot(world, "flash/web", "web-vdb.img", VDB)
    assert bring(there, exported(world, with_ram=False)).state == "booted"


def test_another_cpu_lets_it_boot_and_says_why(archive, there):
    forged = Opened(archive)
    versions = forged.manifest.versions.model_copy(update={"cpu": "<cpu><model>x</model></cpu>"})
    made = bring(there, forged.change_manifest(versions=versions).written())
    assert made.state == "booted"
    assert "Host CPU does not provide avx512f" in made.cold_reason


def test_a_failed_resume_lets_it_boot_and_says_why(archive, there):
    there.hooks.at["hypervisor.restore"] = failing(HypervisorError("x", "restore: bad device"))
    made = bring(there, archive)
    assert (made.state, made.cold_reason) == ("booted", "restore: bad device")


def test_another_name_has_another_uuid_and_other_addresses(archive, there, story):
    forged = Opened(archive)
    xml = forged.data["domain.xml"].decode().replace("</devices>", f"{CARD}</devices>")
    made = bring(
        there, forged.change_part("domain.xml", xml.encode()).written(), name="new", cold=True
    )
    guest = there.guest("new")
    assert (made.name, guest.uuid) == ("new", made.uuid)
    assert made.uuid != story.domain.uuid
    assert text(parse(guest.inactive), "name") == "new"
    card = parse(guest.inactive).find("devices/interface")
    assert card.find("mac").get("address") != "52:54:00:00:00:01"


def test_the_same_name_keeps_its_addresses_and_gets_no_bridge_of_this_host(archive, there):
    forged = Opened(archive)
    xml = forged.data["domain.xml"].decode().replace("</devices>", f"{CARD}</devices>")
    bring(there, forged.change_part("domain.xml", xml.encode()).written(), cold=True)
    card = parse(there.guest("web").inactive).find("devices/interface")
    assert card.find("mac").get("address") == "52:54:00:00:00:01"
    assert (card.get("type"), card.find("source")) == ("ethernet", None)


def test_it_may_lie_in_a_dataset(archive, there):
    there.pool.create("tank")
    there.pool.create("tank/vm")
    made = bring(there, archive, parent="tank/vm")
    assert made.directory == str(there.root / "zfs/tank/vm/web")
    assert "tank/vm/web" in {each.name for each in there.pool.datasets()}
    assert Path(made.disks["vda"]).read_bytes() == VDA


def test_uefi_variables_and_tpm_state_come_along(world, there, tmp_path):
    nvram, tpm = world.root / "vars.fd", world.root / "swtpm-of-web"
    nvram.write_bytes(b"variables")
    tpm.mkdir()
    (tpm / "tpm2-00.permall").write_bytes(b"state")
    world.add_guest(nvram=str(nvram), tpm=str(tpm))
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    in_snapshot(world, "tank/web", "web-vda.img", VDA)
    made = bring(there, exported(world))
    guest = there.guest("web")
    assert Path(text(parse(guest.inactive), "os/nvram")).read_bytes() == b"variables"
    place = there.root / "swtpm" / made.uuid / "tpm2"
    assert (place / "tpm2-00.permall").read_bytes() == b"state"
    assert parse(guest.inactive).find("devices/tpm/backend/source").get("path") == str(place)
    assert (there.images / "web" / "nvram.fd").stat().st_mode & 0o7777 == 0o600


# -- interrupted, failed ------------------------------------------------------------------------


def fork():
    """Fork without compressors that are garbage: a child has none of the threads that they join."""
    gc.collect()
    return os.fork()


@pytest.mark.parametrize("parent", [None, "tank/vm"])
@pytest.mark.parametrize("at", ["unpacking", "resuming from RAM"])
def test_an_interrupted_import_is_repeated(archive, there, at, parent):
    """A kill: what is there stays, and no exception handler runs."""
    if parent:
        there.pool.create("tank")
        there.pool.create(parent)
    pid = fork()
    if pid == 0:
        there.heard.at[at] = lambda: os._exit(9)
        bring(there, archive, parent=parent)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    if parent:
        there.pool.create(f"{parent}/web")
    assert bring(there, archive, parent=parent).state == "resumed"


def test_a_killed_import_is_repeated_at_any_point_of_unpacking(archive, there):
    place = there.images / "web"
    place.mkdir(0o700)
    (place / MARK).write_bytes(b"")
    (place / "vda.raw").write_bytes(b"half")
    assert bring(there, archive).state == "resumed"
    assert (place / "vda.raw").read_bytes() == VDA


def test_a_guest_that_has_written_since_is_not_overwritten(archive, there):
    there.hooks.at["hypervisor.define"] = lambda: os._exit(9)
    pid = fork()
    if pid == 0:
        bring(there, archive)
    os.waitpid(pid, 0)
    del there.hooks.at["hypervisor.define"]
    image = there.images / "web" / "vda.raw"
    assert json.loads((image.parent / MARK).read_bytes())["files"]["vda.raw"]
    os.utime(image, ns=(1, 1))
    with pytest.raises(RefusedError, match="exists already, and is no unfinished import"):
        bring(there, archive)
    assert image.read_bytes() == VDA


def test_a_signal_leaves_nothing(archive, there):
    there.heard.at["unpacking"] = lambda: setattr(there.context.interrupt, "signum", 15)
    with pytest.raises(InterruptedRunError):
        bring(there, archive)
    assert nothing_of_it(there)


def test_a_refused_definition_leaves_nothing(archive, there):
    there.hooks.at["hypervisor.define"] = failing(HypervisorError("domain XML", "define: no"))
    with pytest.raises(HypervisorError):
        bring(there, archive)
    assert nothing_of_it(there)


def test_a_failed_import_leaves_no_dataset(archive, there):
    there.pool.create("tank")
    with pytest.raises(ArchiveError):
        bring(there, archive[: len(archive) // 2], parent="tank")
    assert [each.name for each in there.pool.datasets()] == ["tank"]


def test_a_guest_that_does_not_start_is_kept(archive, there):
    there.hooks.at["hypervisor.start"] = failing(HypervisorError("x", "start: no network"))
    with pytest.raises(AttentionError, match="is imported, and does not start: start: no network"):
        bring(there, archive, cold=True)
    assert there.guest("web").inactive is not None
    assert sorted(os.listdir(there.images / "web")) == ["vda.raw", "vdb.raw"]


def test_ram_that_cannot_be_resumed_is_not_lost_silently(archive, there):
    there.hooks.at["hypervisor.restore"] = failing(HypervisorError("x", "restore: bad CPU"))
    there.hooks.at["hypervisor.start"] = failing(HypervisorError("x", "start: no network"))
    words = "its RAM, which is discarded: restore: bad CPU; it does not start: start: no network"
    with pytest.raises(AttentionError, match=words) as caught:
        bring(there, archive)
    assert "boot it: virsh start web" in caught.value.line()
    assert sorted(os.listdir(there.images / "web")) == ["vda.raw", "vdb.raw"]


TAKEN = RefusedError("web", "the guest rival has the same MAC address", "shut it off")


def test_an_import_whose_addresses_are_taken_meanwhile_leaves_nothing(archive, there):
    """The guest would boot without its RAM later."""
    there.hooks.at["hypervisor.restore"] = failing(TAKEN)
    with pytest.raises(RefusedError, match="same MAC address; shut it off"):
        bring(there, archive)
    assert nothing_of_it(there)
    there.hooks.at.clear()
    assert bring(there, archive).state == "resumed"


def test_a_guest_that_was_started_meanwhile_is_kept(archive, there):
    def start():
        there.hypervisor.start(there.guest("web").uuid, paused=False)
        raise TAKEN

    there.hooks.at["hypervisor.restore"] = start
    with pytest.raises(AttentionError, match="another program has started it"):
        bring(there, archive)
    assert there.guest("web").live is not None
    assert sorted(os.listdir(there.images / "web")) == ["vda.raw", "vdb.raw"]


def test_a_guest_that_cannot_be_removed_is_kept_with_its_ram(archive, there):
    there.hooks.at["hypervisor.restore"] = failing(TAKEN)
    there.hooks.at["hypervisor.undefine"] = failing(HypervisorError("x", "undefine: denied"))
    with pytest.raises(AttentionError, match="same MAC address; it stays: undefine: denied; its"):
        bring(there, archive)
    assert ".import-ram.save" in os.listdir(there.images / "web")


def test_missing_uefi_variables_are_named(archive, there):
    forged = Opened(archive)
    xml = forged.data["domain.xml"].decode()
    assert "<os>" in xml
    xml = xml.replace("</os>", "<nvram>/var/lib/libvirt/qemu/nvram/web.fd</nvram></os>")
    bring(there, forged.change_part("domain.xml", xml.encode()).written(), cold=True)
    assert "the archive has no UEFI variables: the guest gets new ones" in there.heard.notes


def test_no_room_is_refused_before_anything_is_written(archive, there):
    size = 1 << 58
    disk_map = pack_map([(0, size)], size)
    forged = Opened(archive).change("disks/vda.raw", disk_map, map_bytes=len(disk_map), size=size)
    table = forged.contents
    archive = forged.written(lambda tar: giant(tar, table, len(disk_map) + size))
    with pytest.raises(RefusedError, match=r"needs \d+ MiB in .*images, \d+ MiB are free"):
        bring(there, archive)
    assert nothing_of_it(there)


def giant(tar, table, size):
    """The beginning of a tar file whose disk ``vda`` has so many bytes, as its table says."""
    members = tuple(
        each.model_copy(update={"bytes": size}) if each.name == "disks/vda.raw" else each
        for each in table.members
    )
    data = contents_bytes(table.model_copy(update={"members": members}))
    first = Member(name="contents.json", bytes=len(data))
    old = int(tar[124:135], 8)
    return header(first, table.mtime) + data + padding(first) + tar[512 + -(-old // 512) * 512 :]


def test_a_host_that_cannot_run_it_is_left_alone(archive, there):
    there.hypervisor.cpu_incompatibility = "the CPU lacks avx512"
    with pytest.raises(RefusedError, match="the CPU lacks avx512; or use --no-start"):
        bring(there, archive)
    assert nothing_of_it(there)
    assert bring(there, archive, starts=False).state == "defined"


def test_a_guest_that_appears_meanwhile_is_not_replaced(archive, there):
    there.heard.at["unpacking"] = lambda: there.add_guest("web", {"vda": "tank/real"})
    with pytest.raises(RefusedError, match="the guest web has its UUID"):
        bring(there, archive)
    assert sources(there.guest("web").inactive)["vda"].endswith("real/web-vda.img")
    assert list(there.images.iterdir()) == []


def test_an_import_waits_for_no_other_command_on_the_same_guest(archive, there):
    uuid, interrupt = Opened(archive).manifest.uuid, there.context.interrupt
    lock = domain_lock(default_paths.LOCKS, "web", uuid, "restore", wait=0, interrupt=interrupt)
    with lock, pytest.raises(BusyError, match="held by restore"):
        bring(there, archive)
    assert nothing_of_it(there)


def test_files_of_a_defined_guest_are_kept_after_an_error_of_the_file_system(archive, there):
    """libvirt defined it, and then the definition could not be synced."""
    there.hypervisor.on_change(failing(OSError(28, "No space left on device")))
    with pytest.raises(AttentionError, match="No space left on device; all files were kept"):
        bring(there, archive, cold=True)
    assert there.guest("web").inactive is not None
    assert (there.images / "web" / "vda.raw").read_bytes() == VDA


def test_a_guest_with_a_user_network_can_be_exported_again(archive, there):
    forged = Opened(archive)
    card = "<interface type='user'><mac address='52:54:00:00:00:01'/></interface>"
    for part in ("domain.xml", "domain.live.xml"):
        xml = forged.data[part].replace(b"</devices>", f"{card}</devices>".encode())
        forged.change_part(part, xml)
    assert bring(there, forged.written()).state == "resumed"
    assert "commandline" not in there.guest("web").inactive


def test_a_killed_import_leaves_the_tpm_of_no_other_guest_to_be_overwritten(world, there):
    tpm = world.root / "swtpm-of-web"
    tpm.mkdir()
    (tpm / "tpm2-00.permall").write_bytes(b"state")
    world.add_guest(tpm=str(tpm))
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    in_snapshot(world, "tank/web", "web-vda.img", VDA)
    archive = exported(world)
    place = there.images / "web"
    place.mkdir(0o700)
    (place / MARK).write_text(json.dumps({"uuid": "of another", "files": None}))
    other = there.root / "swtpm" / Opened(archive).manifest.uuid / "tpm2"
    other.mkdir(parents=True)
    (other / "tpm2-00.permall").write_bytes(b"precious")
    with pytest.raises(RefusedError, match="the TPM of a guest with its UUID"):
        bring(there, archive)
    assert (other / "tpm2-00.permall").read_bytes() == b"precious"


def test_a_repeated_import_with_another_name_has_the_uuid_of_the_first(archive, there):
    place = there.images / "new"
    place.mkdir(0o700)
    uuid = "11111111-2222-4333-8444-555555555555"
    (place / MARK).write_text(json.dumps({"uuid": uuid, "files": None}))
    assert bring(there, archive, name="new").uuid == uuid


@pytest.fixture
def killed(archive, there):
    """An import with RAM that was killed when the guest was defined, and not yet resumed."""
    there.hooks.at["hypervisor.restore"] = failing(KilledError())
    with pytest.raises(KilledError):
        bring(there, archive)
    del there.hooks.at["hypervisor.restore"]
    assert there.guest("web").live is None
    return there.images / "web"


def finished(there, archive, words, **options):
    """The same import again says this; nothing of the first one but the guest is left."""
    with pytest.raises(AttentionError, match=words):
        bring(there, archive, **options)
    assert sorted(os.listdir(there.images / "web")) == ["vda.raw", "vdb.raw"]
    return there.guest("web")


@pytest.mark.parametrize("paused", [False, True])
def test_an_import_that_was_killed_after_the_definition_resumes_the_ram(
    archive, there, killed, story, paused
):
    if paused:
        mark = json.loads((killed / MARK).read_text())
        (killed / MARK).write_text(json.dumps(mark | {"running": False}))
    guest = finished(there, archive, "it is complete, and was resumed from RAM")
    assert guest.ram == story.ram
    assert guest.state is (DomainState.PAUSED if paused else DomainState.RUNNING)


def test_it_is_not_resumed_over_disks_that_a_guest_has_written_to(archive, there, killed):
    (killed / "vda.raw").write_bytes(b"written by the guest")
    words = "may have written to its disks since; without its RAM: virsh start web"
    assert finished(there, archive, words).live is None


def test_a_killed_import_whose_ram_does_not_resume_says_why(archive, there, killed):
    there.hooks.at["hypervisor.restore"] = failing(HypervisorError("x", "restore: bad device"))
    words = r"was not resumed from RAM \(restore: bad device\): virsh start web"
    assert finished(there, archive, words).live is None


def test_a_killed_import_is_not_resumed_where_that_is_not_wanted(archive, there, killed):
    assert finished(there, archive, "it is complete: virsh start web", cold=True).live is None


def test_a_killed_import_whose_guest_runs_by_now_is_finished(archive, there, killed):
    there.hypervisor.start(there.guest("web").uuid, paused=False)
    guest = finished(there, archive, "it is complete, and runs")
    assert guest.running_reason != "restored"


def test_a_killed_import_does_not_resume_while_another_command_works(archive, there, killed):
    uuid, interrupt = there.guest("web").uuid, there.context.interrupt
    lock = domain_lock(default_paths.LOCKS, "web", uuid, "snapshot", wait=0, interrupt=interrupt)
    with lock, pytest.raises(BusyError, match="held by snapshot"):
        bring(there, archive)
    assert (killed / ".import-ram.save").exists()


def test_a_second_guest_is_not_resumed_where_its_original_may_run(archive, there):
    there.hypervisor.networks["outer"] = False
    with pytest.raises(RefusedError, match="the network outer is not isolated"):
        bring(there, archive, name="new", network="outer")
    assert nothing_of_it(there)
    assert bring(there, archive, network="outer").state == "resumed"


def test_a_definition_that_is_nested_thousands_deep_is_refused(archive, there):
    forged = Opened(archive)
    deep = b"<metadata>" + b"<a>" * 20000 + b"</a>" * 20000 + b"</metadata></domain>"
    xml = forged.data["domain.xml"].replace(b"</domain>", deep)
    with pytest.raises(RefusedError):
        bring(there, forged.change_part("domain.xml", xml).written())
    assert nothing_of_it(there)


@pytest.mark.parametrize("way", ["import", "export"])
def test_it_ends_when_others_have_used_up_the_room(archive, there, world, monkeypatch, way):
    """Guests on this file system would be paused when their images cannot grow."""
    looks, real = [1 << 50] if way == "import" else [], shutil.disk_usage(there.images)
    left = lambda _path: real._replace(free=looks.pop() if looks else 0)  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", left)
    with pytest.raises(RunFailedError, match=r"0 MiB left, and .* are kept for others"):
        bring(there, archive) if way == "import" else exported(world)
    assert nothing_of_it(there)


def test_room_is_left_on_the_file_system():
    assert reserve(100 << 30) == 1 << 30
    assert reserve(2 << 30) == (2 << 30) // 20


def test_a_directory_below_one_of_another_user_is_refused(archive, there, tmp_path):
    there.images = tmp_path / "theirs" / "images"
    there.images.mkdir(parents=True)
    os.chown(there.images.parent, 12345, 12345)
    with pytest.raises(RefusedError, match="theirs: belongs to another user"):
        bring(there, archive)


# -- what is here already -----------------------------------------------------------------------


def test_a_name_or_uuid_that_exists_is_refused(archive, there, story):
    there.add_guest("web")
    with pytest.raises(RefusedError, match="has its UUID; import it beside that: --name NEW"):
        bring(there, archive)
    there.add_guest("other")
    with pytest.raises(RefusedError, match="the guest other has its name"):
        bring(there, archive, name="other")
    assert list(there.images.iterdir()) == []


def test_a_directory_that_exists_stays(archive, there):
    (there.images / "web").mkdir()
    (there.images / "web" / "vda.raw").write_bytes(b"precious")
    with pytest.raises(RefusedError, match="exists already"):
        bring(there, archive)
    assert (there.images / "web" / "vda.raw").read_bytes() == b"precious"


def test_a_link_in_its_place_is_not_followed(archive, there, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (there.images / "web").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="exists already"):
        bring(there, archive)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_directory_that_others_write_to_is_refused(archive, there):
    there.images.chmod(0o777)
    with pytest.raises(RefusedError, match="other users may write to it"):
        bring(there, archive)


@pytest.mark.parametrize("name", ["a/b", "../x", ".x", "-x", "", " x", "x\n", "x" * 300, ".."])
def test_a_name_that_is_none_is_refused(archive, there, name):
    forged = Opened(archive)
    for part in ("domain.xml", "domain.live.xml"):
        if part in forged.data:
            forged.change_part(
                part, forged.data[part].replace(b"<name>web<", f"<name>{name}<".encode())
            )
    forged.contents = forged.contents.model_copy(update={"domain": name})
    with pytest.raises(UsageError, match="cannot be the name of a guest"):
        bring(there, forged.change_manifest(domain=name).written())
    assert nothing_of_it(there)


# -- damage -------------------------------------------------------------------------------------


def test_an_archive_that_ends_early_is_refused_wherever_it_ends(archive, there):
    step = max(len(archive) // 25, 1)
    for end in [*range(0, len(archive), step), *range(len(archive) - 20, len(archive))]:
        refused(there, archive[:end], None)


def test_a_flipped_bit_is_noticed_wherever_it_is(archive, there):
    for at in range(0, len(archive), max(len(archive) // 40, 1)):
        changed = bytearray(archive)
        changed[at] ^= 4
        try:
            bring(there, bytes(changed))
        except ArchiveError:
            assert nothing_of_it(there)
        else:  # zstd ignores a few bits
            assert tar_of(bytes(changed)) == tar_of(archive), f"byte {at}"
            remove(there)


def test_a_flipped_bit_in_the_tar_file_is_noticed_wherever_it_is(archive, there):
    """As above, with a right checksum of zstd."""
    tar = tar_of(archive)
    for at in range(0, len(tar), max(len(tar) // 60, 1)):
        changed = bytearray(tar)
        changed[at] ^= 4
        refused(there, packed(bytes(changed)), None)


def test_what_follows_the_end_is_refused(archive, there):
    refused(there, archive + b"x", None)
    refused(there, archive + packed(b"more"), "does not end where it must")
    refused(there, archive.removesuffix(END_MARK), "does not end where it must")


@pytest.mark.parametrize("content", [b"", b"no archive", packed(b""), packed(b"x" * 5000)])
def test_another_file_is_no_archive(there, content):
    refused(there, content, None)


# -- hostile archives ---------------------------------------------------------------------------


def entry(name, **changes):
    info = tarfile.TarInfo(name)
    for key, value in changes.items():
        setattr(info, key, value)
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize(
    "other",
    [
        entry("../../etc/cron.d/x"),
        entry("/etc/cron.d/x"),
        entry("manifest.json", type=tarfile.SYMTYPE, linkname="/etc/shadow"),
        entry("manifest.json", type=tarfile.LNKTYPE, linkname="/etc/shadow"),
        entry("manifest.json", type=tarfile.CHRTYPE),
        entry("manifest.json", type=tarfile.DIRTYPE),
        entry("manifest.json", size=1 << 40),
        entry("manifest.json", mode=0o4755),
        entry("not in the table"),
        entry("contents.json"),
    ],
)
def test_a_member_other_than_the_next_of_the_table_is_refused(archive, there, other):
    tar = tar_of(archive)
    at = 512 + -(-int(tar[124:135], 8) // 512) * 512
    refused(there, packed(tar[:at] + other + tar[at + 512 :]), "the header of its member")
    refused(there, packed(tar[:at] + other + tar[at:]), "the header of its member")


def test_a_member_that_is_listed_twice_is_refused(archive, there):
    forged = Opened(archive)
    members = forged.contents.members
    forged.contents = forged.contents.model_copy(
        update={"members": (*members[:-1], members[-2], members[-1])}
    )
    refused(there, forged.written(), "twice")


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../../x", "disks/../x", "A", "disks/vda.raw\0", "x" * 300]
)
def test_a_name_in_the_table_is_never_a_path(archive, there, name):
    forged = Opened(archive)
    forged.data[name] = forged.data["disks/vda.raw"]
    with pytest.raises((ArchiveError, ValueError)):
        bring(there, forged.change_entry("disks/vda.raw", name=name).written())
    assert nothing_of_it(there)


def test_a_table_with_other_members_than_the_manifest_is_refused(archive, there):
    forged = Opened(archive)
    extra = forged.contents.members[0].model_copy(update={"name": "more"})
    members = (*forged.contents.members[:-1], extra, forged.contents.members[-1])
    forged.contents = forged.contents.model_copy(update={"members": members})
    forged.data["more"] = forged.data["manifest.json"]
    refused(there, forged.written(), "members, its manifest")


def test_a_small_file_that_unpacks_to_a_giant_is_refused_early(archive, there):
    bomb = packed(tar_of(archive)[:512] + bytes(64 << 20))
    assert len(bomb) < 100_000
    refused(there, bomb, "table of contents is invalid|is another")
    forged = Opened(archive)
    refused(there, forged.change_part("ram.save", b"x", bytes=1 << 59).written(), "manifest")


def test_parts_of_senseless_size_are_refused(archive, there):
    forged = Opened(archive)
    refused(there, forged.change_part("domain.xml", b" " * (2 << 20)).written(), "KiB")


@pytest.mark.parametrize(
    "image_map",
    [
        pack_map([(0, 10), (5, 15)], 100),
        pack_map([(50, 60), (0, 10)], 100),
        pack_map([(0, 10), (1 << 61, (1 << 61) + 10)], 100),
        b"2\n0\n10\n".ljust(512, b"\0"),
        b"-1\n".ljust(512, b"\0"),
        b"x" * 512,
        bytes(512),
        b"1\n0\n99\n".ljust(512, b"\0"),
        b"9999999999999999999999\n".ljust(512, b"\0"),
    ],
)
def test_a_map_that_is_none_is_refused(archive, there, image_map):
    forged = Opened(archive).change(
        "disks/vdb.raw", image_map + b"z" * 20, map_bytes=len(image_map), size=100
    )
    refused(there, forged.written(), "the map of its disk vdb is damaged")


def with_qcow2(archive, image):
    """The archive, with this as the qcow2 image of its second disk."""
    forged = Opened(archive)
    disks = tuple(
        each.model_copy(update={"format": "qcow2"}) if each.target == "vdb" else each
        for each in forged.manifest.disks
    )
    for part in ("domain.xml", "domain.live.xml"):
        if part in forged.data:
            root = parse(forged.data[part].decode())
            root.findall("devices/disk/driver")[1].set("type", "qcow2")
            forged.change_part(part, ElementTree.tostring(root))
    forged.change_manifest(disks=disks)
    disk_map = pack_map([(0, len(image))], len(image))
    forged.data["disks/vdb.qcow2"] = disk_map + image
    forged.change_entry(
        "disks/vdb.raw",
        name="disks/vdb.qcow2",
        bytes=len(disk_map + image),
        size=len(image),
        map_bytes=len(disk_map),
        format="qcow2",
    )
    return forged.written()


def test_a_disk_that_names_another_file_is_refused(archive, there):
    for image in (qcow2(backing="/etc/shadow"), qcow2(data_file="/dev/sda"), b"raw"):
        refused(there, with_qcow2(archive, image), "its disk vdb")


def with_part(archive, role, content=b"<domain/>"):
    """An archive whose manifest and table have one more part."""
    opened = Opened(archive)
    size, digest = len(content), hashlib.sha256(content).hexdigest()
    part = Part(name="more", role=role, bytes=size, sha256=digest)
    members, parts = list(opened.contents.members), list(opened.manifest.parts)
    is_ram = role is Role.RAM
    at = -1 if is_ram else next(n for n, each in enumerate(members) if each.disk is not None)
    members.insert(at, Member(name="more", bytes=size))
    opened.contents = opened.contents.model_copy(update={"members": tuple(members)})
    opened.data["more"] = content
    parts.insert(len(parts) if is_ram else 0, part)
    opened.change_manifest(parts=tuple(parts))
    return opened.written()


@pytest.mark.parametrize("role", [Role.RAM, Role.LIVE_XML])
def test_two_parts_of_one_role_are_refused(archive, there, role):
    """A second image of RAM would be held in memory, whatever its size."""
    with pytest.raises(RefusedError, match=f"its manifest has two parts of the role {role}"):
        bring(there, with_part(archive, role))
    assert not list(there.images.iterdir())


@pytest.mark.parametrize("kind", ["link", "pipe", "other"])
def test_a_mark_of_another_user_is_not_believed(archive, there, tmp_path, kind):
    bring(there, archive, starts=False)
    place, mine = there.images / "web", tmp_path / "mine"
    text = json.dumps({"uuid": there.guest("web").uuid, "files": None})
    mine.mkdir()
    for name in (".import", ".profile"):
        (mine / name).write_text(text)
    if kind == "link":
        place.rename(tmp_path / "moved")
        place.symlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(place / ".import")
    else:
        (place / ".import").write_text(text)
        there.images.chmod(0o777)
    with pytest.raises(RefusedError, match="the guest web has its UUID"):
        bring(there, archive)
    assert sorted(os.listdir(mine)) == [".import", ".profile"]


ENOUGH_MEMORY = {
    "balloon": "<memory unit='GiB'>1536</memory><currentMemory unit='KiB'>1024</currentMemory>",
    "plugged": "<maxMemory slots='1' unit='TiB'>512</maxMemory><memory unit='MiB'>1</memory>",
}
"""1024 GiB of 2048 GiB are available."""


@pytest.mark.parametrize("kind", ENOUGH_MEMORY)
def test_a_guest_that_may_get_more_memory_later_is_imported(archive, there, kind):
    opened = with_memory(archive, ENOUGH_MEMORY[kind])
    assert bring(there, opened.written(), cold=True).state == "booted"


def with_memory(archive, memory):
    opened = Opened(archive)
    for part in opened.manifest.parts:
        if part.role in (Role.LIVE_XML, Role.INACTIVE_XML):
            text = re.sub("<memory .*?</memory>", "", opened.data[part.name].decode())
            text = re.sub("<currentMemory .*?</currentMemory>", "", text)
            text = text.replace("<devices>", f"{memory}<devices>", 1)
            opened.change_part(part.name, text.encode())
    return opened


MORE_MEMORY = {
    "memory": "<memory unit='TiB'>512</memory><currentMemory unit='KiB'>1024</currentMemory>",
    "cells": "<cpu><numa><cell id='0' cpus='0' memory='512' unit='TiB'/></numa></cpu>",
}


@pytest.mark.parametrize("kind", MORE_MEMORY)
def test_a_guest_with_more_memory_than_the_host_has(archive, there, kind):
    opened = with_memory(archive, MORE_MEMORY[kind])
    with pytest.raises(RefusedError, match="it has 536870912 MiB of memory, this host"):
        bring(there, opened.written(), cold=True)


@pytest.mark.parametrize("how", ["discard", "begin"])
def test_a_kill_while_the_files_of_a_complete_import_are_removed(there, monkeypatch, how):
    """The same command continues."""
    place, unlink = ImportPlace(there.images / "web"), os.unlink
    place.begin("uuid")
    for name in ("vda.qcow2", "vdb.qcow2"):
        (place.path / name).write_bytes(b"data")
    place.complete()

    def killed(path, *arguments, **more):
        unlink(path, *arguments, **more)
        if str(path).endswith(".qcow2"):
            raise KilledError

    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", killed)
        with pytest.raises(KilledError):
            place.discard() if how == "discard" else place.begin("uuid")
    assert ImportPlace(place.path).check() == "uuid"


@pytest.mark.parametrize("how", ["discard", "finish"])
@pytest.mark.parametrize("kill", [1, 2])
def test_the_mark_goes_last(there, monkeypatch, how, kill):
    """Otherwise a kill meanwhile would leave what no command removes."""
    place, left, unlink = ImportPlace(there.images / "web"), [kill], os.unlink
    place.begin("uuid")
    for name in (".ram.save", ".import-ram.save"):
        (place.path / name).write_bytes(b"data")

    def killed(*arguments, **more):
        left[0] -= 1
        if left[0] < 0:
            raise KilledError
        unlink(*arguments, **more)

    act = getattr(place, how)
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", killed)
        with pytest.raises(KilledError):
            act()
    assert place.marked() == "uuid"


def test_it_notes_that_a_qcow2_image_may_grow(archive, there, monkeypatch):
    real = shutil.disk_usage(there.images)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: real._replace(free=1 << 40))
    bring(there, archive, starts=False)
    assert not any("may grow" in each for each in there.heard.notes)
    remove(there)
    image = bytearray(qcow2())
    image[24:32] = (1 << 50).to_bytes(8, "big")  # the size of the disk
    bring(there, with_qcow2(archive, bytes(image)), starts=False)
    assert any("its disks may grow by 1073741" in each for each in there.heard.notes)


def test_an_error_after_its_start_says_that_it_is_here(archive, there):
    there.hooks.at["hypervisor.restore"] = failing(OSError(5, "Input/output error"))
    with pytest.raises(AttentionError, match=r"is imported, and then failed: .*Input/output error"):
        bring(there, archive)
    assert there.guest("web").inactive is not None


def test_a_paused_guest_that_is_not_resumed_does_not_run(archive, there):
    forged = Opened(archive).change_manifest(was_running=False).written()
    there.hooks.at["hypervisor.restore"] = failing(HypervisorError("x", "restore: bad device"))
    made = bring(there, forged)
    assert (made.state, made.cold_reason) == ("defined", "restore: bad device")
    assert there.guest("web").live is None
