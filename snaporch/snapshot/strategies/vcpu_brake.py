"""Slows a guest's vCPUs down in steps while its RAM is saved, so that saving it comes to an end.

A guest that changes RAM faster than it is saved would have to be suspended, for as long as saving
all of its RAM takes (:mod:`snaporch.snapshot.strategies.ram_limits`). With less CPU time it changes
less. QEMU itself would do the same (``auto-converge``), but libvirt does not ask for that when it
saves RAM.
"""

from __future__ import annotations

from itertools import takewhile

from snaporch.hypervisor import HypervisorError
from snaporch.hypervisor.vcpu_quota import reduced
from snaporch.snapshot.strategies.base import RunMaterial

_FIRST_PASSES, _STEP_PASSES = 2.5, 0.5
"""How many times the guest's RAM is saved before the first step, and before each further one."""
_PERCENTS = (50, 25)
"""The first steps; the last is the configured floor."""


def steps(floor: int) -> list[tuple[float, int]]:
    """The steps: how many times the RAM was saved, and the percent of CPU time from then on."""
    percents = [*takewhile(lambda percent: percent > floor, _PERCENTS), floor]
    return [(_FIRST_PASSES + _STEP_PASSES * n, percent) for n, percent in enumerate(percents)]


class VcpuBrake:
    """Reduces the CPU time of a guest's vCPUs, and restores it."""

    def __init__(self, work: RunMaterial) -> None:
        self._work = work
        self._own = work.plan.facts.vcpu_quotas
        self._left: list[tuple[float, int]] = []
        self._slowed = False

    def begin(self) -> None:
        """Begin with the first step: saving RAM begins now."""
        self._left = steps(self._work.plan.settings.vcpu_floor) if self._own else []

    def follow(self, arrived: int, expected: int) -> None:
        """Take the next step if so much RAM was saved that it is due.

        Args:
            arrived: bytes of RAM that were saved so far.
            expected: bytes of RAM that the guest used when saving began.
        """
        if not self._left or arrived <= self._left[0][0] * expected:
            return
        passes, percent = self._left[0]
        uuid = self._work.domain.uuid
        if arrived <= passes * self._work.hypervisor.resident_bytes(uuid):
            return  # it uses more RAM than at first: this need not be its second time
        if passes == _FIRST_PASSES:
            self._work.warn("its RAM changes faster than it is saved: slowing its vCPUs down")
        self._left.pop(0)
        self._slowed = True
        try:
            self._work.hypervisor.set_vcpu_quotas(reduced(self._own, percent))
        except HypervisorError as error:
            self._work.warn(f"it cannot be slowed down: {error}")
            self.release()

    def release(self) -> None:
        """Give the vCPUs their CPU time back."""
        if self._slowed:
            try:
                self._work.hypervisor.set_vcpu_quotas(self._own)
            except HypervisorError as error:
                self._work.warn(f"it may still be slowed down: {error}")
        self._left, self._slowed = [], False
