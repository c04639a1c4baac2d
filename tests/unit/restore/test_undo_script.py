"""The script that undoes a restore: it checks everything before it changes anything."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes.domain_xml import DiskSpec
from fakes.images import qcow2

from snaporch.errors import NotFoundError
from snaporch.prune.scan import scan_store
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.restore.safety_catalog import safety_copies
from snaporch.restore.select_undo import choose_copy
from snaporch.restore.source import reading_lock
from snaporch.restore.undo_command import guests_left_barred
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

_TOOL = """#!{python}
import json, os, sys
from pathlib import Path

here = Path({here!r})
facts = json.loads((here / "facts.json").read_text())
tool, asked = Path(sys.argv[0]).name, sys.argv[1:]
if tool == "zfs" and asked[0] == "get":
    key, name = asked[3].partition("@")[0], asked[4]
    if name not in facts:
        sys.exit(1)
    print(facts[name][key])
elif tool == "zfs" and asked[0] == "holds":
    print(*(f"{{asked[2]}}\\t{{tag}}\\tnow" for tag in facts["tags"]), sep="\\n")
elif tool == "zfs" and asked[0] == "list":
    print("\\n".join(facts["newer"]))
elif tool == "findmnt":
    print(facts["mounts"].get(asked[-1], ""))
    sys.exit(asked[-1] not in facts["mounts"])
elif tool == "unshare":
    os.execvp(asked[1], asked[1:])
elif tool == "mount":  # -t zfs -o ro SNAPSHOT DIRECTORY
    dataset, _, snapshot = asked[4].partition("@")
    os.rmdir(asked[5])
    os.symlink(Path(facts["mounts"][dataset]) / ".zfs/snapshot" / snapshot, asked[5])
elif tool == "stat" and asked[:2] == ["-c", "%d"]:
    print(facts["device"])
elif tool == "stat":
    os.execv({stat!r}, ["stat", *asked])
elif tool == "virsh" and asked[0] in ("domstate", "dominfo", "list", "dumpxml"):
    if asked[0] in facts["down"] or os.environ["LIBVIRT_DEFAULT_URI"] != facts["uri"]:
        sys.exit(1)
    said = {{"domstate": "state", "dominfo": "info", "list": "known", "dumpxml": "xml"}}
    print(facts[said[asked[0]]])
elif asked[0] == facts.get("fails"):
    sys.exit(1)
else:
    with (here / "done").open("a") as log:
        print(tool, *asked, file=log)
