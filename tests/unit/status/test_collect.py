import fcntl
import os
import re
import shutil
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes.schedule import HOURLY, NOW

from snaporch import default_paths
from snaporch.config import StatusOptions
from snaporch.fence import Fence
from snaporch.hypervisor import StartHookProblem
from snaporch.interrupt import Interrupt
from snaporch.journal import Journal, Note, Step
from snaporch.locks import domain_lock, record_check, replication_lock_name
from snaporch.model import DomainState, Level, iso
from snaporch.restore.start_bar import with_start_bar
from snaporch.schedule.apply_retention import prune_daily
from snaporch.schedule.failed_attempts import FailedAttempt, write_failed
from snaporch.schedule.forecast import make_forecasts, record_carried_out
from snaporch.schedule.recurrence import times
from snaporch.snapshot.group import snapshot_group
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.status.collect import collect_status, current_status, usage
from snaporch.status.problems import find_problems
from snaporch.zfs import BlockingMount


def policy(status, domain=0):
    (found,) = status.domains[domain].policies
    return found


def test_last_and_next_of_each_policy(scheduled, standing):
    scheduled.taken(NOW - timedelta(minutes=10))
    found = policy(standing())
    assert (found.policy, found.missed) == ("hourly", 0)
    assert found.last == NOW - timedelta(minutes=10)
    assert found.next.at == NOW + timedelta(minutes=30)


def test_a_machine_that_pulls_reports_its_own_guests_too(scheduled):
    source = {"host": "root@vm1", "dataset": "backup/vm1", "bundles": "/srv/vm1", "domains": ["*"]}
    scheduled.configure(source={"vm1": source})
    status = current_status(scheduled.context, NOW)
    assert [each.name for each in status.domains] == ["web"]
    assert [each.source for each in status.sources] == ["vm1"]


def test_the_newest_of_each_level(scheduled, standing):
    scheduled.hours_ago(5, 3)
    scheduled.hours_ago(2, 1, level="crash", policy=None)
    (web,) = standing().domains
    hour = timedelta(hours=1)
    assert web.newest == {Level.RAM: NOW - 3 * hour, Level.CRASH: NOW - hour}
    assert web.counts == {Level.RAM: 2, Level.CRASH: 2}
    assert web.last.level is Level.CRASH


@pytest.mark.parametrize(
    ("minutes", "missed"),
    # the snapshot is of 12:20; 13:00 may come until 13:30, and 14:00 until 14:30
    [(0, 0), (30, 0), (59, 0), (60, 0), (61, 1), (119, 1), (120, 1), (121, 2), (9999, 2)],
)
def test_times_that_were_missed(scheduled, standing, minutes, missed):
    scheduled.taken(NOW - timedelta(minutes=10))
    assert policy(standing(NOW + timedelta(minutes=minutes))).missed == missed


def test_nothing_is_missed_before_the_first_snapshot(standing):
    assert policy(standing()).missed == 0
    assert policy(standing()).last is None


def test_a_failure_delays_the_next_time_but_missed_times_stay_missed(scheduled, standing):
    scheduled.taken(NOW - timedelta(hours=5))
    key = f"{scheduled.world.guest().uuid}/hourly"
    write_failed(scheduled.context.config.paths.schedule, {key: FailedAttempt(NOW, "no such luck")})
    found = policy(standing())
    assert found.next.failed.reason == "no such luck"
    assert found.next.at > NOW
    assert found.missed == 2


def test_a_snapshot_after_a_failure_ends_it(scheduled, standing):
    key = f"{scheduled.world.guest().uuid}/hourly"
    before = NOW - timedelta(minutes=20)
    write_failed(
        scheduled.context.config.paths.schedule, {key: FailedAttempt(before, "no such luck")}
    )
    scheduled.taken(NOW - timedelta(minutes=10))
    assert policy(standing()).next.failed is None


