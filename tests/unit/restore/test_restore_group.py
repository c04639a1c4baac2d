"""The members of a group are restored together: all are off before one is rolled back."""

import os
import shutil
import stat
import threading
from pathlib import Path

import pytest
from fakes.hooks import KilledError, failing, failing_once

from snaporch import default_paths
from snaporch.bundle.manifest import MemberEntry
from snaporch.bundle.store import replace_manifest
from snaporch.config import Config
from snaporch.errors import (
    AttentionError,
    BusyError,
    CalledOffError,
    InterruptedRunError,
    NotFoundError,
    RefusedError,
    RunFailedError,
    SnaporchError,
    UsageError,
)
from snaporch.hypervisor import HypervisorError
from snaporch.interrupt import Interrupt
from snaporch.locks import domain_lock
from snaporch.model import DomainState
from snaporch.recovery.recover_runs import recover
from snaporch.restore import journal, restore_group
from snaporch.restore.confirm_and_restore import RestoreRequest
from snaporch.restore.host_requirements import MemoryNeed, check_needs
from snaporch.restore.journal import HOLD
from snaporch.restore.restore_group import (
    MembersMeeting,
    choose_members,
    preview_group,
    run_group_restore,
)
from snaporch.restore.run import RestorePoint
from snaporch.restore.select_undo import undo_without_copy
from snaporch.snapshot.group import snapshot_group
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PoolError

PATIENCE = 10
"""Seconds after which a thread hangs."""


@pytest.fixture
def pair(world):
    """Two guests on two pools, snapshotted as a group, and written to since."""
    world.add_guest("app", disks={"vda": "tank/app", "vdb": "flash/app"})
    world.add_guest("db", disks={"vda": "tank/db"})
    context = world.with_defaults(ram_strategy="auto")
    document = context.config.model_dump(exclude_unset=True)
    context.config = Config.model_validate(document | {"group": {"pair": {"domains": ["*"]}}})
    assert snapshot_group(context, "pair", SnapshotRequest(name="s1")).failures == []
    world.then = {name: world.guest(name).ram for name in ("app", "db")}
    for name in ("app", "db"):
        world.guest(name).ram = f"later, in {name}".encode()
    world.hooks.log.clear()
    return world


def put_back(world, name="db@s1", *, wait=0, jobs=None, confirm=None, **options):
    request = RestoreRequest(name, **options)
    return run_group_restore(world.context, request, confirm=confirm, wait=wait, jobs=jobs)


def running_before(world):
    """No guest has noticed anything, and nothing is left."""
    untouched = all(
        world.guest(name).ram.startswith(b"later")
        and world.guest(name).state is DomainState.RUNNING
        for name in ("app", "db")
    )
    return untouched and world.leftovers() == []


def test_both_go_on_where_they_were(pair):
    outcome = put_back(pair)
    assert outcome.failures == []
    assert [each.record.full_name for each in outcome.restored] == ["app@s1", "db@s1"]
    assert all(each.resumed and Path(each.undo).exists() for each in outcome.restored)
    assert {name: pair.guest(name).ram for name in ("app", "db")} == pair.then
    assert pair.leftovers() == []


def test_none_is_rolled_back_before_all_are_off(pair):
    """The last guest to be stopped takes its time; the other one is off, and waits."""
    rolled_back, early = threading.Event(), []
    pair.hooks.at["pool.rollback tank/db@s1"] = rolled_back.set
    pair.hooks.at["hypervisor.destroy app"] = lambda: early.append(rolled_back.wait(1))
    outcome = put_back(pair)
    assert early == [False]
    assert rolled_back.is_set()
    assert len(outcome.restored) == 2


def test_none_is_stopped_before_all_are_saved(pair):
    stopped, early = threading.Event(), []
    pair.hooks.at["hypervisor.destroy db"] = stopped.set
    pair.hooks.at[f"pool.hold tank/app@s1 {HOLD}"] = lambda: early.append(stopped.wait(1))
    outcome = put_back(pair)
    assert early == [False]
    assert len(outcome.restored) == 2


