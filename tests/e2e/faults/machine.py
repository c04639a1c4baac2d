"""Faults of other processes than snaporch: the emulator and libvirtd."""

import fcntl
import os
import signal
from contextlib import suppress
from pathlib import Path

import libvirt
from guests.guest import Guest, connect
from support import RUNTIME, must, wait_for

_LIBVIRTD = Path("/run/libvirtd.pid")


def kill_emulator(guest: Guest) -> None:
    """SIGKILL of a guest's QEMU; returns when there is no such process any more."""
    pid = int(Path(f"/run/libvirt/qemu/{guest.name}.pid").read_text())
    _end(pid, signal.SIGKILL)


def end_emulator(guest: Guest) -> None:
    """SIGTERM of a guest's QEMU, which ends as when the guest has shut down."""
    pid = int(Path(f"/run/libvirt/qemu/{guest.name}.pid").read_text())
    _end(pid, signal.SIGTERM)


def restart_libvirtd() -> None:
    """Restart libvirtd as ``systemctl restart`` does."""
    _end(int(_LIBVIRTD.read_text()), signal.SIGTERM)
    start_libvirtd()


def kill_libvirtd() -> None:
    """SIGKILL of libvirtd; QEMU continues without it."""
    _end(int(_LIBVIRTD.read_text()), signal.SIGKILL)


def start_libvirtd() -> None:
    """Start libvirtd, and wait until it answers."""
    must("libvirtd", "--daemon")
    wait_for(_answers, "libvirtd")


def _answers() -> bool:
    with suppress(libvirt.libvirtError):
        return bool(connect().getLibVersion())
    return False


def _end(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        process = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(process, signum)
        finally:
            os.close(process)
    wait_for(lambda: _gone(pid), f"the end of process {pid}")


def _gone(pid: int) -> bool:
    """Whether a process has ended, be it waited for or not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] in "ZX"


def locks_held() -> list[str]:
    """Lock files of domains that a process holds."""
    return [path.name for path in sorted(RUNTIME.glob("*.lock")) if _is_held(path)]


def _is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