def test_a_policy_that_does_not_exist_is_reported(scheduled, standing):
    scheduled.world.pool.set_properties(["tank/web"], {"snaporch:policy": "dayly"})
    status = standing()
    assert status.domains[0].unknown_policies == ("dayly",)
    (text,) = [e.text for e in find_problems(status, StatusOptions()) if e.code == "unknown-policy"]
    assert text == (
        "snaporch:policy of tank/web names the policy 'dayly', which does not exist, and it has no "
        "other; see: snaporch plan"
    )


def test_a_failed_verification_counts_as_long_as_its_snapshot_exists(scheduled, standing):
    first, second = scheduled.hours_ago(2, 1)
    pool = scheduled.world.pool

    def verified(record, text):
        pool.set_properties([f"tank/web@{record.snapshot}"], {"snaporch:verified": text})

    def failures():
        problems = find_problems(standing(), StatusOptions())
        return [each.text for each in problems if each.code == "verify-failed"]

    verified(first, "2026-06-10T11:00:00Z failed checked disks steps:disks,script")
    verified(second, "2026-06-10T12:00:00Z passed resumed")
    (text,) = failures()
    assert text.startswith(f"the verification of @{first.snapshot} failed; to repeat it: ")
    assert text.endswith(f"snaporch verify --disks --script PATH web@{first.snapshot}")
    pool.destroy_snapshots([f"tank/web@{first.snapshot}"])
    assert failures() == []


# -- runs ----------------------------------------------------------------------------------------


@pytest.fixture
def opened(scheduled):
    """The journal of a run of web that has come to a step."""

    def make(*steps):
        context = scheduled.context
        plan = make_plan(context, context.hypervisor.domain("web"))
        journal = Journal(context.config.paths.journal, plan.facts)
        for step in steps:
            with journal.step(step):
                pass
        return journal

    return make


def held(scheduled, doing="snapshot"):
    web, runtime = scheduled.world.guest(), scheduled.context.config.paths.runtime
    return domain_lock(runtime, web.name, web.uuid, doing, wait=0, interrupt=Interrupt())


@pytest.mark.parametrize(
    ("steps", "phase", "window"),
    [
        ((), "preparing", False),
        ((Step.PREPARE,), "freezing", False),
        ((Step.PREPARE, Step.FREEZE), "frozen", True),
        ((Step.PREPARE, Step.FREEZE, Step.POOL_SNAPSHOT), "committing", True),
        ((Step.PREPARE, Step.FREEZE, Step.POOL_SNAPSHOT, Step.RELEASE), "sealing", False),
    ],
)
def test_a_run_under_way(scheduled, standing, opened, steps, phase, window):
    opened(*steps)
    with held(scheduled):
        (run,) = standing().runs
    assert (run.domain, run.kind, run.phase, run.in_window) == ("web", "snapshot", phase, window)
    assert run.locked
    assert run.since - datetime.now(UTC) < timedelta(seconds=1)


@pytest.mark.parametrize("content", ['{"format": 99}\n', "garbage\n"])
def test_an_interrupted_run_and_an_unreadable_journal(scheduled, standing, opened, content):
    opened(Step.PREPARE)
    strange = scheduled.context.config.paths.journal / "zz.jsonl"
    strange.write_text(content)
    run, other = standing().runs
    assert not run.locked
    assert (other.kind, other.path) == ("", str(strange))
    assert other.step in ("use the snaporch that wrote it", "see docs/how-to/recovery.md")


@pytest.mark.parametrize("doing", [None, "recover", "snapshot"])
def test_a_guest_that_a_run_may_still_hold(scheduled, standing, opened, doing):
    """The process that is to resume it has not done so yet."""
    opened(Step.PREPARE).note(Note.SUSPENDED)
    with held(scheduled, doing) if doing else nullcontext():
        (run,) = standing().runs
    assert (run.guest_may_be_frozen, run.locked) == (True, doing == "snapshot")


def test_a_guardian_is_known_by_its_lock_on_the_journal(standing, opened):
    journal = opened(Step.PREPARE)
    journal.note(Note.SUSPENDED)
    assert not standing().runs[0].guarded
    with journal.path.open("rb") as guardian:
        fcntl.flock(guardian, fcntl.LOCK_SH)
        assert standing().runs[0].guarded