def test_one_at_a_time_is_rolled_back_and_resumed(pair):
    put_back(pair, jobs=1)
    order = [act for act in pair.hooks.acts() if act in ("pool.rollback", "hypervisor.restore")]
    assert order.count("hypervisor.restore") == 2
    first = order.index("hypervisor.restore")
    assert order[first + 1] == "pool.rollback"  # of the other one
    assert order[:first].count("pool.rollback") in (1, 2)  # db has one dataset, app two


def test_a_member_that_is_refused_stops_all_before_any_is_touched(pair):
    pair.pool.hold(["tank/app@s1"], "other")
    pair.pool.snapshot(["tank/app@newer"], {})
    with pytest.raises(RefusedError, match="newer"):
        put_back(pair)
    assert running_before(pair)


def test_a_member_that_cannot_be_saved_stops_none(pair):
    pair.hooks.at[f"pool.hold tank/db@s1 {HOLD}"] = failing(PoolError("tank/db", "broken"))
    outcome = put_back(pair)
    assert outcome.restored == []
    assert [str(each) for each in outcome.failures] == ["tank/db: broken"]
    assert running_before(pair)


def test_a_member_that_cannot_be_stopped_rolls_none_back(pair):
    error = HypervisorError("db", "will not die")
    pair.hooks.at["hypervisor.destroy db"] = failing(error)
    outcome = put_back(pair)
    assert outcome.restored == []
    assert "pool.rollback" not in pair.hooks.acts()
    assert str(outcome.failures[0]).startswith("db: will not die")
    assert pair.guest("db").state is DomainState.RUNNING
    assert pair.leftovers() == []
    if len(outcome.failures) == 2:  # it was stopped already
        assert isinstance(outcome.failures[1], RunFailedError)
        assert pair.guest("app").state is DomainState.OFF


def test_a_member_that_fails_half_way_does_not_keep_the_others_off(pair):
    error = PoolError("tank/db", "broken")
    pair.hooks.at["pool.rollback tank/db@s1"] = failing(error)
    outcome = put_back(pair)
    assert [each.record.domain for each in outcome.restored] == ["app"]
    (failed,) = outcome.failures
    assert isinstance(failed, AttentionError)
    assert "snaporch recover db" in failed.step
    pair.hooks.at.clear()
    recover(pair.context, pair.guest("db").uuid)
    assert {name: pair.guest(name).ram for name in ("app", "db")} == pair.then


def test_a_signal_before_the_first_rollback_undoes_all(pair):
    interrupt = pair.context.interrupt

    def signal():
        interrupt.signum = 15

    pair.hooks.at["pool.send_increment"] = signal
    outcome = put_back(pair)
    assert outcome.restored == []
    assert all(isinstance(each, InterruptedRunError) for each in outcome.failures)
    interrupt.signum = None
    assert running_before(pair)


def test_a_member_that_another_run_holds_stops_all(pair):
    guest = pair.guest("app")
    with (
        domain_lock(
            default_paths.LOCKS, "app", guest.uuid, "a test", wait=0, interrupt=Interrupt()
        ),
        pytest.raises(BusyError),
    ):
        put_back(pair)
    assert running_before(pair)


def test_the_question_is_asked_once_for_all(pair):
    asked = []
    put_back(pair, confirm=lambda plans: asked.append([plan.thing for plan in plans]))
    assert asked == [["app@s1", "db@s1"]]


def test_a_member_that_changed_since_the_question_stops_all(pair):
    def then_it_changes(_plans):
        pair.guest("app").state = DomainState.PAUSED

    outcome = put_back(pair, confirm=then_it_changes)
    assert outcome.restored == []
    assert [each.reason for each in outcome.failures] == [
        "changed since it was shown: the guest; nothing was touched"
    ]
    assert "hypervisor.destroy" not in pair.hooks.acts()


