import shutil
from contextlib import ExitStack
from datetime import timedelta

import pytest
from fakes.schedule import HOURLY, NOW

from snaporch import default_paths
from snaporch.errors import NotFoundError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.locks import domain_lock
from snaporch.model import DomainState, VerificationResult, VerifyDepth, iso
from snaporch.schedule.failed_attempts import FailedAttempt, read_failed, write_failed
from snaporch.schedule.forecast import make_forecasts
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.verify.verify import write_result


def the_next(scheduled, now=NOW):
    ((found,),) = [each.next_snapshots for each in make_forecasts(scheduled.context, now)]
    return found


def test_without_any_snapshot_the_first_is_due(scheduled):
    found = the_next(scheduled)
    assert (found.due(NOW), found.reason) == (True, "no snapshot yet")


def test_the_next_follows_the_newest(scheduled):
    scheduled.hours_ago(2, 0)
    found = the_next(scheduled)
    assert found.at == NOW + timedelta(minutes=30)
    assert not found.due(NOW)


def test_missed_ones_are_due_once(scheduled):
    scheduled.hours_ago(30)
    assert the_next(scheduled).due(NOW)
    scheduled.hours_ago(0)
    assert not the_next(scheduled).due(NOW)


def test_snapshots_by_hand_do_not_count(scheduled):
    scheduled.hours_ago(0, policy=None)
    assert the_next(scheduled).due(NOW)


def test_a_name_or_an_inherited_property_does_not_mark_a_snapshot(scheduled):
    scheduled.configure(policy={"manual-ish": HOURLY}, defaults={"policies": ["manual-ish"]})
    scheduled.world.pool.set_properties(["tank/web"], {"snaporch:retention": "manual-ish"})
    scheduled.hours_ago(0, policy=None)
    (each,) = make_forecasts(scheduled.context, NOW)
    assert [v.taken.policy for v in each.retention] == [None]
    assert each.next_snapshots[0].due(NOW)


def test_a_clock_that_went_back_does_not_stop_snapshots(scheduled):
    scheduled.hours_ago(3, 2, 1, 0)
    earlier = NOW - timedelta(hours=2)
    found = the_next(scheduled, earlier)
    assert (found.due(earlier), found.reason) == (True, "the clock was set back")
    scheduled.hours_ago(2)
    assert the_next(scheduled, earlier).at == earlier + timedelta(minutes=30)
    assert the_next(scheduled, earlier + timedelta(minutes=31)).due(earlier + timedelta(minutes=31))


def test_a_failed_snapshot_is_retried_later(scheduled):
    uuid = scheduled.context.hypervisor.domain("web").uuid
    directory = scheduled.context.config.paths.schedule
    write_failed(
        directory, {f"{uuid}/hourly": FailedAttempt(NOW - timedelta(minutes=4), "no agent")}
    )
    found = the_next(scheduled)
    assert found.at == NOW + timedelta(minutes=6)
    assert found.reason == "retry after a failure: no agent"
    assert the_next(scheduled, found.at).due(found.at)


def test_a_failed_attempt_from_the_future_is_ignored(scheduled):
    uuid = scheduled.context.hypervisor.domain("web").uuid
    directory = scheduled.context.config.paths.schedule
    write_failed(directory, {f"{uuid}/hourly": FailedAttempt(NOW + timedelta(days=1), "later")})
    assert the_next(scheduled).due(NOW)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', '{"a": ["x", "y"]}'])
def test_a_damaged_file_of_failures_is_read_as_empty(tmp_path, text):
    (tmp_path / "failed.json").write_text(text)
    assert read_failed(tmp_path) == {}


def test_failures_are_read_as_they_were_written(tmp_path):
    known = {"u/p": FailedAttempt(NOW, "why")}
    write_failed(tmp_path / "new", known)
    write_failed(tmp_path / "new", known)
    assert read_failed(tmp_path / "new") == known


