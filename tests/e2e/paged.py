"""RAM in pages: the configuration, and what ZFS and the bundles record of it."""

import json
from pathlib import Path

import pytest
from support import must, snaporch

CONFIG = """
[ram_pages]
dataset = "tank/ram"

[defaults]
ram_store = "pages"

[prune]
trash_keep = "0s"
"""


@pytest.fixture(scope="module", autouse=True)
def configured(tmp_path_factory):
    """Every command of this module stores RAM in pages."""
    path = tmp_path_factory.mktemp("config") / "snaporch.toml"
    path.write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNAPORCH_CONFIG", str(path))
        yield


def uuid(guest):
    return must("virsh", "domuuid", guest.name).strip()


def dataset(guest):
    return f"tank/ram/{uuid(guest)}"


def manifest(document):
    return json.loads((Path(document["bundle"]) / "manifest.json").read_text())


def ram(document):
    (part,) = [part for part in manifest(document)["parts"] if part["role"] == "ram"]
    return part


def listed(guest, name):
    return next(
        each for each in snaporch("list", guest.name, "--json").json if each["snapshot"] == name
    )


def zfs_number(name, key):
    return int(must("zfs", "get", "-Hp", "-o", "value", key, name))


def settle(guest):
    """Count for a while, so that the checks see no part of an earlier restore."""
    for _ in range(15):
        guest.wait_count()


def page_snapshots(guest):
    text = must("zfs", "list", "-H", "-d", "1", "-t", "snapshot", "-o", "name", dataset(guest))
    return [full.partition("@")[2] for full in text.splitlines()]
