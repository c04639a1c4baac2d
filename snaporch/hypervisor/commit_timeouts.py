"""How long a commit may take: when its guest is suspended, and when the commit is given up.

:mod:`snaporch.hypervisor.block_commit` obeys them: its throttle suspends and resumes the guest, its
stall detector gives the commit up. ``commit_patience`` in :mod:`snaporch.config.schema` sets
``running``.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CommitTimeouts:
    """Time limits of a commit, in seconds."""

    running: float = 60.0
    """How long the guest may write faster than the commit copies, before it is suspended."""
    pause: float = 5.0
    """The first suspension. An equally long rest follows each, and the next is twice as long."""
    stall: float = 300.0
    """How long a commit may make no progress."""