def test_no_for_an_answer_touches_nothing(pair):
    def no(_plans):
        raise RefusedError("pair@s1", "not confirmed")

    with pytest.raises(RefusedError):
        put_back(pair, confirm=no)
    assert running_before(pair)


def test_a_member_without_a_snapshot_of_that_instant_is_named(pair):
    for name in ("tank/app@s1", "flash/app@s1"):
        pair.pool.destroy_snapshots([name])
    with pytest.raises(RefusedError) as refused:
        put_back(pair)
    assert str(refused.value) == (
        "pair@s1: app has no snapshot of that instant any more; restore the others one by one, "
        "without --group"
    )


def test_a_snapshot_without_a_group_is_refused(story, world):
    request = RestoreRequest("web@s1")
    with pytest.raises(RefusedError, match="was not taken with a group"):
        run_group_restore(world.context, request, confirm=None, wait=0, jobs=None)


def test_a_snapshot_that_is_not_there_is_not_found(pair):
    with pytest.raises(NotFoundError):
        put_back(pair, "db@s2")


def test_options_of_one_domain(pair, tmp_path):
    with pytest.raises(UsageError, match="--bundle"):
        put_back(pair, bundle=tmp_path)
    with pytest.raises(UsageError, match="--keep-running-state"):
        put_back(pair, keep_running=True)


def test_the_preview_has_all_members_and_changes_nothing(pair):
    previews = preview_group(pair.context, RestoreRequest("db@s1"))
    assert [preview.plan.thing for preview in previews] == ["app@s1", "db@s1"]
    assert [preview.refusals for preview in previews] == [(), ()]
    assert running_before(pair)
    assert pair.hooks.acts() == []


# -- how members wait for each other ------------------------------------------------------------


def meet(jobs=2):
    return MembersMeeting({"1": "app", "2": "db"}, jobs)


def test_a_failure_calls_off_those_that_wait():
    meeting = meet()
    ended = []

    def member():
        try:
            meeting.wait_at("1", lambda _name: meeting.check("1"), RestorePoint.CHECKED)
        except CalledOffError as error:
            ended.append(str(error))

    thread = threading.Thread(target=member)
    thread.start()
    meeting.fail("2", RuntimeError())
    thread.join(PATIENCE)
    assert ended == ["app: undone, because db failed"]


def test_a_failure_after_all_are_off_calls_none_off():
    meeting = meet()
    first = threading.Thread(
        target=meeting.wait_at, args=("1", lambda _name: None, RestorePoint.BARRED)
    )
    first.start()
    meeting.wait_at("2", lambda _name: None, RestorePoint.BARRED)
    first.join(PATIENCE)
    meeting.fail("2", RuntimeError())
    meeting.check("1")


