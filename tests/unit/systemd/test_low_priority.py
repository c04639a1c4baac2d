"""What is left to do after the release, behind everything else on the host."""

import os

import pytest

from snaporch.default_paths import HostPaths
from snaporch.systemd import low_priority


@pytest.fixture
def host(tmp_path):
    """A host with systemd, and this process with the threads 7 and 8."""
    host = HostPaths(proc=tmp_path / "proc", run=tmp_path / "run")
    for thread in ("7", "8"):
        (host.proc / "self/task" / thread).mkdir(parents=True)
    (host.run / "systemd/system").mkdir(parents=True)
    return host


@pytest.fixture
def commands(monkeypatch, tmp_path):
    """Returns the priorities that were set, and the programs that were run, which fail."""
    programs, log, nice = tmp_path / "bin", tmp_path / "log", []
    programs.mkdir()
    for name in ("ionice", "busctl"):
        (programs / name).write_text(f'#!/bin/sh\n(echo {name} "$@") >> {log}\nexit 1\n')
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.setattr(os, "getpriority", lambda _which, thread: {7: 0, 8: 15}[thread])
    monkeypatch.setattr(os, "setpriority", lambda _which, *words: nice.append(["nice", *words]))

    def found():
        lines = log.read_text().splitlines() if log.exists() else []
        return [*nice, *(line.split(" ") for line in lines)]

    return found


def test_without_systemd_by_nice_and_ionice_of_each_thread(commands, host):
    """None of them comes forward by it."""
    (host.run / "systemd/system").rmdir()
    low_priority.lower_priority("seal", host)
    *nice, (*how, one, other) = commands()
    assert sorted(nice) == [["nice", 7, 10], ["nice", 8, 15]]
    assert how == ["ionice", "-c", "3", "-p"]
    assert {one, other} == {"7", "8"}


@pytest.mark.parametrize(("before", "after"), [("0", "500"), ("900", "900")])
def test_without_memory_the_kernel_ends_this_process_and_no_guest(commands, host, before, after):
    score = host.proc / "self" / "oom_score_adj"
    score.write_text(f"{before}\n")
    low_priority.lower_priority("replicate", host)
    assert score.read_text().strip() == after


def test_under_systemd_in_a_slice_of_its_own(commands, host):
    low_priority.lower_priority("seal", host)
    words = commands()[-1]
    assert words[:6] == ["busctl", "--quiet", "call", *low_priority._MANAGER]
    assert words[6:8] == ["StartTransientUnit", "ssa(sv)a(sa(sv))"]
    count = int(words[10])
    properties = words[11:-1]
    assert properties[:4] == ["PIDs", "au", "1", str(os.getpid())]
    assert properties[4:7] == ["Slice", "s", "snaporch.slice"]
    assert count == 1 + (len(properties) - 4) // 3
    assert words[-1] == "0"


def test_a_host_that_cannot_is_no_error(monkeypatch, tmp_path, host):
    """There are no such threads (PID_MAX_LIMIT), and the programs are not installed."""
    monkeypatch.setenv("PATH", str(tmp_path))
    threads = host.proc / "self/task"
    for number in (7, 8):
        (threads / str(number)).rename(threads / str((1 << 22) + number))
    low_priority.lower_priority("seal", host)


def test_not_into_a_scope_where_its_own_unit_is_around_it(commands, host):
    group = host.proc / "self/cgroup"
    group.write_text("0::/snaporch.slice/snaporch-verify.service\n")
    low_priority.lower_priority("verify", host)
    assert [words[0] for words in commands()] == ["nice", "nice", "ionice"]
    group.write_text("0::/snaporch.slice/snaporch.service\n")
    low_priority.lower_priority("verify", host)
    assert commands()[-1][0] == "busctl"