def test_a_paused_guest_may_be_held_if_its_journal_is_damaged(scheduled, standing, opened):
    journal = opened(Step.PREPARE)
    scheduled.world.guest().state = DomainState.PAUSED
    assert not standing().runs[0].guest_may_be_frozen  # each suspend is noted before
    with journal.path.open("a") as stream:
        stream.write("not JSON\n")
    assert standing().runs[0].guest_may_be_frozen


def test_a_guest_that_an_undo_has_left_barred(scheduled, standing):
    guest = scheduled.world.guest()
    guest.live, guest.state = None, DomainState.OFF
    whole, guest.inactive = guest.inactive, with_start_bar(scheduled.context, guest.inactive)
    ((name, text),) = standing().barred_guests
    assert (name, "cannot be started" in text) == ("web", True)
    seen = make_forecasts(scheduled.context, NOW)
    guest.inactive = whole  # its restore has just ended
    assert collect_status(scheduled.context, seen, NOW).barred_guests == ()


def test_a_rebuild_that_is_not_complete(scheduled, standing):
    assert standing().unfinished_rebuilds == ()
    scheduled.context.pool.set_properties(["tank/web"], {"snaporch:rebuild": "finish"})
    assert standing().unfinished_rebuilds == ("tank/web",)


def test_overlays_of_no_run(scheduled, standing, opened):
    journal = opened(Step.PREPARE)
    overlays = scheduled.context.config.paths.overlays
    (overlays / journal.path.stem).mkdir(parents=True)
    (overlays / "20200101T000000Z-0badcafe").mkdir()
    assert standing().overlays_without_journal == ()  # an empty one is no problem
    (overlays / "20200101T000000Z-0badcafe" / "vda.qcow2").touch()
    assert standing().overlays_without_journal == (str(overlays / "20200101T000000Z-0badcafe"),)


def test_overlays_removed_meanwhile_are_no_problem(scheduled, standing, monkeypatch):
    directory = scheduled.context.config.paths.overlays / "20200101T000000Z-0badcafe"
    directory.mkdir(parents=True)
    overlay = directory / "vda.qcow2"
    overlay.touch()

    journals, real = scheduled.context.config.paths.journal, os.listdir
    journals.mkdir(parents=True, exist_ok=True)

    def listdir(path):
        if path == journals and directory.exists():  # its run ends before journals are listed
            overlay.unlink()
            directory.rmdir()
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    assert standing().overlays_without_journal == ()
    assert not directory.exists()


@pytest.mark.parametrize(
    ("limits", "reported"),
    [
        ({"overlay_max_mib": 1}, "uses 3 MiB.*more than paths.overlay_max_mib"),
        ({"overlay_max_mib": 3}, None),
        ({"overlay_floor_mib": 1 << 30}, "less than paths.overlay_floor_mib"),
    ],
)
def test_overlays_of_an_unreadable_journal_are_watched(
    scheduled, standing, opened, limits, reported
):
    """No guardian can: it needs the facts in the journal."""
    config = scheduled.context.config
    paths = config.paths.model_copy(update={"overlay_floor_mib": 0} | limits)
    scheduled.context.config = config.model_copy(update={"paths": paths})
    journal = opened(Step.PREPARE)
    overlay, _ = on_overlay(scheduled, journal.path.stem)
    overlay.parent.mkdir(parents=True)
    overlay.write_bytes(b"x" * (3 << 20))
    before = standing()
    assert (before.overlays_without_journal, before.exceeded_limits) == ((), ())
    assert before.domains[0].unknown_overlays == ()
    first, _, rest = journal.path.read_text().partition("\n")
    journal.path.write_text(first.replace('"format": 2', '"format": 99') + "\n" + rest)
    status = standing()
    assert status.overlays_without_journal == (str(overlay.parent),)
    assert status.domains[0].unknown_overlays == (str(overlay),)
    found = [text for _, text in status.exceeded_limits]
    assert len(found) == (reported is not None)
    assert reported is None or re.search(reported, found[0])
    with held(scheduled):  # a run that is alive watches over its guest
        assert standing().overlays_without_journal == ()


