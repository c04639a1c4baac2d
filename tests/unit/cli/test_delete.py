import io
import sys

import pytest

from snaporch.errors import ExitCode
from snaporch.locks import domain_lock


@pytest.fixture
def taken(host, snaporch):
    """A guest with two snapshots."""
    host.add_guest()
    for name in ("s1", "s2"):
        host.record = snaporch("snapshot", "web", "--name", name, "--json").json
    return host


def names(snaporch):
    return [each["snapshot"] for each in snaporch("list", "--json").json]


def test_it_prints_what_it_deletes_and_frees(taken, snaporch):
    answer = snaporch("delete", "web@s1", "--yes")
    assert (answer.code, answer.err) == (0, "")
    first, last = answer.out.splitlines()
    assert first.startswith("web@s1  tank/web@s1; bundle (")
    assert first.endswith("KiB) to the trash")
    assert last.startswith("deleted 1 snapshot and freed 5 B; ")
    assert last.endswith("KiB more when the trash is emptied, after 3d")
    assert names(snaporch) == ["s2"]


def test_a_dry_run_foresees_the_same_and_changes_nothing(taken, snaporch):
    foreseen = snaporch("delete", "web@s1", "--dry-run").out
    assert names(snaporch) == ["s1", "s2"]
    done = snaporch("delete", "web@s1", "--yes").out
    assert foreseen.replace("would delete", "deleted").replace("and free ", "and freed ") == done


def test_a_dry_run_is_refused_as_the_delete_would_be(taken, snaporch):
    snaporch("keep", "web@s1")
    foreseen = snaporch("delete", "web@s1", "web@s2", "--dry-run")
    done = snaporch("delete", "web@s1", "web@s2", "--yes")
    assert (foreseen.code, foreseen.out) == (ExitCode.REFUSED, "")
    assert foreseen.err.splitlines() == done.err.splitlines()
    assert len(done.err.splitlines()) == 2


def test_json_has_the_zfs_snapshots_and_the_bundle(taken, snaporch):
    document = snaporch("delete", "web@s1", "--json", "--yes").json
    assert (document["dry_run"], document["freed_bytes"]) == (False, 5)
    (each,) = document["snapshots"]
    assert each["zfs_snapshots"] == ["tank/web@s1"]
    assert each["bundle"]["action"] == "trash"
    assert document["trashed_bytes"] == each["bundle"]["bytes"] > 0
    assert set(each) == {"domain", "uuid", "snapshot", "run", "zfs_snapshots", "bundle"}


def test_without_a_terminal_it_needs_yes(taken, snaporch, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    answer = snaporch("delete", "web@s1")
    assert answer.code == ExitCode.REFUSED
    first, second, summary, last = answer.err.splitlines()
    assert first == "snaporch: deleting these snapshots cannot be undone:"
    assert "web@s1  tank/web@s1" in second
    assert "would delete 1 snapshot" in summary
    assert last.endswith("no terminal to ask on; use --yes")
    assert names(snaporch) == ["s1", "s2"]


def test_every_refusal_has_its_line(taken, snaporch):
    taken.pool.hold(["tank/web@s1"], "mine")
    answer = snaporch("delete", "web@s1", "web@s2", "--yes")
    assert answer.code == ExitCode.REFUSED
    held, newest = answer.err.splitlines()
    assert held.endswith("held (mine); release it: zfs release mine tank/web@s1")
    assert newest.endswith("take another one first, or use --also-newest")
    assert answer.out == ""
    assert names(snaporch) == ["s1", "s2"]


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([], ExitCode.USAGE, "DOMAIN@SNAPSHOT"),
        (["web"], ExitCode.USAGE, "'web': is not DOMAIN@SNAPSHOT; see `snaporch list`"),
        (["web@nope"], ExitCode.NOT_FOUND, "web@nope: snaporch has no such snapshot; see"),
        (["web@s1", "--wait", "x"], ExitCode.USAGE, "--wait"),
    ],
)
@pytest.mark.parametrize("command", ["delete", "keep", "unkeep"])
def test_wrong_names_are_one_line(taken, snaporch, command, words, code, text):
    answer = snaporch(command, *words)
    assert answer.code == code
    (line,) = answer.err.splitlines()
    assert text in line


def test_a_busy_domain_is_exit_code_6(taken, snaporch):
    uuid, runtime = taken.record["uuid"], taken.context.config.paths.runtime
    with domain_lock(runtime, "web", uuid, "restore", wait=0, interrupt=taken.context.interrupt):
        answer = snaporch("delete", "web@s1", "--yes")
    assert (answer.code, answer.out) == (ExitCode.BUSY, "")
    assert "held by restore" in answer.err


def test_kept_snapshots_stay_until_they_are_released(taken, snaporch):
    answer = snaporch("keep", "web@s1")
    assert (answer.code, answer.out, answer.err) == (0, "web@s1  kept: tank/web\n", "")
    assert taken.pool.holds("tank/web@s1") == ["snaporch-keep"]
    since = snaporch("list", "--json").json[0]["kept"]
    assert since.endswith("Z")
    assert "kept" in snaporch("show", "web@s1").out
    refused = snaporch("delete", "web@s1", "--yes")
    assert refused.err == "snaporch: web@s1: is kept; snaporch unkeep web@s1\n"
    assert snaporch("keep", "web@s1", "--json").json[0]["kept"] == since, "kept since the first"
    assert snaporch("unkeep", "web@s1").out == "web@s1  no longer kept: tank/web\n"
    assert taken.pool.holds("tank/web@s1") == []
    assert snaporch("unkeep", "web@s1", "--json").json[0]["kept"] is None
    assert snaporch("delete", "web@s1", "--yes").code == 0


def test_a_note_is_written_later_changed_and_removed(taken, snaporch):
    note = "before the upgrade, “ask Ann”"
    assert snaporch("note", "web@s1", note).out == f"web@s1  note: {note}\n"
    assert snaporch("list", "--json").json[0]["note"] == note
    assert note in snaporch("show", "web@s1").out
    assert note in snaporch("list").out
    assert snaporch("note", "web@s1", "", "--json").json[0]["note"] is None
    assert note not in snaporch("list").out


@pytest.mark.parametrize(
    "words",
    [["keep"], ["unkeep"], ["note", "why"], ["verify", "--checksums"]],
    ids=lambda words: words[0],
)
def test_escape_sequences_of_a_domain_property_are_text(taken, snaporch, words):
    command, *rest = words
    taken.pool.set_properties(["tank/web@s2"], {"snaporch:domain": "\x1b[31mweb"})
    answer = snaporch(command, f"{taken.record['uuid']}@s2", *rest)
    assert "\\x1b[31mweb@s2" in answer.out, answer
    assert "\x1b" not in answer.out + answer.err


@pytest.mark.parametrize("text", ["two\nlines", "\x1b[31m", "x" * 1025, "a\tb"])
def test_a_note_is_one_short_printable_line(taken, snaporch, text):
    for words in (["note", "web@s1", text], ["snapshot", "web", "--note", text]):
        answer = snaporch(*words)
        assert answer.code == ExitCode.USAGE
        (line,) = answer.err.splitlines()
        assert line.startswith("snaporch: note: ")


def test_a_note_is_taken_with_the_snapshot(taken, snaporch):
    document = snaporch("snapshot", "web", "--name", "s3", "--note", "why", "--json").json
    assert document["note"] == "why"
    assert [each["note"] for each in snaporch("list", "--json").json] == [None, None, "why"]
