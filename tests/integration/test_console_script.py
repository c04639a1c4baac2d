"""The installed command as a process of its own, on a host without ZFS."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("snaporch")


@pytest.fixture
def run(tmp_path):
    """Runs the command, which finds neither this host's configuration nor its ``zfs``."""
    config = tmp_path / "snaporch.toml"
    config.write_text(f"[paths]\nbundles = '{tmp_path}/b'\njournal = '{tmp_path}/j'\n")

    def call(*words, **environment):
        clean = {"PATH": str(tmp_path), "HOME": str(tmp_path), "LC_ALL": "C.UTF-8"}
        clean |= {"SNAPORCH_CONFIG": str(config)} | environment
        return subprocess.run(
            [sys.executable, SCRIPT, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=clean,
            check=False,
            timeout=60,
        )

    return call


def only_line(done):
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("snaporch: ")
    return line


@pytest.mark.parametrize(
    "words", [["list"], ["snapshot", "web"], ["restore", "web@s1"], ["recover"]]
)
def test_without_zfs_every_command_says_so(run, words):
    done = run(*words)
    assert done.returncode == 7
    assert "zfs" in only_line(done)


def test_a_configuration_that_does_not_exist(run, tmp_path):
    done = run("list", SNAPORCH_CONFIG=str(tmp_path / "absent.toml"))
    assert done.returncode == 3
    assert "absent.toml: no such file" in only_line(done)


def test_a_configuration_with_a_mistake(run, tmp_path):
    (tmp_path / "bad.toml").write_text('[defaults]\nwait = "-1s"\n')
    done = run("--config", str(tmp_path / "bad.toml"), "list")
    assert done.returncode == 3
    assert "bad.toml: defaults.wait: " in only_line(done)


def test_the_option_wins_over_the_environment(run, tmp_path):
    (tmp_path / "bad.toml").write_text("nope = 1\n")
    done = run("list", "--config", str(tmp_path / "bad.toml"))
    assert "bad.toml: nope" in only_line(done)


@pytest.mark.parametrize("kind", ["directory", "loop", "below a file"])
def test_a_configuration_that_cannot_be_read(run, tmp_path, kind):
    path = tmp_path / "odd"
    if kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    else:
        path.touch()
        path /= "snaporch.toml"
    done = run("list", SNAPORCH_CONFIG=str(path))
    assert done.returncode == 3
    assert str(path) in only_line(done)


def test_a_configuration_that_may_not_be_read(run, tmp_path):
    path = tmp_path / "secret.toml"
    path.touch(mode=0o000)
    if os.access(path, os.R_OK):  # root can read it, so for root it is an empty file
        assert run("list", SNAPORCH_CONFIG=str(path)).returncode == 7
    else:
        done = run("list", SNAPORCH_CONFIG=str(path))
        assert done.returncode == 3
        assert "Permission denied" in only_line(done)


def test_help_and_version_need_nothing(run):
    assert run("--version").stdout.startswith("snaporch ")
    assert run("--help").returncode == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [(["--help"], 8), (["list", "-h"], 8), (["--version"], 8), ([], 2), (["snapshot", "-h"], 0)],
)
def test_output_that_cannot_be_written_is_reported(words, code):
    """On a full disk; the parser prints its help by other code than results."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, SCRIPT, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    done.stdout = ""
    assert "a result could not be written (No space left on device)" in only_line(done)
    assert done.returncode == code


def test_the_version_costs_no_more_than_python(run):
    """Measured by the imported modules, which do not depend on the load of the machine."""
    code = (
        "import json, sys; before = set(sys.modules)\n"
        "sys.argv = ['snaporch', '--version']\n"
        "from snaporch.__main__ import main; main()\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    version, modules = done.stdout.splitlines()
    assert version == run("--version").stdout.strip()
    assert set(json.loads(modules)) == {"snaporch", "snaporch.__main__"}


def test_wrong_usage_is_reported_in_one_line(run):
    done = run("snapshot")
    assert done.returncode == 2
    only_line(done)


def test_output_that_is_not_utf8_is_no_traceback(run):
    done = run("list", "--config", "/nirgends/Bär.toml", LC_ALL="C", PYTHONIOENCODING="ascii")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr
