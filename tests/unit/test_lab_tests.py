"""What ``tests/e2e/run`` leaves when it is ended: nothing."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "e2e" / "run"
LAB = """#!/bin/sh
# A lab that is a process of its runner.
exec 9>"{alive}"
echo begun >&9
sleep 60 &
wait
"""


@pytest.fixture
def checkout(tmp_path):
    """A tree with two modules, whose labs are no labs."""
    scripts = {
        "lab/build": "#!/bin/sh\n",
        "lab/guests/build": "#!/bin/sh\necho /guests\n",
        "lab/run": LAB.format(alive=tmp_path / "alive"),
    }
    for name, text in scripts.items():
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "tests/e2e").mkdir()
    for name in ("test_one.py", "test_two.py"):
        (tmp_path / "tests/e2e" / name).touch()
    shutil.copy(RUN, tmp_path / "tests/e2e/run")
    os.mkfifo(tmp_path / "alive")
    return tmp_path


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda each: each.name)
def test_a_signal_ends_the_labs_and_begins_no_more(checkout, number):
    words = [sys.executable, checkout / "tests/e2e/run", "--jobs", "1", "test_one", "test_two"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(checkout / "cache")}
    with (
        subprocess.Popen(words, env=environment, stdout=subprocess.PIPE) as process,
        (checkout / "alive").open() as alive,
    ):
        assert alive.readline() == "begun\n"
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert alive.read() == ""  # the runner and its lab have ended, and no other has begun
