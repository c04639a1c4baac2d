"""The contract of every Pool."""

from pathlib import Path

import pytest
from contract_pools import FakeScratch, ZfsScratch

from snaporch.model import Dataset, DatasetKind
from snaporch.zfs import Bookmark, InUseError, Pool, PoolError

# pyzfs 2.3 warns on Python 3.13 when it formats an error
pytestmark = pytest.mark.filterwarnings("ignore:'maxsplit' is passed:DeprecationWarning")


def _command() -> Pool:
    from snaporch.zfs.cli import ZfsCommand

    return ZfsCommand.open()


def _lzc() -> Pool:
    from snaporch.zfs.cli import ZfsCommand
    from snaporch.zfs.lzc import LibZfsCore

    return LibZfsCore(ZfsCommand.open())


MAKERS = {
    "fake": FakeScratch,
    "command": lambda: ZfsScratch(_command()),
    "lzc": lambda: ZfsScratch(_lzc()),
}


@pytest.fixture(
    params=[
        "fake",
        pytest.param("command", marks=(pytest.mark.lab, pytest.mark.daily(22, "command"))),
        pytest.param("lzc", marks=pytest.mark.lab),
    ]
)
def scratch(request):
    made = MAKERS[request.param]()
    yield made
    made.remove()


@pytest.fixture
def pool(scratch):
    return scratch.pool


@pytest.fixture
def root(scratch):
    return scratch.root


def names(pool, *datasets):
    return [snapshot.full_name for snapshot in pool.snapshots(list(datasets))]


class TestSurvey:
    def test_a_survey_equals_the_listings(self, pool, root):
        pool.snapshot([f"{root}@a"], {"snaporch:run": "r", "snaporch:retention": "hourly"})
        pool.snapshot([f"{root}@b"], {})
        mine = [s for s in pool.policy_view().snapshots if s.dataset == root]
        assert mine == pool.snapshots([root])
        assert mine[0].properties == {"run": "r", "retention": "hourly"}

    def test_held_and_cloned_snapshots_are_pinned(self, pool, root):
        for name in ("held", "cloned", "free"):
            pool.snapshot([f"{root}@{name}"], {})
        before = pool.policy_view().pinned
        pool.hold([f"{root}@held"], "mine")
        pool.clone(f"{root}@cloned", f"{root}/clone")
        found = pool.policy_view().pinned
        assert found[f"{root}@held"] == "held"
        assert found[f"{root}@cloned"] == f"cloned as {root}/clone"
        assert f"{root}@free" not in found
        assert not any(name.startswith(root) for name in before)
        pool.destroy_dataset(f"{root}/clone")

    def test_policies_of_datasets_are_inherited(self, scratch, pool, root):
        scratch.create(f"{root}/below")
        scratch.create(f"{root}/own")
        pool.set_properties([root], {"snaporch:policy": "hourly"})
        pool.set_properties([f"{root}/own"], {"snaporch:policy": "none"})
        found = pool.policy_view().policies
        assert found[root] == found[f"{root}/below"] == "hourly"
        assert found[f"{root}/own"] == "none"
        assert scratch.other not in found
        assert pool.policies([f"{root}/below", scratch.other]) == {f"{root}/below": "hourly"}
        assert pool.policies([]) == {}

    def test_a_policy_of_a_dataset_is_not_a_property_of_its_snapshots(self, pool, root):
        pool.set_properties([root], {"snaporch:policy": "hourly"})
        pool.snapshot([f"{root}@by-hand"], {})
        (mine,) = [s for s in pool.policy_view().snapshots if s.dataset == root]
        assert mine.properties == {}


