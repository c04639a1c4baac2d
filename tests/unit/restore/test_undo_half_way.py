"""``snaporch undo`` after interrupted restores never brings back disks of two instants."""

import subprocess

import pytest
from fakes.hooks import failing

from snaporch.errors import AttentionError, RefusedError
from snaporch.model import DomainState
from snaporch.restore import steps
from snaporch.restore.confirm_and_undo import UndoRequest, preview_undo, run_undo
from snaporch.restore.journal import RestoreStep, unfinished
from snaporch.restore.safety_catalog import safety_copies
from snaporch.restore.safety_copy import SafetyCopyWriter
from snaporch.restore.select_undo import choose_copy
from snaporch.restore.undo_command import guests_left_barred
from snaporch.restore.undo_plan import make_undo_plan
from snaporch.zfs import PoolError

from .test_recovery import Killed, cannot_be_started, die, kill  # noqa: F401
from .test_recovery import put_back as restore_how
from .test_undo_command import held, put_back, undo


def command(world, copy=None, *, dry_run=False):
    """Run ``snaporch undo``; return what it reported."""
    request, lines = UndoRequest("web", copy), []
    if dry_run:
        preview_undo(world.context, request, lines.append)
    else:
        run_undo(world.context, request, confirm=None, report=lines.append, wait=0)
    return lines


def assert_back(story, world, content=b"now"):
    uuid = story.domain.uuid
    assert story.content() == {content}
    assert world.guest().inactive == story.domain.inactive_xml
    assert unfinished(world.paths.journal, uuid) == []
    assert guests_left_barred(world.context) == []
    assert held(world) == []


@pytest.fixture
def torn(story, world, kill):  # noqa: F811
    """A restore was interrupted after the first of two datasets."""
    with kill("after", "flash/web"):
        put_back(world)
    return story


@pytest.mark.parametrize(
    "place", [None, RestoreStep.FILES, "tank/web", "flash/web", RestoreStep.ROLLBACK]
)
def test_disks_that_a_restore_found_half_done_are_not_brought_back(torn, world, kill, place):  # noqa: F811
    """This holds whether the second restore ended or was interrupted itself."""
    if place is None:
        assert put_back(world, cold=True).undo is None
    else:
        moment = "ahead" if place != RestoreStep.ROLLBACK else "after"
        with kill(moment, place if place != RestoreStep.ROLLBACK else RestoreStep.STOP):
            put_back(world, cold=True)
    first, second = safety_copies(world.context.store, "web")
    assert (first.record.half_way, second.record.half_way) == (False, True)
    with pytest.raises(
        RefusedError, match=f"of two instants.*undo web --copy {first.name} .--dry-run n"
    ):
        make_undo_plan(world.context, second)
    assert choose_copy(world.context, "web", None).name == first.name
    command(world)
    assert_back(torn, world)


def test_a_copy_of_half_done_disks_is_not_used_by_an_undo_of_the_undo(torn, world):
    command(world)
    command(world)
    assert_back(torn, world)


def test_half_done_disks_are_known_through_a_chain_of_restores(torn, world, kill):  # noqa: F811
    with kill("after", RestoreStep.STOP):
        put_back(world)
    with kill("ahead", "tank/web"):
        put_back(world)
    assert [copy.record.half_way for copy in safety_copies(world.context.store)] == [
        False,
        True,
        True,
    ]
    undo(world)
    assert_back(torn, world)


def test_disks_that_a_restore_found_whole_are_brought_back(torn, world, kill):  # noqa: F811
    """The second restore has rolled back all datasets that the first had not."""
    with kill("ahead", RestoreStep.FILES):
        put_back(world)
    put_back(world)
    copy = choose_copy(world.context, "web", None)
    assert copy.name == safety_copies(world.context.store)[-1].name
    assert not copy.record.half_way


def test_disks_that_a_script_left_half_done_are_not_brought_back(story, world):
    """The script keeps no journal; it leaves the guest barred."""
    put_back(world)
    (copy,) = safety_copies(world.context.store, "web")
    guest = world.guest()
    guest.live, guest.state = None, DomainState.OFF
    guest.inactive = (copy.directory / "barred.xml").read_text()
    world.pool.write("flash/web", b"half done")
    put_back(world, cold=True)
    assert choose_copy(world.context, "web", None).name == copy.name
    undo(world)
    assert_back(story, world)


