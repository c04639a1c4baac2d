"""Pulling sources: what fails stops nothing else, and is seen."""

import json
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
from fakes.pull_case import UUID, Notes, PullCase

from snaporch.config import Config
from snaporch.config.transfer_window import ALWAYS, parse_windows
from snaporch.errors import InterruptedRunError, NotFoundError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.pull.pull import due_sources, find_sources, pull_sources, without_windows
from snaporch.pull.record import PullRecord, read_records, write_records

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Context:
    """What pulling needs of a context."""

    config: Config
    progress: Notes
    interrupt: Interrupt = field(default_factory=Interrupt)


@pytest.fixture
def context(case):
    return Context(case.config, case.progress)


def pull(context, case, at=NOW):
    return list(pull_sources(context, [case.name], lambda _c, _n: case.open(), lambda: at))


def lines(pulled):
    return [failure.line() for each in pulled for failure in each.failures]


def with_domains(case, *domains):
    case.settings = case.settings.model_copy(update={"domains": domains})
    return case.config.model_copy(update={"source": {case.name: case.settings}})


def test_each_guest_is_recorded(context, case):
    case.take("r1")
    case.take("r2", 2)
    assert lines(pull(context, case)) == []
    records = read_records(case.config.paths.schedule)
    assert {key: each.domain for key, each in records.items()} == {
        f"vm1/{UUID.format(1)}": "web",
        f"vm1/{UUID.format(2)}": "db",
        "vm1/": "",
    }
    assert all(each.pulled == NOW and not each.failed for each in records.values())


def test_a_name_that_matches_no_guest_is_an_error_and_the_others_come(case):
    case.take("r1")
    context = Context(with_domains(case, "web", "wbe"), case.progress)
    pulled = pull(context, case)
    (line,) = lines(pulled)
    assert line.startswith("vm1: wbe: the source sends no such guest")
    assert [each.result.arrived for each in pulled if each.result] == [["r1"]]
    assert "wbe" in read_records(case.config.paths.schedule)["vm1/"].failed


def test_a_source_without_any_guest_is_an_error(context, case):
    assert "the source sends no guest" in lines(pull(context, case))[0]


def test_a_failure_of_a_guest_does_not_stop_the_others(context, case):
    case.take("r1")
    case.take("r2", 2)
    (case.store.root / UUID.format(1) / "r1" / "ram.save").unlink()
    pulled = pull(context, case)
    assert len(lines(pulled)) == 1
    records = read_records(case.config.paths.schedule)
    web, db = records[f"vm1/{UUID.format(1)}"], records[f"vm1/{UUID.format(2)}"]
    assert (web.pulled, web.skipped, db.pulled, db.skipped) == (None, 1, NOW, 0)
    assert "not whole" in web.failed


def test_a_failure_keeps_when_the_last_pull_succeeded(context, case):
    case.take("r1")
    pull(context, case)
    case.host.is_away = True
    assert "cannot be reached" in lines(pull(context, case, NOW + timedelta(hours=2)))[0]
    record = read_records(case.config.paths.schedule)["vm1/"]
    assert (record.pulled, record.tried) == (NOW, NOW + timedelta(hours=2))
    assert "cannot be reached" in record.failed


def test_a_source_is_due_by_every_and_after_a_failure_by_retry(context, case):
    assert due_sources(context, NOW) == ["vm1"]
    case.take("r1")
    pull(context, case)
    assert due_sources(context, NOW + timedelta(minutes=59)) == []
    assert due_sources(context, NOW + timedelta(minutes=60)) == ["vm1"]
    case.host.is_away = True
    pull(context, case)
    assert due_sources(context, NOW + timedelta(minutes=9)) == []
    assert due_sources(context, NOW + timedelta(minutes=10)) == ["vm1"]


def test_two_sources_with_the_same_guests_do_not_meet(tmp_path, case):
    (tmp_path / "other").mkdir()
    other = PullCase(tmp_path / "other", "vm2", "backup/vm2")
    for each in (case, other):
        each.take("r1")
    context = Context(
        Config(
            source={"vm1": case.settings, "vm2": other.settings}, paths={"schedule": tmp_path / "s"}
        ),
        case.progress,
    )
    cases = {"vm1": case, "vm2": other}
    pulled = list(pull_sources(context, [*cases], lambda _c, name: cases[name].open(), lambda: NOW))
    assert lines(pulled) == []
    assert {name.split("/")[1] for name in case.here() + other.here()} == {"vm1", "vm2"}
    assert case.bundles_here() == other.bundles_here() == ["r1"]