def test_overlays_that_no_guest_uses_exceed_no_limit(scheduled, standing):
    """They may be older than their bases, as those in quarantine: a commit could lose writes."""
    config = scheduled.context.config
    paths = config.paths.model_copy(update={"overlay_floor_mib": 1 << 30})
    scheduled.context.config = config.model_copy(update={"paths": paths})
    (paths.overlays / "quarantine" / "run").mkdir(parents=True)
    status = standing()
    assert status.exceeded_limits == ()


def test_overlays_in_quarantine_are_no_unknown_ones(scheduled, standing):
    overlays = scheduled.context.config.paths.overlays
    quarantine = overlays / "quarantine"
    quarantine.mkdir(parents=True)
    assert standing().quarantined == ()
    (quarantine / "run").mkdir()
    assert standing().quarantined == ()  # its overlay was deleted
    (quarantine / "run" / "vda.qcow2").touch()
    status = standing()
    assert (status.quarantined, status.overlays_without_journal) == ((str(quarantine / "run"),), ())
    assert status.as_json()["quarantined"] == [str(quarantine / "run")]


def on_overlay(scheduled, run="gone"):
    web = scheduled.world.guest()
    overlay = scheduled.context.config.paths.overlays / run / "vda.qcow2"
    (base,) = web.sources()[0].values()
    web.live = web.live.replace(base, str(overlay))
    return overlay, base


def test_a_guest_on_an_overlay_of_no_run(scheduled, standing, opened):
    overlay, _ = on_overlay(scheduled)
    assert standing().domains[0].unknown_overlays == (str(overlay),)
    with held(scheduled):
        assert standing().domains[0].unknown_overlays == ()


@pytest.mark.parametrize("off", [False, True])
def test_a_definition_on_an_overlay_of_no_run(scheduled, standing, off):
    """Its next start would use the overlay."""
    overlay, base = on_overlay(scheduled)
    web = scheduled.world.guest()
    web.live = web.live.replace(str(overlay), base)
    web.inactive = web.inactive.replace(base, str(overlay))
    if off:
        scheduled.world.hypervisor.destroy(web.uuid)
    assert standing().domains[0].unknown_overlays == (str(overlay),)


def test_a_run_that_ends_meanwhile_is_no_problem(scheduled, standing):
    overlay, base = on_overlay(scheduled)
    web = scheduled.world.guest()
    ask = scheduled.world.hypervisor.sources

    def settled(uuid):
        web.live = web.live.replace(str(overlay), base)
        return ask(uuid)

    scheduled.world.hypervisor.sources = settled
    assert standing().domains[0].unknown_overlays == ()


@pytest.mark.parametrize(("doing", "is_shown"), [("replicate", True), ("retention", False)])
def test_a_replication_that_keeps_retention_waiting_is_shown(scheduled, standing, doing, is_shown):
    web = scheduled.world.guest()
    scheduled.taken(NOW)
    name = replication_lock_name(web.uuid)
    with domain_lock(default_paths.LOCKS, web.name, name, doing, wait=0, interrupt=Interrupt()):
        (domain,) = standing().domains
    assert (domain.replicated_by is not None) == is_shown
    assert standing().domains[0].replicated_by is None


# -- the scheduler and the store -----------------------------------------------------------------


def test_the_scheduler_that_runs_is_shown(scheduled, standing):
    assert not standing().scheduler.is_active
    runtime = scheduled.context.config.paths.runtime
    with domain_lock(runtime, "schedule", "schedule", "daemon", wait=0, interrupt=Interrupt()):
        scheduler = standing().scheduler
    assert (scheduler.holder.doing, scheduler.holder.pid) == ("daemon", os.getpid())
    assert scheduler.is_active
    assert scheduler.refresh == scheduled.context.config.schedule.refresh


def test_the_daemons_last_check_is_shown(scheduled, standing):
    runtime = scheduled.context.config.paths.runtime
    with domain_lock(runtime, "schedule", "schedule", "daemon", wait=0, interrupt=Interrupt()):
        assert standing().scheduler.holder.checked == ""
        for at in (NOW, NOW + timedelta(hours=1)):
            record_check(runtime, at)
            scheduler = standing().scheduler
            assert (scheduler.holder.doing, scheduler.checked) == ("daemon", at)
    record_check(runtime, NOW)  # the daemon does not hold the lock
    assert standing().scheduler.checked is None


