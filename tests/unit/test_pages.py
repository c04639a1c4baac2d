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


@pytest.fixture
def rewrite(tmp_path):
    """Paste the block that rewrites an image, with a guest in a state; its output."""
    (text,) = [
        each.text
        for each in blocks("docs/how-to/check.md")
        if each.first == "zfs set recordsize=16K tank/vm/web"
    ]
    programs, directory = tmp_path / "bin", tmp_path / "web"
    programs.mkdir()
    directory.mkdir()
    (directory / "disk.raw").write_text("first")

    def run(state, **stubs):
        for name, line in {"zfs": "exit 0", "virsh": f"echo '{state}'", **stubs}.items():
            (programs / name).write_text(f"#!/bin/sh\n{line}\n")
            (programs / name).chmod(0o700)
        done = subprocess.run(
            ["bash", "-c", text.replace("/tank/vm/web", str(directory))],
            env={"PATH": f"{programs}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) == (done.stdout == "")
        return done.stdout, {each.name: each.read_text() for each in directory.iterdir()}

    return run


@pytest.mark.parametrize("state", ["running", "shut off"])
def test_an_image_is_not_rewritten_from_the_old_one_of_an_earlier_time(rewrite, tmp_path, state):
    image = tmp_path / "web/disk.raw"
    assert rewrite("shut off") == ("", {"disk.raw": "first", "disk.old": "first"})
    image.write_text("weeks later")
    inode = image.stat().st_ino
    said, files = rewrite(state)
    assert said.startswith("not rewritten")
    assert files == {"disk.raw": "weeks later", "disk.old": "first"}
    assert image.stat().st_ino == inode


@pytest.mark.parametrize("left", ["disk.old", "disk.new"])
def test_an_image_that_is_left_over_is_not_overwritten(rewrite, tmp_path, left):
    (tmp_path / "web" / left).write_text("left")
    said, files = rewrite("shut off")
    assert said.startswith("not rewritten")
    assert files == {"disk.raw": "first", left: "left"}


def test_the_image_of_a_guest_that_runs_is_not_touched(rewrite):
    said, files = rewrite("running")
    assert said.startswith("not rewritten")
    assert files == {"disk.raw": "first"}


def test_an_image_whose_copy_failed_stays_as_it_was(rewrite):
    said, files = rewrite("shut off", cp="echo part >disk.new; exit 1")
    assert said.startswith("not rewritten")
    assert files == {"disk.new": "part\n", "disk.old": "first"}
