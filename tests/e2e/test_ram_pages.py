"""RAM in pages: all kinds of restores, also with missing or damaged parts."""

import os
from pathlib import Path

import pytest
from fakes import manifests
from guests.disks import Disk
from guests.guest import Guest
from guests.serial import Log
from paged import configured, dataset, listed, page_snapshots, ram, settle, uuid
from support import (
    BUNDLES,
    assert_clean,
    assert_restored,
    must,
    one_line_error,
    restore,
    snaporch,
    snapshot,
    wait_for,
)

__all__ = ["configured"]


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("paged", disks=[Disk("file", "tank/paged"), Disk("zvol", "flash/paged")])
    yield made
    made.remove()


@pytest.fixture(scope="module")
def three(guest):
    """Three snapshots, with a little counting in between; their counts."""
    counts = {}
    for name in ("s1", "s2", "s3"):
        document = snapshot(guest, "--name", name)
        assert ram(document)["compression"] == "pages", document
        counts[name] = guest.snapshot_count(name)
        guest.wait_count(beyond=counts[name] + 10)
    return counts


def test_each_snapshot_has_pages_in_place_of_an_image(guest, three):
    assert page_snapshots(guest) == list(three)
    for name in three:
        bundle = Path(listed(guest, name)["bundle"])
        assert (bundle / "ram.rest").exists()
        assert not (bundle / "ram.save").exists()
    assert_clean(guest)


def test_only_root_can_look_into_the_page_file_and_its_snapshots(guest, three):
    root = Path("/tank/ram") / uuid(guest)
    assert root.stat().st_mode & 0o777 == 0o700
    opened = os.open(root / ".zfs/snapshot/s1", os.O_RDONLY | os.O_DIRECTORY)
    assert os.fstat(opened).st_mode & 0o777 == 0o700
    os.close(opened)
    assert (root / "pages").stat().st_mode & 0o777 == 0o600


def test_verify_resumes_each(guest, three):
    outcome = snaporch("verify", *(f"{guest.name}@{name}" for name in three), "--json", "--quiet")
    assert outcome.status == 0, outcome.err
    assert {each["reached"] for each in outcome.json} == {"resumed"}


def test_a_clone_runs_from_pages(guest, three):
    mark = guest.mark()
    outcome = snaporch("clone", f"{guest.name}@s2", "paged-clone", "--running", "--json")
    assert outcome.status == 0, outcome.err
    log = Log(Path("/var/lib/snaporch/clones") / outcome.json["uuid"] / "log-paged.serial")
    counts = wait_for(lambda: log.report().counts, "the clone counts")
    assert counts[0] in (three["s2"], three["s2"] + 1)
    assert (log.report().cold, log.report().bad) == ([], [])
    guest.wait_count()
    assert snaporch("clone", "--delete", "paged-clone").status == 0
    guest.wait_count()
    guest.assert_undisturbed(mark)


def test_extracted_ram_is_restored_by_virsh_alone(guest, three, tmp_path):
    image = tmp_path / "image"
    outcome = snaporch("extract", "--ram", f"{guest.name}@s3", str(image))
    assert outcome.status == 0, outcome.err
    assert image.stat().st_mode & 0o777 == 0o600
    guest.destroy()
    for place in ("tank/paged", "flash/paged"):
        must("zfs", "rollback", f"{place}@s3")
    mark = guest.mark()
    must("virsh", "restore", str(image), "--running")
    guest.assert_continues(mark, three["s3"])


@pytest.mark.parametrize("name", ["s3", "s2", "s1"])
def test_each_goes_on_where_it_was(guest, three, name):
    settle(guest)
    mark = guest.mark()
    document = restore(guest, name, "--discard-newer", "--no-safety")
    assert document["resumed"]
    assert_restored(guest, mark, three[name])
    assert_clean(guest)


def test_prune_takes_the_pages_of_what_is_gone_and_no_others(guest, three):
    """The restores above destroyed the guest's snapshots s2 and s3."""
    snapshot(guest, "--name", "s4")
    assert page_snapshots(guest) == ["s1", "s2", "s3", "s4"]
    foreseen = snaporch("prune", "--dry-run")
    assert page_snapshots(guest) == ["s1", "s2", "s3", "s4"]
    print(foreseen.out)
    done = snaporch("prune")
    assert done.status == 0, done.err
    print(done.out)
    assert page_snapshots(guest) == ["s1", "s4"]
    assert listed(guest, "s4")["state"] == "complete"
    mark = guest.mark()
    count = guest.snapshot_count("s4")
    restore(guest, "s4", "--no-safety")
    assert_restored(guest, mark, count)