def test_a_forecast_names_the_snapshots_to_delete(scheduled):
    old, *_ = scheduled.hours_ago(3, 2, 1)
    (each,) = make_forecasts(scheduled.context, NOW)
    assert [v.taken.run for v in each.to_delete] == [old.run]
    assert each.names[old.run] == (f"tank/web@{old.snapshot}",)


def test_held_cloned_and_incomplete_snapshots_stay_and_have_a_reason(scheduled):
    held, cloned, torn, *_ = scheduled.hours_ago(7, 6, 5, 2, 1, 0)
    pool = scheduled.world.pool
    pool.hold([f"tank/web@{held.snapshot}"], "mine")
    pool.clone(f"tank/web@{cloned.snapshot}", "tank/copy")
    shutil.rmtree(torn.bundle)
    (each,) = make_forecasts(scheduled.context, NOW)
    reasons = {v.taken.run: v.reason for v in each.retention if not v.delete}
    assert reasons[held.run] == "held, though not in hourly=2"
    assert reasons[cloned.run] == "cloned as tank/copy, though not in hourly=2"
    assert reasons[torn.run].startswith("incomplete")


def test_snapshots_that_came_back_from_a_replica_stay_until_they_are_released(scheduled):
    """The replica kept more of them than the rule here."""
    taken = [each.snapshot for each in scheduled.hours_ago(9, 8, 7, 6)]
    pool = scheduled.world.pool
    for name in taken:
        pool.set_properties([f"tank/web@{name}"], {"snaporch:copy": "nas"})
    scheduled.hours_ago(0)
    (each,) = make_forecasts(scheduled.context, NOW)
    assert each.to_delete == []
    assert each.retention[0].reason == "came back from a replica, though not in hourly=2"
    assert not each.next_snapshots[0].due(NOW)
    for name in taken:
        pool.inherit(f"tank/web@{name}", "snaporch:copy")
    (each,) = make_forecasts(scheduled.context, NOW)
    assert [verdict.taken.snapshot for verdict in each.to_delete] == taken[:3]


def test_copies_that_another_host_sends_after_a_failover_are_not_the_guests_own(scheduled):
    policy = {"hourly": HOURLY | {"replicate": ["usb"]}}
    replica = {"usb": {"dataset": "usb/kvm", "bundles": "/usb/bundles"}}
    scheduled.configure(policy=policy, defaults={"policies": ["hourly"]}, replica=replica)
    own = scheduled.taken(NOW - timedelta(hours=3))
    marked = {"snaporch:replicated": "usb"}
    scheduled.world.pool.set_properties([f"tank/web@{own.snapshot}"], marked)
    scheduled.copied(NOW - timedelta(minutes=5))
    (each,) = make_forecasts(scheduled.context, NOW)
    assert [record.run for record in each.records] == [own.run]
    assert [verdict.taken.run for verdict in each.retention] == [own.run]
    assert each.next_snapshots[0].due(NOW)
    assert each.replications == ()


def test_a_copy_in_a_local_pool_is_not_the_guests_own(scheduled):
    (taken,) = scheduled.hours_ago(0)
    pool = scheduled.world.pool
    pool.replicate(f"tank/web@{taken.snapshot}", "backup/kvm/tank:web")
    pool.set_properties([f"backup/kvm/tank:web@{taken.snapshot}"], {"snaporch:copy": "usb"})
    assert not the_next(scheduled).due(NOW)
    pool.destroy_snapshots([f"tank/web@{taken.snapshot}"])
    assert make_forecasts(scheduled.context, NOW)[0].records == ()
    assert the_next(scheduled).due(NOW)
    shutil.rmtree(taken.bundle)
    assert make_forecasts(scheduled.context, NOW)[0].records == ()
    assert the_next(scheduled).due(NOW)


