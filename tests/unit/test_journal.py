import errno
import json
import os
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, replace
from datetime import datetime
from pathlib import Path

import pytest
from fakes.hypervisor import Agent

from snaporch import command_log
from snaporch.errors import UnavailableError
from snaporch.hypervisor import OverlayDisk
from snaporch.journal import (
    Journal,
    JournalError,
    Note,
    OtherJournal,
    RunFacts,
    Step,
    UnreadableJournal,
    append_line,
    append_note,
    explains_no_pause,
    forget,
    journals_of,
    list_journals,
    other_journals_of,
    read_journal,
    read_journals,
    release_mark,
)
from snaporch.model import DomainState, Owner, Strategy
from snaporch.recovery import guardian
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest

FACTS = RunFacts(
    run="20250601T120000Z-0badcafe",
    domain="Bärs <vm>\n",
    uuid="7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d",
    was=DomainState.RUNNING,
    boot="boot:7",
    strategy=Strategy.OVERLAY,
    snapshot="two words",
    datasets=("flash/b", "tank/a"),
    overlay_dir="/overlays/r",
    overlays=(OverlayDisk("vda", "/tank/a/x", "file", "raw", "/overlays/r/vda.qcow2"),),
    ram_pipe="/run/snaporch/r.ram",
)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "journal"


@pytest.fixture
def path(directory):
    return directory / f"{FACTS.run}.jsonl"


def killed(directory, *steps, facts=FACTS):
    """The journal of a run that was killed in the last of these steps."""
    journal = Journal(directory, facts)
    for step in steps[:-1]:
        with journal.step(step):
            pass
    if steps:
        journal._write(event="begin", step=steps[-1].value)
    journal.close(settled=False)


def test_facts_and_steps_survive(directory):
    killed(directory, Step.PREPARE, Step.FREEZE, Step.POOL_SNAPSHOT)
    (found,) = read_journals(directory)
    assert found.facts == FACTS
    assert (found.uuid, found.domain) == (FACTS.uuid, FACTS.domain)
    assert found.ended == {Step.PREPARE, Step.FREEZE}


def test_facts_without_overlays_survive(directory):
    killed(directory, facts=replace(FACTS, overlays=(), was=DomainState.OFF))
    assert read_journals(directory)[0].facts.overlays == ()


def test_a_step_that_fails_does_not_end(directory, path):
    journal = Journal(directory, FACTS)
    with pytest.raises(ValueError, match="no"), journal.step(Step.PREPARE):
        raise ValueError("no")
    journal.close(settled=False)
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == [
        "open",
        "begin",
    ]


def test_logged_commands_have_the_fields_of_the_open_journal(directory):
    with command_log.fields(DOMAIN="before", RUN="before", STEP="before"):
        journal = Journal(directory, FACTS)
        own = {"DOMAIN": FACTS.domain, "RUN": FACTS.run, "SNAPSHOT": FACTS.snapshot}
        assert command_log.current_fields() == own
        with journal.step(Step.FREEZE):
            assert command_log.current_fields() == {**own, "STEP": Step.FREEZE.value}
        journal.close(settled=False)


def test_the_line_of_a_step_that_cannot_be_noted_has_that_step(directory):
    with command_log.fields():
        journal = Journal(directory, FACTS)
        journal.close(settled=False)
        with pytest.raises(OSError, match="Bad file"), journal.step(Step.SEAL):
            pass
        assert command_log.current_fields()["STEP"] == Step.SEAL.value


def test_a_journal_that_is_opened_again_sets_its_run(directory, path):
    Journal(directory, FACTS).close(settled=False)
    with command_log.fields(**dict.fromkeys(command_log.FIELD_NAMES, "")):
        Journal.reopen(path).close(settled=False)
        assert command_log.current_fields() == {"RUN": FACTS.run}


def test_lines_of_other_processes_leave_no_file_open(directory, path):
    Journal(directory, FACTS).close(settled=False)
    before = len(os.listdir("/proc/self/fd"))
    append_line(path, event="note")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_journal_with_nothing_left_to_do_is_removed(directory):
    Journal(directory, FACTS).close(settled=True)
    assert list(directory.iterdir()) == []


