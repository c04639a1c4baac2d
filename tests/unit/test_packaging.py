"""The Debian package's files agree with the program's; tests/package builds and installs it."""

import configparser
import re
import subprocess
from pathlib import Path

import pytest

from snaporch import __version__

TOP = Path(__file__).resolve().parents[2]


def test_the_package_has_the_version_of_the_program():
    first = (TOP / "debian/changelog").read_text("utf-8").splitlines()[0]
    assert first.startswith(f"snaporch ({__version__}) ")


def test_each_required_library_is_vendored():
    setup = configparser.ConfigParser()
    setup.read(TOP / "setup.cfg", "utf-8")
    required = re.findall(r"(?m)^[\w-]+", setup["options"]["install_requires"])
    pinned = re.findall(r"(?m)^([\w-]+)==", (TOP / "debian/tools/vendored.txt").read_text("utf-8"))
    assert set(required) - set(pinned) == {"libvirt-python"}


@pytest.mark.parametrize(
    ("file", "words", "goes"),
    [
        ("", [], True),
        ("journal/20260101T000000Z-00000000.jsonl", [], False),
        ("journal/20260101T000000Z-00000000.jsonl", ["in-favour"], False),
        ("fences/4b1d2f0e-0000-4000-8000-000000000001", [], False),
        ("fences/4b1d2f0e-0000-4000-8000-000000000001", ["in-favour"], True),
    ],
)
def test_without_a_python_that_starts_a_removal_looks_for_journals_and_fences(
    tmp_path, file, words, goes
):
    script, _, _ = (TOP / "debian/snaporch.prerm").read_text().partition("# What ran is started")
    script = script.replace("/var/lib/snaporch", str(tmp_path)).replace("python3", "false")
    if file:
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).touch()
    ask = [*("sh", "-c", f'{script}\nunfinished "$1"', "prerm"), *(words or [""])]
    assert (subprocess.run(ask, check=False, capture_output=True).returncode != 0) is goes
