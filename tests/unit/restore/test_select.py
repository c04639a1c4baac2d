"""The selection of a snapshot: by time, or with a bundle elsewhere."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes import manifests

from snaporch.bundle.manifest import MANIFEST_NAME
from snaporch.errors import NotFoundError, RefusedError, UsageError
from snaporch.model import BundleState, DomainState
from snaporch.restore.bundle_checks import check_bundle
from snaporch.restore.confirm_and_restore import RestoreRequest
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.restore.select import newest_until, parse_moment
from snaporch.restore.source import find_records


def utc(hour):
    return datetime(2026, 11, 21, hour, tzinfo=UTC)


def date(record, moment):
    """Have a snapshot be of another time."""
    path = Path(record.bundle) / MANIFEST_NAME
    manifest = manifests.load(path)
    manifest["created"] = moment.isoformat()
    manifests.store(path, manifest)


@pytest.fixture
def three(story):
    """The snapshots s1 of 10:00, s2 of 11:00 and s3 of 12:00."""
    records = [story.record, story.snapshot("s2"), story.snapshot("s3")]
    for hour, record in enumerate(records, start=10):
        date(record, utc(hour))
    story.world.hooks.log.clear()
    return story


@pytest.mark.parametrize(
    ("moment", "name"),
    [
        (utc(10), "s1"),
        (utc(11) - timedelta(milliseconds=1), "s1"),
        (utc(11), "s2"),
        (utc(23), "s3"),
    ],
)
@pytest.mark.parametrize("by", ["name", "uuid"])
def test_the_newest_that_is_not_after_it(three, world, moment, name, by):
    domain = getattr(three.domain, by)
    assert newest_until(world.context, domain, moment).snapshot == name


def test_a_time_before_the_first_snapshot_is_an_error(three, world):
    with pytest.raises(NotFoundError, match=r"its oldest snapshot, s1, was taken after that"):
        newest_until(world.context, "web", utc(9))
    with pytest.raises(NotFoundError, match="no snapshot of it"):
        newest_until(world.context, "mail", utc(9))


def test_a_time_is_local_without_an_offset(monkeypatch):
    import time

    monkeypatch.setenv("TZ", "Etc/GMT-3")
    time.tzset()
    try:
        assert parse_moment("2026-11-21T13:00") == utc(10)
        assert parse_moment("2026-11-21T13:00+01:00") == utc(12)
        assert parse_moment("2026-11-21T13:00Z") == utc(13)
        assert parse_moment("2026-11-21 13:00:00") == utc(10)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("text", ["", "yesterday", "10:00", "2026-13-01", "0001-01-01T00:00"])
def test_an_invalid_time_is_wrong_usage(text):
    with pytest.raises(UsageError):
        parse_moment(text)


@pytest.fixture
def twice(story, world):
    """The guest was moved, and a name was used again; returns the records, the older first."""
    world.add_guest(disks={"vda": "tank/moved"})
    records = [story.record, story.snapshot("s1")]
    for hour, record in enumerate(records, start=10):
        date(record, utc(hour))
    return records


def test_a_name_of_two_runs_is_ambiguous(twice, world):
    for choose in (
        lambda: make_restore_plan(world.context, "web", "s1"),
        lambda: find_records(world.context, "web@s1"),
    ):
        with pytest.raises(
            RefusedError, match="stands for several instants; name the run"
        ) as refused:
            choose()
        for record in twice:
            assert f"web@{record.run} on {', '.join(record.datasets)}" in refused.value.step


def test_snapshots_of_a_former_name_are_named(story, world):
    with pytest.raises(NotFoundError) as caught:
        find_records(world.context, "shop@s1")
    assert caught.value.step == "other domains have web@s1; see `snaporch list`"
    with pytest.raises(NotFoundError) as caught:
        find_records(world.context, "web@nope")
    assert caught.value.step == "see `snaporch list web`"
    with pytest.raises(NotFoundError) as caught:
        find_records(world.context, "shop@nope")
    assert caught.value.step == "see `snaporch list`"


def test_each_of_them_can_be_named_by_its_run(twice, world):
    for record in twice:
        (found,) = find_records(world.context, f"web@{record.run}")
        made = make_restore_plan(world.context, "web", record.run)
        for one in (found, made.record):
            assert (one.run, one.datasets) == (record.run, record.datasets)


@pytest.mark.parametrize(("hour", "index"), [(10, 0), (11, 1)])
def test_a_time_chooses_a_run_and_not_a_name(twice, world, hour, index):
    request = RestoreRequest("web", to_time=f"{utc(hour)}")
    assert request.choose(world.context) == (twice[index].uuid, twice[index].run)


# -- a bundle elsewhere -------------------------------------------------------------------------


def plan(world, bundle, name="s1", *, domain="web", **how):
    return make_restore_plan(world.context, domain, name, discard_newer=True, bundle=bundle, **how)


@pytest.fixture
def elsewhere(story, world):
    place = world.root / "elsewhere"
    shutil.move(story.record.bundle, place)
    return place


def test_the_guest_is_resumed_from_it(story, world, elsewhere):
    made = check_bundle(world.context, plan(world, elsewhere))
    assert restore(world.context, made, safety=True).resumed
    assert world.guest().ram == story.ram
    assert story.content() == {b"first"}


def test_it_need_not_be_marked_on_the_snapshots(story, world, elsewhere):
    """As after a replication without properties."""
    for dataset in story.datasets:
        world.pool._find(f"{dataset}@s1")[1].properties.clear()
    assert plan(world, elsewhere).ram == elsewhere / "ram.save"


def test_a_torn_snapshot_is_refused_with_any_bundle(story, world, elsewhere):
    world.pool.set_properties(["tank/web@s1"], {"snaporch:torn": "yes"})
    with pytest.raises(RefusedError, match="its disks are not of one instant"):
        plan(world, elsewhere)


def test_a_relative_path_becomes_absolute(story, world, elsewhere, monkeypatch):
    """libvirtd has another working directory."""
    monkeypatch.chdir(elsewhere.parent)
    assert plan(world, Path("elsewhere")).ram == elsewhere / "ram.save"


@pytest.mark.parametrize(("domain", "name"), [("web", "s2"), ("mail", "s1")])
def test_it_must_be_of_the_snapshot_that_was_named(story, world, elsewhere, domain, name):
    story.snapshot("s2")
    with pytest.raises(RefusedError, match="is the bundle of web@s1"):
        plan(world, elsewhere, name, domain=domain)


def test_its_guids_must_be_those_of_the_snapshots(story, world, elsewhere):
    world.pool.remake("tank/web@s1")
    with pytest.raises(RefusedError, match="some of its snapshots are missing: tank/web@s1"):
        plan(world, elsewhere)


def test_it_must_be_complete(story, world, elsewhere):
    (elsewhere / "ram.save").unlink()
    with pytest.raises(RefusedError, match=f"the bundle is {BundleState.INCOMPLETE}"):
        plan(world, elsewhere)
    assert plan(world, elsewhere, cold=True).boot


def test_its_checksums_are_verified(story, world, elsewhere):
    data = bytearray((elsewhere / "ram.save").read_bytes())
    data[-1] ^= 1
    (elsewhere / "ram.save").write_bytes(data)
    with pytest.raises(RefusedError, match="damaged"):
        check_bundle(world.context, plan(world, elsewhere))


def test_a_directory_that_is_no_bundle_is_refused(story, world):
    with pytest.raises(NotFoundError):
        plan(world, world.root / "nothing")
    (world.root / "empty").mkdir()
    with pytest.raises(RefusedError, match="manifest cannot be read"):
        plan(world, world.root / "empty")


# -- final states -------------------------------------------------------------------------------


def test_paused_is_resumed_and_does_not_run(story, world):
    made = make_restore_plan(world.context, "web", "s1", paused=True)
    restored = restore(world.context, made, safety=False)
    assert (restored.state, restored.resumed) == (DomainState.PAUSED, True)
    assert world.guest().ram == story.ram


def test_paused_without_ram_is_refused(make_story, world):
    make_story(state=DomainState.OFF)
    with pytest.raises(RefusedError, match="has no RAM to resume from; use --disks-only") as raised:
        make_restore_plan(world.context, "web", "s1", paused=True)
    assert raised.value.step.endswith("and then: virsh start web")
    assert "--cold" not in raised.value.step, "it would boot at once"


def test_only_the_disks_leave_it_off_and_defined(story, world):
    made = make_restore_plan(world.context, "web", "s1", disks_only=True)
    restored = restore(world.context, made, safety=False)
    assert (restored.state, restored.resumed) == (DomainState.OFF, False)
    assert story.content() == {b"first"}
    assert world.guest().inactive == story.domain.inactive_xml


def test_only_the_disks_need_no_ram(story, world):
    (Path(story.record.bundle) / "ram.save").unlink()
    assert not make_restore_plan(world.context, "web", "s1", disks_only=True).boot
