"""The commands on the page of groups that put back a disk of several guests."""

import os
import subprocess
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "groups.md"
VIRSH = """#!/bin/sh
case "$1" in
    list) cat "$STATE/saved" ;;
    domstate) cat "$STATE/$2" && echo ;;
    restore) echo "virsh $*" >>"$STATE/calls" ;;
    resume) echo "virsh $*" >>"$STATE/calls"; echo running >"$STATE/$2" ;;
esac
[ "$1 ${2##*/}" != "$(cat "$STATE/fails")" ]
"""
ZFS = """#!/bin/sh
case "$1" in
    list)
        for last; do :; done
        case "$*" in *" bookmark "*) kind=bookmarks ;; *) kind=snapshots ;; esac
        cat "$STATE/${last##*/}.$kind"
        ;;
    get) echo 20 ;;
    rollback) echo "zfs $*" >>"$STATE/calls" ;;
esac
[ "$1 ${2##*/}" != "$(cat "$STATE/fails")" ]
"""


@pytest.fixture
def host(tmp_path):
    """A host on which both guests are off."""
    for name, text in (("virsh", VIRSH), ("zfs", ZFS)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "saved").write_text("another\n\n")
    (tmp_path / "calls").touch()
    (tmp_path / "fails").touch()
    for guest in ("app-1", "db"):
        (tmp_path / guest).write_text("shut off\n")
        (tmp_path / f"{guest}.save").touch()
    for dataset in ("tank/shared", "tank/vm/app-1", "tank/vm/db"):
        text = f"{dataset}@before-upgrade\n{dataset}@older\n"
        (tmp_path / f"{Path(dataset).name}.snapshots").write_text(text)
        (tmp_path / f"{Path(dataset).name}.bookmarks").write_text(f"20\t{dataset}#sent\n")
    return tmp_path


def paste(host):
    """Run the block of the page; what it says."""
    (block,) = (
        each.partition("```")[0]
        for each in PAGE.read_text().split("```sh\n")[1:]
        if each.startswith("snapshot=before-upgrade\n")
    )
    lines = block.splitlines()
    (images,) = (number for number, line in enumerate(lines) if line.startswith("images="))
    lines[images] = f'images="{host}/app-1.save {host}/db.save"'
    done = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        env={"PATH": f"{host}:{os.environ['PATH']}", "STATE": str(host)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def calls(host):
    return (host / "calls").read_text().replace(f"{host}/", "").splitlines()


DONE = [
    "zfs rollback tank/shared@before-upgrade",
    "zfs rollback tank/vm/app-1@before-upgrade",
    "zfs rollback tank/vm/db@before-upgrade",
    "virsh restore app-1.save --paused",
    "virsh restore db.save --paused",
    "virsh resume app-1",
    "virsh resume db",
]


def test_all_are_back_before_one_runs(host):
    assert paste(host) == (0, "")
    assert calls(host) == DONE


def test_pasted_twice_nothing_is_rolled_back(host):
    paste(host)
    assert paste(host) == (1, "app-1 is running; nothing was changed\n")
    assert calls(host) == DONE


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("db", "paused\n", "db is paused"),
        ("db", None, ""),
        ("saved", "another\ndb\n\n", "db has a managed save image"),
        ("db.save", None, "db.save cannot be read"),
        ("db.snapshots", "tank/vm/db@newer\n", "the newest snapshot of tank/vm/db is 'tank/vm/db@"),
        ("db.snapshots", "", "the newest snapshot of tank/vm/db is ''"),
        ("db.bookmarks", "20\ttank/vm/db#sent\n21\ttank/vm/db#late\n", "tank/vm/db#late is newer"),
    ],
)
def test_nothing_is_changed_if_a_check_fails(host, file, text, said):
    (host / file).unlink()
    if text is not None:
        (host / file).write_text(text)
    status, error = paste(host)
    assert status != 0
    assert said in error
    assert calls(host) == []


@pytest.mark.parametrize(
    ("fails", "done"),
    [
        ("domstate db", 0),
        ("rollback app-1@before-upgrade", 2),
        ("restore db.save", 5),
        ("resume app-1", 6),
    ],
)
def test_nothing_follows_a_command_that_fails(host, fails, done):
    (host / "fails").write_text(fails)
    assert paste(host)[0] != 0
    assert calls(host) == DONE[:done]