def test_an_unknown_source_is_named(case):
    with pytest.raises(NotFoundError, match=r"no such source \(vm1\)"):
        find_sources(case.config, ["vm9"])


def test_snapshots_that_wait_are_recorded_with_the_time_until_some_come(context, case):
    case.take("r1")
    case.unfinished = {"r2"}
    pull(context, case)
    case.take("r2")
    key, hour = f"vm1/{UUID.format(1)}", timedelta(hours=1)

    def since(hours):
        pull(context, case, NOW + hours * hour)
        return read_records(case.config.paths.schedule)[key].waiting_since

    assert [since(1), since(2)] == [NOW + hour] * 2
    case.host.is_away = True
    assert since(3) == NOW + hour
    case.host.is_away = False
    case.unfinished = {"r3"}
    case.take("r3")
    assert since(4) == NOW + 4 * hour
    case.unfinished = set()
    assert since(5) is None


def test_a_guest_that_is_not_sent_any_more_fails_once_and_is_forgotten(context, case):
    case.take("r1")
    case.take("r2", 2)
    pull(context, case)
    case.allowed = {"web"}
    (line,) = lines(pull(context, case))
    assert line.startswith("vm1: db: the source does not send this guest any more")
    records = read_records(case.config.paths.schedule)
    assert sorted(records) == ["vm1/", f"vm1/{UUID.format(1)}"]
    assert "any more" in records["vm1/"].failed
    assert lines(pull(context, case)) == []


def test_a_source_that_is_away_forgets_no_guest(context, case):
    case.take("r1")
    pull(context, case)
    case.host.is_away = True
    pull(context, case)
    assert len(read_records(case.config.paths.schedule)) == 2


def test_guests_that_change_each_time_leave_no_records(context, case):
    answer = {"datasets": [], "waiting": [], "shared": [], "unmarked": []}
    case.host.answers["snapshots"] = json.dumps(answer).encode()
    for number in range(3):
        uuid = f"4b1d2f0e-0000-4000-8000-{number:012}"
        guests = {"guests": [{"uuid": uuid, "domain": "web"}]}
        case.host.answers["guests"] = json.dumps(guests).encode()
        pull(context, case)
    assert len(read_records(case.config.paths.schedule)) == 2


BY_NIGHT, BY_DAY = (datetime(2026, 1, 1, hour).astimezone() for hour in (23, 9))


def in_window(case, **more):
    """The source may be pulled at night."""
    values = {"every": timedelta(hours=1), "window": parse_windows("22:00-06:00"), **more}
    case.settings = case.settings.model_copy(update=values)
    config = case.config.model_copy(update={"source": {case.name: case.settings}})
    return Context(config, case.progress)


def test_a_source_is_due_in_its_window_only(case):
    assert due_sources(in_window(case), BY_NIGHT) == ["vm1"]
    assert due_sources(in_window(case), BY_DAY) == []
    assert due_sources(in_window(case, rate_outside=3), BY_DAY) == ["vm1"]


def test_by_hand_a_source_has_no_window_and_that_is_said(case):
    context = in_window(case, rate=9)
    for moment, count in ((BY_DAY, 1), (BY_NIGHT, 0)):
        case.progress.notes.clear()
        found = without_windows(context, ["vm1"], moment)
        assert found.config.source["vm1"].start_window == ALWAYS
        assert found.config.source["vm1"].rate_now() == 9
        assert sum("by hand it has none" in note for note in case.progress.notes) == count


def test_the_end_of_the_window_stops_a_pull_and_other_guests_come_first_then(case):
    case.take("r1")
    case.take("r2", 2)
    context, order = in_window(case), []

    def night(guests):
        """Pull; the window ends once so many guests were asked for."""
        moment = lambda: BY_DAY if len(asked) >= guests else BY_NIGHT  # noqa: E731
        asked = []

        def opened(inner, _name):
            source, copies, puller = case.open()
            first = source.guest

            def guest(uuid, domain):
                asked.append(domain)
                inner.interrupt.check("vm1")
                return first(uuid, domain)

            source.guest = guest
            return source, copies, puller

        done = [*pull_sources(context, ["vm1"], opened, moment)]
        order.append(asked)
        return [each.result.domain for each in done if each.result]

    first = night(1)
    assert first == []
    assert any("the next one continues" in note for note in case.progress.notes)
    record = read_records(case.config.paths.schedule)
    assert [each.pulled for each in record.values()] == [None]
    assert due_sources(context, BY_NIGHT + timedelta(days=1)) == ["vm1"]
    assert night(9) == [*{"web", "db"} - {*order[0]}, *order[0]]