"""


class Host:
    """Stand-ins for zfs, virsh, findmnt, stat, unshare and mount, which print the ``facts``."""

    def __init__(self, here, story, script):
        self.here, self.script = here, script
        text = _TOOL.format(python=sys.executable, here=str(here), stat=shutil.which("stat"))
        for tool in ("zfs", "virsh", "findmnt", "stat", "unshare", "mount"):
            (here / tool).write_text(text)
            (here / tool).chmod(0o755)
        self.facts = {
            "newer": [],
            "tags": ["backup", "snaporch-undo"],
            "mounts": {name: str(story.world.root / "zfs" / name) for name in story.datasets},
            "device": 0,
            "state": "shut off",
            "info": "Managed save:   no",
            "xml": "<domain/>",
            "down": [],
            "uri": "qemu:///system",
            "known": story.domain.uuid,
        }
        for snapshot in story.world.pool.snapshots():
            self.facts[snapshot.full_name] = {"guid": snapshot.guid, "createtxg": 100}
            self.facts[snapshot.dataset] = {
                "available": 1 << 30,
                "written": 0,
                "type": "filesystem",
            }

    def run(self, *options):
        """Run the script; returns the finished process."""
        (self.here / "facts.json").write_text(json.dumps(self.facts))
        path = {**os.environ, "PATH": f"{self.here}:{os.environ['PATH']}"}
        return subprocess.run(
            ["sh", self.script, *options], env=path, capture_output=True, text=True, check=False
        )

    def undo(self, *options):
        """Run the script; returns its exit status, its errors and the commands that it ran."""
        done = self.run(*options)
        log = self.here / "done"
        return done.returncode, done.stderr, log.read_text() if log.exists() else ""


@pytest.fixture
def host(story, world, tmp_path_factory):
    plan = make_restore_plan(world.context, "web", "s1", discard_newer=True)
    script = restore(world.context, plan, safety=True).undo
    return Host(tmp_path_factory.mktemp("host"), story, script)


def refused(host, *words, options=()):
    status, said, done = host.undo(*options)
    assert (status, done) == (5, "")
    assert said.startswith("undo.sh: web: ")
    for word in (*words, "nothing was touched"):
        assert word in said


def test_without_obstacles_the_script_restores_everything(host):
    status, said, done = host.undo()
    assert (status, said) == (0, "")
    lines = done.splitlines()
    assert lines[0] == "virsh define barred.xml"
    assert lines.count("zfs rollback -r tank/web@s1") == lines.count("virsh define domain.xml") == 1
    assert not [line for line in lines if "managedsave-remove" in line]


def test_the_script_prints_what_it_did_and_the_copy_is_not_offered_again(host, world):
    (copy,) = safety_copies(world.context.store, "web")
    assert copy.is_offered
    assert (
        host.run().stdout == "the restore of web to @s1 was undone; state of the guest: shut off\n"
    )
    assert not copy.is_offered
    with pytest.raises(NotFoundError) as raised:
        choose_copy(world.context, "web", None)
    assert raised.value.line() == (
        "web: undo.sh has undone its restores already; "
        f"to bring the newest copy back again: snaporch undo web --copy {copy.name} "
        "(--dry-run names the options that it needs)"
    )
    assert choose_copy(world.context, "web", copy.name) == copy


def test_prune_knows_every_file_of_a_copy_that_the_script_has_brought_back(host, world):
    assert host.undo()[0] == 0
    (copy,) = safety_copies(world.context.store, "web")
    found = {each.path: each.problem for each in scan_store(world.context.store.root)}
    assert found[copy.directory] == ""


def test_the_older_copy_is_offered_when_the_script_has_undone_the_later_restore(host, world):
    (older,) = safety_copies(world.context.store, "web")
    plan = make_restore_plan(world.context, "web", "s1", discard_newer=True)
    host.script = restore(world.context, plan, safety=True).undo
    assert choose_copy(world.context, "web", None) != older
    assert host.undo()[0] == 0
    assert choose_copy(world.context, "web", None) == older


@pytest.mark.parametrize("again", [False, True])
def test_a_copy_that_the_script_did_not_bring_back_is_offered(host, world, again):
    """Also one that it has brought back before."""
    options = ["--again"] if again else []
    if again:
        host.undo()
    for tool in ("receive", "rollback"):
        host.facts["fails"] = tool
        assert host.undo(*options)[0] != 0
        assert safety_copies(world.context.store, "web")[0].is_offered


def come_back(host, world, *datasets):
    """The snapshots that the script receives from the copy's streams are on these datasets."""
    (copy,) = safety_copies(world.context.store, "web")
    for last in copy.record.last:
        if last.dataset in datasets:
            host.facts[f"{last.dataset}@{last.name}"] = {"guid": last.guid, "createtxg": 101}


def refused_the_second_time(host, world):
    (copy,) = safety_copies(world.context.store, "web")
    again = f"sh {copy.directory}/undo.sh --again"
    refused(host, "the restore of web to @s1 was undone already", "would be lost", again)


def test_the_script_does_not_discard_what_was_written_since_it_has_ended(host, world):
    """The safety snapshots may be destroyed at any time."""
    assert host.undo()[0] == 0
    (host.here / "done").unlink()
    refused_the_second_time(host, world)
    host.facts["state"] = "running"
    refused_the_second_time(host, world)
    host.facts["state"] = "shut off"
    assert host.undo("--again")[0] == 0


def test_what_snaporch_undo_has_brought_back_is_not_undone_again_by_the_script(host, world):
    """It leaves no mark: each dataset has the last snapshot of the streams, by its GUID."""
    come_back(host, world, "tank/web", "flash/web")
    refused_the_second_time(host, world)
    (copy,) = safety_copies(world.context.store, "web")
    host.facts[f"tank/web@{copy.record.last[0].name}"]["guid"] += 1
    assert host.undo()[0] == 0


def test_an_interrupted_run_of_the_script_is_finished(host, world):
    come_back(host, world, "tank/web")
    assert host.undo()[0] == 0


@pytest.mark.parametrize("left", ["bar", "journal"])
def test_a_run_interrupted_when_all_streams_were_received_is_finished(host, world, left):
    """The guest cannot have been started yet."""
    come_back(host, world, "tank/web", "flash/web")
    if left == "bar":
        host.facts["xml"] = (Path(host.script).parent / "barred.xml").read_text()
    else:
        (journal,) = re.findall(r"^rm -f (/.*)$", Path(host.script).read_text(), re.MULTILINE)
        Path(journal).touch()
    status, said, done = host.undo()
    assert (status, said) == (0, "")
    assert "virsh define domain.xml" in done


