"""The page of what was tried on stock hosts keeps the sections of other suites."""

import importlib.util
import sys
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "acceptance/report.py"
spec = importlib.util.spec_from_file_location("acceptance_report", SOURCE)
report = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = report
spec.loader.exec_module(report)

PASSED = report.Result("the package installs", "passed", 12.4)


def write(page, suite, *results):
    text = report.section(suite, "package `x.deb`", {"OpenZFS": "2.3.9"}, list(results))
    report.write(page, suite, text)
    return page.read_text()


def test_a_new_report_replaces_that_of_its_suite_only(tmp_path):
    page = tmp_path / "page.md"
    write(page, "trixie", PASSED)
    write(page, "bookworm", PASSED)
    text = write(page, "trixie", report.Result("the package installs", "failed", 3, "no room"))
    assert text.startswith(report.HEAD)
    assert [line for line in text.splitlines() if line.startswith("## ")] == [
        "## Debian bookworm",
        "## Debian trixie",
    ]
    assert text.count("| the package installs | passed | 12 |") == 1
    assert text.count("| the package installs | failed: no room | 3 |") == 1


def test_what_was_not_run_is_not_reported_as_passed():
    assert report.row(report.Result("a step", "not run")) == "| a step | not run |  |"


def test_a_reason_cannot_break_the_table():
    result = report.Result("a step", "failed", 1, "a | b\n`c`")
    assert report.row(result) == "| a step | failed: a   b  c  | 1 |"
