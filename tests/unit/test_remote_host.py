"""Commands on another machine end, whatever the machine does."""

import os
import time

import pytest

from snaporch.remote_host import CommandError, Host


@pytest.fixture
def nas(tmp_path, monkeypatch):
    """Another machine, which is this one."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return Host("root@nas")


def test_a_command_over_its_limit_is_ended_and_reported(nas, tmp_path):
    """As if the pool there were suspended."""
    number = tmp_path / "number"
    with pytest.raises(CommandError) as caught:
        nas.script(f"echo $$ >{number}; exec sleep 1000", what="zfs list", limit=0.5)
    assert caught.value.line() == (
        "zfs list on root@nas: takes over 0 s, and was ended; see: zpool status, on root@nas"
    )
    with pytest.raises(ProcessLookupError):
        os.kill(int(number.read_text()), 0)


def test_what_a_command_over_its_limit_has_said_last_is_in_the_error(nas):
    with pytest.raises(
        CommandError, match=r"takes over 1 s, and was ended: no route, trying again"
    ):
        nas.script(
            "printf 'first\nno route, trying again\n' >&2; exec sleep 1000", what="x", limit=1
        )


def test_after_a_command_over_the_usual_limit_no_other_waits_for_it(nas, tmp_path):
    nas = Host("root@nas", limit=1)
    with pytest.raises(CommandError, match="takes over 1 s"):
        nas.script("exec sleep 1000", what="zfs list")
    with pytest.raises(CommandError) as caught:
        nas.run("touch", str(tmp_path / "ran"))
    assert caught.value.line() == (
        f"touch {tmp_path / 'ran'} on root@nas: was not run: zfs list on root@nas took over 1 s; "
        "see: zpool status, on root@nas"
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("limit", [0.5, 1.5], ids=["check", "large"])
def test_after_a_command_over_another_limit_the_next_is_run(nas, limit):
    """A large bundle on slow disks must not keep the others from being copied."""
    nas = Host("root@nas", limit=1)
    with pytest.raises(CommandError, match="takes over"):
        nas.script("exec sleep 1000", what="sha256sum", limit=limit)
    assert nas.script("echo done", what="echo") == "done\n"


def test_a_command_that_has_closed_its_output_has_the_limit_too():
    with pytest.raises(CommandError, match=r"^sleep: takes over.*zpool status, on this machine"):
        Host("").script("exec sleep 1000 >&- 2>&-", what="sleep", limit=0.5)


def test_a_command_within_its_limit_is_not_ended():
    assert Host("").script("sleep 0.5; echo done", what="sleep", limit=60) == "done\n"


def test_an_output_without_end_is_an_error_and_no_shorter_listing(nas):
    with pytest.raises(CommandError, match="zfs list on root@nas: prints over 128 MiB"):
        nas.script("yes | head -c 300000000", what="zfs list")


def test_an_answer_may_have_a_limit_of_its_own(nas):
    with pytest.raises(CommandError, match="prints over 1 MiB, and was ended"):
        nas.script("yes | head -c 3000000", what="x", most=1 << 20)
    assert len(nas.script("yes | head -c 3000000", what="x")) == 3_000_000


def test_of_errors_without_end_the_last_are_kept(nas):
    script = "yes x | tr -d '\\n' | head -c 300000000 >&2; echo the cause >&2; exit 1"
    with pytest.raises(CommandError, match=r"the cause$") as caught:
        nas.script(script, what="zfs list")
    assert len(caught.value.reason) < 10_000


def test_an_exception_of_the_check_ends_a_command():
    begun = time.monotonic()

    def check():
        if time.monotonic() > begun + 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Host("", check).run("sleep", "1000")


def test_an_error_names_the_command_and_the_host(nas):
    with pytest.raises(CommandError, match=r"^false list on root@nas: exit status 1"):
        nas.run("false", "list", "-H")