def test_sources_that_were_served_last_come_last(case, tmp_path):
    context = in_window(case)
    both = {"vm0": case.settings, "vm1": case.settings}
    context.config = context.config.model_copy(update={"source": both})
    earlier = BY_NIGHT - timedelta(hours=9)
    for served, expected in (("vm0", ["vm1", "vm0"]), ("vm1", ["vm0", "vm1"])):
        records = {f"{each}/u": PullRecord("web", tried=earlier) for each in both}
        records[f"{served}/u"] = PullRecord("web", tried=earlier + timedelta(hours=2))
        write_records(case.config.paths.schedule, records)
        assert due_sources(context, BY_NIGHT) == expected


def test_a_signal_forgets_no_guest_before_it_was_reported(context, case):
    case.take("r1")
    case.take("r2", 2)
    pull(context, case)
    case.allowed = {"web"}
    context.interrupt.check = Mock(side_effect=InterruptedRunError("vm1", "signal", 15))
    with pytest.raises(InterruptedRunError):
        pull(context, case)
    context.interrupt = Interrupt()
    (line,) = lines(pull(context, case))
    assert line.startswith("vm1: db: the source does not send this guest any more")


def within(context, case, **more):
    changes = {"newest_within": timedelta(days=2), **more}
    case.settings = case.settings.model_copy(update=changes)
    context.config = case.config.model_copy(update={"source": {case.name: case.settings}})


def test_a_guest_that_is_not_sent_any_more_is_not_forgotten_while_its_age_matters(context, case):
    within(context, case)
    case.take("r1")
    case.take("r2", 2)
    pull(context, case)
    newest = read_records(case.config.paths.schedule)[f"vm1/{UUID.format(2)}"].newest
    case.allowed = {"web"}
    for _ in range(2):
        (line,) = lines(pull(context, case))
        assert "domains = [...]" in line
        assert read_records(case.config.paths.schedule)[f"vm1/{UUID.format(2)}"].newest == newest
    within(context, case, domains=("web",))
    assert len(lines(pull(context, case))) == 1
    assert lines(pull(context, case)) == []
    assert f"vm1/{UUID.format(2)}" not in read_records(case.config.paths.schedule)


def test_guests_that_change_each_time_leave_few_records_while_their_age_matters(
    context, case, monkeypatch
):
    monkeypatch.setattr("snaporch.pull.pull.MAX_GUESTS", 2)
    within(context, case)
    case.take("r1")
    directory = case.config.paths.schedule
    newest = {"a": NOW, "b": None, "c": NOW, "d": NOW}
    write_records(
        directory, {f"vm1/{key}": PullRecord(key, newest=at) for key, at in newest.items()}
    )
    assert len(lines(pull(context, case))) == 4
    assert sorted(read_records(directory)) == ["vm1/", f"vm1/{UUID.format(1)}", "vm1/a", "vm1/c"]


def test_a_pull_that_cannot_be_recorded_fails_and_the_other_sources_are_pulled(context, case):
    case.take("r1")
    case.config.paths.schedule.write_text("")
    opened = []

    def open_source(_context, name):
        opened.append(name)
        return case.open()

    found = list(pull_sources(context, [case.name, case.name], open_source, lambda: NOW))
    assert opened == [case.name, case.name]
    assert [each.result.arrived for each in found if each.result] == [["r1"], []]
    errors = [failure for each in found for failure in each.failures]
    assert [type(each) for each in errors] == [UnavailableError, UnavailableError]
    assert str(case.config.paths.schedule) in errors[0].line()


def test_a_failure_has_the_time_of_the_last_success(context, case):
    case.take("r1")
    path = case.store.root / UUID.format(1) / "r1" / "ram.save"
    data = path.read_bytes()
    path.unlink()
    assert [each.succeeded for each in pull(context, case) if each.failures] == [None]
    path.write_bytes(data)
    pull(context, case, NOW + timedelta(hours=1))
    shutil.rmtree(case.bundles / UUID.format(1))
    path.unlink()
    for hours in (2, 3):
        found = pull(context, case, NOW + timedelta(hours=hours))
        assert [e.succeeded for e in found if e.failures] == [NOW + timedelta(hours=1)]
    case.host.is_away = True
    (found,) = pull(context, case, NOW + timedelta(hours=4))
    assert (found.result, found.succeeded) == (None, NOW + timedelta(hours=1))
