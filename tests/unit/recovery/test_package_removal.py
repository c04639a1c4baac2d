import json

import pytest

from snaporch.errors import ExitCode
from snaporch.fence import Fence, Fences
from snaporch.install_files import render_units
from snaporch.journal import FORMAT
from snaporch.recovery.package_removal import main


@pytest.fixture
def ask(tmp_path):
    """The exit code and the output of the question for a host with these journals."""
    config = tmp_path / "snaporch.toml"
    journals = tmp_path / "lib" / "journal"
    config.write_text(f"[paths]\nbundles = '{tmp_path}/b'\njournal = '{journals}'\n")

    def call(**files):
        journals.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (journals / f"{name}.jsonl").write_text(text)
        lines = []
        return main(config, lines.append, [tmp_path / "units"]), "".join(lines)

    return call


def journal(domain, **first):
    facts = {"uuid": f"uuid of {domain}", "domain": domain}
    line = {"event": "open", "format": FORMAT, "kind": "restore", "facts": facts}
    return json.dumps(line | first) + "\n"


def test_without_a_journal_the_line_names_what_stays(ask, tmp_path):
    code, text = ask()
    assert code == 0
    assert text == (
        f"snaporch: the ZFS snapshots, the bundles below {tmp_path}/b and {tmp_path}/lib stay\n"
    )


def test_a_host_on_which_snaporch_never_ran(tmp_path):
    config = tmp_path / "snaporch.toml"
    config.write_text(f"[paths]\njournal = '{tmp_path}/absent'\n")
    assert main(config, lambda _: None, ()) == 0


def test_a_broken_configuration_may_hide_unfinished_runs(tmp_path):
    config = tmp_path / "snaporch.toml"
    config.write_text("[paths]\nbundle = '/srv'\n")
    said = []
    assert main(config, said.append, ()) == ExitCode.CONFIG
    reason = f"{config}: paths.bundle: is not an option of snaporch"
    step = "correct it, or move it away if it never had paths.journal"
    assert said == [f"snaporch: {reason}; {step}\n"]


def test_unfinished_runs_are_named_with_the_next_step(ask):
    code, text = ask(a=journal("web"), b=journal("db"))
    assert code == ExitCode.REFUSED
    assert text.startswith("snaporch: db, web: a run has not ended")
    assert text.endswith("; wait until it has ended, or run: snaporch recover\n")
    assert text.count("\n") == 1


def test_a_journal_that_cannot_be_read_counts_as_unfinished(ask, tmp_path):
    code, text = ask(a=journal("web", format=FORMAT + 1))
    assert code == ExitCode.REFUSED
    assert f"{tmp_path}/lib/journal/a.jsonl" in text


def test_a_configuration_that_cannot_be_read_hides_no_journal(ask, tmp_path):
    ask(a=journal("web"))
    (tmp_path / "snaporch.toml").write_text("nope = 1\n")
    code, text = ask()
    assert code == 3
    assert "nope" in text


def unit(tmp_path, name, config):
    """A unit as `snaporch install` writes it for this configuration."""
    text = render_units(["/usr/bin/snaporch", "--config", str(config)])[name]
    (tmp_path / "units").mkdir(exist_ok=True)
    (tmp_path / "units" / name).write_text(text)


def test_journals_of_the_configuration_that_units_name_count(ask, tmp_path):
    other, journals = tmp_path / 'an "odd" 50% $name.toml', tmp_path / "other"
    unit(tmp_path, "snaporch.service", other)
    assert ask()[0] == 0  # the file does not exist
    journals.mkdir()
    other.write_text(f"[paths]\njournal = '{journals}'\n")
    code, text = ask()
    assert code == 0
    assert text.endswith("cannot start: systemctl disable --now snaporch.service\n")
    (journals / "a.jsonl").write_text(journal("web"))
    code, text = ask()
    assert code == ExitCode.REFUSED
    assert text.startswith("snaporch: web: a run has not ended")
    assert text.count("\n") == 1


def test_a_fenced_guest_would_start_without_the_hook(tmp_path):
    config, said = tmp_path / "snaporch.toml", []
    config.write_text(f"[paths]\njournal = '{tmp_path}/absent'\n")
    fences = Fences(tmp_path / "fences")
    assert main(config, said.append, (), fences) == 0
    uuid = "4678f48e-9e6e-53d3-9c13-dbd66056a5d1"
    fences.put(Fence(uuid, "web"))
    said.clear()
    assert main(config, said.append, (), fences) == ExitCode.REFUSED
    (line,) = said
    assert line.startswith("snaporch: web: is fenced, and libvirt starts it again without")
    assert line.endswith(f"; then run: snaporch fence --remove {uuid}\n")
    assert main(config, said.append, ()) == 0  # the other flavour has the hook