def test_a_torn_snapshot_does_not_count(scheduled):
    """It is no snapshot of its policy's time, and it displaces no other snapshot."""
    _, second, first, torn = scheduled.hours_ago(3, 2, 1, 0)
    full = f"tank/web@{torn.snapshot}"
    scheduled.world.pool.set_properties([full], {"snaporch:torn": "yes"})
    (each,) = make_forecasts(scheduled.context, NOW)
    reasons = {v.taken.run: v.reason for v in each.retention if not v.delete}
    assert set(reasons) == {second.run, first.run, torn.run}
    assert reasons[torn.run].startswith("incomplete")
    assert the_next(scheduled).due(NOW)


def test_a_policy_without_keep_deletes_nothing(scheduled):
    scheduled.configure(policy={"hourly": {"every": "1h"}}, defaults={"policies": ["hourly"]})
    scheduled.hours_ago(9, 8, 7)
    assert make_forecasts(scheduled.context, NOW)[0].to_delete == []


def test_a_forecast_lists_zfs_once_for_all_domains(scheduled):
    scheduled.world.add_guest("mail")
    scheduled.hours_ago(1)
    listings = []
    scheduled.world.hooks.at["pool.policy_view"] = lambda: listings.append(1)
    assert [each.domain.name for each in make_forecasts(scheduled.context, NOW)] == ["mail", "web"]
    assert len(listings) == 1
    assert [each.domain.name for each in make_forecasts(scheduled.context, NOW, "mail")] == ["mail"]


def test_a_domain_that_does_not_exist(scheduled):
    with pytest.raises(NotFoundError):
        make_forecasts(scheduled.context, NOW, "wbe")


def test_a_run_that_failed_after_its_zfs_snapshots_is_retried(scheduled):
    uuid = scheduled.context.hypervisor.domain("web").uuid
    scheduled.hours_ago(2)
    (failed,) = scheduled.hours_ago(0.25)
    shutil.rmtree(failed.bundle)
    assert the_next(scheduled).due(NOW)
    directory = scheduled.context.config.paths.schedule
    write_failed(
        directory, {f"{uuid}/hourly": FailedAttempt(NOW - timedelta(minutes=14), "store full")}
    )
    found = the_next(scheduled)
    assert (found.at, found.failed.reason) == (NOW - timedelta(minutes=4), "store full")


def test_a_snapshot_that_failed_to_read_back_is_retried(scheduled):
    policy = {"hourly": HOURLY | {"verify": True}}
    scheduled.configure(policy=policy, defaults={"policies": ["hourly"]})
    (failed,) = scheduled.hours_ago(0)
    write_result(
        scheduled.context,
        failed,
        VerificationResult(NOW, passed=False, reached=VerifyDepth.NOTHING),
    )
    assert the_next(scheduled).due(NOW)


def test_a_failed_verification_makes_no_snapshot_due_before_its_time(scheduled):
    (failed,) = scheduled.hours_ago(0)
    write_result(
        scheduled.context,
        failed,
        VerificationResult(NOW, passed=False, reached=VerifyDepth.CHECKED),
    )
    assert the_next(scheduled).at == NOW + timedelta(minutes=30)
    ((verdict,),) = [each.retention for each in make_forecasts(scheduled.context, NOW)]
    assert verdict.taken.passed is False


def test_failures_are_kept_in_the_spare_directory_until_their_own_can_be_written(tmp_path):
    place, spare = tmp_path / "place", tmp_path / "spare"
    place.write_text("no directory")
    known = {"u/p": FailedAttempt(NOW, "disk full")}
    with pytest.raises(UnavailableError):
        write_failed(place, known, spare=spare)
    assert read_failed(place, spare=spare) == known
    place.unlink()
    write_failed(place, {}, spare=spare)
    assert (read_failed(place, spare=spare), list(spare.iterdir())) == ({}, [])


def found_unchanged(scheduled, record, moment):
    names = [f"{dataset}@{record.snapshot}" for dataset in record.datasets]
    scheduled.world.pool.set_properties(names, {"snaporch:unchanged": iso(moment)})