def test_the_ram_image_of_the_unfinished_restore_is_deleted(host, world):
    (run,) = re.findall(
        r"^rm -rf \.\./\.(.*)\.partial \|\| true$", Path(host.script).read_text(), re.MULTILINE
    )
    image = world.context.store.create(world.guest().uuid, run).directory / "ram.save"
    image.write_bytes(b"ram")
    assert host.undo()[0] == 0
    assert not image.parent.exists()


@pytest.mark.parametrize("dataset", ["tank/web", "flash/web"])
def test_a_missing_or_replaced_target_is_refused(host, dataset):
    """The script refuses before the first rollback, whichever target it is."""
    host.facts[f"{dataset}@s1"]["guid"] += 1
    refused(host, f"{dataset}@s1 is missing, or is another snapshot of that name")
    del host.facts[f"{dataset}@s1"]
    refused(host, f"{dataset}@s1 is missing, or is another snapshot of that name")


@pytest.mark.parametrize(("holds", "clones"), [("1", "-"), ("0", "tank/test")])
def test_snapshots_that_cannot_be_destroyed_are_refused(host, holds, clones):
    host.facts["newer"] = ["99\t1\ttank/x\ttank/web@old", f"101\t{holds}\t{clones}\ttank/web@new"]
    refused(host, "tank/web@new")


def test_a_kept_snapshot_is_refused_also_without_its_hold(host):
    host.facts["newer"] = ["101\t0\t-\ttank/web@new\t2026-11-01T00:00:00Z"]
    refused(host, "tank/web@new")
    host.facts["newer"] = ["101\t0\t-\ttank/web@new\t-"]
    assert host.undo()[0] == 0


def test_the_base_snapshots_of_another_copy_may_be_destroyed(host):
    """snaporch's own holds are released before ZFS has to destroy it."""
    host.facts["newer"] = ["101\t2\t-\ttank/web@new"]
    host.facts["tags"] = ["snaporch-restore", "snaporch-undo"]
    status, said, done = host.undo()
    assert (status, said) == (0, "")
    lines = done.splitlines()
    rollback = lines.index("zfs rollback -r tank/web@s1")
    assert lines.index("zfs release snaporch-undo tank/web@new") < rollback
    assert lines.index("zfs release snaporch-restore tank/web@new") < rollback


def test_too_little_room_is_refused(host):
    host.facts["flash/web"]["available"] = 3
    refused(host, "flash/web has no room")
    host.facts["flash/web"]["written"] = 1 << 20
    assert host.undo()[0] == 0


def test_disks_that_a_process_uses_are_refused(host):
    """A process is found by its open files, whatever its name."""
    with (host.here / "image").open("w"):
        host.facts["device"] = host.here.stat().st_dev
        refused(host, "is in use: /proc/")


@pytest.fixture
def there(host):
    """The kernel's files as the script sees them: ``flash/web`` is a volume with a partition."""
    place = host.here / "kernel"
    block = place / "sys" / "class" / "block"
    for device, number in ((block / "zd16", "230:16"), (block / "zd16" / "zd16p1", "230:17")):
        (device / "holders").mkdir(parents=True)
        (device / "dev").write_text(f"{number}\n")
        (place / device.name).touch()
    (block / "zd16" / "zd16p1" / "partition").write_text("1\n")
    (block / "zd16p1").symlink_to(block / "zd16" / "zd16p1")
    (place / "swaps").write_text("Filename Type Size Used Priority\n")
    (place / "mountinfo").touch()
    script = Path(host.script)
    text = (
        script.read_text()
        .replace("/sys/", f"{place}/sys/")
        .replace("/proc/swaps", f"{place}/swaps")
        .replace("find /proc/[0-9]*/mountinfo -exec cat {} +", f"cat {place}/mountinfo")
    )
    script.write_text(text.replace("/dev/zvol/flash/web", str(place / "zd16")))
    host.facts["flash/web"]["type"] = "volume"
    return place


def mapped(place):
    (place / "sys/class/block/zd16p1/holders/dm-3").touch()
    return "dm-3"


def swapped_to(place):
    (place / "swaps").write_text(f"Filename Type\n{place}/zd16p1 partition 1 0 -2\n")
    return "swap"


def mounted(place):
    line = "36 25 230:17 / /srv rw shared:1 master:2 - ext4 /dev/disk/by-uuid/1a rw\n"
    (place / "mountinfo").write_text(line)
    return "a mount at /srv"


