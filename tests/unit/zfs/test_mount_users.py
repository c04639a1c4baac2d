"""The programs that have a snapshot mounted, from the kernel's data of each process."""

import pytest

from snaporch.zfs import MountedError, PoolError
from snaporch.zfs.cli import ZfsCommand
from snaporch.zfs.mount_users import BlockingMount, blocking_mounts

HELD = "tank/web@x"
AUTOMOUNT = "/tank/web/.zfs/snapshot/x"
QEMU = "qemu\0-name\0guest=a,,b,debug-threads=on\0-uuid\0u-1\0"


class Proc:
    """A /proc of processes in mount namespaces; this one's is ``host``."""

    def __init__(self, root):
        self.root = root
        self.add("1", "host", comm="init")
        (root / "self").symlink_to("1")

    def add(self, pid, namespace, *mounts, comm="sleep", cmdline=""):
        """Add mounts, each with its source, mount point and optional fields."""
        process = self.root / pid
        (process / "ns").mkdir(parents=True)
        (self.root / namespace).touch()
        (process / "ns" / "mnt").symlink_to(self.root / namespace)
        lines = [
            f"4{n} 28 0:3{n} / {at} rw {optional}- zfs {source} rw\n"
            for n, (source, at, optional) in enumerate(mounts)
        ]
        (process / "mountinfo").write_text("".join(lines))
        (process / "comm").write_text(f"{comm}\n")
        (process / "cmdline").write_text(cmdline)


@pytest.fixture
def proc(tmp_path):
    return Proc(tmp_path)


def test_a_guest_is_named_and_its_helpers_are_not(proc):
    for pid in ("20", "22"):
        proc.add(pid, "guest", (HELD, AUTOMOUNT, ""))
    proc.add("21", "guest", (HELD, AUTOMOUNT, ""), cmdline=QEMU)
    assert blocking_mounts([HELD], proc.root) == [BlockingMount(HELD, "the guest a,b", "u-1")]


def test_another_process_is_named_with_its_number(proc):
    proc.add("33", "box", ("tank/web", "/tank/web", ""), (HELD, AUTOMOUNT, ""), comm="backup me")
    found = [BlockingMount(HELD, "backup me (process 33)")]
    assert blocking_mounts([HELD], proc.root) == blocking_mounts(None, proc.root) == found
    assert blocking_mounts(["tank/other@x"], proc.root) == []


@pytest.mark.parametrize("optional", ["shared:5 ", "master:5 "])
def test_mounts_that_follow_the_hosts_do_not_block(proc, optional):
    proc.add("33", "box", (HELD, AUTOMOUNT, optional))
    assert blocking_mounts(None, proc.root) == []


def test_of_the_hosts_own_mounts_zfs_takes_its_back(proc):
    proc.add("33", "host", (HELD, AUTOMOUNT, ""), ("tank/web@y", "/mnt", ""), ("tank", "/t", ""))
    names = [HELD, "tank/web@y", "tank"]
    assert blocking_mounts(names, proc.root) == [BlockingMount("tank/web@y", "this host, at /mnt")]


def test_a_process_that_ends_meanwhile(proc):
    proc.add("33", "box", (HELD, AUTOMOUNT, ""))
    (proc.root / "33" / "mountinfo").unlink()
    assert blocking_mounts(None, proc.root) == []


class Failing(ZfsCommand):
    """A ``zfs`` that destroys nothing."""

    def __init__(self, *mounts):
        super().__init__("zfs")
        self.mounts = list(mounts)

    def _run(self, *arguments):
        raise PoolError("zfs destroy", "dataset is busy")

    def blocking_mounts(self, names=None):
        return [each for each in self.mounts if each.name in names]


def test_the_error_of_destroying_names_the_mounting_program():
    with pytest.raises(MountedError, match="tank/web is mounted by the guest db; it can"):
        Failing(BlockingMount("tank/web", "the guest db")).destroy_dataset("tank/web")


def test_another_reason_is_reported_unchanged():
    with pytest.raises(PoolError) as caught:
        Failing(BlockingMount("tank/other", "the guest db")).destroy_dataset("tank/web")
    assert type(caught.value) is PoolError
    assert "dataset is busy" in str(caught.value)
