import os

import pytest

from snaporch.bundle.find_bundles import find_bundles

UUID = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"


@pytest.fixture
def shelve(tmp_path):
    """Puts a manifest with this text into the store."""

    def put(run, text, uuid=UUID):
        path = tmp_path / uuid / run
        path.mkdir(parents=True)
        (path / "manifest.json").write_text(text)
        return path

    return put


def test_bundles_that_mention_both_names_are_found(tmp_path, shelve):
    shelve("r2", '{"dataset": "tank/web", "name": "s1"}')
    shelve("r1", '{"name":"s1","dataset":"tank/web"}')
    assert find_bundles(tmp_path, "tank/web", "s1") == [f"{UUID}/r1", f"{UUID}/r2"]


@pytest.mark.parametrize(
    "text", ["", '"tank/web"', '"s1"', '"tank/web2" "s1"', '"tank/web" "s11"', "tank/web s1"]
)
def test_bundles_without_both_names_are_not_found(tmp_path, shelve, text):
    shelve("r1", text)
    assert find_bundles(tmp_path, "tank/web", "s1") == []


def test_links_are_not_followed_and_hidden_files_are_not_read(tmp_path, shelve):
    text = '"tank/web" "s1"'
    whole = shelve("r1", text)
    shelve(".r2.partial", text)
    shelve("gone", text, uuid=".trash")
    (whole.parent / "link").symlink_to(whole)
    linked = shelve("r3", "")
    (linked / "manifest.json").unlink()
    (linked / "manifest.json").symlink_to(whole / "manifest.json")
    piped = shelve("r4", "")
    (piped / "manifest.json").unlink()
    os.mkfifo(piped / "manifest.json")
    assert find_bundles(tmp_path, "tank/web", "s1") == [f"{UUID}/r1"]


def test_a_missing_store_has_no_bundles(tmp_path):
    assert find_bundles(tmp_path / "none", "tank/web", "s1") == []


def test_bundles_written_by_the_store_are_found(tmp_path, world):
    """The search reads text; this fails if manifests are written differently."""
    from pathlib import Path

    from snaporch.snapshot.request import SnapshotRequest
    from snaporch.snapshot.run import take_snapshot

    domain = world.add_guest(disks={"vda": "tank/vm one"})
    bundle = Path(take_snapshot(world.context, domain, SnapshotRequest("two words")).bundle)
    reference = f"{bundle.parent.name}/{bundle.name}"
    assert find_bundles(world.paths.bundles, "tank/vm one", "two words") == [reference]
