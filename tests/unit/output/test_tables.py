import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from snaporch.model import (
    BundleState,
    Level,
    SnapshotRecord,
    VerificationResult,
    VerifyDepth,
)
from snaporch.output.tables import print_records, print_results

RECORD = SnapshotRecord(
    domain="webserver-01",
    uuid="u",
    snapshot="snaporch_20250601T120000Z_manual",
    run="r",
    level=Level.QUIESCED,
    datasets=("tank/web",),
    created=datetime.now(UTC) - timedelta(days=99, hours=23, minutes=1),
    ram_bytes=1000 << 20,
    stored_bytes=1000 << 20,
    pause_ms=9999.0,
    bundle="/b",
    state=BundleState.INCOMPLETE,
)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def terminal(monkeypatch):
    """A colour terminal of 80 columns."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)


@pytest.fixture
def piped(monkeypatch):
    """A pipe, with a width in the environment."""
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def lines(capsys):
    return ANSI.sub("", capsys.readouterr().out).splitlines()


def test_ordinary_names_fit_80_columns(terminal, capsys):
    print_records([RECORD])
    assert max(len(line.rstrip()) for line in lines(capsys)) <= 80


def test_on_80_columns_every_cell_is_still_whole(terminal, capsys):
    print_records([RECORD])
    text = "\n".join(lines(capsys))
    for cell in ("quiesced", "1000.0M", "9999ms", "incomplete", "99d 23h"):
        assert cell in text


@pytest.mark.parametrize("policy", ["hourly", "every-fifteen-minutes-by-day"])
def test_names_are_whole_on_80_columns(terminal, capsys, policy):
    """They can be copied for `snaporch restore`."""
    named = replace(RECORD, snapshot=f"snaporch_20250601T120000Z_{policy}")
    verified = VerificationResult(datetime.now(UTC), True, VerifyDepth.RESUMED)
    print_records([named, replace(named, verified=verified, group="shop", apart=("vdb", "vdc"))])
    header, details, first, _, second, row, more = lines(capsys)
    assert header == "DOMAIN@SNAPSHOT"
    assert details.split() == ["AGE", "LEVEL", "RAM", "STORED", "PAUSE", "STATE", "VERIFIED"]
    assert first == second == named.full_name
    assert row.split()[2:] == ["quiesced", "1000.0M", "1000.0M", "9999ms", "incomplete", "0s"]
    assert more == "  group shop; without vdb, vdc"


def test_short_names_have_one_line_on_80_columns(terminal, capsys):
    print_records([replace(RECORD, domain="web", snapshot="before-upgrade")])
    assert len(lines(capsys)) == 2


def test_a_long_name_is_folded_and_not_cut_on_a_terminal(terminal, capsys):
    print_records([replace(RECORD, domain="n" * 60)])
    shown = lines(capsys)
    assert max(len(line.rstrip()) for line in shown) <= 80
    assert "".join(shown).count("n") >= 60


def test_piped_output_is_one_line_for_each_snapshot(piped, capsys):
    print_records([replace(RECORD, domain="n" * 200), RECORD])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == [
        "DOMAIN",
        "SNAPSHOT",
        "AGE",
        "LEVEL",
        "RAM",
        "STORED",
        "PAUSE",
        "STATE",
    ]
    assert [row.split()[0] for row in rows] == ["n" * 200, "webserver-01"]
    assert all(row.rstrip().endswith("incomplete") for row in rows)


def test_piped_output_has_no_colours(piped, capsys):
    print_records([RECORD, replace(RECORD, state=BundleState.MISSING)])
    assert "\x1b" not in capsys.readouterr().out


def test_names_are_text_and_not_markup(piped, capsys):
    print_records([replace(RECORD, domain="[bold]web[/] :smile:\x1b[0m")])
    assert "[bold]web[/] :smile:\\x1b[0m" in capsys.readouterr().out


def test_what_is_unknown_is_a_dash(piped, capsys):
    print_records([replace(RECORD, ram_bytes=None, pause_ms=None)])
    assert capsys.readouterr().out.splitlines()[1].split().count("-") == 2


def test_an_outcome_says_which_disks_are_of_another_instant(piped, capsys):
    taken = replace(RECORD, apart=("vdb", "vdc")).as_json()
    print_results([("web", 0, taken), ("mail", 0, RECORD.as_json())])
    _, web, mail = capsys.readouterr().out.splitlines()
    assert web.endswith("incomplete, without vdb, vdc")
    assert mail.endswith("incomplete")
