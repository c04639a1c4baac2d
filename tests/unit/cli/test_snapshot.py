"""``snapshot`` of several domains: ``--all`` and ``--jobs``."""

import json
import os
import signal
import sys
import threading

import pytest

from snaporch.config import Schedule
from snaporch.errors import ExitCode
from snaporch.hypervisor.clone_xml import NAMESPACE
from snaporch.model import DomainState
from snaporch.schedule.parallel_snapshots import child_command, limits_for, worst_status
from snaporch.schedule.run_due import estimate_load
from snaporch.snapshot.request import SnapshotRequest

CHILD = """
import json, os, sys, uuid
asked, words = sys.argv[1], sys.argv[2:]
known = ["web", "mail", "db", "off", "copy", "app", "bad5", "bad8", "bad9"]
names = {str(uuid.uuid5(uuid.NAMESPACE_DNS, name)): name for name in known}
place = words.index("snapshot") + 1
name, options = names[words[place]], words[place + 1:-2]
with open(asked, "a") as stream:
    stream.write(json.dumps([name, options]) + "\\n")
name = "app+db" if name == "app" else name
if name.startswith("bad"):
    print(f"snaporch: {name}: no such luck", file=sys.stderr)
    sys.exit(int(name[3:]))
taken = [{"domain": each, "snapshot": "s", "level": "ram", "pause_ms": 12.0,
          "stored_bytes": 2048, "state": "complete",
          "unchanged": "2026-06-10T10:00:00Z" if each == "off" else None}
         for each in name.split("+")]
print(json.dumps(taken if len(taken) > 1 else taken[0]))
"""
WAITING = """
import signal, sys
def stop(*_):
    sys.exit("snaporch: web: stopped by SIGTERM")
signal.signal(signal.SIGTERM, stop)
with open(sys.argv[2], "a") as stream:
    stream.write("one\\n")
open(sys.argv[1], "w").close()
signal.pause()
"""

TOGETHER = """
import sys, time
with open(sys.argv[1], "a") as stream:
    stream.write("one ")
end = time.monotonic() + 60
while open(sys.argv[1]).read().count("one") < 2:
    if time.monotonic() > end:
        sys.exit("snaporch: alone")
    time.sleep(0.02)
"""


@pytest.fixture
def children(host, tmp_path):
    """Child processes only print; returns a function for the domain and the options of each."""
    asked = tmp_path / "asked"
    asked.touch()
    host.context.program = (sys.executable, "-c", CHILD, str(asked))
    return lambda: [json.loads(line) for line in asked.read_text().splitlines()]


def rows(answer):
    return [line.split() for line in answer.out.splitlines()]


def test_all_domains_are_snapshotted_and_printed_as_a_table(host, snaporch, children):
    for name in ("web", "mail", "db"):
        host.add_guest(name)
    answer = snaporch("snapshot", "--all", "--quiet")
    assert (answer.code, answer.err) == (0, "")
    assert rows(answer) == [
        ["DOMAIN", "SNAPSHOT", "LEVEL", "PAUSE", "STORED", "RESULT"],
        ["db", "s", "ram", "12ms", "2.0K", "complete"],
        ["mail", "s", "ram", "12ms", "2.0K", "complete"],
        ["web", "s", "ram", "12ms", "2.0K", "complete"],
    ]


def test_an_unchanged_guest_is_reported(host, snaporch, children):
    for name in ("web", "off"):
        host.add_guest(name)
    answer = snaporch("snapshot", "--all")
    complete, unchanged = ("complete",), ("complete,", "unchanged:", "no", "other", "was", "taken")
    assert [(row[0], tuple(row[5:])) for row in rows(answer)[1:]] == [
        ("off", unchanged),
        ("web", complete),
    ]
    assert "off  done: @s  unchanged, no other was taken" in answer.err
    assert "web  done: @s  unchanged" not in answer.err


def test_a_failure_stops_no_other_snapshot_and_the_worst_exit_code_counts(host, snaporch, children):
    for name in ("bad5", "web", "bad9", "bad8"):
        host.add_guest(name)
    answer = snaporch("snapshot", "--all", "--jobs", "3", "--quiet")
    assert answer.code == ExitCode.ATTENTION
    assert ["bad5", "-", "-", "-", "-", "failed", "(5)"] in rows(answer)
    assert ["web", "s", "ram", "12ms", "2.0K", "complete"] in rows(answer)
    assert "snaporch: bad8: no such luck" in answer.err.splitlines()


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([], 0),
        ([0, 0], 0),
        ([0, 5], 5),
        ([8, 5], 8),
        ([8, 1, 5], 1),
        ([8, 9, 1], 9),
        ([5, 137], 137),
    ],
)
def test_the_worst_exit_code(codes, expected):
    assert worst_status(codes) == expected


