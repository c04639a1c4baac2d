"""The safety copy that an undo uses."""

import pytest

from snaporch.bundle.manifest import ManifestError, with_checksum
from snaporch.catalog.safety_copy_holds import bases_of
from snaporch.errors import NotFoundError, RefusedError
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.restore.safety_catalog import RECORD, UNDONE, safety_copies
from snaporch.restore.select_undo import choose_copy


def put_back(world):
    plan = make_restore_plan(world.context, "web", "s1", discard_newer=True)
    return restore(world.context, plan, safety=True)


@pytest.fixture
def restored(story, world):
    put_back(world)
    return story


def test_the_newest_copy_is_chosen_that_was_not_brought_back(restored, world):
    put_back(world)
    older, newer = safety_copies(world.context.store, "web")
    assert choose_copy(world.context, "web", None) == newer
    (newer.directory / UNDONE).touch()
    assert choose_copy(world.context, "web", None) == older
    assert choose_copy(world.context, "web", newer.name) == newer


def test_a_domain_without_a_copy_is_not_found(story, world):
    with pytest.raises(NotFoundError, match="no safety copy"):
        choose_copy(world.context, "web", None)


def test_a_missing_copy_is_not_found(restored, world):
    with pytest.raises(NotFoundError, match="has no safety copy safety-1; it has safety-"):
        choose_copy(world.context, "web", "safety-1")


@pytest.mark.parametrize(
    ("content", "step"),
    [
        (with_checksum("{\n}"), "use the snaporch that wrote it"),
        (b"{}", "choose another copy"),
        (b"\xff{", "choose another copy"),
    ],
    ids=["another version", "no checksum", "no text"],
)
def test_a_record_of_another_version_is_refused(restored, world, content, step):
    (copy,) = safety_copies(world.context.store, "web")
    (copy.directory / RECORD).write_bytes(content)
    with pytest.raises(RefusedError, match=step):
        choose_copy(world.context, "web", None)
    assert safety_copies(world.context.store) == []


def test_a_record_with_a_flipped_bit_is_refused(restored, world):
    """It is still JSON, and of the form of a record."""
    (copy,) = safety_copies(world.context.store, "web")
    path = copy.directory / RECORD
    written = path.read_bytes()
    (snapshot, *_) = copy.manifest.snapshots
    path.write_bytes(written.replace(b"%d" % snapshot.guid, b"%d" % (snapshot.guid ^ 1)))
    with pytest.raises(RefusedError, match=r"its SHA-256 differs.*; choose another copy"):
        choose_copy(world.context, "web", None)
    assert safety_copies(world.context.store) == []
    with pytest.raises(ManifestError, match="its SHA-256 differs"):
        bases_of(copy.directory)
    path.write_bytes(written)
    assert bases_of(copy.directory)