def test_no_directory_no_journals(directory):
    assert read_journals(directory) == []


def test_journals_come_oldest_first(directory):
    for run in ("20250602T000000Z-00", "20250601T000000Z-ff"):
        killed(directory, facts=replace(FACTS, run=run))
    assert [j.facts.run[:8] for j in read_journals(directory)] == ["20250601", "20250602"]


def test_a_journal_is_private(directory, path):
    killed(directory)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_step_is_on_stable_storage_before_it_begins(directory, monkeypatch):
    synced = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda fd: (synced.append(fd), real(fd)))
    journal = Journal(directory, FACTS)
    before = len(synced)
    with journal.step(Step.FREEZE):
        assert len(synced) == before + 1
    journal.close(settled=True)


def test_a_frozen_guest_waits_for_no_storage(directory, path, monkeypatch):
    journal = Journal(directory, FACTS)
    with journal.step(Step.PREPARE):
        pass
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda _fd: synced.append(path.read_text()))
    with journal.step(Step.FREEZE):
        pass
    assert len(synced) == 1
    with journal.step(Step.POOL_SNAPSHOT):
        assert '"end", "step": "freeze"' in path.read_text()  # the guardian reads it meanwhile
    with journal.step(Step.RELEASE):
        assert len(synced) == 1
    assert len(synced) == 2
    assert synced[1] == path.read_text()
    journal.note(Note.SUSPENDED)
    assert len(synced) == 3
    journal.close(settled=True)


def test_a_torn_last_line_counts_as_not_written(directory, path):
    killed(directory, Step.PREPARE, Step.FREEZE, Step.RELEASE)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rfind(b"\n") + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        (found,) = read_journals(directory)
        assert found.ended == {Step.PREPARE, Step.FREEZE}


@pytest.mark.parametrize("content", [b"", b"{", b'{"at": "2025', b"\0" * 512])
def test_a_journal_whose_first_line_is_torn_is_of_a_run_that_touched_nothing(
    directory, path, content
):
    directory.mkdir()
    path.write_bytes(content)
    assert read_journals(directory) == []
    assert path.exists()
    assert read_journals(directory, sweep=True) == []
    assert not path.exists()


@pytest.mark.parametrize("content", [b"garbage\n", b"\n", b"\0\n{", b"garbage\n" * 3])
def test_a_journal_without_a_line_that_can_be_parsed_is_unreadable(directory, path, content):
    """A journal gets its name with its first line, so its run may have changed something."""
    directory.mkdir()
    path.write_bytes(content)
    (found,) = list_journals(directory, sweep=True)
    assert isinstance(found, UnreadableJournal)
    assert found.uuid is None
    reason = "cannot be read (no line of it is JSON); see docs/how-to/recovery.md"
    assert found.error.line() == f"{path}: {reason}"
    assert path.exists()


def test_a_journal_with_lines_after_a_damaged_first_line_is_kept(directory, path):
    """Its run had changed something."""
    killed(directory, Step.PREPARE, Step.FREEZE)
    path.write_bytes(b"?" + path.read_bytes())
    (found,) = list_journals(directory, sweep=True)
    assert isinstance(found, UnreadableJournal)
    assert str(path) in found.error.line()
    assert path.exists()


def test_zeros_after_a_power_loss_count_as_not_written(directory, path):
    killed(directory, Step.PREPARE, Step.FREEZE)
    with path.open("ab") as stream:
        stream.write(b"\0" * 300)
    assert read_journals(directory)[0].ended == {Step.PREPARE}


def test_noise_after_a_power_loss_counts_as_not_written(directory, path):
    killed(directory, Step.PREPARE, Step.FREEZE)
    with path.open("ab") as stream:
        stream.write(b"\xff\xfe\xe4")
    assert read_journals(directory)[0].ended == {Step.PREPARE}


def test_a_reader_between_creation_and_first_line_does_not_remove_it(directory, path, monkeypatch):
    """Another domain's run reads all journals while this one is being created."""
    real = os.write

    def write(descriptor, data):
        read_journals(directory)
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)
    journal = Journal(directory, FACTS)
    monkeypatch.undo()
    journal.close(settled=False)
    assert path.exists()


