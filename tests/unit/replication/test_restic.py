import json
import os
import signal
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from fakes import restic as fake
from fakes.world import Heard

from snaporch.config import ResticReplica
from snaporch.errors import InterruptedRunError, UnavailableError, WindowClosedError
from snaporch.interrupt import Interrupt, WindowInterrupt
from snaporch.replication.interface import ReplicaError
from snaporch.replication.restic import (
    ResticRepository,
    read_secret,
    read_variables,
    repository_problem,
    restic_reason,
)
from snaporch.replication.restic_records import marks_tags


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "password"
    path.write_text("open sesame\n")
    path.chmod(0o600)
    return path


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory for a repository, which does not exist; the command is the fake."""
    tools = tmp_path / "tools"
    tools.mkdir()
    fake.put_in(tools)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    return tmp_path / "repository"


def section(place, secret, **more):
    return ResticReplica(engine="restic", repository=str(place), password_file=secret, **more)


def opened(replica, tmp_path):
    return ResticRepository("cloud", replica, Interrupt(), Heard(), cache=tmp_path / "cache")


def make(place):
    for name in ("data", "snapshots"):
        (place / name).mkdir(parents=True)
    (place / "config").write_text("{}")


def test_a_file_with_a_secret_is_read(secret):
    assert read_secret(secret) == "open sesame\n"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_may_use_is_refused(secret, mode):
    secret.chmod(mode)
    with pytest.raises(UnavailableError, match=r"may be read or written by others; .*chmod 600"):
        read_secret(secret)


def test_a_link_a_directory_and_nothing_are_refused(secret, tmp_path):
    (tmp_path / "link").symlink_to(secret)
    (tmp_path / "empty").touch(0o600)
    for name in ("link", "none", "empty", "."):
        with pytest.raises(UnavailableError):
            read_secret(tmp_path / name)


def test_a_pipe_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(UnavailableError, match="no plain file"):
        read_secret(tmp_path / "pipe")


def test_variables_are_read(secret):
    secret.write_text("# a key\n\nAWS_ACCESS_KEY_ID=abc\nB='d e=f'\nC=\n")
    assert read_variables(secret) == {"AWS_ACCESS_KEY_ID": "abc", "B": "d e=f", "C": ""}


@pytest.mark.parametrize("line", ["export A=b", "hush", "=b", "A=b c", "A='b", "A-B=c"])
def test_a_line_of_another_form_is_named_and_not_shown(secret, line):
    secret.write_text(f"X=y\n{line}\n")
    with pytest.raises(UnavailableError, match="line 2 is not NAME=VALUE") as caught:
        read_variables(secret)
    assert line not in caught.value.reason


def test_a_repository_that_answers_has_no_problem(place, secret):
    make(place)
    assert repository_problem(section(place, secret), Interrupt()) == ""


def test_a_repository_that_was_not_made_is_a_problem_with_its_command(place, secret):
    found = repository_problem(section(place, secret), Interrupt())
    assert "unable to open config file" in found
    assert f"if it was never made: restic -r {place} --password-file {secret} init" in found


def test_a_file_that_others_may_read_is_a_problem(place, secret):
    secret.chmod(0o644)
    assert "chmod 600" in repository_problem(section(place, secret), Interrupt())


def test_without_restic_the_package_is_named(place, secret, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    (place.parent / "tools" / "restic").unlink()
    found = repository_problem(section(place, secret), Interrupt())
    assert found == "restic: is not installed; apt install restic"


def test_the_repository_can_come_from_the_environment_file(place, secret, tmp_path):
    make(place)
    variables = tmp_path / "environment"
    variables.write_text(f"RESTIC_REPOSITORY={place}\n")
    variables.chmod(0o600)
    replica = ResticReplica(engine="restic", environment_file=str(variables), password_file=secret)
    assert repository_problem(replica, Interrupt()) == ""
    variables.write_text("A=b\n")
    assert "does not set RESTIC_REPOSITORY" in repository_problem(replica, Interrupt())


def test_what_is_recorded_is_listed_at_once(place, secret, tmp_path):
    make(place)
    repository = opened(section(place, secret), tmp_path)
    assert repository.contents().policies == {}
    repository.record(marks_tags({}, {"tank/web": "hourly"}))
    assert repository.contents().policies == {"tank/web": "hourly"}


def test_a_failure_is_one_reason_with_a_next_step(place, secret, tmp_path):
    repository = opened(section(place, secret), tmp_path)
    with pytest.raises(
        ReplicaError, match="cannot be listed: unable to open config file"
    ) as caught:
        repository.contents()
    assert "snapshots" in caught.value.step
    with pytest.raises(ReplicaError, match="a record was not stored: unable to open"):
        repository.record(["snaporch"])


_WRONG = '{"message_type":"exit_error","code":12,"message":"Fatal: wrong password or no key found"}'


@pytest.mark.parametrize("line", [_WRONG, "Fatal: wrong password or no key found"])
def test_a_wrong_password_is_one_line_that_names_its_file(place, secret, tmp_path, line):
    (place.parent / "tools" / "restic").write_text(f"#!/bin/sh\necho '{line}' >&2\nexit 12\n")
    with pytest.raises(ReplicaError) as caught:
        opened(section(place, secret), tmp_path).contents()
    assert caught.value.line() == (
        "replica cloud: cannot be listed: wrong password or no key found; put the password of the "
        f"repository into {secret}"
    )
    found = repository_problem(section(place, secret), Interrupt())
    assert f"put the password of the repository into {secret}" in found
    assert "init" not in found


_HELD = """repository is already locked exclusively by PID 13036 on vm by root (UID 0, GID 0)
lock was created at 2026-11-26 15:29:48 (497.974276ms ago)
storage ID 71325c14
the `unlock` command can be used to remove stale locks"""


@pytest.mark.parametrize(
    "said",
    [
        f"unable to create lock in backend: {_HELD}",
        f"Fatal: unable to create lock in backend: {_HELD}",
        json.dumps({"message_type": "exit_error", "code": 11, "message": f"Fatal: no: {_HELD}"}),
    ],
)
def test_a_lock_that_a_killed_restic_has_left_is_named_with_the_command(
    place, secret, tmp_path, said
):
    (tmp_path / "said").write_text(said)
    (place.parent / "tools" / "restic").write_text(f"#!/bin/sh\ncat {tmp_path}/said >&2\nexit 1\n")
    repository = opened(section(place, secret), tmp_path)
    step = f"remove the lock: restic -r {place} --password-file {secret} unlock"
    for act in (
        repository.contents,
        repository.check_answers,
        repository.reclaim,
        lambda: repository.record(["snaporch"]),
    ):
        with pytest.raises(ReplicaError) as caught:
            act()
        assert caught.value.reason.endswith(_HELD.partition("\n")[0])
        assert caught.value.step == f"if no other restic uses it, {step}"


@pytest.mark.parametrize("line", ["{", "{}", '{"message": ', "[" * 9000, "{" + '"a":[' * 9000])
def test_what_only_looks_like_an_error_as_json_is_the_reason_itself(line):
    assert restic_reason([line]) == line


def test_a_signal_ends_the_question_whether_a_repository_answers(place, secret):
    (place.parent / "tools" / "restic").write_text("#!/bin/sh\nexec sleep 600\n")
    interrupt = Interrupt()
    begun = time.monotonic()
    with interrupt.watching():
        timer = threading.Timer(0.3, signal.raise_signal, [signal.SIGTERM])
        timer.start()
        with pytest.raises(InterruptedRunError, match="SIGTERM"):
            repository_problem(section(place, secret), interrupt)
        timer.join()
    assert time.monotonic() - begun < 20


def test_the_end_of_the_window_is_no_failure_of_the_listing(place, secret, tmp_path):
    make(place)
    window = WindowInterrupt(closed=lambda: "its window has ended")
    repository = ResticRepository(
        "cloud", section(place, secret), window, Heard(), cache=tmp_path / "cache"
    )
    with pytest.raises(WindowClosedError):
        repository.contents()


@pytest.mark.parametrize(("is_open", "limit"), [(True, 2), (False, 1)])
def test_the_rate_is_that_of_the_moment_at_which_a_stream_begins(
    place, secret, tmp_path, is_open, limit
):
    hours = (-1, 2) if is_open else (2, 4)
    now = datetime.now(UTC).astimezone()
    window = "-".join(f"{now + timedelta(hours=each):%H:%M}" for each in hours)
    replica = section(place, secret, window=window, rate=2, rate_outside=1)
    words = opened(replica, tmp_path).backup(["t"], "/x")
    assert words[words.index("--limit-upload") + 1] == str(limit << 10)  # KiB/s


def test_without_a_rate_there_is_no_limit(place, secret, tmp_path):
    assert "--limit-upload" not in opened(section(place, secret), tmp_path).backup(["t"], "/x")


def test_an_answer_that_is_no_listing_is_an_error(place, secret, tmp_path):
    make(place)
    (place.parent / "tools" / "restic").write_text("#!/bin/sh\necho 5\n")
    with pytest.raises(ReplicaError, match="its listing cannot be read"):
        opened(section(place, secret), tmp_path).contents()


def test_a_listing_beside_which_restic_says_anything_may_lack_something(place, secret, tmp_path):
    make(place)
    tool = place.parent / "tools" / "restic"
    tool.write_text("#!/bin/sh\necho 'could not load snapshot 12' >&2\necho '[]'\n")
    with pytest.raises(ReplicaError, match="may not be whole: could not load snapshot 12; try"):
        opened(section(place, secret), tmp_path).contents()
    full = "unable to open cache: MkdirAll: mkdir /var/cache/x: no space left on device"
    for text in ("subprocess ssh: Welcome", full, json.dumps({"message": full})):
        tool.write_text(f"#!/bin/sh\necho '{text}' >&2\necho '[]'\n")
        assert opened(section(place, secret), tmp_path).contents().streams == {}


def test_no_command_line_has_a_secret(place, secret, tmp_path):
    variables = tmp_path / "environment"
    variables.write_text("RESTIC_REPOSITORY=rest:http://me:hush@nas/\nKEY=hush\n")
    variables.chmod(0o600)
    replica = ResticReplica(engine="restic", environment_file=str(variables), password_file=secret)
    repository = opened(replica, tmp_path)
    words = [*repository.backup(["t"], "/x"), *repository.dump("id", "/x")]
    words += [repository.by_hand("init")]
    assert not any("hush" in word or "sesame" in word for word in words)


def test_no_error_has_a_secret_or_a_part_of_it(place, secret, tmp_path):
    variables = tmp_path / "environment"
    variables.write_text("RESTIC_REPOSITORY=rest:http://me:hu/sh:ing@nas/\nKEY=abcdef\n")
    variables.chmod(0o600)
    replica = ResticReplica(engine="restic", environment_file=str(variables), password_file=secret)
    tool = place.parent / "tools" / "restic"
    text = 'parse "http://me:hu/sh:ing@nas/": invalid port ":ing" after host; abcdef'
    tool.write_text(f"#!/bin/sh\necho 'Fatal: {text}' >&2\nexit 1\n")
    with pytest.raises(ReplicaError) as caught:
        opened(replica, tmp_path).contents()
    line = caught.value.line()
    assert 'parse "http://…@nas/": invalid port ":…" after host; …' in line
    assert line.count("…") == 3
    assert "…" in repository_problem(replica, Interrupt())


@pytest.mark.parametrize(
    ("lines", "reads", "reason"),
    [
        (["warning", "Fatal: no server", "hint"], False, "no server"),
        (["Fatal: empty", "snaporch: the stream: ends"], False, "the stream: ends"),
        (["snaporch: the stream: ends", "Fatal: damage"], True, "damage"),
        (["snaporch: the stream: ends", "cannot dump file: x"], True, "cannot dump file: x"),
        (["snaporch: the stream: ends", "cannot receive: x"], True, "the stream: ends"),
        (["cannot receive: no space"], True, "cannot receive: no space"),
        ([], False, "no output"),
    ],
)
def test_the_reason_of_a_failure(lines, reads, reason):
    assert restic_reason(lines, reads=reads) == reason
