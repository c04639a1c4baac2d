"""Each command block of the README and of docs/how-to is run in the lab, or says why not."""

import os
import re
import subprocess
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


@pytest.mark.parametrize("has_bundle", [True, False])
def test_nothing_is_received_by_hand_without_the_bundle(tmp_path, has_bundle):
    (text,) = [
        each.text
        for each in blocks("docs/how-to/replication.md")
        if each.first == 'mkdir -p -m 700 "$store"'
    ]
    stubs = {"ssh": "exit $MISSING", "zfs": "exit 1", "syncoid": 'echo "$@" >>"$CALLS"'}
    for name, line in {**stubs, "rsync": stubs["syncoid"]}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o700)
    calls = tmp_path / "calls"
    facts = {"store": str(tmp_path), "bundle": "u/r", "name": "s1", "copies": "backup/tank:web"}
    facts |= {"MISSING": str(int(not has_bundle)), "CALLS": str(calls)}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", text],
        env={**facts, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert calls.exists() == has_bundle
    assert ("nothing was received" in done.stderr) != has_bundle


def test_copies_that_were_kept_are_not_brought_back():
    page = (TOP / "docs/how-to/replication.md").read_text()
    (program,) = re.findall(r"awk -F '\\t' '(\$2 !~ [^']*)'", page)
    names = {
        "backup/kvm/tank:vm:web@s1": True,
        "backup/kvm/tank:vm:web@s1-kept-7": True,  # an older snapshot whose name was used again
        "backup/kvm/tank:vm:web-kept@s1": False,
        "backup/kvm/tank:vm:web-kept-s3@s1": False,  # as the error of a diverged copy advises
        "backup/kvm/tank:vm:web-kept-2@s1": False,
    }
    lines = "".join(f"web\t{name}\n" for name in names)
    done = subprocess.run(
        ["awk", "-F", "\t", program], input=lines, capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[1::2] == [name for name, listed in names.items() if listed]
