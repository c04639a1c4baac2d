import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.status_example import RECORD

from snaporch.config import Schedule
from snaporch.model import Level
from snaporch.schedule.concurrency import ConcurrencyLimiter, SnapshotJob
from snaporch.schedule.subprocesses import (
    BulkJobResult,
    Subprocesses,
    bulk_job_command,
    snapshot_command,
)

WEB = SnapshotJob("u", "web", "hourly", frozenset({"tank"}), 0)
OBEDIENT = """
import signal, sys
def stop(*_):
    print("snaporch: web: stopped by SIGTERM", file=sys.stderr)
    sys.exit(143)
signal.signal(signal.SIGTERM, stop)
with open(sys.argv[1], "w") as ready:
    ready.write("x")
signal.pause()
"""


def captures(script, *arguments, jobs=1):
    return Subprocesses(
        ConcurrencyLimiter(Schedule(jobs=jobs)),
        lambda _: [sys.executable, "-c", script, *arguments],
        lambda _: [],
    )


def test_the_command_names_everything(world, tmp_path):
    assert "--config" not in snapshot_command(world.context)(WEB)
    world.context.config_path = tmp_path / "c.toml"
    words = snapshot_command(world.context)(WEB)
    assert words[1:5] == ["-P", "-m", "snaporch", "--config"]
    assert words[5:] == [
        str(tmp_path / "c.toml"), "snapshot", "u", "--policy", "hourly", "--if-changed",
        "--json", "--quiet",
    ]  # fmt: skip


def test_a_result_comes_back():
    outcome = captures("print('web@s  ram')").take(WEB)
    assert (outcome.ok, outcome.text) == (True, "web@s  ram")


def test_a_failure_has_its_last_line_as_the_reason():
    script = "import sys; print('web  note: first', file=sys.stderr); sys.exit('snaporch: web: no')"
    outcome = captures(script).take(WEB)
    assert (outcome.status, outcome.text) == (1, "no")
    assert outcome.notes == ("web  note: first",)


def test_a_child_that_is_killed_has_status_128_and_the_signal():
    outcome = captures("import os; os.kill(os.getpid(), 9)").take(WEB)
    assert (outcome.status, outcome.text) == (137, "exited with status 137 without output")


def test_a_child_that_cannot_be_started():
    missing = lambda _: ["/nonexistent/python"]  # noqa: E731
    outcome = Subprocesses(ConcurrencyLimiter(Schedule()), missing, missing).take(WEB)
    assert not outcome.ok
    assert outcome.text.startswith("cannot be started")


def running_bulk_jobs(*command):
    return Subprocesses(ConcurrencyLimiter(Schedule()), lambda _: [], lambda _: command)


def test_a_bulk_job_is_reported_line_by_line(world):
    script = "import sys; print('a@s  FAILED'); sys.exit('snaporch: verification failed: a')"
    done = running_bulk_jobs(sys.executable, "-c", script).run_bulk_job("verify")
    assert done == BulkJobResult("verify", 1, ("a@s  FAILED",), ("verification failed: a",))
    assert bulk_job_command(world.context)("verify")[-3:] == ["verify", "--due", "--quiet"]
    assert bulk_job_command(world.context)("replicate")[-3:] == ["replicate", "--due", "--quiet"]
    assert running_bulk_jobs("/nonexistent/python").run_bulk_job("verify").status == 7
    stopped = running_bulk_jobs(sys.executable, "-c", script)
    stopped.stop()
    assert stopped.run_bulk_job("verify").status == 143


def test_a_stop_terminates_running_children_and_starts_no_other(tmp_path):
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    made = captures(OBEDIENT, str(ready))
    outcomes = {}
    other = SnapshotJob("v", "mail", "hourly", frozenset({"tank"}), 0)
    threads = [
        threading.Thread(target=lambda each=each: outcomes.update({each.domain: made.take(each)}))
        for each in (WEB, other)
    ]
    threads[0].start()
    assert Path(ready).read_text() == "x"
    threads[1].start()
    made.stop()
    for thread in threads:
        thread.join(60)
    assert (outcomes["web"].status, outcomes["web"].text) == (143, "stopped by SIGTERM")
    assert outcomes["mail"].text == "not started: stopped by a signal"
    assert outcomes["mail"].status == 128 + signal.SIGTERM


def test_no_child_is_started_after_a_stop():
    made = captures("print('begun')")
    made.stop()
    assert made.take(WEB).text == "not started: stopped by a signal"


def printed(tmp_path, *levels, single=False):
    """The outcome of a child that prints a snapshot of each level."""
    documents = [
        replace(RECORD, domain=f"d{n}", level=level).as_json() for n, level in enumerate(levels)
    ]
    place = tmp_path / "printed"
    place.write_text(json.dumps(documents[0] if single else documents))
    return captures("import sys; print(open(sys.argv[1]).read())", str(place)).take(WEB)


@pytest.mark.parametrize("level", list(Level))
def test_the_level_is_read_from_what_a_snapshot_prints(tmp_path, level):
    outcome = printed(tmp_path, level, single=True)
    assert outcome.level is level
    assert outcome.text == f"d0@{RECORD.snapshot}  {level}  complete  paused 250 ms"


def test_the_level_of_a_group_is_the_worst_of_those_that_ran(tmp_path):
    outcome = printed(tmp_path, Level.RAM, Level.CRASH, Level.OFF, Level.QUIESCED)
    assert outcome.level is Level.CRASH
    assert len(outcome.text.splitlines()) == 4
    assert printed(tmp_path, Level.OFF, Level.OFF).level is Level.OFF


def test_without_a_document_there_is_no_level():
    assert captures("print('web@s  ram  complete')").take(WEB).level is None
