"""Datasets that were renamed: none of their snapshots is missing, and none is used."""

from dataclasses import replace
from pathlib import Path

import pytest

from snaporch.catalog.records import all_records
from snaporch.config import Config
from snaporch.errors import RefusedError
from snaporch.model import BundleState, Level
from snaporch.prune.prune import prune
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.restore.source import complete_source, find_records
from snaporch.show import describe
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.verify.verify import VerifyOptions, verify


@pytest.fixture
def renamed(story, world):
    """``tank/web`` has another name; its pool ``flash`` too."""
    world.pool.create("tank2/other")
    world.pool.rename("tank/web", "tank/web2")
    world.pool.rename("flash/web", "flash2/web")
    return story


def records(world):
    return all_records(world.context.store, world.pool.snapshots(), renamed_too=True)


def refusal(world, act):
    with pytest.raises(RefusedError) as caught:
        act()
    assert world.hooks.log == []
    return caught.value


def test_it_is_listed_as_complete_by_its_new_names(renamed, world):
    (record,) = records(world)
    assert record.datasets == ("flash2/web", "tank/web2")
    assert (record.state, record.level) == (BundleState.COMPLETE, Level.RAM)
    assert record.bundle == renamed.record.bundle


def test_it_is_shown_as_complete_with_the_commands_to_run_first(renamed, world):
    shown = describe(world.context, find_records(world.context, "web@s1")[-1])
    assert [each.name for each in shown.datasets] == ["flash2/web@s1", "tank/web2@s1"]
    assert all(each.guid is not None for each in shown.datasets)
    (line,) = shown.by_hand
    assert line.startswith("# its snapshot of ")


@pytest.mark.parametrize("options", [{}, {"cold": True}, {"disks_only": True}])
def test_a_restore_refuses_it_and_says_how_to_go_on(renamed, world, options):
    world.pool.rename("flash2/web", "flash/web")
    error = refusal(world, lambda: make_restore_plan(world.context, "web", "s1", **options))
    assert error.reason == "its snapshot of tank/web is one of tank/web2 now"
    assert error.step == "zfs rename tank/web2 tank/web; then try again"
    world.pool.rename("tank/web2", "tank/web")
    make_restore_plan(world.context, "web", "s1", **options)


def test_a_restore_from_a_bundle_elsewhere_refuses_it_too(renamed, world):
    bundle = Path(renamed.record.bundle)
    act = lambda: make_restore_plan(world.context, "web", "s1", bundle=bundle)  # noqa: E731
    assert "is one of" in refusal(world, act).reason


def test_a_pool_that_was_imported_by_another_name_is_named(renamed, world):
    world.pool.rename("tank/web2", "tank/web")
    error = refusal(world, lambda: make_restore_plan(world.context, "web", "s1"))
    assert error.reason == "its snapshot of flash/web is one of flash2/web now"
    assert error.step == "zpool export flash2; zpool import flash2 flash; then try again"


def test_clone_and_verify_refuse_it_and_record_no_result(renamed, world):
    record = records(world)[0]
    for act in (
        lambda: complete_source(world.context, record),
        lambda: verify(world.context, record, VerifyOptions()),
    ):
        assert "is one of" in refusal(world, act).reason
    assert records(world)[0].verified is None


def test_the_old_name_may_be_in_use(renamed, world):
    world.pool.rename("flash2/web", "flash/web")
    world.pool.create("tank/web")
    error = refusal(world, lambda: make_restore_plan(world.context, "web", "s1"))
    assert error.step == "move tank/web away"


def test_prune_leaves_it_alone(renamed, world):
    done = prune(Config.model_validate({"paths": world.paths.model_dump()}), world.pool)
    assert [verdict.action.value for verdict in done.decisions] == ["keep"]


def test_retention_keeps_it(renamed, world):
    assert all_records(world.context.store, world.pool.snapshots()) == []


def test_a_received_copy_is_no_rename(story, world):
    world.pool.replicate("tank/web@s1", "backup/web")
    world.pool.destroy_snapshots(["tank/web@s1"])
    world.hooks.log.clear()
    (record,) = records(world)
    assert record.datasets == ("flash/web",)
    assert record.state is BundleState.INCOMPLETE
    error = refusal(world, lambda: make_restore_plan(world.context, "web", "s1"))
    assert "are missing: tank/web@s1" in error.reason


def test_a_copy_does_not_hide_a_rename(story, world):
    world.pool.replicate("tank/web@s1", "backup/web")
    world.pool.rename("tank/web", "tank/web2")
    assert records(world)[0].datasets == ("flash/web", "tank/web2")


def test_two_possible_datasets_are_not_guessed_from(story, world):
    copies = [
        replace(each, dataset=f"backup/{number}")
        for each in world.pool.snapshots(["tank/web"])
        for number in (1, 2)
    ]
    found = [*world.pool.snapshots(["flash/web"]), *copies]
    (record,) = all_records(world.context.store, found, renamed_too=True)
    assert record.datasets == ("flash/web",)
    assert record.state is BundleState.INCOMPLETE


def test_a_guest_on_a_dataset_that_another_marked_is_found_too(world):
    """Guests that share a dataset share its snapshots, which bear the marks of one."""
    for name in ("one", "two"):
        world.add_guest(name, disks={"vda": "tank/both"})
        take_snapshot(world.context, world.hypervisor.domain(name), SnapshotRequest(f"{name}-s"))
    world.pool.set_properties(["tank/both@two-s"], {"snaporch:run": "another"})
    world.pool.rename("tank/both", "tank/both2")
    assert {each.datasets for each in records(world) if each.domain == "two"} == {("tank/both2",)}


# -- renamed, and mounted where it was -----------------------------------------------------------


@pytest.fixture
def stayed(renamed, world):
    """The paths of the disks lead to the same files, by whatever names."""
    world.resolver.named.update({"tank/web": "tank/web2", "flash/web": "flash2/web"})
    world.pool.create("flash2")
    return renamed


def test_a_restore_rolls_back_the_datasets_by_their_new_names(stayed, world):
    made = make_restore_plan(world.context, "web", "s1")
    assert {each.full_name for each in made.snapshots} == {"tank/web2@s1", "flash2/web@s1"}
    assert "tank/web was renamed, and is tank/web2 now" in world.heard.notes
    restore(world.context, made, safety=True)
    assert {world.pool.read(name) for name in ("tank/web2", "flash2/web")} == {b"first"}
    assert world.hypervisor.domain("web").active


def test_a_restore_from_a_bundle_elsewhere_does_too(stayed, world):
    bundle = Path(stayed.record.bundle)
    made = make_restore_plan(world.context, "web", "s1", bundle=bundle)
    assert {each.dataset for each in made.snapshots} == {"tank/web2", "flash2/web"}


def test_it_is_a_source_for_clones_and_checks(stayed, world):
    assert {m.dataset for m in complete_source(world.context, records(world)[0]).members} == {
        "tank/web2",
        "flash2/web",
    }


def test_an_old_name_that_is_taken_is_refused_all_the_same(stayed, world):
    world.pool.rename("flash2/web", "flash/web")
    world.pool.create("tank/web")
    error = refusal(world, lambda: make_restore_plan(world.context, "web", "s1"))
    assert error.step == "move tank/web away"