def mounted_with_a_number_of_its_own(place):
    """As btrfs is."""
    (place / "zvol").symlink_to(place / "zd16p1")
    (place / "mountinfo").write_text(f"36 25 0:45 /@ /srv rw - btrfs {place}/zvol rw\n")
    return "a mount at /srv"


def in_a_pool(place):
    tool = place.parent / "zpool"
    tool.write_text(f"#!/bin/sh\nprintf 'other\\t1G\\n\\t%s\\t1G\\n' {place}/zd16p1\n")
    tool.chmod(0o755)
    return "a pool"


def looped(place, over="zd16p1"):
    (place / "sys/block/loop7/loop").mkdir(parents=True)
    (place / "sys/block/loop7/loop/backing_file").write_text(f"{place / over}\n")
    return "/sys/block/loop7"


@pytest.mark.parametrize(
    "use",
    [mapped, swapped_to, mounted, mounted_with_a_number_of_its_own, in_a_pool, looped],
)
def test_a_volume_that_the_host_uses_is_refused(host, there, use):
    """The host may also use a partition of it; no process has it open."""
    refused(host, "flash/web", use(there))


def test_an_unused_volume_is_accepted(host, there):
    mapped_elsewhere = there / "sys/class/block/zd32/holders/dm-3"
    mapped_elsewhere.parent.mkdir(parents=True)
    mapped_elsewhere.touch()
    others = f"36 25 0:45 / /srv rw - btrfs {there}/zd32 rw\n37 25 0:46 / /x rw - tmpfs zd16 rw\n"
    others += "38 25 0:47 / /y rw - tmpfs this rw\n"
    (there / "mountinfo").write_text(others)
    (there / "swaps").write_text("Filename Type\n/dev/zd1 partition 1 0 -2\n")
    assert host.undo()[:2] == (0, "")


def test_a_volume_that_the_kernel_does_not_report_is_refused(host, there):
    shutil.rmtree(there / "sys")
    refused(host, "the users of", "are unknown")


def test_an_image_beneath_a_loop_device_is_refused(host, there):
    """On a file system on which no process has anything open."""
    looped(there, "/sys/kernel")
    host.facts["flash/web"]["type"] = "filesystem"
    host.facts["device"] = os.stat("/sys/kernel").st_dev
    refused(host, "is in use: ", "/sys/block/loop7")


@pytest.fixture
def over_a_base(world):
    """A guest on ``tank/web`` over an image that is in no snapshot."""
    base, top = world.image("flash/golden", "base.img"), world.image("tank/web", "top.img")
    top.write_bytes(qcow2(str(base), "raw"))
    world.add_guest("web", {}, more=(DiskSpec("vda", str(top), format="qcow2"),))
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    return base


@pytest.mark.parametrize("keep", [True, False])
def test_a_backing_file_that_was_changed_since_is_refused(
    over_a_base, world, tmp_path_factory, keep
):
    """The image would differ, with and without RAM."""
    plan = make_restore_plan(world.context, "web", "s1", discard_newer=True)
    script = restore(world.context, plan, safety=True, keep_running=keep).undo
    story = SimpleNamespace(world=world, datasets=["tank/web"], domain=world.guest())
    host = Host(tmp_path_factory.mktemp("host"), story, script)
    status, said, done = host.undo()
    assert (status, said) == (0, "")
    assert ("virsh restore" in done) is keep
    (host.here / "done").unlink()
    over_a_base.write_bytes(b"committed")
    words = (f"{over_a_base}, which lies beneath a disk", "was changed", "--disks-only")
    refused(host, *words, options=["--again"])
    assert host.undo("--again", "--disks-only")[0] == 0
    assert "virsh restore" not in host.undo("--again", "--disks-only")[2]


def test_ram_that_cannot_be_resumed_leaves_the_disks_back(world, over_a_base, tmp_path_factory):
    plan = make_restore_plan(world.context, "web", "s1", discard_newer=True)
    script = restore(world.context, plan, safety=True, keep_running=True).undo
    story = SimpleNamespace(world=world, datasets=["tank/web"], domain=world.guest())
    host = Host(tmp_path_factory.mktemp("host"), story, script)
    host.facts["fails"] = "restore"
    status, said, done = host.undo()
    image = Path(script).with_name("running.save")
    assert (status, f"virsh restore --bypass-cache {image}" in said) == (9, True)
    assert "virsh define domain.xml" in done
    assert not safety_copies(world.context.store, "web")[0].is_offered


