"""The dataset of all copies of a source."""

import subprocess

from snaporch.zfs.pulled import Counts, PulledZfs


def zfs(datasets="", listing=""):
    """ZFS that prints these listings, and the commands that it got."""
    commands = []

    def run(command, **_how):
        words = [each if isinstance(each, str) else each.decode() for each in command][1:]
        commands.append(words)
        out = listing if "filesystem,volume,snapshot" in words else datasets
        return subprocess.CompletedProcess(command, 0, out.encode(), b"")

    return PulledZfs("zfs", run), commands


def test_it_is_created_so_that_copies_are_neither_mounted_nor_changed():
    pool, commands = zfs("backup\tfilesystem\n")
    pool.make_root("backup/pulled/vm1")
    assert [each for each in commands if each[0] == "create"] == [
        ["create", "-o", "canmount=off", "backup/pulled"],
        [
            *("create", "-o", "mountpoint=none", "-o", "volmode=none"),
            *("-o", "readonly=on", "backup/pulled/vm1"),
        ],
    ]


def test_what_is_directly_below_it_is_counted():
    pool, _ = zfs(listing="b/vm1\nb/vm1@own\nb/vm1/a\nb/vm1/a@1\nb/vm1/a@2\nb/vm1/b\nb/vm1/b@1\n")
    assert pool.counts("b/vm1") == Counts(2, 3)