def test_the_last_prune_is_known(scheduled, standing):
    assert standing().scheduler.pruned is None
    prune_daily(scheduled.context, lambda: False)
    began = standing().scheduler.pruned
    assert abs(datetime.now(UTC) - began) < timedelta(minutes=1)


def test_the_store_is_measured(tmp_path):
    store = tmp_path / "bundles"
    for name, size in (
        ("u/r1/ram.save", 100),
        ("u/r1/manifest.json", 11),
        ("v/r2/manifest.json", 5),
        ("u/.r3.partial/ram.save", 20),
        ("u/safety-x/000.zfs", 30),
        ("v/.ram.raw", 40),
        (".trash/t.u.r0/ram.save", 7),
        (".encrypted/nas/u/r1/manifest.json", 50),
        (".encrypted/nas/u/.r1.partial/ram.save.age", 60),
    ):
        path = store / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    found = usage(store)
    assert (found.bundles, found.bundle_bytes) == (2, 116)
    assert (found.other_bytes, found.trash_bytes) == (200, 7)
    assert 0 < found.free_bytes < found.size_bytes


def test_a_store_that_does_not_exist_yet_has_the_space_of_its_file_system(tmp_path):
    found = usage(tmp_path / "not" / "yet")
    assert found.bundles == 0
    assert found.size_bytes == usage(Path(tmp_path)).size_bytes


def test_zfs_is_listed_once(scheduled, standing):
    scheduled.hours_ago(5, 4, 3, 2, 1)
    calls = []
    found = scheduled.world.pool.policy_view()
    scheduled.world.pool.policy_view = lambda: calls.append(1) or found
    for name in ("snapshots", "holds", "clones", "sizes", "snapshot_listing", "datasets"):
        setattr(scheduled.world.pool, name, lambda *_: pytest.fail("a listing more"))
    standing()
    assert calls == [1]


# -- no snapshot is taken, and no failure is reported ---------------------------------------------


def codes(scheduled, status):
    return [each.code for each in find_problems(status, scheduled.context.config.status)]


def test_a_policy_that_never_took_a_snapshot(scheduled, standing):
    assert "never" in codes(scheduled, standing())
    record_carried_out(scheduled.context, make_forecasts(scheduled.context, NOW), NOW)
    later = NOW + timedelta(minutes=30)
    assert "never" not in codes(scheduled, standing(later))
    assert "never" in codes(scheduled, standing(later + timedelta(seconds=1)))


def test_the_time_of_the_first_run_of_a_policy_does_not_move(scheduled, standing):
    for minutes in (0, 5, 31):
        moment = NOW + timedelta(minutes=minutes)
        record_carried_out(scheduled.context, make_forecasts(scheduled.context, moment), moment)
    assert "never" in codes(scheduled, standing(moment))


def test_a_clock_that_was_set_back_delays_the_problem_no_longer_than_a_first_run(
    scheduled, standing
):
    later = NOW + timedelta(days=3)
    record_carried_out(scheduled.context, make_forecasts(scheduled.context, later), later)
    assert "never" in codes(scheduled, standing())
    record_carried_out(scheduled.context, make_forecasts(scheduled.context, NOW), NOW)
    assert "never" not in codes(scheduled, standing())


def test_a_snapshot_from_the_future_does_not_count(scheduled, standing):
    record_carried_out(scheduled.context, make_forecasts(scheduled.context, NOW), NOW)
    scheduled.taken(NOW + timedelta(days=3))
    assert codes(scheduled, standing(NOW + timedelta(hours=1))) == ["never", "scheduler-inactive"]


def test_incomplete_snapshots_do_not_count(scheduled, standing):
    (record,) = scheduled.hours_ago(0)
    shutil.rmtree(record.bundle)
    status = standing()
    assert policy(status).last is None
    assert "never" in codes(scheduled, status)


