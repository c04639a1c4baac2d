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
    """The status of a process with this exit code, as wait(2) returns it."""
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
def test_only_a_failed_test_or_a_timeout_notices_a_mistake(run, tmp_path, code, survived, broken):
    trial = run.Trial("recovery/recover_runs", 1, tmp_path)
    mistake = SimpleNamespace(title="f: 1 -> 2", is_control=False)
    trial._judge(mistake, ended(code))
    assert (trial.survived, trial.broken) == (survived, broken)
    assert os.waitstatus_to_exitcode(ended(code)) == code


def test_the_watcher_can_be_a_plugin_beside_conftests_of_other_directories(run):
    """pytest then leaves some plugins out, and looks for them in a set."""
    plugins = {run.Baseline(), run.Baseline()}
    assert len(plugins) == 2


@pytest.mark.parametrize("code", [1, 3, 5, -signal.SIGALRM])
def test_the_module_as_it_is_has_to_pass_in_both_ways(run, tmp_path, code):
    trial = run.Trial("recovery/recover_runs", 1, tmp_path)
    controls = run.controls("def f():\n    return 1\n")
    assert [bool(each.lines) for each in controls] == [True, False]
    for each in controls:
        trial._judge(each, 0)
    assert (trial.survived, trial.broken) == ([], [])
    for each in controls:
        trial._judge(each, ended(code))
    assert (trial.survived, len(trial.broken)) == ([], 2)


@pytest.mark.parametrize(
    ("body", "made"),
    [
        ("f(x) in (1, g)", ["1 -> left out", "g -> left out"]),
        ("frozenset({'a', 'b'})", ["'a' -> left out", "'b' -> left out"]),
        ("run(['zfs', name])", ["'zfs' -> left out", "name -> left out"]),
        ("f(x, raw=raw, **more)", ["raw=raw -> left out"]),
        ("marks.get('level')", ["'level' -> 'level~'"]),
        ("f('said to people')", []),
        ("f(f'{x}: said')", []),
        (
            "suppress(OSError, ValueError)",
            [
                "OSError -> left out",
                "ValueError -> left out",
            ],
        ),
    ],
)
def test_mistakes_that_an_author_could_have_made(run, body, made):
    titles = [each.title for each in run.mistakes(f"def h():\n    return {body}\n")]
    kinds = [title.removeprefix("h: ") for title in titles]
    assert [kind for kind in kinds if " -> " in kind and "return" not in kind] == [
        *(["f(x) in (1, g) -> f(x) not in (1, g)"] if " in " in body else []),
        *made,
        *(["1 -> 2"] if "1" in body else []),
    ]


def test_statements_in_another_order_and_errors_that_are_not_caught(run):
    source = """
def h():
    try:
        first()
        second()
    except (KeyError, OSError):
        third()
    except ValueError:
        pass
"""
    titles = {each.title for each in run.mistakes(source)}
    assert titles == {
        "h: first(); second() -> second(); first()",
        "h: first() -> pass",
        "h: second() -> pass",
        "h: third() -> pass",
        "h: KeyError -> left out",
        "h: OSError -> left out",
        "h: except ValueError: -> except ():",
    }


def test_unpacked_tuples_and_values_like_their_names_are_not_changed(run):
    source = "class Kind:\n    PAGES = 'pages'\n\ndef h():\n    a, b = c, d\n    return a, b\n"
    titles = [each.title for each in run.mistakes(source)]
    assert titles == ["h: return (a, b) -> return None"]