def test_the_script_refuses_and_names_the_copy_to_use(torn, world):
    put_back(world, cold=True)
    first, second = safety_copies(world.context.store, "web")
    done = subprocess.run(
        ["sh", second.directory / "undo.sh"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 5
    assert "of two instants" in done.stderr
    assert f"snaporch undo web --copy {first.name}" in done.stderr
    assert "nothing was touched" in done.stderr


def test_a_second_restore_that_stops_half_way_names_the_copy_of_the_first(torn, world):
    world.hooks.at["pool.rollback"] = failing(PoolError("zfs rollback", "no"))
    with pytest.raises(AttentionError) as caught:
        put_back(world)
    first, _ = safety_copies(world.context.store, "web")
    assert f"or go back: snaporch undo web --copy {first.name})" in caught.value.line()


def test_without_a_copy_of_the_first_restore_nothing_is_undone(story, world, kill):  # noqa: F811
    with kill("after", "flash/web"):
        restore_how(world, safety=False)
    put_back(world, cold=True)
    with pytest.raises(RefusedError, match=r"of two instants.*see `snaporch list`"):
        undo(world)
    assert story.content() == {b"first"}
    assert world.guest().state is DomainState.RUNNING


# -- the last restore, and no other --------------------------------------------------------------


def test_a_restore_that_changed_nothing_is_cancelled_and_the_previous_one_undone(torn, world, kill):  # noqa: F811
    with kill("before", RestoreStep.SAFETY):
        put_back(world)
    command(world)
    assert_back(torn, world)


def test_a_restore_interrupted_after_a_half_done_script(story, world, kill):  # noqa: F811
    put_back(world)
    (copy,) = safety_copies(world.context.store, "web")
    guest = world.guest()
    guest.live, guest.state = None, DomainState.OFF
    guest.inactive = (copy.directory / "barred.xml").read_text()
    with kill("before", RestoreStep.SAFETY):
        put_back(world, cold=True)
    command(world)
    assert_back(story, world)


@pytest.fixture
def stopping(story, world, monkeypatch):
    """Kills a restore when the guest is stopped, weeks after an earlier restore."""

    def begin(*, safety=True, transient=False, **how):
        put_back(world)
        if transient:
            world.guest().inactive = None
        story.write(b"weeks of work")
        with monkeypatch.context() as patched:
            patched.setattr(SafetyCopyWriter, "write_script", raise_killed)
            patched.setattr(steps, "check_newer_may_go", raise_killed)
            with pytest.raises(Killed):
                restore_how(world, safety=safety, **how)
        del world.hooks.at["hypervisor.find"]
        domain = world.hypervisor.find(story.domain.uuid)
        assert domain is None or not domain.active

    def raise_killed(*_what, **_how):
        die(world)

    return begin


@pytest.mark.parametrize("kept", ["RAM", "disks", "nothing"])
def test_a_restore_interrupted_at_its_stop_is_undone_and_not_an_older_one(
    story, world, stopping, kept
):
    stopping(safety=kept != "nothing", keep_running=kept == "RAM")
    (line,) = command(world, dry_run=True)
    assert "was interrupted: undo it: nothing was rolled back" in line
    command(world)
    assert_back(story, world, b"weeks of work")
    assert world.guest().state is (DomainState.RUNNING if kept == "RAM" else DomainState.OFF)
    assert len(safety_copies(world.context.store, "web")) == 1


def test_a_restore_without_a_copy_has_to_be_finished_first(story, world, kill):  # noqa: F811
    put_back(world)
    story.write(b"weeks of work")
    with kill("after", "flash/web"):
        restore_how(world, safety=False)
    for dry_run in (True, False):
        with pytest.raises(RefusedError, match=r"no safety copy.*snaporch recover web first"):
            command(world, dry_run=dry_run)
    assert world.pool.read("tank/web") == b"weeks of work"
    assert cannot_be_started(world, story.domain.uuid)


@pytest.mark.parametrize("moment", ["after", "ahead"])
def test_a_restore_that_replaced_another_names_the_copy_of_that(torn, world, kill, moment):  # noqa: F811
    with kill(moment, RestoreStep.STOP if moment == "after" else "flash/web"):
        restore_how(world, safety=False)
    command(world)
    assert_back(torn, world)


def test_a_restore_that_replaced_one_without_a_copy_keeps_its_journal(story, world, kill):  # noqa: F811
    """Only its journal describes the state of the disks."""
    with kill("after", "flash/web"):
        restore_how(world, safety=False)
    with kill("ahead", "flash/web"):
        restore_how(world, safety=False)
    with pytest.raises(RefusedError, match="snaporch recover web first"):
        command(world)
    assert cannot_be_started(world, story.domain.uuid)
    assert len(unfinished(world.paths.journal, story.domain.uuid)) == 1


def test_a_restore_of_a_stopped_transient_guest_is_not_cancelled(world, stopping):
    """Its definition and TPM state were lost when it was stopped."""
    stopping(keep_running=True, transient=True)
    with pytest.raises(RefusedError, match="snaporch recover web first"):
        command(world)
