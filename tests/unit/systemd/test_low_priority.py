"""What is left to do after the release, behind everything else on the host."""

import os
import subprocess

import pytest

from snaporch.systemd import low_priority


@pytest.fixture
def commands(monkeypatch):
    """What would have been run."""
    called = []

    def run(command, **_options):
        called.append(list(command))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(low_priority.subprocess, "run", run)
    monkeypatch.setattr(os, "listdir", lambda _path: ["7", "8"])
    monkeypatch.setattr(os, "getpriority", lambda _which, thread: {7: 0, 8: 15}[thread])
    monkeypatch.setattr(
        os, "setpriority", lambda _which, thread, nice: called.append(["nice", thread, nice])
    )
    return called


def test_without_systemd_by_nice_and_ionice_of_each_thread(commands, monkeypatch, tmp_path):
    """None of them comes forward by it."""
    monkeypatch.setattr(low_priority, "SYSTEMD", tmp_path / "none")
    low_priority.lower_priority("seal")
    assert commands == [
        ["nice", 7, 10],
        ["nice", 8, 15],
        ["ionice", "-c", "3", "-p", "7", "8"],
    ]


def test_under_systemd_in_a_slice_of_its_own(commands, monkeypatch, tmp_path):
    monkeypatch.setattr(low_priority, "SYSTEMD", tmp_path)
    low_priority.lower_priority("seal")
    words = commands[-1]
    assert words[:6] == ["busctl", "--quiet", "call", *low_priority._MANAGER]
    assert words[6:8] == ["StartTransientUnit", "ssa(sv)a(sa(sv))"]
    count = int(words[10])
    properties = words[11:-1]
    assert properties[:4] == ["PIDs", "au", "1", str(os.getpid())]
    assert properties[4:7] == ["Slice", "s", "snaporch.slice"]
    assert count == 1 + (len(properties) - 4) // 3
    assert words[-1] == "0"


def test_a_host_that_cannot_is_no_error(monkeypatch, tmp_path):
    def absent(*_command, **_options):
        raise FileNotFoundError

    monkeypatch.setattr(low_priority, "SYSTEMD", tmp_path)
    monkeypatch.setattr(os, "setpriority", absent)
    monkeypatch.setattr(low_priority.subprocess, "run", absent)
    low_priority.lower_priority("seal")


def test_not_into_a_scope_where_its_own_unit_is_around_it(commands, monkeypatch, tmp_path):
    monkeypatch.setattr(low_priority, "SYSTEMD", tmp_path)
    group = tmp_path / "cgroup"
    monkeypatch.setattr(low_priority, "_CGROUP", group)
    group.write_text("0::/snaporch.slice/snaporch-verify.service\n")
    low_priority.lower_priority("verify")
    assert [words[0] for words in commands] == ["nice", "nice", "ionice"]
    group.write_text("0::/snaporch.slice/snaporch.service\n")
    low_priority.lower_priority("verify")
    assert commands[-1][0] == "busctl"
