"""How long a command waits, in seconds: for RAM, for libvirt, for signs of life of a clone.

These are no options; a command's :class:`~snaporch.context.Context` has them, so that a test can
hand in its own. The times of a commit are in :mod:`snaporch.hypervisor.commit_timeouts`, those of
sanoid's hooks in :mod:`snaporch.sanoid.hooks.handshake_times`.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RamTimes:
    """How long saving and sealing a RAM image may make no progress, and how often it is checked.

    They are obeyed in :mod:`snaporch.snapshot.strategies.ram_limits` and
    :mod:`snaporch.snapshot.ram_capture`.
    """

    arrival: int = 120
    """How long no RAM may arrive from QEMU, before the run is given up."""
    sealing: int = 600
    """How long the store may take nothing, before sealing is given up. The guest runs meanwhile, so
    a slow store gets time to write everything to its disks."""
    interrupted: int = 30
    """The same after a signal: sealing that still progresses is finished."""
    tick: float = 0.5
    abort: float = 10
    """For the end of a sealing that was aborted."""


@dataclass(frozen=True, slots=True)
class LibvirtTimes:
    """How long to wait for libvirt, and how often to ask it.

    They are obeyed in :mod:`snaporch.recovery.release_guest`, ``observe.py`` beside it, and
    :mod:`snaporch.snapshot.strategies.base`.
    """

    poll: float = 0.2
    reconnect: float = 60
    """For a libvirtd that restarts."""
    job: float = 120
    """For the end of a snapshot job that was aborted."""
    start: float = 5
    """For libvirt to start a guest, before the recovery is retried later."""
    resume: float = 30
    """For a guest that cannot run yet."""
    first_pause: float = 0.1
    """The pause after the first try to resume a guest; doubled after each."""
    longest_pause: float = 2.0


@dataclass(frozen=True, slots=True)
class LivenessTimes:
    """How long to wait for signs of life of a clone, and how often to look.

    They are obeyed in :mod:`snaporch.verify.liveness`.
    """

    cpu: float = 60
    """For a virtual CPU that runs."""
    agent: float = 300
    """For an answer of the guest's agent."""
    poll: float = 0.1
