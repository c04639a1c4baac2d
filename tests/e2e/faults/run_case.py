"""One case from beginning to end, inside one lab."""

import time
from dataclasses import asdict, dataclass

from guests.guest import Guest
from support import JOURNAL, OVERLAYS, Outcome, must, wait_for

from faults import machine
from faults.matrix import Case, Fault, Moment
from faults.oracle import (
    Scene,
    arguments,
    assert_boots_with,
    assert_no_loss,
    assert_other_snapshot_is,
    assert_recorded_as_reported,
    assert_well,
    assert_worth_its_level,
    look,
    snapshot_as_other_program,
)
from faults.process import Run, snaporch_here
from snaporch.journal import Step
from snaporch.model import Strategy

DOCUMENTED = (0, 8, 9)
"""Exit statuses that a run may have when libvirtd or QEMU has exited."""
UNGUARDED = (Fault.RUN_KILLED, Fault.BOTH_KILLED, Fault.LIBVIRTD_KILLED)
UNDECIDED = "being switched"
EMULATOR = (Fault.EMULATOR_KILLED, Fault.BOTH_KILLED)


@dataclass
class Verdict:
    """How a case went."""

    case: str
    seconds: float
    checking: float
    """How many of these were spent on checking the snapshot that the run left."""
    ended: int | None
    """The run's exit status, or minus the signal that killed it."""
    said: str
    """The last line on standard error of the run, or what recovery did."""

    def line(self) -> dict[str, object]:
        """For the report."""
        return asdict(self)


def perform(case: Case, scene: Scene) -> Verdict:
    """Bring a run to its point, strike, have the run recovered, and check everything."""
    began = time.monotonic()
    guest = scene.guest(case.strategy)
    mark, state = guest.mark(), guest.state()
    if state == "running":
        guest.wait_count()
    run = Run(*arguments(case, guest), point=case.point, guarded=case.fault not in UNGUARDED)
    try:
        run.wait_stopped()
        before = look(guest, mark)
        if case.strategy is Strategy.OVERLAY:
            snapshot_as_other_program(guest)
        said = strike(case.fault, guest, run, case)
    finally:
        run.kill()
        run.close()
    state = "shut off" if case.fault in EMULATOR else state
    assert_well(guest, state, may_quarantine=case.may_quarantine)
    if case.strategy is Strategy.OVERLAY:
        assert_other_snapshot_is(guest, torn=case.tears)
    assert_no_loss(guest, before)
    if case.fault in EMULATOR:
        assert_boots_with(guest, before)
    checking = time.monotonic()
    assert_worth_its_level(guest, resumed=case.resumes)
    ended = time.monotonic()
    return Verdict(str(case), round(ended - began, 2), round(ended - checking, 2), run.status, said)


def strike(fault: Fault, guest: Guest, run: Run, case: Case | None = None) -> str:
    """Strike a stopped run, and have it end or be recovered; the last line it printed.

    Args:
        case: what may be left to the admin; without one, nothing may.
    """
    if fault in EMULATOR:
        machine.kill_emulator(guest)
        wait_for(lambda: guest.state() == "shut off", "libvirt to see that QEMU is gone")
    if fault is Fault.LIBVIRTD_RESTARTED:
        machine.restart_libvirtd()
    if fault is Fault.LIBVIRTD_KILLED:
        machine.kill_libvirtd()
    if fault in (Fault.EMULATOR_KILLED, Fault.LIBVIRTD_RESTARTED):
        return _let_it_end(guest, run, case)
    run.kill()
    if fault is Fault.LIBVIRTD_KILLED:
        machine.start_libvirtd()
    if fault is Fault.GUARDED_RUN_KILLED:
        return _await_guardian()
    return recover(case)


def _let_it_end(guest: Guest, run: Run, case: Case | None) -> str:
    """The run must end by itself; its guardian recovers what the run could not."""
    run.go_on()
    outcome = run.wait()
    assert outcome.status in _ends(case), f"an undocumented end: {outcome}"
    assert "Traceback" not in outcome.err, outcome.err
    if outcome.status == 0:
        assert_recorded_as_reported(guest, outcome.err)
    said = _last_line(outcome.err)
    if case and case.may_be_undecided and UNDECIDED in outcome.err:
        said += "; " + recover(case, guarded=True)
    if list(JOURNAL.glob("*")):
        said += "; " + _await_guardian()
    return said


def _ends(case: Case | None) -> tuple[int, ...]:
    """The exit statuses that the run may have: one, where it must notice, or must not."""
    if case is None:
        return DOCUMENTED
    if case.step is Step.PREPARE:
        if case.strategy is Strategy.OFF:
            return (0, 8)  # with the connection to libvirtd, or without it
        return (8,) if case.moment is Moment.AFTER else (5,)  # 5: nothing was touched
    all_done = (case.step, case.moment) == (Step.RECORD, Moment.PAST)
    without_guest = case.step in (Step.SEAL, Step.RECORD) and case.fault is Fault.EMULATOR_KILLED
    return (0,) if all_done or without_guest else DOCUMENTED


def _await_guardian() -> str:
    wait_for(lambda: not list(JOURNAL.glob("*")), "the guardian to recover it", 150)
    wait_for(lambda: not machine.locks_held(), "the guardian's end")
    return "recovered by the guardian"


def recover(case: Case | None, *, guarded: bool = False) -> str:
    """Run ``snaporch recover``, and decide for the overlay where it asks; the last line it printed.

    Args:
        guarded: a guardian may come first. While an exiting emulator had an overlay open, the
            overlay could not be compared with its base. If both are equal, it is committed.
    """
    outcome: Outcome = snaporch_here("recover", "--wait", "60s")
    if case and case.may_be_undecided and UNDECIDED in outcome.err:
        assert outcome.status == 9, f"recover: {outcome}"
        for overlay in OVERLAYS.glob("*/*.qcow2"):
            must("qemu-img", "commit", "-q", str(overlay))
        outcome = snaporch_here("recover", "--wait", "60s")
    if guarded and (outcome.status, outcome.out) == (0, ""):
        return _await_guardian()
    aside = case is not None and case.may_quarantine and "quarantined" in outcome.out
    assert outcome.status == (9 if aside else 0), f"recover: {outcome}"
    assert "which had been" in outcome.out, f"recover: {outcome}"
    return _last_line(outcome.out)


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]
