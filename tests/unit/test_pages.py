"""Each command block of the README and of docs/how-to is run in the lab, or says why not."""

import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
sys.path.append(str(TOP / "tests/e2e"))
from pages import NOT_RUN, RUN, blocks, differences  # noqa: E402

PAGES = ["README.md", *(f"docs/how-to/{path.name}" for path in TOP.glob("docs/how-to/*.md"))]


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_run_or_says_why_not(page):
    firsts = [each.first for each in blocks(page)]
    excused = NOT_RUN.get(page, {})
    assert set(RUN.get(page, ())) <= set(firsts)
    left = [line for line in firsts if line not in RUN.get(page, ())]
    assert [line for line in left if not line.startswith(tuple(excused))] == []
    assert [line for line in excused if not any(first.startswith(line) for first in left)] == []


def test_output_differs_in_times_and_sizes_only():
    shown = ["web  paused 500 ms, RAM 792.2 KiB", "web  done"]
    assert differences(shown, ["web  done", "web   paused 1.2 s, RAM 3 GiB"]) == []
    assert differences(shown, ["web  paused 500 ms, RAM 1 MiB"]) == ["is not printed: web  done"]
    printed = ["web  done", "web  left"]
    assert differences(["web  done"], printed) == ["is not on the page: web  left"]
    assert differences(["web  done", "..."], printed) == []
