"""Fixtures of the lab tests. They run inside the lab, as root, one module per fresh lab."""

import json
import os
import random
import sys
from datetime import date
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

DAY = int(os.environ.get("DAY") or date.today().toordinal())  # noqa: DTZ011 - any day will do

pytestmark = pytest.mark.lab
pytest.register_assert_rewrite("acts", "faults.oracle", "support")


def pytest_collection_modifyitems(config, items):
    for item in items:
        item.add_marker(pytest.mark.lab)
        item.add_marker(pytest.mark.timeout(900))
    if not os.environ.get("LONG"):
        rest = [item for item in items if not is_todays(item, items)]
        items[:] = [item for item in items if item not in rest]
        config.hook.pytest_deselected(items=rest)


def is_todays(item, items):
    """Whether a test runs today: of a matrix ``daily(n)`` only n tests do, in turns.

    Tests of a module that are marked ``daily(n, NAME)`` with one name are one matrix. With DAY in
    the environment, those of another day run.
    """
    mark = item.get_closest_marker("daily")
    if mark is None:
        return True
    cases = [
        each
        for each in items
        if each.get_closest_marker("daily") == mark
        and (mark.args[1:] or each.function is item.function)
    ]
    size = mark.args[0]
    shuffled = random.Random(0).sample(cases, len(cases))
    begin = DAY * size
    return item in [shuffled[(begin + number) % len(cases)] for number in range(size)]


@pytest.fixture(scope="module")
def by_overlay(tmp_path_factory):
    """Take overlays for snapshots with RAM, as in sanoid's hooks."""
    path = tmp_path_factory.mktemp("configuration") / "snaporch.toml"
    path.write_text('[defaults]\nram_strategy = "overlay"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNAPORCH_CONFIG", str(path))
        yield


@pytest.fixture(scope="module")
def report(pytestconfig):
    """Print a line past pytest's capture, at once: a lab that is killed has printed it."""
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def print_line(fields, word="FAULT"):
        with capture.global_and_fixture_disabled():
            print(f"\n{word}", json.dumps(fields), flush=True)

    print_line(versions(), "VERSIONS")
    return print_line


def versions():
    """The versions of the programs below the tests."""
    from guests.guest import connect
    from support import must

    connection = connect()
    emulator, library = connection.getVersion(), connection.getLibVersion()
    return {
        "Linux": os.uname().release,
        "OpenZFS": must("zfs", "version").split()[0].removeprefix("zfs-"),
        "libvirt": f"{library // 1_000_000}.{library // 1000 % 1000}.{library % 1000}",
        "QEMU": f"{emulator // 1_000_000}.{emulator // 1000 % 1000}.{emulator % 1000}",
    }