class TestPoolContract:
    def test_a_dataset_gets_one_snapshot_at_a_time(self, pool, root):
        with pytest.raises(PoolError, match="multiple snapshots of"):
            pool.snapshot([f"{root}@a", f"{root}@b"], {})
        assert names(pool, root) == []

    def test_a_new_dataset_is_listed_with_its_kind(self, pool, root):
        assert Dataset(root, DatasetKind.FILESYSTEM) in pool.datasets()

    def test_encryption_is_reported_and_inherited(self, scratch, pool, root):
        scratch.create_encrypted(f"{root}/secret")
        scratch.create(f"{root}/secret/below")
        found = {name for name in pool.encrypted() if name.startswith(root)}
        assert found == {f"{root}/secret", f"{root}/secret/below"}
        roots = pool.encryption_roots([root, f"{root}/secret", f"{root}/secret/below"])
        assert roots == dict.fromkeys(found, f"{root}/secret")
        assert pool.encryption_roots([]) == {}

    def test_the_directories_of_file_systems_that_are_mounted_at_boot(self, scratch, pool, root):
        pool.create_filesystem(f"{root}/one", {"mountpoint": "/tmp/one"})
        found = pool.mountpoints()
        assert (found[root], found[f"{root}/one"]) == (f"/{root}", "/tmp/one")
        pool.set_properties([f"{root}/one"], {"canmount": "noauto"})
        assert f"{root}/one" not in pool.mountpoints()

    def test_a_snapshot_carries_its_properties(self, pool, root):
        pool.snapshot([f"{root}@a"], {"snaporch:run": "r", "snaporch:domain": "Bär <vm> & Co"})
        (found,) = pool.snapshots([root])
        assert found.full_name == f"{root}@a"
        assert found.properties == {"run": "r", "domain": "Bär <vm> & Co"}
        assert found.created.utcoffset().total_seconds() == 0

    def test_no_snapshots_is_an_empty_list(self, pool, root):
        assert pool.snapshots([root]) == []

    def test_snapshots_come_oldest_first_over_all_datasets(self, scratch, pool, root):
        scratch.create(f"{root}/x")
        pool.snapshot([f"{root}/x@b"], {})
        pool.snapshot([f"{root}@a"], {})
        pool.snapshot([f"{root}/x@a"], {})
        assert names(pool, root, f"{root}/x") == [f"{root}/x@b", f"{root}@a", f"{root}/x@a"]

    def test_only_the_datasets_asked_for_are_listed_and_not_their_children(
        self, scratch, pool, root
    ):
        scratch.create(f"{root}/x")
        pool.snapshot([f"{root}@a", f"{root}/x@a"], {})
        assert names(pool, root) == [f"{root}@a"]

    def test_absent_datasets_have_no_snapshots(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        assert names(pool, f"{root}/gone", root) == [f"{root}@a"]

    def test_asking_for_no_dataset_lists_none(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        assert pool.snapshots([]) == []

    def test_asking_for_all_lists_all(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        assert f"{root}@a" in [snapshot.full_name for snapshot in pool.snapshots()]

    def test_a_census_knows_every_pool_and_every_snapshot_by_its_guid(self, pool, scratch, root):
        pool.snapshot([f"{root}@a"], {})
        pool.snapshot([f"{scratch.other}@b"], {})
        listing = pool.snapshot_listing()
        assert {root.split("/")[0], scratch.other.split("/")[0]} <= listing.pools
        for found in pool.snapshots([root, scratch.other]):
            assert found.full_name in listing.snapshots[found.guid]

    def test_pools_are_waited_for(self, pool, root):
        pool.sync([root, f"{root}/below"])

    def test_a_destroyed_snapshot_is_in_no_listing(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        (found,) = pool.snapshots([root])
        pool.destroy_snapshots([f"{root}@a"])
        assert found.guid not in pool.snapshot_listing().snapshots

    def test_a_replica_is_in_the_census_beside_its_original(self, pool, scratch, root):
        pool.snapshot([f"{root}@a"], {})
        (found,) = pool.snapshots([root])
        scratch.replicate(f"{root}@a", f"{scratch.other}/copy")
        names = pool.snapshot_listing().snapshots[found.guid]
        assert set(names) == {f"{root}@a", f"{scratch.other}/copy@a"}

    def test_snapshots_taken_together_are_of_one_transaction(self, scratch, pool, root):
        scratch.create(f"{root}/x")
        pool.snapshot([f"{root}@a", f"{root}/x@a"], {"snaporch:run": "r"})
        first, second = pool.snapshots([root, f"{root}/x"])
        assert first.createtxg == second.createtxg
        assert first.guid != second.guid

    def test_taking_is_all_or_none(self, scratch, pool, root):
        scratch.create(f"{root}/x")
        pool.snapshot([f"{root}/x@a"], {})
        with pytest.raises(PoolError):
            pool.snapshot([f"{root}@a", f"{root}/x@a"], {})
        assert names(pool, root) == []

    @pytest.mark.parametrize("below", ["/gone@a", "@a%", "@" + "n" * 256])
    def test_a_refused_snapshot_is_a_pool_error(self, pool, root, below):
        with pytest.raises(PoolError):
            pool.snapshot([root + below], {})
        assert names(pool, root) == []

    def test_one_call_is_for_one_pool(self, scratch, pool, root):
        with pytest.raises(PoolError):
            pool.snapshot([f"{root}@a", f"{scratch.other}@a"], {})
        assert names(pool, root, scratch.other) == []

    def test_destroying_ignores_missing_snapshots(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        pool.destroy_snapshots([f"{root}@a", f"{root}@never"])
        assert pool.snapshots([root]) == []

    def test_destroying_nothing_is_fine(self, pool, root):
        pool.destroy_snapshots([])
        pool.destroy_snapshots([f"{root}@never"])

    def test_destroying_is_all_or_none_when_one_is_held(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        pool.snapshot([f"{root}@b"], {})
        pool.hold([f"{root}@b"], "keep")
        with pytest.raises(InUseError):
            pool.destroy_snapshots([f"{root}@a", f"{root}@b"])
        assert names(pool, root) == [f"{root}@a", f"{root}@b"]

    def test_destroying_is_all_or_none_when_one_is_cloned(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        pool.snapshot([f"{root}@b"], {})
        pool.clone(f"{root}@b", f"{root}/clone")
        with pytest.raises(InUseError):
            pool.destroy_snapshots([f"{root}@a", f"{root}@b"])
        assert names(pool, root) == [f"{root}@a", f"{root}@b"]

    def test_properties_can_be_changed(self, pool, root):
        pool.snapshot([f"{root}@a"], {"snaporch:level": "crash", "snaporch:run": "r"})
        pool.set_properties([f"{root}@a"], {"snaporch:level": "ram"})
        assert pool.snapshots([root])[0].properties == {"level": "ram", "run": "r"}

    def test_of_all_properties_those_are_listed_that_are_known(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        pool.set_properties([f"{root}@a"], {"snaporch:torn": "yes", "snaporch:other": "x"})
        assert pool.snapshots([root])[0].properties == {"torn": "yes"}
        (mine,) = [s for s in pool.policy_view().snapshots if s.dataset == root]
        assert mine.properties == {"torn": "yes"}

    def test_properties_can_be_removed(self, pool, root):
        pool.snapshot([f"{root}@a"], {"snaporch:note": "x", "snaporch:run": "r"})
        pool.snapshot([f"{root}@b"], {})
        pool.clear_properties([f"{root}@a", f"{root}@b"], ["snaporch:note"])
        assert [each.properties for each in pool.snapshots([root])] == [{"run": "r"}, {}]

    def test_what_destroying_frees_counts_held_snapshots_too(self, pool, scratch, root):
        scratch.write(root, b"first")
        pool.snapshot([f"{root}@a"], {})
        pool.snapshot([f"{root}@b"], {})
        scratch.write(root, b"then")
        pool.hold([f"{root}@a"], "mine")
        together = pool.reclaimable([f"{root}@a", f"{root}@b"])
        assert together > 0
        assert together >= pool.reclaimable([f"{root}@a"]) + pool.reclaimable([f"{root}@b"])
        pool.release([f"{root}@a"], "mine")
        assert names(pool, root) == [f"{root}@a", f"{root}@b"], "it destroys nothing"

    def test_what_a_missing_snapshot_would_free_is_an_error(self, pool, root):
        with pytest.raises(PoolError):
            pool.reclaimable([f"{root}@never"])

    def test_properties_of_a_missing_dataset_are_an_error(self, pool, root):
        with pytest.raises(PoolError):
            pool.set_properties([f"{root}@never"], {"snaporch:level": "ram"})

    def test_holds_come_and_go(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        pool.hold([f"{root}@a"], "one")
        pool.hold([f"{root}@a"], "two")
        assert sorted(pool.holds_of([f"{root}@a"])[f"{root}@a"]) == ["one", "two"]
        pool.release([f"{root}@a"], "one")
        assert pool.holds_of([f"{root}@a"])[f"{root}@a"] == ["two"]

    def test_releasing_a_missing_hold_is_fine(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        pool.release([f"{root}@a"], "never")
        assert pool.holds_of([f"{root}@a"])[f"{root}@a"] == []

    def test_holding_is_all_or_none(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        with pytest.raises(PoolError):
            pool.hold([f"{root}@a", f"{root}@never"], "keep")
        assert pool.holds_of([f"{root}@a"])[f"{root}@a"] == []

    def test_a_clone_is_a_dataset_and_is_listed(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        pool.snapshot([f"{root}@b"], {})
        pool.clone(f"{root}@a", f"{root}/clone")
        assert f"{root}/clone" in [dataset.name for dataset in pool.datasets()]
        assert pool.clones([f"{root}@a", f"{root}@b"]) == {f"{root}@a": [f"{root}/clone"]}
        pool.destroy_dataset(f"{root}/clone")
        assert pool.clones([f"{root}@a"]) == {}

    def test_a_clone_is_made_with_its_properties(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        properties = {"snaporch:clone": "one", "snaporch:clone-name": "Bär <vm> & Co"}
        pool.clone(f"{root}@a", f"{root}/clone", properties)
        assert pool.local_properties(list(properties)) == {f"{root}/clone": properties}
        assert pool.local_properties(["snaporch:verify"]) == {}

    def test_a_file_system_is_made_with_its_properties_and_those_above(self, pool, root):
        properties = {"snaporch:ram": "one", "compression": "zstd", "recordsize": "16384"}
        pool.create_filesystem(f"{root}/above/made", properties)
        assert f"{root}/above" in [dataset.name for dataset in pool.datasets()]
        assert pool.local_properties(list(properties))[f"{root}/above/made"] == properties
        pool.snapshot([f"{root}/above/made@a"], {"snaporch:ram": "one/two"})
        (found,) = pool.snapshots([f"{root}/above/made"])
        assert found.properties == {"ram": "one/two"}

    def test_a_file_system_that_exists_stays_as_it_is(self, pool, root):
        pool.create_filesystem(f"{root}/made", {"snaporch:ram": "one"})
        with pytest.raises(PoolError):
            pool.create_filesystem(f"{root}/made", {"snaporch:ram": "two"})
        assert pool.local_properties(["snaporch:ram"]) == {f"{root}/made": {"snaporch:ram": "one"}}

    def test_a_file_system_of_no_pool_is_an_error(self, pool):
        with pytest.raises(PoolError):
            pool.create_filesystem("nowhere/made", {})

    def test_inherited_properties_are_not_local(self, scratch, pool, root):
        pool.set_properties([root], {"snaporch:clone": "one"})
        scratch.create(f"{root}/below")
        pool.snapshot([f"{root}@a"], {})
        assert pool.local_properties(["snaporch:clone"]) == {root: {"snaporch:clone": "one"}}
        assert pool.local_properties(["snaporch:clone"], [f"{root}/below"]) == {}
        with pytest.raises(PoolError):
            pool.local_properties(["snaporch:clone"], [f"{root}/never"])

    def test_a_file_system_and_a_volume_have_properties_of_their_own(self, scratch, pool, root):
        volume = f"{root}/parent/thick"
        scratch.create_thick(volume, room=0)
        pool.set_properties([root], {"recordsize": "32768", "logbias": "throughput"})
        keys = ("recordsize", "volblocksize", "volsize", "refreservation", "logbias", "available")
        found = pool.native_properties(keys, [root, volume])
        assert found[root].keys() == set(keys) - {"volblocksize", "volsize"}
        assert found[volume].keys() == set(keys) - {"recordsize"}
        assert (found[root]["recordsize"], found[root]["logbias"]) == ("32768", "throughput")
        assert found[volume]["volsize"] == str(32 << 20)
        assert int(found[volume]["refreservation"]) >= 32 << 20
        assert int(found[root]["available"]) > 0
        assert pool.native_properties(keys, []) == {}
        with pytest.raises(PoolError):
            pool.native_properties(keys, [f"{root}/absent"])

    def test_the_sectors_of_a_pool_are_a_power_of_two(self, pool, root):
        found = pool.sector_bytes(root.partition("/")[0])
        assert found in {1 << each for each in range(9, 17)}
        assert pool.parity_groups(root.partition("/")[0]) == ()

    def test_properties_of_zfs_are_set_on_datasets_and_own_ones_cleared(self, pool, root):
        own = {"recordsize": "16384", "quota": "1073741824", "snaporch:rebuild": "one"}
        pool.set_properties([root], own)
        assert pool.local_properties([*own, "atime"], [root]) == {root: own}
        pool.clear_properties([root], ["snaporch:rebuild", "snaporch:never"])
        assert pool.local_properties(["snaporch:rebuild"], [root]) == {}

    def test_a_clone_that_exists_or_has_no_origin_is_an_error(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        pool.clone(f"{root}@a", f"{root}/clone", {})
        for origin in (f"{root}@a", f"{root}@never"):
            with pytest.raises(PoolError):
                pool.clone(origin, f"{root}/clone", {"snaporch:clone": "two"})
        assert pool.local_properties(["snaporch:clone"]) == {}

    def test_the_origin_of_a_clone_is_listed(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        pool.clone(f"{root}@a", f"{root}/clone")
        assert pool.origins([root, f"{root}/clone"]) == {f"{root}/clone": f"{root}@a"}
        assert pool.origins([]) == {}

    def test_sizes_are_listed(self, scratch, pool, root):
        scratch.write(root, b"x" * 100_000)
        pool.snapshot([f"{root}@a"], {})
        ((name, (used, referenced)),) = pool.sizes([f"{root}@a"]).items()
        assert name == f"{root}@a"
        assert 0 <= used < referenced
        assert pool.sizes([]) == {}

    def test_no_snapshots_have_no_clones(self, pool):
        assert pool.clones([]) == {}

    def test_a_dataset_with_snapshots_is_not_destroyed(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        with pytest.raises(PoolError):
            pool.destroy_dataset(root)
        assert names(pool, root) == [f"{root}@a"]

    def test_a_rollback_brings_the_content_back(self, scratch, pool, root):
        scratch.write(root, b"first")
        pool.snapshot([f"{root}@a"], {})
        scratch.write(root, b"second")
        pool.rollback(f"{root}@a")
        assert scratch.read(root) == b"first"

    def test_a_rollback_destroys_no_newer_snapshot(self, scratch, pool, root):
        scratch.write(root, b"first")
        pool.snapshot([f"{root}@a"], {})
        scratch.write(root, b"second")
        pool.snapshot([f"{root}@b"], {})
        with pytest.raises(PoolError):
            pool.rollback(f"{root}@a")
        assert names(pool, root) == [f"{root}@a", f"{root}@b"]
        assert scratch.read(root) == b"second"

    def test_a_rollback_to_a_missing_snapshot_is_an_error(self, pool, root):
        with pytest.raises(PoolError):
            pool.rollback(f"{root}@never")

    def test_newer_are_later_snapshots_and_bookmarks(self, pool, root):
        for name in "abc":
            pool.snapshot([f"{root}@{name}"], {})
        pool.bookmark(f"{root}@a", "first")
        pool.bookmark(f"{root}@c", "last")
        assert sorted(pool.listing([root]).newer(f"{root}@b")) == [f"{root}#last", f"{root}@c"]
        pool.destroy_bookmark(f"{root}#last")
        assert pool.listing([root]).newer(f"{root}@b") == [f"{root}@c"]
        assert pool.listing([root]).newer(f"{root}@c") == []

    def test_newer_than_a_missing_snapshot_is_an_error(self, pool, root):
        with pytest.raises(PoolError):
            pool.listing([root]).newer(f"{root}@never")

    def test_a_listing_has_snapshots_bookmarks_and_clones(self, scratch, pool, root):
        scratch.create(f"{root}/below")
        pool.snapshot([f"{root}@b", f"{root}/below@b"], {"snaporch:note": "a\tb\nc"})
        pool.snapshot([f"{root}@a"], {})
        pool.bookmark(f"{root}@b", "mark")
        for name in ("one", "two"):
            pool.clone(f"{root}@b", f"{root}/{name}")
        found = pool.listing([root])
        assert list(found.snapshots) == pool.snapshots([root])
        assert [each.name for each in found.snapshots] == ["b", "a"]
        assert found.snapshots[0].properties["note"] == "a\tb\nc"
        assert found.bookmarks == pool.bookmarks(root) != {}
        assert {name: sorted(of) for name, of in found.clones.items()} == {
            f"{root}@b": [f"{root}/one", f"{root}/two"]
        }
        for name in ("one", "two"):
            pool.destroy_dataset(f"{root}/{name}")
        both = pool.listing([root, f"{root}/below"])
        assert len(both.snapshots) == 3
        assert both.clones == {}
        assert pool.listing([]).snapshots == ()
        with pytest.raises(PoolError):
            pool.listing([root, f"{root}/never"])

    def test_bookmarks_are_those_of_the_dataset_alone(self, scratch, pool, root):
        scratch.create(f"{root}/below")
        pool.snapshot([f"{root}@a", f"{root}/below@a"], {})
        pool.bookmark(f"{root}@a", "first")
        pool.bookmark(f"{root}/below@a", "other")
        pool.bookmark(f"{root}@a", "second")
        assert sorted(pool.bookmarks(root)) == [f"{root}#first", f"{root}#second"]
        (a,) = pool.snapshots([root])
        pool.destroy_snapshots([f"{root}@a"])
        born = Bookmark(a.guid, a.createtxg)
        assert pool.bookmarks(root) == {f"{root}#first": born, f"{root}#second": born}

    def test_a_bookmark_is_made_once_and_of_an_existing_snapshot(self, pool, root):
        pool.snapshot([f"{root}@a"], {})
        pool.bookmark(f"{root}@a", "first")
        with pytest.raises(PoolError):
            pool.bookmark(f"{root}@a", "first")
        with pytest.raises(PoolError):
            pool.bookmark(f"{root}@never", "other")
        assert list(pool.bookmarks(root)) == [f"{root}#first"]

    def test_a_missing_bookmark_is_an_error(self, pool, root):
        with pytest.raises(PoolError):
            pool.destroy_bookmark(f"{root}#never")

    def test_an_increment_is_written_whole(self, scratch, pool, root, tmp_path):
        pool.snapshot([f"{root}@a"], {})
        scratch.write(root, b"x" * 5000)
        pool.snapshot([f"{root}@b"], {})
        path = tmp_path / "stream"
        size = pool.send_increment(f"{root}@a", f"{root}@b", path, raw=False)
        assert size == path.stat().st_size > 0
        assert path.stat().st_mode & 0o777 == 0o600
        assert pool.increment_size(f"{root}@a", f"{root}@b", raw=False) > 0

    def test_an_impossible_increment_is_an_error_and_leaves_no_file(self, pool, root, tmp_path):
        pool.snapshot([f"{root}@a"], {})
        with pytest.raises(PoolError):
            pool.send_increment(f"{root}@a", f"{root}@never", tmp_path / "stream", raw=False)
        assert not (tmp_path / "stream").exists()

    def test_receiving_an_increment_discards_later_changes(self, scratch, pool, root, tmp_path):
        pool.snapshot([f"{root}@a"], {})
        for name in ("b", "c"):
            scratch.write(root, name.encode())
            pool.snapshot([f"{root}@{name}"], {})
        before = {each.name: each.guid for each in pool.snapshots([root])}
        pool.send_increment(f"{root}@a", f"{root}@c", tmp_path / "stream", raw=False)
        pool.destroy_snapshots([f"{root}@b", f"{root}@c"])
        pool.rollback(f"{root}@a")
        scratch.write(root, b"since")
        assert pool.available(root) > 0
        pool.receive(root, tmp_path / "stream")
        assert {each.name: each.guid for each in pool.snapshots([root])} == before
        assert scratch.read(root) == b"c"

    def test_an_increment_without_its_origin_is_an_error(self, scratch, pool, root, tmp_path):
        pool.snapshot([f"{root}@a"], {})
        pool.snapshot([f"{root}@b"], {})
        pool.send_increment(f"{root}@a", f"{root}@b", tmp_path / "stream", raw=False)
        pool.destroy_snapshots([f"{root}@a", f"{root}@b"])
        with pytest.raises(PoolError):
            pool.receive(root, tmp_path / "stream")

    def test_user_properties_of_snapshots_are_listed(self, scratch, pool, root):
        pool.snapshot([f"{root}@a"], {"org:note": "two words", "snaporch:run": "r"})
        pool.snapshot([f"{root}@b"], {})
        listed = pool.user_properties([f"{root}@a", f"{root}@b"])
        assert listed == {f"{root}@a": {"org:note": "two words", "snaporch:run": "r"}}
        assert pool.user_properties([]) == {}

    @pytest.mark.timeout(60)
    def test_a_value_neither_hides_nor_forges_another(self, scratch, pool, root):
        """Tabs, line breaks and invalid characters arrive with streams."""
        forged = (
            f"x\n{root}@victim\tsnaporch:verified\tlocal\tpassed\n{root}@victim\t1\t2\t3\tpassed"
            f"\n{root}@phantom\tguid\t-\t7\n{root}@phantom\t7\t8\t9\tx\n\n\t\t\n \r\x85\u2028"
        )
        hostile = {"snaporch:run": forged, "snaporch:domain": "two\nlines", "org:x": forged}
        pool.snapshot([f"{root}@mine"], hostile)
        pool.set_properties([f"{root}@mine"], {"org:y": "\t"})
        pool.snapshot([f"{root}@victim"], {"snaporch:verified": "never"})
        pool.set_properties([root], {"snaporch:policy": forged})
        copy = f"{scratch.other}/copy"
        scratch.replicate(f"{root}@mine", copy)
        marks = {"run": forged, "domain": "two\nlines"}
        expected = {f"{root}@mine": marks, f"{root}@victim": {"verified": "never"}}
        expected[f"{copy}@mine"] = marks
        survey = pool.policy_view()
        everything = [s for s in survey.snapshots if s.dataset in (root, copy)]
        for found in (everything, pool.snapshots([root, copy])):
            assert {each.full_name: each.properties for each in found} == expected
        assert survey.policies[root] == forged
        assert pool.local_properties(["snaporch:policy"]) == {root: {"snaporch:policy": forged}}
        all_of_it = hostile | {"org:y": "\t"}
        assert pool.user_properties([f"{root}@mine", f"{root}@victim", f"{copy}@mine"]) == {
            f"{root}@mine": all_of_it,
            f"{root}@victim": {"snaporch:verified": "never"},
            f"{copy}@mine": all_of_it,
        }

    def test_bytes_written_since_a_snapshot(self, scratch, pool, root):
        scratch.write(root, b"first")
        pool.snapshot([f"{root}@a"], {})
        assert pool.written_since(f"{root}@a") == 0
        scratch.write(root, b"x" * 100_000)
        assert pool.written_since(f"{root}@a") > 0
        with pytest.raises(PoolError):
            pool.written_since(f"{root}@gone")

    def test_an_import_is_no_write_to_a_volume(self, scratch, pool):
        volume = f"{scratch.other}/thick/volume"
        scratch.create_thick(volume, 64 << 20)
        pool.snapshot([f"{volume}@a"], {})
        assert not pool.is_volume_modified(f"{volume}@a")
        scratch.import_again("flash")
        assert pool.written_since(f"{volume}@a") > 0
        assert not pool.is_volume_modified(f"{volume}@a")
        scratch.write_volume(volume, b"x" * 512)
        assert pool.is_volume_modified(f"{volume}@a")
        with pytest.raises(PoolError):
            pool.is_volume_modified(f"{volume}@gone")

    def test_a_snapshot_is_read_by_a_private_mount(self, scratch, pool, root):
        scratch.write(root, b"then")
        pool.snapshot([f"{root}@a"], {})
        with pool.mounted_snapshot(f"{root}@a") as at:
            assert (at / "content").read_bytes() == b"then"
            assert f"{root}@a" not in Path("/proc/self/mountinfo").read_text()
            with pytest.raises(PoolError):
                pool.destroy_snapshots([f"{root}@a"])
        pool.destroy_snapshots([f"{root}@a"])
        assert names(pool, root) == []

    def test_a_missing_snapshot_cannot_be_read(self, pool, root):
        with pytest.raises(PoolError), pool.mounted_snapshot(f"{root}@a"):
            pass

    def test_names_with_spaces(self, scratch, pool, root):
        scratch.create(f"{root}/vm one")
        pool.snapshot([f"{root}/vm one@two words"], {"snaporch:run": "r"})
        full = f"{root}/vm one@two words"
        pool.hold([full], "keep")
        assert pool.holds_of([full])[full] == ["keep"]
        pool.release([full], "keep")
        pool.set_properties([full], {"snaporch:level": "ram"})
        assert pool.listing([full.partition("@")[0]]).newer(full) == []
        pool.destroy_snapshots([full])
        assert names(pool, f"{root}/vm one") == []

    def test_what_a_snapshot_needs_of_a_reservation(self, pool, root):
        assert pool.reserved([root]) == {}
        assert pool.reserved([]) == {}

    @pytest.mark.parametrize(("room", "fits"), [(4 << 20, False), (16 << 20, True)])
    def test_room_for_a_snapshot_beside_a_reservation_is_reported(
        self, scratch, pool, root, room, fits
    ):
        volume = f"{root}/thick/volume"
        scratch.create_thick(volume, room)
        ((needed, free),) = pool.reserved([volume]).values()
        assert 8 << 20 <= needed < 9 << 20
        assert room <= free < room + (2 << 20)
        if fits:
            pool.snapshot([f"{volume}@s"], {})
        else:
            with pytest.raises(PoolError):
                pool.snapshot([f"{volume}@s"], {})