def test_snapshots_that_are_being_read_are_refused(host, story, world):
    with reading_lock(world.context, story.record):
        assert host.undo() == (
            6,
            "undo.sh: web: a snapshot of the guest is being read\n",
            "",
        )
    assert host.undo()[0] == 0


@pytest.mark.parametrize("asked", ["list", "dumpxml", "domstate", "dominfo"])
def test_a_libvirt_that_does_not_answer_is_refused(host, asked):
    """It may run the guest nevertheless."""
    host.facts["down"] = [asked]
    refused(host, "libvirt does not")


def test_the_script_asks_the_same_libvirt_as_snaporch(host):
    host.facts["uri"] = "test:///elsewhere"
    refused(host, "libvirt does not answer")


def test_an_undefined_guest_is_accepted(host):
    host.facts["known"], host.facts["down"] = "", ["domstate", "dominfo"]
    assert host.undo()[0] == 0


@pytest.fixture
def shared(story, world, tmp_path_factory):
    """A restored guest, with a note of the administrator's in one of the datasets."""
    place = world.root / "zfs" / "tank" / "web"
    (place / "note").write_text("of another program")
    then = place / ".zfs" / "snapshot" / "s1"
    then.mkdir(parents=True)
    os.link(place / "note", then / "note")
    plan = make_restore_plan(world.context, "web", "s1", discard_newer=True)
    script = restore(world.context, plan, safety=True).undo
    host = Host(tmp_path_factory.mktemp("host"), story, script)
    host.place = place
    return host


def test_an_unchanged_file_of_others_is_accepted(shared):
    (shared.place / "web-vda.img").write_text("the guest has written")
    assert shared.undo()[0] == 0


def test_files_that_others_wrote_since_the_restore_are_refused(shared):
    (shared.place / "sub").mkdir()
    for name in ("sub/new one", "d", "c", "b"):
        (shared.place / name).write_text("new")
    words = ("tank/web would be rolled back with 4 files", "b,c,d;", "--also-roll-back")
    refused(shared, *words)
    assert not list(Path(shared.script).parent.glob("others*"))
    assert shared.undo("--also-roll-back")[0] == 0


def test_a_dataset_that_is_not_mounted(shared):
    del shared.facts["mounts"]["tank/web"]
    refused(shared, "is not mounted", "zfs mount -l")
    assert shared.undo("--also-roll-back")[0] == 0


def test_an_unknown_option_is_refused(host):
    status, said, done = host.undo("--all")
    assert (status, done) == (5, "")
    assert "usage: " in said


def test_a_managed_save_made_since_is_deleted(host):
    """A start would resume it on disks of another time."""
    host.facts["info"] = "Managed save:   yes"
    _, _, done = host.undo()
    lines = done.splitlines()
    (place,) = [index for index, line in enumerate(lines) if "managedsave-remove" in line]
    assert place < lines.index("zfs rollback -r tank/web@s1")


@pytest.fixture
def came_back(story, world, tmp_path_factory):
    """A guest that was restored when it was not defined: the copy has no definition of it."""
    world.hypervisor.destroy(story.domain.uuid)
    world.hypervisor.undefine(story.domain.uuid)
    plan = make_restore_plan(world.context, story.domain.uuid, "s1", discard_newer=True)
    script = restore(world.context, plan, safety=True).undo
    assert not (Path(script).parent / "domain.xml").exists()
    return Host(tmp_path_factory.mktemp("host"), story, script)


def test_a_guest_that_was_not_defined_keeps_its_definition(came_back):
    status, said, done = came_back.undo()
    assert (status, said) == (0, "")
    assert "zfs rollback -r tank/web@s1" in done
    assert "virsh" not in done


def test_a_guest_that_is_not_off_is_refused(host):
    host.facts["state"] = "running"
    refused(host, "the guest is running; shut it off first")


def test_a_guest_that_was_not_defined_is_off_as_well(came_back):
    came_back.facts["state"] = "paused"
    refused(came_back, "the guest is paused; shut it off first")


def test_a_guest_that_was_not_defined_loses_a_managed_save_as_well(came_back):
    test_a_managed_save_made_since_is_deleted(came_back)


def test_a_guest_left_barred_by_an_undo_is_reported(host, story, world):
    assert guests_left_barred(world.context) == []
    world.guest().inactive = (Path(host.script).parent / "barred.xml").read_text()
    (error,) = guests_left_barred(world.context)
    assert f"snaporch undo web --copy {Path(host.script).parent.name}" in error.line()
    assert "snaporch restore" in error.line()
