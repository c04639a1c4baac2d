"""The kernel's data of a process."""

import os
import subprocess
import sys

import pytest

from snaporch.errors import UnavailableError
from snaporch.hypervisor.open_files import open_files_of

UUID = "6f1d0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
_WAIT = """
import sys
reading, writing = open(sys.argv[3]), open(sys.argv[4], "r+b")
print(flush=True)
sys.stdin.read()
"""


@pytest.fixture
def emulator(tmp_path):
    """A process with the arguments of one, and two files open."""
    for name in ("read", "written"):
        (tmp_path / name).touch()
    paths = [str(tmp_path / name) for name in ("read", "written")]
    with subprocess.Popen(
        [sys.executable, "-c", _WAIT, "-uuid", UUID, *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        process.stdout.readline()
        yield tmp_path
        process.stdin.close()


def test_open_files_and_their_modes(emulator):
    found = {os.path.basename(each.path): each for each in open_files_of(UUID)}
    assert (found["read"].writable, found["written"].writable) == (False, True)
    assert os.path.samestat(found["written"].status, os.stat(emulator / "written"))


def test_an_emulator_that_is_not_here():
    with pytest.raises(UnavailableError, match="cannot be found"):
        open_files_of("00000000-0000-0000-0000-000000000000")