def test_other_files_are_left_alone(directory):
    killed(directory)
    (directory / "README").write_text("x")
    assert len(read_journals(directory, sweep=True)) == 1
    assert (directory / "README").exists()


def test_two_may_sweep_at_once(directory, path, monkeypatch):
    directory.mkdir()
    monkeypatch.setattr(os, "listdir", lambda _directory: [path.name])
    assert list_journals(directory, sweep=True) == []


@pytest.mark.parametrize(
    "line",
    [
        {"event": "open", "format": 1, "facts": {}},
        {"event": "open", "format": 1, "facts": {"run": "r"}},
        {"event": "open", "format": 1},
        {"event": "end", "step": "prepare"},
        [],
        None,
    ],
)
def test_facts_that_are_not_all_there_are_an_error_that_names_the_file(directory, path, line):
    directory.mkdir()
    path.write_text(json.dumps(line) + "\n")
    (found,) = list_journals(directory, sweep=True)
    assert isinstance(found, UnreadableJournal)
    assert str(path) in found.error.line()
    assert path.exists()


def strange(directory):
    """The only journal, which must be of the known domain."""
    (found,) = list_journals(directory, sweep=False)
    assert isinstance(found, UnreadableJournal)
    assert found.uuid == FACTS.uuid
    return found.error


def test_a_step_of_a_later_version_is_an_error_that_names_the_file(directory, path):
    killed(directory)
    with path.open("a") as stream:
        stream.write(json.dumps({"event": "end", "step": "teleport"}) + "\n")
    assert str(path) in str(strange(directory))


KEYS = (
    "boot datasets domain downtime_ms emulator group overlay_dir overlay_floor_mib "
    "overlay_max_mib overlays own_downtime_ms ram_pipe run slowing_seconds snapshot strategy "
    "taken_by_other_program uuid vcpu_quotas was window_seconds"
)
NOTES = "suspended resumed held ending freezing pivoting pivoted committed saving released damaged"


def test_the_keys_on_disk_change_only_with_the_format(directory, path):
    """A journal of the version before an upgrade must be read, or refused for its format."""
    killed(directory, Step.FREEZE)
    opened, begun = map(json.loads, path.read_text().splitlines())
    assert opened["format"] == 2
    assert " ".join(sorted(opened["facts"])) == KEYS
    assert " ".join(note.value for note in Note) == NOTES
    assert sorted(begun) == ["at", "event", "step"]


def test_a_journal_of_a_later_format_is_not_guessed_at(directory, path):
    killed(directory)
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    assert "format" in strange(directory).reason


def test_a_strange_journal_stops_its_own_domain_only(directory, path):
    killed(directory)
    path.write_text(path.read_text().replace('"format": 2', '"format": 3'))
    other = replace(FACTS, run="20250602T000000Z-00000002", uuid="other")
    Journal(directory, other).close(settled=False)
    assert [found.facts for found in journals_of(directory, "other")] == [other]
    assert [found.facts for found in read_journals(directory)] == [other]
    with pytest.raises(JournalError, match="format"):
        journals_of(directory, FACTS.uuid)


def test_a_guest_that_was_resumed_is_suspended_no_more(directory):
    journal = Journal(directory, FACTS)
    for note in (Note.SUSPENDED, Note.RESUMED, Note.PIVOTING):
        journal.note(note)
    assert journal.notes == {Note.PIVOTING}
    assert read_journals(directory)[0].notes == journal.notes
    journal.note(Note.SUSPENDED)
    assert read_journals(directory)[0].notes == journal.notes == {Note.PIVOTING, Note.SUSPENDED}


def test_the_guardians_notes_count_and_what_was_done_and_could_not_be_noted(
    directory, path, monkeypatch
):
    journal = Journal(directory, FACTS)
    journal.note(Note.SUSPENDED)
    append_note(path, Note.RELEASED)
    assert Note.RELEASED in journal.all_notes()
    journal.note(Note.SUSPENDED)
    append_note(path, Note.RESUMED)
    assert journal.all_notes() == set()

    def full(*_what):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    for note in (Note.SUSPENDED, Note.HELD, Note.COMMITTED):
        with suppress(OSError):
            journal.note(note)
    assert journal.all_notes() == {Note.HELD, Note.COMMITTED}
    monkeypatch.setattr(Path, "read_bytes", full)
    assert journal.all_notes() == journal.notes == {Note.SUSPENDED, Note.HELD, Note.COMMITTED}