def test_a_domain_that_was_renamed_out_of_its_policy(scheduled, standing):
    scheduled.configure(policy={"hourly": HOURLY | {"domains": ["we*"]}})
    scheduled.hours_ago(0)
    assert codes(scheduled, standing()) == []
    scheduled.world.guest().inactive = scheduled.world.guest().inactive.replace(
        "<name>web</name>", "<name>shop</name>"
    )
    scheduled.world.guest().name = "shop"
    assert codes(scheduled, standing()) == ["no-policy", "unused-policy"]


def test_a_configuration_without_policies(scheduled, standing):
    scheduled.hours_ago(0)
    scheduled.configure()
    assert codes(scheduled, standing()) == ["no-policy"]


@pytest.fixture
def grouped(scheduled):
    """Two guests of a group, one of them off; the policy is that of the running one."""
    uuid = scheduled.world.add_guest("db", disks={"vda": "tank/db"}).uuid
    guest = scheduled.world.hypervisor.guests[uuid]
    guest.live, guest.state = None, DomainState.OFF
    policies = {"hourly": HOURLY | {"domains": ["web"]}}
    scheduled.configure(policy=policies, group={"shop": {"domains": ["web", "db"]}})
    result = snapshot_group(scheduled.context, "shop", SnapshotRequest(policy="hourly"))
    assert [record.domain for record in result.records] == ["db", "web"]
    return scheduled


def test_a_domain_is_snapshotted_by_the_policy_of_another_one_in_its_group(grouped, standing):
    assert codes(grouped, standing(datetime.now(UTC))) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"group": {"shop": {"domains": ["web"]}}},
        {"domain": {"web": {"policies": ["daily"]}}},
    ],
    ids=["left the group", "no domain has the policy"],
)
def test_a_domain_that_no_policy_of_its_group_snapshots_any_more(grouped, standing, changes):
    policies = {"hourly": HOURLY | {"domains": ["web"]}, "daily": {"keep": {"daily": 2}}}
    group = {"group": {"shop": {"domains": ["web", "db"]}}}
    grouped.configure(**({"policy": policies} | group | changes))
    found = find_problems(standing(datetime.now(UTC)), grouped.context.config.status)
    assert ("no-policy", "db") in [(each.code, each.subject) for each in found]


def test_a_domain_whose_policy_was_removed_on_purpose(scheduled, standing):
    scheduled.hours_ago(0)
    scheduled.configure(domain={"web": {"policies": []}})
    assert codes(scheduled, standing()) == []


def test_a_domain_in_a_policy_that_does_not_exist(scheduled, standing):
    domains = {"hourly": HOURLY | {"domains": ["web", "wbe", "x-*"]}}
    scheduled.configure(policy=domains, domain={"shop-x": {"policies": ["hourly"]}})
    scheduled.hours_ago(0)
    found = find_problems(standing(), scheduled.context.config.status)
    assert [(each.code, each.subject) for each in found] == [
        ("no-such-domain", "policy.hourly"),
        ("no-such-domain", "domain"),
    ]


def test_missed_times_use_the_stagger_of_the_group(scheduled, standing):
    """With the domain's own, which may be earlier, the next time would be missed too soon."""
    staggered = {"hourly": {"every": "1h", "stagger": "1h"}}
    scheduled.configure(
        policy=staggered, defaults={"policies": ["hourly"]}, group={"g": {"domains": ["web"]}}
    )
    scheduled.taken(NOW)
    when = times(scheduled.context.config, "hourly", "g")
    own = times(scheduled.context.config, "hourly", scheduled.world.guest().uuid)
    first = when.after(NOW)
    second = when.after(first)
    assert own.after(first) != second
    grace = timedelta(minutes=30)
    assert policy(standing(second + grace)).missed == 1
    assert policy(standing(second + grace + timedelta(seconds=1))).missed == 2