def test_damage_is_found_and_never_restored(guest, three):
    document = snapshot(guest, "--name", "damaged")
    rest = Path(document["bundle"]) / "ram.rest"
    whole = rest.read_bytes()
    rest.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    outcome = snaporch("verify", f"{guest.name}@damaged", "--checksums", "--quiet")
    assert outcome.status == 8
    assert "ram.rest" in outcome.err
    rest.write_bytes(whole)
    path = Path(document["bundle"]) / "manifest.json"
    digest = ram(document)["pages"]["sha256"]
    manifests.replace_text(path, digest, digest[::-1])
    outcome = snaporch("verify", f"{guest.name}@damaged", "--checksums", "--quiet")
    assert outcome.status == 8
    assert "damaged" in outcome.err
    mark = guest.mark()
    refused = snaporch("restore", f"{guest.name}@damaged", "--yes", "--quiet")
    one_line_error(refused, 5, "damaged", "--cold")
    guest.wait_count()
    guest.assert_undisturbed(mark)
    manifests.replace_text(path, digest[::-1], digest)
    assert snaporch("verify", f"{guest.name}@damaged", "--checksums", "--quiet").status == 0


def test_without_its_pages_a_snapshot_is_no_ram_snapshot(guest, three):
    snapshot(guest, "--name", "bare")
    must("zfs", "destroy", f"{dataset(guest)}@bare")
    assert listed(guest, "bare")["state"] == "incomplete"
    assert listed(guest, "bare")["level"] == "crash"
    one_line_error(snaporch("restore", f"{guest.name}@bare", "--yes", "--quiet"), 5, "--cold")


def test_pages_are_found_in_a_copy_of_their_dataset(guest, three):
    """A copy as syncoid makes it: the snapshot has the same GUID."""
    snapshot(guest, "--name", "shipped")
    count = guest.snapshot_count("shipped")
    must("sh", "-c", f"zfs send {dataset(guest)}@shipped | zfs receive flash/ram-copy")
    must("zfs", "destroy", f"{dataset(guest)}@shipped")
    mark = guest.mark()
    restore(guest, "shipped", "--no-safety")
    assert_restored(guest, mark, count)


def test_what_cannot_be_taken_apart_stays_an_image(guest, three):
    """Another program's dataset of that name is left alone, and the run succeeds."""
    must("zfs", "inherit", "snaporch:ram", dataset(guest))
    outcome = snaporch("snapshot", guest.name, "--name", "whole", "--json")
    assert outcome.status == 0
    assert "RAM stays a whole image" in outcome.err
    assert ram(outcome.json)["name"] == "ram.save"
    must("zfs", "set", f"snaporch:ram={uuid(guest)}", dataset(guest))


def test_the_documented_script_makes_the_same_stream(guest, three, tmp_path):
    document = snapshot(guest, "--name", "scripted")
    page = Path(__file__).resolve().parents[2] / "docs" / "concepts" / "ram-pages.md"
    text = page.read_text()
    script = text.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "join.py").write_text(script)
    pages = Path("/tank/ram") / uuid(guest) / ".zfs/snapshot/scripted/pages"
    image = tmp_path / "image"
    must("python3", str(tmp_path / "join.py"), document["bundle"], str(pages), str(image))
    count = guest.snapshot_count("scripted")
    guest.destroy()
    for place in ("tank/paged", "flash/paged"):
        must("zfs", "rollback", f"{place}@scripted")
    mark = guest.mark()
    must("virsh", "restore", str(image), "--running")
    guest.assert_continues(mark, count)


def test_nothing_is_left_over(guest, three):
    assert_clean(guest)
    assert snaporch("prune").status == 0
    assert list(BUNDLES.glob("*/.*")) == []
    taken = {each["snapshot"] for each in snaporch("list", guest.name, "--json").json}
    assert set(page_snapshots(guest)) <= taken