def test_a_run_knows_its_notes_without_reading_its_journal(directory):
    journal = Journal(directory, FACTS)
    seen = []

    def look():
        assert read_journals(directory)[0].notes == journal.notes
        seen.append(set(journal.notes))

    with journal.step(Step.FREEZE):
        look()
    look()
    with journal.step(Step.RELEASE):
        look()
    look()
    assert seen == [{Note.SAVING}, set(), set(), {Note.RELEASED}]
    journal.close(settled=True)


def test_a_step_that_was_taken_and_could_not_be_noted_was_taken(directory, monkeypatch):
    journal = Journal(directory, FACTS)

    def full(*_what):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with suppress(OSError), journal.step(Step.RELEASE):
        monkeypatch.setattr(os, "write", full)
    assert journal.notes == {Note.RELEASED}


def test_the_error_of_a_journal_that_cannot_be_written_has_the_next_step(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="run snaporch as root"):
        Journal(tmp_path / "file", FACTS)


def test_two_runs_never_share_a_journal(directory):
    killed(directory)
    with pytest.raises(UnavailableError):
        Journal(directory, FACTS)


# -- other kinds of runs ------------------------------------------------------------------------


def of_another_kind(directory, *steps):
    journal = Journal(directory, FACTS, kind="cruise")
    for step in steps:
        with journal.step(step, of="tank/a"):
            pass
    journal.close(settled=False)
    return journal.path


def test_another_kind_is_recognised_and_its_lines_are_kept(directory):
    path = of_another_kind(directory, Step.FREEZE)
    (found,) = list_journals(directory, sweep=False)
    assert isinstance(found, OtherJournal)
    assert (found.path, found.kind) == (path, "cruise")
    assert (found.uuid, found.domain) == (FACTS.uuid, FACTS.domain)
    assert [(line["event"], line.get("of")) for line in found.lines] == [
        ("open", None),
        ("begin", "tank/a"),
        ("end", "tank/a"),
    ]


def test_another_kind_is_no_snapshot_run(directory):
    of_another_kind(directory)
    assert read_journals(directory) == []
    assert journals_of(directory, FACTS.uuid) == []
    assert len(other_journals_of(directory, FACTS.uuid)) == 1
    assert other_journals_of(directory, "another") == []


def test_a_journal_can_be_continued_after_a_torn_line(directory):
    path = of_another_kind(directory)
    with path.open("ab") as stream:
        stream.write(b'{"event": "begin", "st')
    journal = Journal.reopen(path)
    with journal.step(Step.SEAL):
        pass
    journal.close(settled=False)
    (found,) = other_journals_of(directory, FACTS.uuid)
    assert [line["event"] for line in found.lines] == ["open", "begin", "end"]
    journal = Journal.reopen(path)
    journal.close(settled=True)
    assert not path.exists()


def test_a_journal_has_its_name_when_it_is_whole_and_keeps_it_through_a_crash(directory, to_disk):
    journal = Journal(directory, FACTS)
    fresh = f"{FACTS.run}.new"
    assert to_disk == [fresh, f"{fresh} -> {FACTS.run}.jsonl", directory.name]
    journal.close(settled=False)


def test_notes_are_on_stable_storage(directory, path, to_disk):
    """The next action cannot be observed afterwards."""
    journal = Journal(directory, FACTS)
    to_disk.clear()
    journal.note(Note.SUSPENDED)
    assert to_disk == [path.name]
    append_note(path, Note.PIVOTING)
    assert to_disk == [path.name] * 2
    journal.close(settled=False)


SAID = {
    "freeze begins": ("begin", Step.FREEZE),
    "freeze ends": ("end", Step.FREEZE),
    "release ends": ("end", Step.RELEASE),
}


