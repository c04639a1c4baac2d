"""The map in CONTRIBUTING.md leads from what a user sees to every module."""

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


def test_each_module_has_a_row():
    named = {found(name) for name in NAMED}
    modules = [p for p in TOP.glob("snaporch/**/*.py") if p.name != "__init__.py"]
    assert sorted(str(p.relative_to(TOP)) for p in modules if p not in named) == []
