"""sanoid's hooks as processes of their own, against libvirt's test driver; no ZFS on this host."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(sys.executable).with_name("snaporch")
HOOKS = Path(__file__).parents[2] / "hooks"
PHASES = ("pre", "post", "pre-prune", "prune")
ROUND = {
    "SANOID_TARGET": "tank/unused",
    "SANOID_TARGETS": "tank/unused",
    "SANOID_SNAPNAME": "autosnap_x_daily",
    "SANOID_SNAPNAMES": "autosnap_x_daily",
    "SANOID_TYPES": "daily",
}
HEAVY = {"typer", "click", "rich", "pydantic", "pydantic_core", "tenacity", "zstandard"}
HEAVY |= {"jinja2", "asyncio", "concurrent", "logging", "ctypes", "subprocess", "socket"}
_WHAT_IS_THERE = """
import atexit, json, sys
atexit.register(lambda: print(json.dumps(sorted(sys.modules))))
from snaporch.__main__ import main
main()
"""


@pytest.fixture
def environment(tmp_path):
    config = tmp_path / "snaporch.toml"
    paths = "\n".join(f'{k} = "{tmp_path}/{k}"' for k in ("bundles", "journal", "runtime"))
    config.write_text(f'libvirt_uri = "test:///default"\n[paths]\n{paths}\n')
    return {
        "PATH": f"{SCRIPT.parent}:/usr/bin:/bin",
        "LC_ALL": "C.UTF-8",
        "SNAPORCH_CONFIG": str(config),
    }


def run(*words, env):
    return subprocess.run(
        words,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def variables(phase):
    return ROUND | {} if phase == "pre-prune" else ROUND | {"SANOID_SCRIPT": phase}


@pytest.mark.parametrize("phase", ["pre", "post"])
def test_a_dataset_without_a_guest_imports_few_modules(environment, phase, monkeypatch):
    """Measured by the imported modules, which do not depend on the load of the machine.

    The dataset is mounted, or ``zfs`` would be asked for it.
    """
    code = _WHAT_IS_THERE.replace(
        "main()\n",
        "from snaporch.sanoid.hooks.host import HookHost\n"
        "HookHost.check_exist = lambda host, datasets: None\n"
        "main()\n",
    )
    done = run(
        sys.executable, "-c", code, "hook", "sanoid", phase, env=environment | variables(phase)
    )
    assert (done.returncode, done.stderr) == (0, "")
    modules = json.loads(done.stdout)
    assert "libvirt" in modules
    assert not {name.split(".")[0] for name in modules} & HEAVY
    mine = {name for name in modules if name.startswith("snaporch.")}
    rest = ("snapshot", "recovery", "cli", "bundle", "config")
    assert not {name for name in mine if name.split(".")[1] in rest}


@pytest.mark.parametrize("phase", PHASES)
def test_the_executables_are_the_command(environment, phase):
    done = run(str(HOOKS / f"sanoid-{phase}"), env=environment | variables(phase))
    same = run(str(SCRIPT), "hook", "sanoid", phase, env=environment | variables(phase))
    assert (done.returncode, done.stdout) == (same.returncode, same.stdout) == (0, "")


def test_the_executables_take_arguments(environment, tmp_path):
    words = [str(HOOKS / "sanoid-pre"), "--config", str(tmp_path / "absent.toml")]
    done = run(*words, env=environment | variables("pre"))
    assert done.returncode == 3
    assert "absent.toml: no such file" in done.stderr


def test_the_executables_prefer_the_snaporch_of_their_own_installation(environment, tmp_path):
    """cron's PATH is /usr/bin:/bin."""
    (tmp_path / "bin").mkdir()
    hooks = tmp_path / "share" / "snaporch" / "hooks"
    hooks.mkdir(parents=True)
    (hooks / "sanoid-pre").write_text((HOOKS / "sanoid-pre").read_text())
    (hooks / "sanoid-pre").chmod(0o755)
    (tmp_path / "bin" / "snaporch").write_text('#!/bin/sh\necho "mine: $*"\n')
    (tmp_path / "bin" / "snaporch").chmod(0o755)
    done = run(str(hooks / "sanoid-pre"), "-q", env={"PATH": "/usr/bin:/bin"})
    assert done.stdout == "mine: hook sanoid pre -q\n"


HOSTILE = {
    "nothing": {},
    "empty": ROUND | {"SANOID_TARGETS": ""},
    "doubled": ROUND | {"SANOID_TARGETS": "tank/a,tank/a"},
    "a line break": ROUND | {"SANOID_TARGETS": "tank/a\ntank/b"},
    "a shell's": ROUND | {"SANOID_TARGETS": "tank/$(touch HERE)", "SANOID_TARGET": "`touch HERE`"},
    "64 KiB": ROUND | {"SANOID_TARGETS": "x" * 65536},
    "another phase": ROUND | {"SANOID_SCRIPT": "prune"},
}


@pytest.mark.parametrize("phase", ["pre", "post"])
@pytest.mark.parametrize("hostile", HOSTILE.values(), ids=HOSTILE)
def test_variables_that_sanoid_never_sets_change_nothing(environment, tmp_path, phase, hostile):
    before = sorted(os.listdir(tmp_path))
    done = subprocess.run(
        [SCRIPT, "hook", "sanoid", phase],
        env=environment | hostile,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("snaporch: ")
    assert len(line) < 250
    assert sorted(os.listdir(tmp_path)) == before


def test_libvirt_that_does_not_answer_is_one_line(environment, tmp_path):
    config = tmp_path / "other.toml"
    config.write_text(f'libvirt_uri = "qemu+unix:///system?socket={tmp_path}/none"\n')
    named = {"SNAPORCH_CONFIG": str(config)}
    done = run(str(SCRIPT), "hook", "sanoid", "pre", env=environment | variables("pre") | named)
    assert done.returncode == 7
    (line,) = done.stderr.splitlines()
    assert "libvirt does not answer" in line


@pytest.mark.parametrize("text", ["libvirt_uri = 3", "[paths]\nruntime = 7", "paths = 1", "{", ""])
def test_a_configuration_with_a_mistake_is_reported_as_by_other_commands(
    environment, tmp_path, text
):
    config = tmp_path / "bad.toml"
    config.write_text(text)
    named = {"SNAPORCH_CONFIG": str(config)}
    done = run(str(SCRIPT), "hook", "sanoid", "pre", env=environment | variables("pre") | named)
    listed = run(str(SCRIPT), "list", env=environment | named)
    if text:
        assert (done.returncode, done.stderr) == (listed.returncode, listed.stderr)
        assert done.returncode == 3
