import errno
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from snaporch import locks
from snaporch.errors import BusyError, InterruptedRunError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.locks import (
    PRUNING,
    RECOVERING,
    RETENTION,
    LockTimes,
    domain_lock,
    has_readers,
    readers_lock,
)

HOLD = """
import sys
from pathlib import Path
from snaporch.interrupt import Interrupt
from snaporch.locks import domain_lock
with domain_lock(Path(sys.argv[1]), "web", "u", sys.argv[2], wait=0, interrupt=Interrupt()):
    print("held", flush=True)
    sys.stdin.readline()
"""


def lock(runtime, wait=0, uuid="u", interrupt=None, **times):
    return domain_lock(
        runtime, "web", uuid, "snapshot", wait=wait, interrupt=interrupt or Interrupt(), **times
    )


@pytest.fixture
def runtime(tmp_path):
    return tmp_path / "runtime"


@contextmanager
def holder(runtime, doing):
    """Another process that holds the domain until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, runtime, doing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.fixture
def other(runtime):
    """A restore in another process."""
    with holder(runtime, "restore") as process:
        yield process


@pytest.fixture
def recovery(runtime):
    """A recovery in another process."""
    with holder(runtime, RECOVERING) as process:
        yield process


def test_a_free_domain_is_held_and_released(runtime):
    for _ in range(2):
        with lock(runtime):
            holder_record = json.loads((runtime / "u.lock").read_text())
            assert holder_record["doing"] == "snapshot"
        assert (runtime / "u.lock").read_text() == ""


def test_another_process_makes_it_busy_and_is_named(runtime, other):
    with pytest.raises(BusyError) as caught, lock(runtime):
        pass
    assert str(caught.value).startswith("web: held by restore; ")
    assert str(other.pid) not in str(caught.value)  # or it would be news each time


@pytest.mark.parametrize(
    ("can_wait", "step"),
    [(True, "try again later, or wait for it with --wait"), (False, "try again later")],
)
def test_only_a_command_that_has_the_option_names_it(runtime, other, can_wait, step):
    with pytest.raises(BusyError) as caught, lock(runtime, can_wait=can_wait):
        pass
    assert str(caught.value) == f"web: held by restore; see: snaporch status; {step}"


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("can_wait", [True, False])
def test_a_readers_lock_too(runtime, alone, can_wait):
    interrupt, options = Interrupt(), {"can_wait": can_wait}
    with readers_lock(runtime, "web", "u", alone=not alone, interrupt=interrupt):
        again = readers_lock(runtime, "web", "u", alone=alone, interrupt=interrupt, **options)
        with pytest.raises(BusyError) as caught, again:
            pass
    assert str(caught.value).endswith("--wait" if can_wait else "; try again later")


def test_other_domains_are_free(runtime, other):
    with lock(runtime, uuid="v"):
        pass


def test_waiting_ends_when_the_other_does(runtime, other):
    threading.Timer(0.3, other.stdin.close).start()
    with lock(runtime, wait=30):
        assert other.wait(5) == 0


def test_a_killed_process_holds_nothing(runtime, other):
    other.kill()
    other.wait()
    with lock(runtime):
        assert json.loads((runtime / "u.lock").read_text())["doing"] == "snapshot"


def test_waiting_is_not_for_ever(runtime, other):
    began = time.monotonic()
    with pytest.raises(BusyError), lock(runtime, wait=1):
        pass
    assert 0.8 <= time.monotonic() - began < 5


def test_a_lock_waits_for_the_end_of_a_recovery_without_an_option(runtime, recovery):
    threading.Timer(0.1, recovery.stdin.close).start()
    with lock(runtime):
        assert recovery.wait(5) == 0


def test_a_lock_waits_for_the_end_of_pruning_without_an_option(runtime):
    with holder(runtime, PRUNING) as pruning:
        threading.Timer(0.1, pruning.stdin.close).start()
        with lock(runtime):
            assert pruning.wait(5) == 0


def test_a_lock_waits_for_the_end_of_retention_without_an_option(runtime):
    with holder(runtime, RETENTION) as retention:
        threading.Timer(0.1, retention.stdin.close).start()
        with lock(runtime):
            assert retention.wait(5) == 0


def test_a_recovery_that_hangs_is_not_waited_for_for_ever(runtime, recovery):
    times = LockTimes(brief=0.1)
    with pytest.raises(BusyError, match="held by recover"), lock(runtime, times=times):
        pass


def test_a_signal_ends_the_waiting_for_a_recovery(runtime, recovery):
    interrupt = Interrupt(signum=15)
    with pytest.raises(InterruptedRunError), lock(runtime, interrupt=interrupt):
        pass


def test_a_signal_ends_the_waiting(runtime, other):
    interrupt = Interrupt()
    threading.Timer(0.1, lambda: setattr(interrupt, "signum", 15)).start()
    with (
        pytest.raises(InterruptedRunError, match="stopped by SIGTERM"),
        lock(runtime, wait=30, interrupt=interrupt),
    ):
        pass


def test_a_run_that_fails_releases_the_domain(runtime):
    with pytest.raises(ValueError, match="no"), lock(runtime):
        raise ValueError("no")
    with lock(runtime):
        pass


def test_a_new_holder_has_time_to_write_its_name(runtime, recovery):
    """Until then the file names a run that was killed."""
    path = runtime / "u.lock"
    truth = path.read_text()
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    path.write_text(json.dumps({"pid": gone.pid, "doing": "snapshot", "since": "yesterday"}))
    threading.Timer(0.5, lambda: path.write_text(truth)).start()
    threading.Timer(1.0, recovery.stdin.close).start()
    with lock(runtime):
        assert recovery.wait(5) == 0


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"pid": 1}'])
def test_a_holder_that_left_no_readable_name_is_another_run(runtime, other, content):
    times = LockTimes(nameless=0.1)
    (runtime / "u.lock").write_text(content)
    with pytest.raises(BusyError, match="held by another run"), lock(runtime, times=times):
        pass


def test_lock_files_are_private(runtime):
    with lock(runtime):
        assert runtime.stat().st_mode & 0o777 == 0o700
        assert (runtime / "u.lock").stat().st_mode & 0o777 == 0o600


def test_a_runtime_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="run snaporch as root"), lock(tmp_path / "file"):
        pass


def test_the_holder_is_found_without_taking_the_lock(runtime):
    assert locks.lock_holder(runtime, "u") is None
    with lock(runtime):
        assert locks.lock_holder(runtime, "u") == f"snapshot (pid {os.getpid()})"
        assert locks.lock_holder(runtime, "another") is None
    assert locks.lock_holder(runtime, "u") is None


def test_a_lock_can_be_taken_without_room_for_the_holders_name(runtime, monkeypatch):
    def full(*_arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with lock(runtime):
        assert locks.lock_holder(runtime, "u") == f"another run (pid {os.getpid()})"
        with pytest.raises(BusyError, match="held by another run"), lock(runtime):
            pass
    assert locks.lock_holder(runtime, "u") is None


def test_a_run_that_failed_holds_nothing(runtime):
    with pytest.raises(ZeroDivisionError), lock(runtime):
        raise ZeroDivisionError
    assert "pid" in (runtime / "u.lock").read_text()
    assert locks.lock_holder(runtime, "u") is None


def test_readers_are_noticed_without_a_lock(tmp_path):
    assert not has_readers(tmp_path, "u-1")
    with readers_lock(tmp_path, "web", "u-1", alone=False, interrupt=Interrupt()):
        assert has_readers(tmp_path, "u-1")
    assert not has_readers(tmp_path, "u-1")


def test_the_lock_of_a_file_whose_number_ends_alike_does_not_count(tmp_path):
    file, locks = tmp_path / "u-1.readers.lock", tmp_path / "locks"
    file.touch()
    number = file.stat().st_ino
    for other, counts in ((f"9{number}", False), (str(number), True)):
        locks.write_text(f"1: FLOCK  ADVISORY  READ  4711 00:19:{other} 0 EOF\n")
        assert has_readers(tmp_path, "u-1", locks) is counts