def test_a_store_that_is_not_mounted(scheduled, standing):
    scheduled.hours_ago(1)
    assert not standing().store_missing
    bundles, elsewhere = scheduled.world.paths.bundles, scheduled.world.root / "elsewhere"
    bundles.rename(elsewhere)
    assert standing().store_missing
    bundles.mkdir()
    assert standing().store_missing
    (bundles / ".snaporch-store").touch()
    assert not standing().store_missing


def test_snapshots_that_are_mounted_elsewhere(scheduled, standing):
    scheduled.hours_ago(1)
    ours = BlockingMount("tank/web@of-others", "the guest db")
    scheduled.world.pool.foreign = [ours, BlockingMount("tank/home@x", "backup (process 7)")]
    assert standing().mounted_snapshots == (ours,)
    assert standing().as_json()["mounted"] == [
        {"snapshot": "tank/web@of-others", "by": "the guest db"}
    ]


def test_a_guest_that_is_off_and_unchanged_is_no_problem_and_has_the_time_of_the_check(
    scheduled, standing
):
    (record,) = scheduled.hours_ago(300)
    scheduled.world.guest().live, scheduled.world.guest().state = None, DomainState.OFF
    looked = NOW - timedelta(minutes=10)
    names = [f"{dataset}@{record.snapshot}" for dataset in record.datasets]
    scheduled.world.pool.set_properties(names, {"snaporch:unchanged": iso(looked)})
    found = policy(standing())
    assert (found.missed, found.unchanged) == (0, looked)
    assert found.last == NOW - timedelta(hours=300)
    assert [t for t in find_problems(standing(), StatusOptions()) if t.subject == "web"] == []
    (domain,) = standing().as_json()["domains"]
    assert domain["policies"][0]["unchanged"] == iso(looked)


def test_an_unchanged_check_from_the_future_is_not_shown(scheduled, standing):
    (record,) = scheduled.hours_ago(1)
    scheduled.world.guest().live, scheduled.world.guest().state = None, DomainState.OFF
    names = [f"{dataset}@{record.snapshot}" for dataset in record.datasets]
    future = iso(NOW + timedelta(seconds=1))
    scheduled.world.pool.set_properties(names, {"snaporch:unchanged": future})
    assert policy(standing()).unchanged is None


def test_a_guest_that_was_started_is_not_called_unchanged(scheduled, standing):
    (record,) = scheduled.hours_ago(1)
    names = [f"{dataset}@{record.snapshot}" for dataset in record.datasets]
    scheduled.world.pool.set_properties(names, {"snaporch:unchanged": iso(NOW)})
    assert policy(standing()).unchanged is None


def test_a_fence_is_shown_and_that_libvirt_would_not_see_it(scheduled, standing):
    domain = scheduled.world.hypervisor.domain("web")
    made = Fence(domain.uuid, "web", run="r", snapshot="s1", replica="nas", delivered="2026")
    scheduled.world.fences.put(made)
    scheduled.world.hypervisor.destroy(domain.uuid)
    status = standing()
    ((name, text),) = status.fenced_guests
    assert name == "web"
    assert "is fenced: it was failed over at @s1 to nas" in text
    assert status.as_json()["fences"] == [
        {
            "domain": "web",
            "uuid": domain.uuid,
            "since": None,
            "snapshot": "s1",
            "replica": "nas",
            "delivered": True,
        }
    ]
    assert f"snaporch fence --remove {domain.uuid}" in text
    assert status.open_fences == status.unfinished_failovers == ()
    assert [policy for each in status.domains for policy in each.policies] == []
    scheduled.world.hypervisor.why_unguarded = StartHookProblem("no hook", "snaporch install")
    ((name, text),) = standing().open_fences
    assert "no hook; run: snaporch install" in text
    scheduled.world.fences.put(replace(made, delivered=""))
    ((name, text),) = standing().unfinished_failovers
    assert text.endswith(f"run: snaporch failover {domain.uuid} --to nas")


def test_a_fenced_guest_that_runs_is_shown(scheduled, standing):
    domain = scheduled.world.hypervisor.domain("web")
    scheduled.world.fences.put(Fence(domain.uuid, "web"))
    ((name, text),) = standing().open_fences
    assert name == "web"
    assert text.endswith(f"virsh destroy {domain.uuid}")
