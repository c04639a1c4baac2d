"""``snaporch pull`` and ``snaporch send``: what they refuse before they do anything."""

import json
import os
from datetime import UTC, datetime, timedelta

import pytest
from fakes.pull_case import PullCase

from snaporch.errors import ExitCode
from snaporch.pull.record import PullRecord, write_records

SOURCE = """
[source.vm1]
host = "vm1"
dataset = "backup/vm1"
bundles = "/srv/pulled"
every = "1h"
"""


@pytest.mark.parametrize("words", [[], ["vm1", "--all"], ["vm1", "--due"], ["--all", "--due"]])
def test_exactly_one_kind_of_sources_is_expected(host, snaporch, words):
    assert snaporch("pull", *words).code == ExitCode.USAGE


def test_a_source_that_is_not_configured_is_named(host, snaporch):
    host.config_file.write_text(host.config_file.read_text() + SOURCE)
    answer = snaporch("pull", "vm2")
    assert answer.code == ExitCode.NOT_FOUND
    assert "vm2: no such source (vm1)" in answer.err


def test_all_without_any_source_is_an_error(host, snaporch):
    answer = snaporch("pull", "--all")
    assert answer.code == ExitCode.NOT_FOUND
    assert "none is configured" in answer.err


def test_nothing_is_due_without_sources(host, snaporch):
    assert snaporch("pull", "--due").code == 0


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--as", "../x", "--all"], "other characters"),
        (["--as", "nas"], "expected --domain"),
        (["--as", "nas", "--all", "--domain", "web"], "expected --domain"),
    ],
)
def test_a_forced_command_that_is_wrong_sends_nothing(host, snaporch, words, reason):
    answer = snaporch("send", *words)
    assert answer.code == ExitCode.USAGE
    assert reason in answer.err
    assert answer.out == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sends")
def test_the_key_gives_no_shell(host, snaporch, monkeypatch):
    monkeypatch.delenv("SSH_ORIGINAL_COMMAND", raising=False)
    answer = snaporch("send", "--as", "nas", "--all")
    assert answer.code == ExitCode.REFUSED
    assert "this key gives no shell" in answer.err


@pytest.fixture
def case(host, command_host, tmp_path):
    """A source with a guest, and its section in the configuration."""
    (tmp_path / "pull").mkdir()
    case = PullCase(tmp_path / "pull")
    text = host.config_file.read_text()
    text = text.replace("[paths]", f'[paths]\nschedule = "{tmp_path / "schedule"}"')
    host.config_file.write_text(text + SOURCE.replace("/srv/pulled", str(case.bundles)))
    command_host.open_pull = lambda _context, _name: case.open()
    return case


def test_what_was_pulled_is_printed(snaporch, case):
    case.take("r1")
    assert snaporch("pull", "vm1").out == "web  vm1  1 snapshot pulled, up to @r1\n"
    assert snaporch("pull", "--all").out == "web  vm1  up to date\n"
    (document,) = json.loads(snaporch("pull", "vm1", "--json").out)
    assert (document["source"], document["domain"], document["arrived"]) == ("vm1", "web", [])
    assert snaporch("pull", "--due").out == ""


def test_a_skipped_snapshot_is_in_the_exit_code_and_the_others_are_printed(snaporch, case):
    case.take("r1")
    case.take("r2", 2)
    next(case.store.root.glob("*/r1/ram.save")).unlink()
    answer = snaporch("pull", "--due")
    assert answer.code == ExitCode.FAILED
    assert answer.err.count("\n") == 1
    assert "is not whole on the source" in answer.err
    assert answer.out.splitlines() == [
        "web  vm1  no whole snapshot pulled; not whole: @r1",
        "db  vm1  1 snapshot pulled, up to @r2",
    ]


def test_a_wait_is_printed_and_is_no_failure(snaporch, case):
    case.take("r1")
    case.unfinished = {"r1"}
    answer = snaporch("pull", "vm1")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "web  vm1  up to date; 2 wait for a run on the source to end\n"


def test_a_failure_is_notified_again_after_a_pull_that_succeeded(host, snaporch, case, tmp_path):
    program, sent = tmp_path / "notify", tmp_path / "sent"
    program.write_text(f"#!/bin/sh\ncat >> {sent}\necho >> {sent}\n")
    program.chmod(0o755)
    text = host.config_file.read_text()
    host.config_file.write_text(f'{text}\n[notify]\ncommand = "{program}"\n')
    case.host.is_away = True
    now = datetime.now(UTC)
    counts = []
    for succeeded in (None, None, now + timedelta(minutes=1)):
        record = PullRecord("", pulled=succeeded, tried=now - timedelta(days=1), failed="x")
        write_records(tmp_path / "schedule", {"vm1/": record})
        assert snaporch("pull", "--due").code == ExitCode.FAILED
        counts.append(sent.read_text().count('"event"'))
    assert counts == [1, 1, 2]
