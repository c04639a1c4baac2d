"""The map in CONTRIBUTING.md leads from what a user sees to modules; the index has them all."""

import ast
import re
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
TEXT = (TOP / "CONTRIBUTING.md").read_text("utf-8")
MAP = TEXT.partition("## Where to start")[2].partition("\n## ")[0]
_FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:/|\.\w+)|[\w-]+(?:/[\w-]+)+")
NAMED = [name for name in re.findall(r"`([^`\s]+)`", MAP) if _FILE.fullmatch(name)]
_OTHERS = {"snaporch.toml", "sanoid.conf", "ram.save", "undo.sh", "paths.journal", "schedule.jobs"}
"""What the user sees; not files of the repository."""


def found(name):
    return next((p for p in (TOP / "snaporch" / name, TOP / name) if p.exists()), None)


def test_each_path_of_the_map_exists():
    assert [name for name in NAMED if found(name) is None and name not in _OTHERS] == []


def test_each_module_states_what_it_does():
    """So that a search of the index of modules finds it."""
    first = {path: summary(path) for path in TOP.glob("snaporch/**/*.py")}
    said = {path for path, text in first.items() if text.endswith(".") and len(text.split()) >= 5}
    assert sorted(str(path.relative_to(TOP)) for path in first.keys() - said) == []


def summary(path):
    """The first paragraph of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "").split("\n\n")[0]
