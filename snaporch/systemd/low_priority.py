"""Lowers the priority of bulk work below everything else on the host.

The weights are those of :mod:`snaporch.systemd.unit_settings`, as in the installed units.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress

from snaporch.command_log import LoggedCommand
from snaporch.default_paths import HOST, HostPaths
from snaporch.systemd.unit_settings import LOW_WEIGHT

_NICE = 10
_OOM_SCORE = 500
"""Added to this process's part of the memory, in thousandths (proc_pid_oom_score_adj(5))."""
_MANAGER = (
    "org.freedesktop.systemd1",
    "/org/freedesktop/systemd1",
    "org.freedesktop.systemd1.Manager",
)


def lower_priority(work: str, host: HostPaths = HOST) -> None:
    """Lower the CPU and I/O priority of this process, and offer it if the host is out of memory.

    The kernel ends this process then, and not a guest, which is larger.

    Under systemd the process also moves into a scope in ``snaporch.slice``
    (org.freedesktop.systemd1(5), ``StartTransientUnit``), unless it already runs in a unit for
    this kind of work. Failures are ignored.

    Args:
        work: the kind of work: ``seal``, ``verify``.
        host: where the kernel and systemd show this process.
    """
    threads = os.listdir(host.proc / "self" / "task")  # each thread has its own priority (sched(7))
    for thread in map(int, threads):
        with suppress(OSError):
            nice = os.getpriority(os.PRIO_PROCESS, thread)
            os.setpriority(os.PRIO_PROCESS, thread, max(nice, _NICE))
    _try("ionice", "-c", "3", "-p", *threads)
    with suppress(OSError, ValueError):
        score = host.proc / "self" / "oom_score_adj"
        score.write_text(str(max(int(score.read_text()), _OOM_SCORE)))
    is_booted = (host.run / "systemd" / "system").is_dir()  # sd_booted(3)
    if is_booted and not _is_inside(host, f"snaporch-{work}"):
        arguments = _scope(work, os.getpid())
        _try("busctl", "--quiet", "call", *_MANAGER, "StartTransientUnit", *arguments)


def _is_inside(host: HostPaths, unit: str) -> bool:
    try:
        return f"snaporch.slice/{unit}" in (host.proc / "self" / "cgroup").read_text()
    except OSError:
        return False


def _scope(work: str, pid: int) -> list[str]:
    """The arguments of ``StartTransientUnit``, in the form of busctl(1): types, then values."""
    properties = [
        ["PIDs", "au", "1", str(pid)],
        ["Slice", "s", "snaporch.slice"],
        ["CPUWeight", "t", str(LOW_WEIGHT)],
        ["IOWeight", "t", str(LOW_WEIGHT)],
        ["CollectMode", "s", "inactive-or-failed"],
    ]
    words = [word for each in properties for word in each]
    name = f"snaporch-{work}-{pid}.scope"
    return ["ssa(sv)a(sa(sv))", name, "fail", str(len(properties)), *words, "0"]


def _try(*command: str) -> None:
    with suppress(OSError, subprocess.TimeoutExpired), LoggedCommand(*command) as log:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=10
        )
        log.exited(done.returncode)
