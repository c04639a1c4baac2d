from pathlib import Path

import pytest

from snaporch.sanoid.hooks.caller import Caller, find_sanoid


@pytest.fixture
def proc(tmp_path):
    """Makes /proc entries, each with its parent and its command line."""

    def process(pid, parent, *words, cwd=None):
        entry = tmp_path / str(pid)
        entry.mkdir()
        (entry / "stat").write_text(f"{pid} (a) b) c) S {parent} 1 1 0\n")
        (entry / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
        if cwd:
            (entry / "cwd").symlink_to(cwd)
        return tmp_path

    return process


def tree(proc, *words, **more):
    proc(1, 0, "/sbin/init")
    proc(50, 1, "/usr/sbin/cron")
    proc(60, 50, *words, **more)
    proc(70, 60, "sh", "-c", "snaporch hook sanoid pre")
    return proc(80, 70, "python3", "/usr/bin/snaporch", "hook", "sanoid", "pre")


PERL = ("/usr/bin/perl", "/usr/sbin/sanoid")


@pytest.mark.parametrize(
    ("words", "directory"),
    [
        ([*PERL, "--cron"], "/etc/sanoid"),
        ([*PERL, "--configdir", "/srv/x", "--cron"], "/srv/x"),
        ([*PERL, "--cron", "--configdir=/srv/x"], "/srv/x"),
        ([*PERL, "-conf", "/srv/x"], "/srv/x"),
        ([*PERL, "--configdir", "rel"], "/home/rel"),
        ([*PERL, "--configdir"], "/etc/sanoid"),
        (["/usr/bin/perl", "-w", "/usr/local/sbin/sanoid"], "/etc/sanoid"),
        (["sanoid", "--cron"], "/etc/sanoid"),
    ],
)
def test_sanoid_is_found_among_the_ancestors(proc, words, directory):
    root = tree(proc, *words, cwd="/home")
    caller = find_sanoid(root, 80)
    assert (caller.pid, caller.config_dir) == (60, Path(directory))
    assert caller.program == Path("/home") / next(word for word in words if "sanoid" in word)


@pytest.mark.parametrize(
    ("options", "directory"),
    [
        (["--cron"], "/var/cache/sanoid"),
        (["--cache-ttl", "5", "--cache-dir=/srv/c"], "/srv/c"),
        (["--cache-d", "c", "--configdir", "/srv/x"], "/home/c"),
    ],
)
def test_the_cache_directory(proc, options, directory):
    root = tree(proc, *PERL, *options, cwd="/home")
    assert find_sanoid(root, 80).cache_dir == Path(directory)


@pytest.mark.parametrize("words", [["bash"], ["sudo", "sanoid"], ["vi", "sanoid"], []])
def test_other_programs_are_not_sanoid(proc, words):
    assert find_sanoid(tree(proc, *words), 80) == Caller(0, Path("/etc/sanoid"))


def test_an_ancestor_that_has_just_exited(proc):
    assert find_sanoid(proc(80, 79, "python3"), 80).pid == 0


def test_the_real_proc_can_be_read():
    assert find_sanoid().pid == 0
