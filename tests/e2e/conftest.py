"""Fixtures of the lab tests. They run inside the lab, as root, one module per fresh lab."""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lab"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

pytestmark = pytest.mark.lab
pytest.register_assert_rewrite("acts", "faults.oracle", "support")


def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.lab)
        item.add_marker(pytest.mark.timeout(900))


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
