"""Page snapshots are deleted with their bundle, and never while they could be needed."""

import os
from pathlib import Path

import pytest
from fakes import streams
from hypothesis import given
from hypothesis import strategies as st

from snaporch.bundle.manifest import read_manifest
from snaporch.locks import domain_lock
from snaporch.prune.decision import PruneAction
from snaporch.prune.page_snapshots import PageFacts, PageReference, decide_pages
from snaporch.zfs import BlockingMount

FACTS = st.builds(
    PageFacts,
    reference=st.sampled_from(PageReference),
    store_there=st.booleans(),
    pools_there=st.booleans(),
    existing=st.sampled_from(["", "tank/web@s1"]),
)


@pytest.fixture
def pages(shelf):
    """Two snapshots of a guest, both with their RAM in pages; the names of the page snapshots."""
    shelf.world.with_pages()
    shelf.take("s1")
    shelf.world.guest().ram = streams.guest_stream(seed=5, changed=(1, 2))
    shelf.take("s2")
    return shelf


def dataset(shelf):
    return f"tank/ram/{shelf.world.hypervisor.domain('web').uuid}"


def names(shelf):
    return [s.name for s in shelf.pool.snapshots([dataset(shelf)])]


def lose(shelf, name):
    shelf.lose(name, "tank/web", "flash/web")


def action_on(shelf, name, **options):
    return shelf.actions(**options)[f"{dataset(shelf)}@{name}"]


@given(FACTS)
def test_pages_that_a_bundle_names_or_may_name_stay(facts):
    action, reason = decide_pages(facts)
    assert reason
    if facts.reference in (PageReference.NAMED, PageReference.UNREADABLE, PageReference.COPY):
        assert action is PruneAction.KEEP
    if facts.reference is PageReference.NONE and (
        facts.existing or not facts.store_there or not facts.pools_there
    ):
        assert action is PruneAction.KEEP


def test_pages_without_bundle_and_snapshots_are_deleted():
    assert decide_pages(PageFacts(PageReference.NONE, True, True, ""))[0] is PruneAction.DELETE
    assert (
        decide_pages(PageFacts(PageReference.OTHER, True, True, "tank/web@s1"))[0]
        is PruneAction.DELETE
    )


def test_pages_stay_while_their_snapshot_exists(pages):
    assert action_on(pages, "s1") == ("keep", "its bundle needs it")
    assert names(pages) == ["s1", "s2"]


def test_pages_stay_while_their_bundle_is_in_the_trash(pages):
    lose(pages, "s1")
    pages.prune()
    assert len(pages.trashed()) == 1
    assert names(pages) == ["s1", "s2"]


def test_pages_are_deleted_with_their_own_bundle_only(pages):
    lose(pages, "s1")
    assert action_on(pages, "s1", trash_days=0) == (
        "delete",
        "its bundle and its snapshots no longer exist",
    )
    assert names(pages) == ["s2"]


def test_a_dry_run_destroys_nothing(pages):
    lose(pages, "s1")
    assert action_on(pages, "s1", trash_days=0, dry_run=True)[0] == "delete"
    assert action_on(pages, "s2", trash_days=0, dry_run=True)[0] == "keep"
    assert names(pages) == ["s1", "s2"]


def test_pages_are_deleted_when_retention_deletes_the_bundle(pages):
    lose(pages, "s1")
    (bundle,) = [p for p in pages.root.glob("*/*") if read_manifest(p).snapshot == "s1"]
    pages.prune(trash_days=0, only=[f"{bundle.parent.name}/{bundle.name}"])
    assert names(pages) == ["s2"]


def test_pages_of_a_bundle_that_names_others_are_deleted(pages):
    """A run that was killed before its manifest named the pages leaves such pages."""
    (first,) = [p for p in pages.root.glob("*/*") if read_manifest(p).snapshot == "s1"]
    reference = f"{first.parent.name}/{first.name}"
    pages.pool.snapshot(
        [f"{dataset(pages)}@left"], {"snaporch:ram": reference, "snaporch:ram-pools": "tank,flash"}
    )
    assert action_on(pages, "left") == ("delete", "its bundle has its RAM elsewhere")
    assert names(pages) == ["s1", "s2"]


def test_a_bundle_that_another_host_sent_decides_nothing_about_pages_of_this_one(pages):
    """A hostile host can store any manifest under the UUID of a guest of its replica's machine."""
    (first,) = [p for p in pages.root.glob("*/*") if read_manifest(p).snapshot == "s1"]
    reference = f"{first.parent.name}/{first.name}"
    pages.pool.snapshot(
        [f"{dataset(pages)}@own"], {"snaporch:ram": reference, "snaporch:ram-pools": "tank,flash"}
    )
    (first / "copy.json").write_text('{"dataset": "backup/vm1"}')
    assert action_on(pages, "own") == ("keep", "its bundle there is a copy of another host's")
    assert "own" in names(pages)