def test_an_unchanged_check_counts_as_a_snapshot_of_its_time(scheduled):
    (record,) = scheduled.hours_ago(30)
    found_unchanged(scheduled, record, NOW - timedelta(minutes=15))
    assert the_next(scheduled).at == NOW + timedelta(minutes=30)
    later = NOW + timedelta(minutes=30)
    assert the_next(scheduled, later).due(later)


def test_an_unchanged_check_from_the_future_does_not_count(scheduled):
    (record,) = scheduled.hours_ago(30)
    found_unchanged(scheduled, record, NOW + timedelta(hours=9))
    assert the_next(scheduled).due(NOW)


def test_an_unchanged_check_ends_a_failed_attempt(scheduled):
    uuid = scheduled.context.hypervisor.domain("web").uuid
    directory = scheduled.context.config.paths.schedule
    (record,) = scheduled.hours_ago(30)
    write_failed(
        directory, {f"{uuid}/hourly": FailedAttempt(NOW - timedelta(minutes=16), "no zfs")}
    )
    found_unchanged(scheduled, record, NOW - timedelta(minutes=15))
    assert the_next(scheduled).failed is None


def test_an_unchanged_check_from_the_future_ends_no_failed_attempt(scheduled):
    uuid = scheduled.context.hypervisor.domain("web").uuid
    directory = scheduled.context.config.paths.schedule
    (record,) = scheduled.hours_ago(30)
    write_failed(
        directory, {f"{uuid}/hourly": FailedAttempt(NOW - timedelta(minutes=16), "no zfs")}
    )
    found_unchanged(scheduled, record, NOW + timedelta(hours=9))
    assert the_next(scheduled).failed.reason == "no zfs"


def test_snapshots_of_a_guest_that_is_off_stay(scheduled):
    """A month of unchanged checks displaces no snapshot."""
    scheduled.hours_ago(900, 899, 720)
    scheduled.world.guest().live, scheduled.world.guest().state = None, DomainState.OFF
    (off,) = scheduled.hours_ago(719)
    for hours in range(718, 0, -24):
        now = NOW - timedelta(hours=hours)
        domain = scheduled.context.hypervisor.domain("web")
        record = take_snapshot(
            scheduled.context, domain, SnapshotRequest(policy="hourly", if_changed=True)
        )
        assert record.run == off.run
        found_unchanged(scheduled, record, now)
        (each,) = make_forecasts(scheduled.context, now)
        kept = [v.taken.created for v in each.retention if not v.delete]
        assert kept[-2:] == [NOW - timedelta(hours=720), NOW - timedelta(hours=719)]


def locked(uuid):
    return domain_lock(default_paths.LOCKS, "x", uuid, "verify", wait=0, interrupt=Interrupt())


def begin_clone(world, name):
    clone = world.add_guest(name)
    (world.paths.clones / clone.uuid).mkdir(parents=True)
    (world.paths.clones / clone.uuid / "making").touch()
    return clone.uuid


def test_clones_of_verifications_are_no_domains_but_leftovers_and_permanent_ones_are(scheduled):
    uuid = begin_clone(scheduled.world, "verify-1")
    (scheduled.world.paths.clones / scheduled.world.add_guest("mine").uuid).mkdir()

    def names():
        return {each.domain.name for each in make_forecasts(scheduled.context, NOW)}

    with locked(uuid):
        assert names() == {"web", "mine"}
    assert names() == {"web", "mine", "verify-1"}, "its process was killed"


def test_a_clone_that_is_made_while_domains_are_listed_is_no_domain(scheduled):
    listed = scheduled.world.hypervisor.domains
    with ExitStack() as stack:

        def domains():
            stack.enter_context(locked(begin_clone(scheduled.world, "verify-1")))
            return listed()

        scheduled.world.hypervisor.domains = domains
        assert [each.domain.name for each in make_forecasts(scheduled.context, NOW)] == ["web"]