@pytest.mark.parametrize(
    ("level", "said", "held"),
    [
        ("ram", [], False),
        ("ram", ["freeze begins"], True),
        ("ram", ["freeze begins", "released"], False),
        ("ram", ["freeze begins", "held"], False),  # by its owner
        ("manual", [], False),
        ("quiesced", ["released", "freezing"], True),
        ("ram", ["freeze begins", "freeze ends"], False),  # it runs on its overlays
        ("ram", ["freeze begins", "freeze ends", "suspended"], True),  # for its commit
        ("ram", ["freeze begins", "freeze ends", "suspended", "resumed"], False),
        ("ram", ["freeze begins", "released", "suspended"], True),
        ("ram", ["freeze begins", "released", "suspended", "resumed"], False),
        ("manual", ["freeze begins", "freeze ends"], True),
        ("manual", ["freeze begins", "freeze ends", "released"], False),
        ("manual", ["freeze begins", "freeze ends", "release ends"], False),
        ("paused", ["freeze begins"], False),
        ("paused", ["freeze begins", "suspended"], True),
        ("paused", ["freeze begins", "suspended", "freeze ends"], True),
        ("paused", ["freeze begins", "suspended", "freeze ends", "release ends"], False),
        ("quiesced", ["freeze begins", "freezing"], True),
        ("quiesced", ["freeze begins", "freezing", "released"], False),
        ("quiesced", ["freeze begins", "freezing", "freeze ends", "release ends"], False),
    ],
)
def test_whether_a_run_may_hold_its_guest(world, level, said, held):
    world.add_guest(agent=Agent.ANSWERS)
    context = world.with_defaults(ram_strategy="manual" if level == "manual" else "overlay")
    wanted = "ram" if level == "manual" else level
    facts = make_plan(context, world.hypervisor.domain("web"), SnapshotRequest("s1", wanted)).facts
    journal = Journal(world.paths.journal, facts)
    for what in said:
        if what in SAID:
            event, step = SAID[what]
            journal._write(event=event, step=step.value)
        else:
            journal.note(Note(what))
    journal.close(settled=False)
    (found,) = read_journals(world.paths.journal)
    assert found.held is held


def test_a_guest_that_was_paused_before_is_not_held(world):
    world.add_guest(state=DomainState.PAUSED)
    facts = make_plan(
        world.context, world.hypervisor.domain("web"), SnapshotRequest("s1", "paused")
    ).facts
    journal = Journal(world.paths.journal, facts)
    journal.note(Note.SUSPENDED)
    journal.close(settled=False)
    assert not read_journals(world.paths.journal)[0].held


def test_what_is_on_stable_storage_is_the_line(directory, path, monkeypatch):
    Journal(directory, FACTS).close(settled=False)
    there = []
    monkeypatch.setattr(os, "fsync", lambda _: there.append(path.read_text()))
    append_note(path, Note.PIVOTING)
    (text,) = there
    assert "pivoting" in text.splitlines()[-1]


def test_the_guardians_mark_is_removed_with_the_journal(directory, path):
    Journal(directory, FACTS).close(settled=False)
    release_mark(path).touch()
    forget(path)
    assert os.listdir(directory) == []


def test_a_journal_exists_until_the_mark_is_removed(directory, path):
    Journal(directory, FACTS).close(settled=False)
    release_mark(path).mkdir()
    with pytest.raises(OSError, match="released"):
        forget(path)
    assert path.exists()


def test_the_guardian_leaves_its_mark_where_the_run_looks(path):
    assert guardian.release_mark(path) == release_mark(path)


def test_a_journal_that_is_closed_is_open_no_more(directory):
    before = len(os.listdir("/proc/self/fd"))
    Journal(directory, FACTS).close(settled=False)
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_an_older_snaporch_did_not_write_was_not_so(directory, path):
    document = asdict(FACTS)
    later = [f.name for f in fields(RunFacts) if f.default is not MISSING]
    facts = RunFacts.from_json({key: value for key, value in document.items() if key not in later})
    assert later
    assert not any(getattr(facts, name) for name in later)


