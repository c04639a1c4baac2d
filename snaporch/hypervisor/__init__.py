"""Access to libvirt; no other package calls it."""

from snaporch.hypervisor.absent import is_expected, no_guests
from snaporch.hypervisor.interface import (
    BackingImage,
    Blocker,
    CancelledError,
    CaptureRequest,
    CommitStage,
    DiskWrites,
    GuestExit,
    HostObject,
    Hypervisor,
    HypervisorError,
    LostLibvirtError,
    NotFrozenByUsError,
    OnCommitStage,
    OpenFile,
    OverlayDisk,
    PausedBy,
    Screenshot,
    StartHookProblem,
    Vitals,
)
from snaporch.hypervisor.pause_clock import Pause, milliseconds

__all__ = [
    "BackingImage",
    "Blocker",
    "CancelledError",
    "CaptureRequest",
    "CommitStage",
    "DiskWrites",
    "GuestExit",
    "HostObject",
    "Hypervisor",
    "HypervisorError",
    "LostLibvirtError",
    "NotFrozenByUsError",
    "OnCommitStage",
    "OpenFile",
    "OverlayDisk",
    "Pause",
    "PausedBy",
    "Screenshot",
    "StartHookProblem",
    "Vitals",
    "is_expected",
    "milliseconds",
    "no_guests",
    "open_hypervisor",
]


def open_hypervisor(uri: str) -> Hypervisor:
    """Connect to libvirt.

    Raises:
        UnavailableError: the bindings are not installed, or libvirt does not answer at ``uri``.
    """
    from snaporch.errors import UnavailableError

    try:
        from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor
    except ImportError as error:
        raise UnavailableError(
            "libvirt",
            f"the Python bindings cannot be loaded ({error})",
            "apt install python3-libvirt",
        ) from error
    return LibvirtHypervisor(uri)
