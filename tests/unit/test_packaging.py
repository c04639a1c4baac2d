"""The Debian package's files agree with the program's; tests/package builds and installs it."""

import configparser
import re
from pathlib import Path

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