def test_whose_the_emulator_is_survives(directory):
    facts = replace(FACTS, emulator=Owner(64055, 103))
    Journal(directory, facts).close(settled=False)
    assert read_journals(directory)[0].facts == facts


def test_a_missing_journal_is_none(path):
    assert read_journal(path) is None


def test_a_journal_has_what_other_code_reads(directory, path):
    journal = Journal(directory, FACTS)
    with journal.step(Step.POOL_SNAPSHOT):
        pass
    journal.close(settled=False)
    first, *steps = map(json.loads, path.read_text().splitlines())
    assert (first["event"], first["kind"]) == ("open", "snapshot")
    assert [(each["event"], each["step"]) for each in steps] == [
        ("begin", "pool-snapshot"),
        ("end", "pool-snapshot"),
    ]
    assert all(datetime.fromisoformat(each["at"]).tzinfo for each in (first, *steps))


def test_an_unreadable_journal_is_named(tmp_path):
    (tmp_path / "20260609T100410.000000Z.jsonl").mkdir()
    with pytest.raises(UnavailableError, match=r"20260609T100410.000000Z.jsonl: .*irectory"):
        list_journals(tmp_path, sweep=False)


def test_a_line_after_one_that_a_full_disk_cut_is_whole(directory, path, monkeypatch):
    journal = Journal(directory, FACTS)
    write = os.write

    def cut(descriptor, data):
        if len(data) < 30:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data[:20])

    with monkeypatch.context() as full:
        full.setattr(os, "write", cut)
        with pytest.raises(OSError, match="No space"):
            journal.note(Note.FREEZING)
    journal.note(Note.SUSPENDED)
    journal.close(settled=False)
    assert read_journals(directory)[0].notes == {Note.SUSPENDED, Note.DAMAGED}


def test_a_line_that_was_not_written_whole_is_no_damage(directory, path):
    killed(directory, Step.FREEZE)
    with path.open("a") as stream:
        stream.write('{"at": "2026-')
    assert Note.DAMAGED not in read_journals(directory)[0].notes
    with path.open("a") as stream:
        stream.write("\n")
    assert Note.DAMAGED in read_journals(directory)[0].notes


def test_a_last_line_that_lacks_only_its_end_counts(directory, path):
    journal = Journal(directory, FACTS)
    journal.note(Note.SUSPENDED)
    journal.close(settled=False)
    os.truncate(path, path.stat().st_size - 1)
    assert read_journals(directory)[0].held


def test_a_run_knows_its_notes_though_its_journal_was_overwritten(directory, path):
    journal = Journal(directory, FACTS)
    journal.note(Note.SUSPENDED)
    path.write_bytes(b"?" * path.stat().st_size + b"\n")
    assert journal.all_notes() == {Note.SUSPENDED}
    journal.close(settled=False)


def test_a_paused_run_that_released_its_guest_does_not_count_as_suspending_it(directory):
    journal = Journal(directory, replace(FACTS, strategy=Strategy.PAUSED))
    for step in (Step.FREEZE, Step.RELEASE):
        with journal.step(step):
            pass
    journal.close(settled=False)
    assert read_journals(directory)[0].notes == {Note.RELEASED}


@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("was", [DomainState.RUNNING, DomainState.PAUSED])
@pytest.mark.parametrize("note", [None, Note.RELEASED, Note.HELD])
def test_with_a_damaged_journal_the_pause_may_be_the_runs_or_the_owners(strategy, was, note):
    facts = replace(FACTS, strategy=strategy, was=was)
    may_have_paused = strategy in (Strategy.OVERLAY, Strategy.MANUAL, Strategy.PAUSED)
    notes = {Note.DAMAGED} | ({note} if note else set())
    unexplained = may_have_paused and was is DomainState.RUNNING and note is None
    assert explains_no_pause(facts, notes) is unexplained
    assert not explains_no_pause(facts, notes - {Note.DAMAGED})


def test_a_run_knows_its_notes_though_its_journal_was_cut(directory, path):
    journal = Journal(directory, FACTS)
    size = path.stat().st_size
    journal.note(Note.SUSPENDED)
    os.truncate(path, size)
    assert journal.all_notes() == {Note.SUSPENDED}
    journal.close(settled=False)
