"""The units, as systemd reads them."""

import shutil
import subprocess

import pytest

from snaporch.install_files import render_units

PROGRAM = shutil.which("true")


@pytest.mark.parametrize(
    "words",
    [
        [PROGRAM],
        [PROGRAM, "--config", "/srv/my own 100% $HOME;\\.toml"],
        [PROGRAM, "--config", '/srv/it\'s "own".toml'],
    ],
)
def test_systemd_has_no_complaint(tmp_path, words):
    """Unknown settings and values, programs that are missing, cycles in the order."""
    units = render_units(words)
    for name, text in units.items():
        (tmp_path / name).write_text(text)
    paths = [str(tmp_path / name) for name in units]
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
