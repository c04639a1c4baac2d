from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from snaporch.errors import UnavailableError
from snaporch.verify.copy_decision import PassedBefore, Source
from snaporch.verify.copy_results import CopyListing, CopyResult, CopyResults

NOW = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)
UUID = "4b1d2f0e-0000-4000-8000-00000000000f"
BEFORE = PassedBefore(NOW, "ab", True, "cd")
GOOD = CopyResult(
    "nas",
    "web",
    UUID,
    "r-1",
    "s1",
    NOW,
    True,
    Source.HERE,
    before=PassedBefore(NOW, "ab", True, "cd"),
)
BAD = replace(GOOD, run="r-2", snapshot="s2", passed=False, reason="why", before=None)


@pytest.fixture
def results(tmp_path):
    return CopyResults(tmp_path / "schedule")


def test_results_are_read_as_they_were_recorded(results):
    results.record(GOOD)
    results.record(BAD)
    assert results.all(["nas", "tape"])[0] == [GOOD, BAD]
    assert results.all(["tape"])[0] == []
    again = replace(BAD, passed=True, reason="")
    results.record(again)
    assert results.of_domain("nas", UUID) == {GOOD.key: GOOD, BAD.key: again}


def listing(*keys, domains=(UUID,), is_complete=True):
    return CopyListing(keys, domains, is_complete)


def test_a_copy_that_is_gone_is_reported_once_and_forgotten_a_month_later(results):
    results.record(GOOD)
    results.record(BAD)
    assert results.sort_out("tape", listing(), NOW) == ([], [])
    assert results.sort_out("nas", listing(GOOD.key), NOW) == ([(BAD, True)], [])
    assert results.all(["nas"]) == ([GOOD], [])
    assert results.sort_out("nas", listing(GOOD.key), NOW + timedelta(days=29)) == ([], [])
    assert BAD.key in results.of_domain("nas", UUID)
    assert results.sort_out("nas", listing(GOOD.key), NOW + timedelta(days=30)) == ([], [])
    assert results.of_domain("nas", UUID) == {GOOD.key: GOOD}


def test_a_pruned_copy_that_passed_is_not_reported_while_there_are_others(results):
    results.record(GOOD)
    assert results.sort_out("nas", listing("other"), NOW) == ([], [])
    assert results.of_domain("nas", UUID) == {GOOD.key: replace(GOOD, absent=NOW)}


def test_what_one_listing_lacks_is_compared_with_its_result_later(results):
    results.record(GOOD)
    assert results.sort_out("nas", listing(domains=()), NOW) == ([(GOOD, True)], [])
    assert results.sort_out("nas", listing(domains=()), NOW) == ([], [])
    assert results.of_domain("nas", UUID)[GOOD.key].before == GOOD.before
    assert results.sort_out("nas", listing(GOOD.key), NOW) == ([], [])
    assert results.all(["nas"]) == ([GOOD], [])


def test_what_a_listing_cannot_show_is_kept(results):
    results.record(GOOD)
    results.record(BAD)
    hidden = listing(domains=(), is_complete=False)
    for _ in range(2):
        assert results.sort_out("nas", hidden, NOW) == ([(BAD, False)], [])
        assert results.all(["nas"]) == ([GOOD, BAD], [])
    assert results.sort_out("nas", listing(is_complete=False), NOW) == ([(BAD, True)], [])


def test_the_last_result_takes_its_file_with_it(results, tmp_path):
    results.record(replace(BAD, absent=NOW))
    results.sort_out("nas", listing(), NOW + timedelta(days=31))
    assert results.domains("nas") == []


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '[{"at": "x"}]', "[" * 10_000, '[{"at": "2026-06-10T12:30:00Z"}]']
)
def test_a_damaged_file_is_not_taken_for_no_result(results, tmp_path, text):
    results.record(GOOD)
    path = tmp_path / "schedule" / "copies" / "nas" / f"{UUID}.json"
    path.write_text(text)
    found, (error,) = results.all(["nas", "tape"])
    assert (found, error.thing, error.step.endswith(f"rm {path}")) == ([], str(path), True)
    with pytest.raises(UnavailableError, match="cannot be read"):
        results.record(BAD)
    assert results.sort_out("nas", listing(), NOW) == ([], [])
    assert path.read_text() == text
    path.unlink()
    results.record(BAD)
    assert results.all(["nas"]) == ([BAD], [])


def test_what_cannot_be_opened_is_not_taken_for_no_result(results, tmp_path):
    (tmp_path / "schedule" / "copies" / "nas" / f"{UUID}.json").mkdir(parents=True)
    (tmp_path / "schedule" / "copies" / "tape").write_text("")
    found, errors = results.all(["nas", "tape"])
    assert (found, [each.reason for each in errors]) == ([], ["Is a directory", "Not a directory"])


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "schedule").write_text("")
    with pytest.raises(UnavailableError, match="schedule"):
        CopyResults(tmp_path / "schedule").record(GOOD)


def test_what_is_gone_is_returned_also_if_the_result_of_another_cannot_be_written(
    results, tmp_path
):
    """The first is marked as reported by then, and would never be reported."""
    other = replace(BAD, uuid=UUID[:-1] + "e")
    results.record(other)
    results.record(BAD)
    in_the_way = tmp_path / "schedule" / "copies" / "nas" / f".{UUID}.json"
    in_the_way.mkdir()
    found, (error,) = results.sort_out("nas", listing(), NOW)
    assert (found, error.thing) == ([(other, True), (BAD, True)], str(in_the_way))
    in_the_way.rmdir()
    assert results.sort_out("nas", listing(), NOW) == ([(BAD, True)], [])
