"""The names that a shell completes; tests/package tries the shells themselves."""

import threading
import time

import pytest
import typer
from fakes.pool import FakePool

from snaporch.cli import completion
from snaporch.cli.completion import names_in_time, snapshot_names
from snaporch.cli.main import app

CONFIG = """
libvirt_uri = "test:///default"
unknown = "a mistake elsewhere hides no name"
[policy.hourly]
[policy.nightly]
[replica.offsite]
[group.shop]
"""


@pytest.fixture
def offered(tmp_path, monkeypatch, capsys):
    """The values offered for the last word; nothing is printed on standard error."""
    path = tmp_path / "snaporch.toml"
    path.write_text(CONFIG)
    monkeypatch.setenv("SNAPORCH_CONFIG", str(path))
    monkeypatch.setenv("_SNAPORCH_COMPLETE", "complete_bash")

    def call(*words):
        monkeypatch.setenv("COMP_WORDS", "\n".join(("snaporch", *words)))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        with pytest.raises(SystemExit):
            app(args=[], prog_name="snaporch", standalone_mode=False)
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out.split()

    return call


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["reco"], ["recover"]),
        (["list", ""], ["test"]),
        (["snapshot", "t"], ["test"]),
        (["snapshot", "x"], []),
        (["snapshot", "--policy", ""], ["hourly", "nightly"]),
        (["snapshot", "--group", "s"], ["shop"]),
        (["replicate", "--to", ""], ["offsite"]),
        (["clone", "--delete", ""], ["test"]),
        (["snapshot", "--level", "q"], ["quiesced"]),
    ],
)
def test_names_that_exist_are_offered(offered, words, names):
    assert offered(*words) == names


def test_the_option_config_wins(offered, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text("[policy.weekly]\n")
    assert offered("snapshot", "--config", str(other), "--policy", "") == ["weekly"]
    assert offered("--config", str(other), "snapshot", "--policy", "") == ["weekly"]


@pytest.mark.parametrize("text", [None, "[", "policy = 7", b"\xff"])
def test_a_broken_configuration_offers_nothing(offered, tmp_path, text):
    path = tmp_path / "snaporch.toml"
    path.unlink()
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert offered("snapshot", "--policy", "") == []


def test_without_libvirt_nothing_is_offered(offered, tmp_path):
    (tmp_path / "snaporch.toml").write_text('libvirt_uri = "qemu+unix:///system?socket=/absent"\n')
    assert offered("list", "") == []


def test_the_snapshots_of_snaporch_are_named_by_their_domain():
    pool = FakePool("tank/web")
    pool.snapshot(["tank/web@s1"], {"snaporch:domain": "web", "snaporch:run": "r"})
    pool.snapshot(["tank/web@foreign"], {})
    assert snapshot_names(pool) == {"web@s1"}


def test_a_source_that_hangs_is_given_up():
    release = threading.Event()
    began = time.monotonic()
    assert names_in_time(release.wait, 0.05) == []
    assert time.monotonic() - began < 5
    release.set()


def test_a_source_that_fails_offers_nothing():
    assert names_in_time(lambda: 1 / 0, 5) == []


def test_names_that_a_shell_would_evaluate_are_not_offered():
    names = ["Bär", "web@a:b", "a b", "$(reboot)", "`x`", '";x', "a\nb", "-ok.1"]
    assert names_in_time(lambda: names, 5) == ["-ok.1", "Bär", "web@a:b"]


def test_each_domain_and_snapshot_of_a_command_is_completed():
    """A new command's arguments are completed if they have the usual metavars."""
    missing = []
    for name, command in typer.main.get_command(app).commands.items():
        for each in command.params:
            completed = getattr(each.shell_complete, "func", None) is completion._complete
            if "DOMAIN" in (each.metavar or "") and not completed:
                missing.append((name, each.name))
    assert missing == []
