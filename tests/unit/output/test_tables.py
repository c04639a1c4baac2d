import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from rich.cells import cell_len

from snaporch.model import (
    BundleState,
    Level,
    SnapshotRecord,
    VerificationResult,
    VerifyDepth,
)
from snaporch.output.tables import ListedRecord, print_results
from snaporch.output.tables import print_records as print_listed

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
VERIFIED = VerificationResult(datetime.now(UTC), True, VerifyDepth.RESUMED)
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def print_records(records, **options):
    print_listed([ListedRecord(record, 5 << 20) for record in records], **options)


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


def test_a_terminal_has_the_columns_for_which_it_is_wide_enough(terminal, capsys, monkeypatch):
    noted = replace(RECORD, note="a note that is much longer than there is room for", group="shop")
    headers = {}
    for width in (60, 80, 90, 100, 130, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        print_records([noted, replace(noted, verified=VERIFIED, kept=noted.created)])
        shown = lines(capsys)
        assert max(len(line) for line in shown) <= width
        assert noted.snapshot in "".join(shown)
        headers[width] = shown[0].split()
    assert headers[60] == headers[80] == ["DOMAIN@SNAPSHOT"]
    assert headers[90][2:] == ["AGE", "LEVEL", "STATE", "VERIFIED", "KEPT"]
    assert headers[130][-2:] == ["GROUP", "NOTE"]
    assert len(headers[90]) < len(headers[100]) < len(headers[130]) < len(headers[200])


def test_a_tiny_terminal_still_has_the_level_and_the_state(terminal, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    print_records([RECORD])
    assert "quiesced incomplete" in "\n".join(lines(capsys))


def test_age_level_and_state_are_whole_on_80_columns(terminal, capsys):
    print_records([RECORD])
    text = "\n".join(lines(capsys))
    for cell in ("quiesced", "incomplete", "99d 23h", RECORD.snapshot):
        assert cell in text


@pytest.mark.parametrize("width", ["30", "45", "60", "80"])
def test_a_failed_verification_and_what_is_left_out_are_never_hidden(
    terminal, capsys, monkeypatch, width
):
    monkeypatch.setenv("COLUMNS", width)
    failed = replace(VERIFIED, passed=False)
    print_records([replace(RECORD, verified=failed, apart=("vdb",), group="shop")])
    text = "\n".join(lines(capsys))
    assert "failed" in text
    assert "vdb" in text


def test_the_age_of_a_verification_is_that_of_its_depth(terminal, capsys):
    """A later one by checksums alone proves less, and says so if no clone ever ran."""
    now = datetime.now(UTC)
    full = VerificationResult(now - timedelta(days=30), True, VerifyDepth.RESUMED)
    light = VerificationResult(now - timedelta(hours=4), True, VerifyDepth.CHECKED)
    short = replace(RECORD, domain="web", snapshot="s1")
    print_records([replace(short, verified=light.after(full)), replace(short, verified=light)])
    header, resumed, checked = lines(capsys)
    assert max(map(len, (header, resumed, checked))) <= 80
    assert "VERIFIED" in header
    assert "30d" in resumed
    assert "4h" not in resumed
    assert checked.endswith("4h checked")


def test_wide_has_everything_on_any_terminal(terminal, capsys):
    print_records([replace(RECORD, policy="hourly", replicated=("nas",), note="why")], wide=True)
    header, row = lines(capsys)
    assert header.split()[-4:] == ["USED", "POLICY", "REPLICAS", "NOTE"]
    assert row.split()[-4:] == ["5.0M", "hourly", "nas", "why"]


@pytest.mark.parametrize("policy", ["every-fifteen-minutes-by-day", "x" * 90])
def test_names_are_whole_on_80_columns(terminal, capsys, policy):
    """They can be copied for `snaporch restore`."""
    named = replace(RECORD, snapshot=f"snaporch_20250601T120000Z_{policy}")
    more = {"group": "shop", "apart": ("vdb", "vdc"), "note": "why"}
    print_records([named, replace(named, verified=VERIFIED, **more)])
    header, details, *rows, last = lines(capsys)
    assert header == "DOMAIN@SNAPSHOT"
    assert details.split() == ["AGE", "LEVEL", "RAM", "STORED", "PAUSE", "STATE", "VERIFIED"]
    assert "".join(rows).count(named.full_name) == 2
    assert last == "  group shop; without vdb, vdc; note: why"


def test_short_names_have_one_line_on_80_columns(terminal, capsys):
    print_records([replace(RECORD, domain="web", snapshot="before-upgrade")])
    assert len(lines(capsys)) == 2


def test_a_long_name_is_folded_and_not_cut_on_a_terminal(terminal, capsys):
    print_records([replace(RECORD, domain="n" * 60)])
    shown = lines(capsys)
    assert max(len(line.rstrip()) for line in shown) <= 80
    assert "".join(shown).count("n") >= 60


@pytest.mark.parametrize("name", ["\u72ac" * 60, "\u72ac " * 40])
def test_wide_characters_are_folded_too(terminal, capsys, name):
    print_records([replace(RECORD, domain=name, note=name)])
    shown = lines(capsys)
    assert max(map(cell_len, shown)) <= 80
    assert "".join(shown).count("\u72ac") == 2 * name.count("\u72ac")


def test_escape_sequences_of_properties_are_text(piped, capsys):
    print_records([replace(RECORD, group="\x1b[31mshop")])
    assert "\x1b[31m" not in capsys.readouterr().out


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
