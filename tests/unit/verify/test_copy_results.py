from dataclasses import replace
from datetime import UTC, datetime

import pytest

from snaporch.errors import UnavailableError
from snaporch.verify.copy_decision import Copy, PassedBefore, Source
from snaporch.verify.copy_results import CopyResult, CopyResults

NOW = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)
UUID = "4b1d2f0e-0000-4000-8000-00000000000f"
GOOD = CopyResult(
    "nas", "web", UUID, "r-1", "s1", NOW, True, Source.HERE, before=PassedBefore(NOW, "ab", True)
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


def test_only_results_of_copies_that_exist_stay(results, tmp_path):
    results.record(GOOD)
    results.record(BAD)
    copy = Copy("web", UUID, "r-2", "s2")
    results.keep_only("nas", [copy])
    assert results.all(["nas"])[0] == [BAD]
    results.keep_only("tape", [])
    assert results.all(["nas"])[0] == [BAD]
    results.keep_only("nas", [])
    assert results.all(["nas"])[0] == []


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
    results.keep_only("nas", [])
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