def test_snapshots_of_other_programs_of_the_pages_dataset_stay(pages):
    pages.pool.snapshot([f"{dataset(pages)}@autosnap"], {})
    pages.prune()
    assert "autosnap" in names(pages)


def test_pages_stay_while_the_store_is_an_empty_directory(pages):
    lose(pages, "s1")
    pages.root.rename(pages.root.with_name("elsewhere"))
    pages.root.mkdir()
    assert action_on(pages, "s1", trash_days=0)[0] == "keep"
    assert names(pages) == ["s1", "s2"]


def test_pages_of_a_bundle_deleted_by_hand_stay_while_the_snapshot_exists(pages):
    (first,) = [p for p in pages.root.glob("*/*") if read_manifest(p).snapshot == "s1"]
    for path in first.iterdir():
        path.unlink()
    first.rmdir()
    assert action_on(pages, "s1")[0] == "keep"
    lose(pages, "s1")
    assert action_on(pages, "s1")[0] == "delete"


def test_pages_stay_while_a_pool_is_exported(pages):
    lose(pages, "s1")
    pages.prune(trash_days=0, dry_run=True)
    for path in pages.root.glob("*/*"):
        if read_manifest(path).snapshot == "s1":
            path.rename(path.with_name("gone"))
    (stray,) = pages.root.glob("*/gone")
    stray.rename(pages.root.parent / "gone")
    pages.pool.exported.add("flash")
    assert action_on(pages, "s1")[0] == "keep"
    pages.pool.exported.clear()
    assert action_on(pages, "s1")[0] == "delete"


def test_held_pages_stay_and_are_reported(pages):
    pages.pool.hold([f"{dataset(pages)}@s1"], "syncoid")
    lose(pages, "s1")
    done = pages.prune(trash_days=0)
    assert names(pages) == ["s1", "s2"]
    assert [failure.reason for failure in done.failures] == ["dataset is busy"]


def test_pages_of_a_busy_domain_are_deleted_by_a_later_prune(pages):
    lose(pages, "s1")
    pages.prune(trash_days=0, dry_run=True)
    world = pages.world
    uuid, interrupt = world.hypervisor.domain("web").uuid, world.context.interrupt
    with domain_lock(world.paths.runtime, "web", uuid, "snapshot", wait=0, interrupt=interrupt):
        pages.prune(trash_days=0)
        assert names(pages) == ["s1", "s2"]
    pages.prune(trash_days=0)
    assert names(pages) == ["s2"]


def test_files_that_a_killed_move_left_are_deleted(pages):
    (first,) = [p for p in pages.root.glob("*/*") if read_manifest(p).snapshot == "s1"]
    (first / "ram.save").write_bytes(b"the image that pages took the place of")
    (first / "manifest.json.new").write_bytes(b"{")
    done = pages.prune()
    assert not any(verdict.found.problem for verdict in done.decisions)
    assert sorted(os.listdir(first)) == [
        "domain.live.xml", "domain.xml", "manifest.json", "ram.rest",
    ]  # fmt: skip


def test_a_save_image_beside_files_of_a_killed_move_stays(shelf):
    shelf.world.with_defaults()
    shelf.world.guest().ram = streams.guest_stream()
    bundle = Path(shelf.take("s1"))
    (bundle / "ram.rest").write_bytes(b"half")
    shelf.prune()
    assert sorted(os.listdir(bundle)) == [
        "domain.live.xml", "domain.xml", "manifest.json", "ram.save",
    ]  # fmt: skip


def test_a_prune_of_one_domain_deletes_no_pages_of_another(pages):
    lose(pages, "s1")
    pages.prune(trash_days=0, domain="other")
    assert names(pages) == ["s1", "s2"]


def test_mounted_pages_are_destroyed_by_a_later_prune(pages):
    lose(pages, "s1")
    pages.pool.foreign = [BlockingMount(f"{dataset(pages)}@s1", "the guest db")]
    held = f"{dataset(pages)}@s1 is mounted by the guest db"
    assert action_on(pages, "s1", trash_days=0) == ("keep", held)
    assert pages.prune(trash_days=0).failures == []
    pages.pool.foreign.clear()
    pages.prune()
    assert names(pages) == ["s2"]
