"""What counts as noticed when a deliberate mistake is tried."""

import os
import signal
import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import SimpleNamespace

import pytest

MUTANTS = Path(__file__).parents[1] / "mutants"


def load(name):
    loader = SourceFileLoader(f"mutants_{Path(name).stem}", str(MUTANTS / name))
    spec = spec_from_loader(loader.name, loader)
    module = sys.modules[loader.name] = module_from_spec(spec)  # which dataclasses ask for
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.syspath_prepend(MUTANTS)
    return load("run")


def ended(code):
    """As wait(2) tells of it."""
    return -code if code < 0 else code << 8


@pytest.mark.parametrize(
    ("code", "survived", "broken"),
    [
        (0, ["f: 1 -> 2"], []),
        (1, [], []),
        (-signal.SIGALRM, [], []),
        (2, [], ["f: 1 -> 2: pytest ended with interrupted"]),
        (3, [], ["f: 1 -> 2: pytest ended with internal error"]),
        (4, [], ["f: 1 -> 2: pytest ended with usage error"]),
        (5, [], ["f: 1 -> 2: pytest ended with no tests collected"]),
        (-signal.SIGSEGV, [], ["f: 1 -> 2: ended by SIGSEGV"]),
    ],
)
def test_only_a_failed_test_and_a_late_one_notice_a_mistake(run, tmp_path, code, survived, broken):
    trial = run.Trial("run/settle", 1, tmp_path)
    mistake = SimpleNamespace(title="f: 1 -> 2", is_control=False)
    trial._judge(mistake, ended(code))
    assert (trial.survived, trial.broken) == (survived, broken)
    assert os.waitstatus_to_exitcode(ended(code)) == code


@pytest.mark.parametrize("code", [1, 3, 5, -signal.SIGALRM])
def test_the_module_as_it_is_has_to_pass_in_both_ways(run, tmp_path, code):
    trial = run.Trial("run/settle", 1, tmp_path)
    controls = run.controls("def f():\n    return 1\n")
    assert [bool(each.lines) for each in controls] == [True, False]
    for each in controls:
        trial._judge(each, 0)
    assert (trial.survived, trial.broken) == ([], [])
    for each in controls:
        trial._judge(each, ended(code))
    assert (trial.survived, len(trial.broken)) == ([], 2)