def test_clones_and_guests_elsewhere_are_left_out(host, snaporch, children):
    host.add_guest("web")
    host.add_guest("bare", disks={})
    clone = host.guest(host.add_guest("copy").name)
    mark = f'<c:clone xmlns:c="{NAMESPACE}" uuid="{clone.uuid}" of="web@s"/>'
    words = f"<metadata>{mark}</metadata><memory"
    clone.inactive = clone.live = clone.inactive.replace("<memory", words, 1)
    answer = snaporch("snapshot", "--all")
    assert [name for name, _ in children()] == ["web"]
    assert "bare  left out: no disk of it is on ZFS" in answer.err
    assert "copy  left out: it is a clone" in answer.err


def test_no_guest_at_all(host, snaporch, children):
    answer = snaporch("snapshot", "--all")
    assert (answer.code, answer.out) == (ExitCode.NOT_FOUND, "")


def test_options_are_passed_to_the_children(host, snaporch, children):
    host.add_guest("web")
    snaporch("snapshot", "web", "--jobs", "1", "--name", "s1", "--level", "crash", "--wait", "7s")
    assert children() == [["web", ["--name", "s1", "--level", "crash", "--wait", "7s"]]]


@pytest.mark.parametrize(("jobs", "limits"), [(7, (7, 7)), (None, (3, 2))])
def test_jobs_limits_snapshots_on_the_host_and_in_a_pool(jobs, limits):
    given = limits_for(Schedule(jobs=3, jobs_per_pool=2), jobs)
    assert (given.jobs, given.jobs_per_pool) == limits


def test_with_jobs_several_run_at_once(host, snaporch, tmp_path):
    for name in ("web", "mail"):
        host.add_guest(name)
    host.context.program = (sys.executable, "-c", TOGETHER, str(tmp_path / "begun"))
    assert snaporch("snapshot", "--all", "--jobs", "2").code == 0


def test_with_a_policy_a_group_is_snapshotted_once(host, snaporch, children):
    for name in ("web", "app", "db"):
        host.add_guest(name)
    with host.config_file.open("a") as config:
        config.write('[policy.hourly]\nevery = "1h"\n[group.pair]\ndomains = ["app", "db"]\n')
    answer = snaporch("snapshot", "--all", "--policy", "hourly", "--quiet")
    assert sorted(name for name, _ in children()) == ["app", "web"]
    assert [row[0] for row in rows(answer)] == ["DOMAIN", "app", "db", "web"]
    answer = snaporch("snapshot", "--all", "--policy", "hourly", "--json")
    assert [each["domain"] for each in json.loads(answer.out)] == ["app", "db", "web"]


def test_the_command_line_of_a_child(host, tmp_path):
    host.context.config_path = tmp_path / "c.toml"
    domain = host.add_guest()
    job = estimate_load(host.context, domain, "", "auto")
    words = child_command(host.context, job, SnapshotRequest(policy="hourly", note="why"))
    assert words[1:] == [
        "-P", "-m", "snaporch", "--config", str(tmp_path / "c.toml"), "snapshot", domain.uuid,
        "--policy", "hourly", "--note", "why", "--json", "--quiet",
    ]  # fmt: skip


def test_json_has_the_snapshots_that_were_taken(host, snaporch, children):
    for name in ("web", "bad5"):
        host.add_guest(name)
    answer = snaporch("snapshot", "--all", "--json")
    assert answer.code == ExitCode.REFUSED
    assert [each["domain"] for each in json.loads(answer.out)] == ["web"]


@pytest.mark.parametrize("words", [("--all", "web"), (), ("--jobs", "2"), ("web", "--jobs", "0")])
def test_wrong_usage(host, snaporch, children, words):
    host.add_guest("web")
    answer = snaporch("snapshot", *words)
    assert (answer.code, answer.out, children()) == (ExitCode.USAGE, "", [])


def test_bad_names_are_refused_before_anything(host, snaporch, children):
    host.add_guest("web")
    assert snaporch("snapshot", "--all", "--name", "a@b").code == ExitCode.USAGE
    assert snaporch("snapshot", "--all", "--policy", "dayly").code == ExitCode.NOT_FOUND
    assert snaporch("snapshot", "web", "wbe", "--jobs", "2").code == ExitCode.NOT_FOUND
    assert children() == []


def test_plans_of_all(host, snaporch, children):
    host.add_guest("web")
    host.add_guest("mail", state=DomainState.OFF)
    host.guest("web").job = "migration out"
    answer = snaporch("snapshot", "--all", "--dry-run")
    assert answer.code == ExitCode.REFUSED
    assert answer.out.startswith("mail@")
    assert "web: libvirt is busy" in answer.err
    assert children() == []


def test_sigterm_stops_the_children_and_begins_no_other(host, snaporch, tmp_path):
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    host.context.program = (sys.executable, "-c", WAITING, str(ready), str(tmp_path / "begun"))
    for name in ("web", "mail"):
        host.add_guest(name)

    def stop():
        ready.read_bytes()
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=stop, daemon=True)
    killer.start()
    answer = snaporch("snapshot", "--all", "--jobs", "1")
    killer.join(60)
    assert answer.code == 128 + signal.SIGTERM
    assert (tmp_path / "begun").read_text() == "one\n"
    assert "not started: stopped by a signal" in answer.err
    assert "stopped by SIGTERM" in answer.err