def test_the_second_waits_for_its_turn():
    meeting = meet(jobs=1)
    through = [threading.Event(), threading.Event()]

    def member(number):
        meeting.wait_at(str(number + 1), lambda _name: None, RestorePoint.ROLLING)
        through[number].set()

    threads = [threading.Thread(target=member, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    while not any(each.wait(0.05) for each in through):
        pass
    first = next(number for number, each in enumerate(through) if each.is_set())
    assert not through[1 - first].is_set()
    meeting.leave(str(first + 1))
    for thread in threads:
        thread.join(PATIENCE)
    assert all(each.is_set() for each in through)


@pytest.mark.parametrize("point", [RestorePoint.SAVED, RestorePoint.CHECKED, RestorePoint.BARRED])
def test_one_that_gave_up_while_it_waited_does_not_count_as_waiting(point):
    """A signal ends the wait of one member, and the last one arrives after it."""
    meeting = meet()

    def stopped(_name):
        raise InterruptedRunError("app", "stopped by SIGINT", 2)

    with pytest.raises(InterruptedRunError):
        meeting.wait_at("1", stopped, point)
    with pytest.raises(CalledOffError):
        meeting.wait_at("2", lambda _name: meeting.check("2"), point)


# -- killed -------------------------------------------------------------------------------------


def test_killed_before_the_first_rollback_the_one_that_was_stopped_stays_off(pair):
    """The other may still run: a guest that is rolled back must not meet it."""
    killed_with_one_off(pair)
    with pytest.raises(AttentionError) as reported:
        recover(pair.context, pair.guest("db").uuid)
    assert "virsh start db" in reported.value.step
    assert "snaporch restore db@s1 --group" in reported.value.step
    recover(pair.context, pair.guest("app").uuid)
    assert "pool.rollback" not in pair.hooks.acts()
    assert pair.guest("db").state is DomainState.OFF
    assert pair.guest("app").state is DomainState.RUNNING
    assert pair.leftovers() == []


def test_killed_after_all_were_off_each_is_finished(pair):
    """The second one waits for its turn when the first one is killed."""
    pair.hooks.at["pool.rollback"] = pair.hooks.kill
    put_back(pair, jobs=1)
    pair.hooks.revive()
    pair.hooks.at.clear()
    for name in ("app", "db"):
        recover(pair.context, pair.guest(name).uuid)
    assert {name: pair.guest(name).ram for name in ("app", "db")} == pair.then
    assert pair.leftovers() == []


@pytest.fixture
def apart(pair):
    """Killed when one was rolled back; the other was started by ``virsh create``."""
    definitions = {name: pair.guest(name).inactive for name in ("app", "db")}
    pair.hooks.at["pool.rollback"] = pair.hooks.kill
    put_back(pair, jobs=1)
    pair.hooks.revive()
    pair.hooks.at.clear()
    first = next(line for line in pair.hooks.log if line.startswith("pool.rollback"))
    rolled = first.partition("/")[2].partition("@")[0]
    (name,) = {"app", "db"} - {rolled}
    recover(pair.context, pair.guest(rolled).uuid)
    guest = pair.guest(name)
    guest.inactive = definitions[name]
    pair.hypervisor.start(guest.uuid, paused=False)
    return name


def test_one_that_was_started_while_others_were_rolled_back_is_not_undone(pair, apart):
    uuid = pair.guest(apart).uuid
    with pytest.raises(AttentionError, match="others of its group were") as reported:
        recover(pair.context, uuid)
    assert f"virsh destroy {apart}, then: snaporch recover {apart}" in reported.value.step
    assert f"snaporch undo {apart}" in reported.value.step
    assert pair.guest(apart).state is DomainState.RUNNING
    pair.hypervisor.destroy(uuid)
    recover(pair.context, uuid)
    assert pair.guest(apart).ram == pair.then[apart]
    assert pair.leftovers() == []


def test_one_that_was_started_while_others_were_rolled_back_may_be_left(pair, apart):
    uuid = pair.guest(apart).uuid
    undone = undo_without_copy(pair.context, uuid)
    assert "the guest was not touched" in undone.done[0]
    assert pair.guest(apart).state is DomainState.RUNNING
    assert pair.leftovers() == []


def test_what_fails_before_its_first_rollback_is_finished_by_recovery(pair):
    """The other goes on where it was; undone, this one would meet it."""
    error = HypervisorError("libvirt", "hangs")
    pair.hooks.at["hypervisor.drop_managed_save"] = failing_once(error)
    outcome = put_back(pair)
    assert len(outcome.restored) == 1
    (failed,) = outcome.failures
    assert isinstance(failed, AttentionError)
    name = ({"app", "db"} - {each.record.domain for each in outcome.restored}).pop()
    assert f"snaporch recover {name}" in failed.step
    recover(pair.context, pair.guest(name).uuid)
    assert {name: pair.guest(name).ram for name in ("app", "db")} == pair.then
    assert pair.leftovers() == []


def test_a_restore_that_may_be_undone_replaces_no_other_yet(pair):
    """The first one stopped half way; the second one is killed before all are off."""
    pair.hooks.at["pool.rollback flash/app@s1"] = failing(PoolError("flash/app", "broken"))
    assert len(put_back(pair).failures) == 1
    pair.hooks.at.clear()
    pair.hooks.at["hypervisor.destroy db"] = pair.hooks.kill
    put_back(pair)
    pair.hooks.revive()
    pair.hooks.at.clear()
    recover(pair.context, pair.guest("app").uuid)
    assert pair.guest("app").ram == pair.then["app"]
    assert pair.guest("app").state is DomainState.RUNNING


# -- together -----------------------------------------------------------------------------------


def off(pair, *names):
    for name in names:
        guest = pair.guest(name)
        guest.state, guest.live = DomainState.OFF, None


def test_members_that_fit_only_one_by_one_are_refused(pair):
    """Each boots with 16 MiB."""
    off(pair, "app", "db")
    pair.set_memory(20 << 20)
    said = (
        "pair@s1: needs 32 MiB of memory, 20 MiB are available; stop other guests, or use "
        "--disks-only"
    )
    with pytest.raises(RefusedError) as refused:
        put_back(pair, cold=True)
    assert str(refused.value) == said
    assert pair.hooks.acts() == []
    previews = preview_group(pair.context, RestoreRequest("db@s1", cold=True))
    assert [[str(each) for each in one.refusals] for one in previews] == [[], [said]]
    assert put_back(pair, disks_only=True).failures == []
    pair.set_memory(32 << 20)
    assert put_back(pair, cold=True, discard_newer=True).failures == []


def test_what_members_give_back_counts_for_all(pair):
    """One that runs gives back what another takes."""
    off(pair, "app")
    pair.guest("db").ram_bytes = 12 << 20
    pair.set_memory(16 << 20)
    assert put_back(pair, cold=True).failures == []


def test_members_that_run_with_more_memory_than_the_host_has_boot_again(pair):
    """Each has 16 MiB, of which it uses little."""
    for name in ("app", "db"):
        pair.guest(name).ram_bytes = 3 << 20
    pair.set_memory(20 << 20)
    assert put_back(pair, cold=True).failures == []


def test_huge_pages_of_all_members_are_added(pair):
    host = pair.resolver.host
    free = host.sys / "kernel/mm/hugepages/hugepages-2048kB/free_hugepages"
    free.parent.mkdir(parents=True)
    free.write_text("15")
    needs = [MemoryNeed(huge={2048: 16 << 20})] * 2
    with pytest.raises(RefusedError, match="needs 16 huge pages of 2048 KiB, 15 are available"):
        check_needs("pair@s1", needs, host)
    check_needs("pair@s1", [*needs, MemoryNeed(huge_freed={2048: 2 << 20})], host)


def test_memory_that_is_gone_after_the_answer_stops_all(pair):
    off(pair, "app", "db")
    with pytest.raises(RefusedError, match="needs 32 MiB of memory, 20 MiB are available"):
        put_back(pair, cold=True, confirm=lambda _plans: pair.set_memory(20 << 20))
    assert pair.hooks.acts() == []


def add_group(pair, name, domains):
    document = pair.context.config.model_dump(exclude_unset=True)
    document["group"][name] = {"domains": domains}
    pair.context.config = Config.model_validate(document)


def properties_of(pair, name):
    return next(each.properties for each in pair.pool.snapshots() if each.full_name == name)


def forge(pair, name, of="db"):
    """Put the mark of the group's instant on the snapshot of another guest."""
    mark = properties_of(pair, f"tank/{of}@s1")["group"]
    pair.pool.set_properties([name], {"snaporch:group": mark})


@pytest.mark.parametrize("name", ["db@s1", "mail@s1"])
@pytest.mark.parametrize("own_group", [True, False])
def test_a_guest_with_a_forged_mark_is_not_restored_with_the_group(pair, name, own_group):
    pair.add_guest("mail", disks={"vda": "tank/mail"})
    if own_group:
        add_group(pair, "post", ["mail"])
        assert snapshot_group(pair.context, "post", SnapshotRequest(name="s1")).failures == []
    else:
        take_snapshot(pair.context, pair.hypervisor.domain("mail"), SnapshotRequest("s1"))
    pair.hooks.log.clear()
    forge(pair, "tank/mail@s1")
    pair.hooks.log.clear()
    with pytest.raises(RefusedError) as refused:
        put_back(pair, name)
    assert str(refused.value) == (
        "pair@s1: mail is marked as a member, and the members' bundles do not name it; the mark "
        "may be forged: restore the others one by one, without --group"
    )
    assert running_before(pair)


def test_a_guest_that_only_its_own_manifest_names_is_no_member(pair):
    """The bundle may have come from another host, too."""
    pair.add_guest("mail", disks={"vda": "tank/mail"})
    mail = pair.hypervisor.domain("mail")
    taken = take_snapshot(pair.context, mail, SnapshotRequest("s1"))
    forge(pair, "tank/mail@s1")
    store = pair.context.store
    _, of_db = store.state(properties_of(pair, "tank/db@s1")["bundle"])
    reference = f"{mail.uuid}/{taken.run}"
    _, own = store.state(reference)
    members = (*of_db.group.members, MemberEntry(domain="mail", uuid=mail.uuid))
    group = of_db.group.model_copy(update={"members": members})
    replace_manifest(store.path(reference), own.model_copy(update={"group": group}))
    with pytest.raises(RefusedError, match="mail is marked as a member"):
        put_back(pair)
    assert running_before(pair)


@pytest.mark.parametrize("own_group", [True, False])
@pytest.mark.parametrize("other", ["a-first", "z-last"])
def test_of_two_snapshots_with_the_mark_the_one_that_its_bundle_names_counts(
    pair, other, own_group
):
    """Both are of the member ``app``."""
    domain = pair.hypervisor.domain("app")
    pair.guest("app").ram = pair.then["app"]
    if own_group:
        add_group(pair, "alone", ["app"])
        assert snapshot_group(pair.context, "alone", SnapshotRequest(name=other)).failures == []
    else:
        take_snapshot(pair.context, domain, SnapshotRequest(other))
    for dataset in ("tank/app", "flash/app"):
        forge(pair, f"{dataset}@{other}")
    members = choose_members(pair.context, RestoreRequest("db@s1"))
    assert [each.full_name for each in members] == ["app@s1", "db@s1"]


# -- refused ------------------------------------------------------------------------------------


def test_a_transient_member_is_refused(pair):
    pair.guest("app").inactive = None
    with pytest.raises(RefusedError, match="transient"):
        put_back(pair)
    assert running_before(pair)


def test_without_a_bundle_the_members_are_unknown(pair):
    for name in ("app", "db"):
        shutil.rmtree(pair.paths.bundles / pair.guest(name).uuid)
    with pytest.raises(RefusedError, match="no bundle says any more who belonged to the group"):
        put_back(pair, cold=True)
    assert running_before(pair)


def test_safety_copies_are_written_one_after_the_other(pair):
    """Each finds the room that the ones before it have left."""
    writing, most = set(), []

    def enter(name):
        writing.add(name)
        most.append(len(writing))

    pair.hooks.at[f"pool.hold tank/app@s1 {HOLD}"] = lambda: enter("app")
    pair.hooks.at[f"pool.hold tank/db@s1 {HOLD}"] = lambda: enter("db")
    pair.hooks.at["pool.send_increment"] = lambda: most.append(len(writing)) or writing.clear()
    put_back(pair)
    assert max(most) == 1


def test_if_it_cannot_be_noted_that_all_are_off_none_goes_on():
    """The disk of the journals is full, say."""

    def full():
        raise OSError(28, "No space left on device")

    meeting = MembersMeeting({"1": "app", "2": "db"}, 2, full)
    ended = []

    def member():
        try:
            meeting.wait_at("1", lambda _name: meeting.check("1"), RestorePoint.BARRED)
        except (CalledOffError, OSError) as error:
            ended.append(error)

    thread = threading.Thread(target=member)
    thread.start()
    with pytest.raises((CalledOffError, OSError)) as last:
        meeting.wait_at("2", lambda _name: meeting.check("2"), RestorePoint.BARRED)
    thread.join(PATIENCE)
    assert {type(ended[0]), type(last.value)} == {CalledOffError, OSError}


def test_a_note_that_may_be_lost_is_no_note(tmp_path, monkeypatch):
    real = os.fsync

    def broken(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(5, "Input/output error")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(SnaporchError, match="Input/output error"):
        journal.note_all_off(tmp_path, "one")
    assert list(tmp_path.iterdir()) == []


def test_the_note_stays_while_a_journal_needs_it(pair):
    place = pair.paths.journal
    pair.hooks.at["pool.rollback tank/db@s1"] = failing(PoolError("tank/db", "broken"))
    assert len(put_back(pair).failures) == 1
    (note,) = place.glob("*.off")
    pair.hooks.at.clear()
    recover(pair.context, pair.guest("db").uuid)
    assert not note.exists()


def killed_with_one_off(pair, **options):
    def kill_when_the_other_is_off():
        while pair.guest("db").state is not DomainState.OFF:
            threading.Event().wait(0.01)
        pair.hooks.kill()

    pair.hooks.at["hypervisor.destroy app"] = kill_when_the_other_is_off
    outcome = put_back(pair, **options)
    assert KilledError in {type(each) for each in outcome.failures}
    pair.hooks.revive()
    pair.hooks.at.clear()


def test_repeated_after_a_kill_a_guest_that_stays_off_is_named(pair):
    """The second try does not begin: the first one has stopped db."""
    killed_with_one_off(pair)
    pair.hooks.at[f"pool.hold tank/app@s1 {HOLD}"] = failing(PoolError("tank/app", "broken"))
    outcome = put_back(pair)
    assert outcome.restored == []
    reports = sorted(str(each) for each in outcome.failures)
    assert len(reports) == 2
    assert reports[0].startswith("db: the restore could not begin")
    assert "start it again with virsh" in reports[0]
    assert reports[1] == "tank/app: broken"


def test_called_off_before_it_begins_a_guest_that_stays_off_is_named(pair, monkeypatch):
    killed_with_one_off(pair)
    pair.hooks.at[f"pool.hold tank/app@s1 {HOLD}"] = failing(PoolError("tank/app", "broken"))
    failed = threading.Event()
    fail, plan = MembersMeeting.fail, restore_group.plan_under_lock

    def fail_and_report(meeting, uuid, error):
        fail(meeting, uuid, error)
        failed.set()

    def plan_later(context, request, record, key):
        assert record.domain != "db" or failed.wait(PATIENCE)
        return plan(context, request, record, key)

    monkeypatch.setattr(MembersMeeting, "fail", fail_and_report)
    monkeypatch.setattr(restore_group, "plan_under_lock", plan_later)
    reports = sorted(str(each) for each in put_back(pair).failures)
    assert [report.split(";")[0] for report in reports] == [
        "db: the restore could not begin (db: undone, because app failed)",
        "tank/app: broken",
    ]


def test_the_command_that_restores_the_group_has_the_options_of_the_first(pair):
    killed_with_one_off(pair, disks_only=True)
    with pytest.raises(AttentionError) as reported:
        recover(pair.context, pair.guest("db").uuid)
    assert "snaporch restore db@s1 --disks-only --group" in reported.value.step
