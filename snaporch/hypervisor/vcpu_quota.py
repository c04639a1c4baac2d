"""The CPU time that a guest's virtual CPUs may use, from the kernel's control groups.

libvirt's own ``vcpu_quota`` cannot be changed while libvirt saves RAM: its snapshot job excludes
jobs that modify the domain (libvirt, ``qemuSnapshotCreateActiveExternal``). So the file that
libvirt would write is written here: ``cpu.max`` of each vCPU's control group (the kernel's
``cgroup-v2.rst``). It holds a quota and a period in microseconds, and ``max`` stands for no quota.
"""

from __future__ import annotations

import errno
import os
import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from snaporch.errors import UnavailableError
from snaporch.hypervisor.interface import HypervisorError
from snaporch.hypervisor.open_files import emulator_process

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_GROUP_OF_VCPU = re.compile(r"0::(/.*/vcpu\d+)")
_QUOTA = re.compile(r"(max|\d+) (\d+)")
_PERIOD_US = 10_000
"""Short, since a vCPU that has used up its quota holds up a pause until its period ends."""
LEAST_PERCENT = 10
"""The kernel takes no quota below 1 ms, which is this share of the period."""

VcpuQuotas = Mapping[str, str]
"""The content of ``cpu.max`` by control group, as in ``/proc/PID/cgroup``."""


def read_quotas(uuid: str, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> dict[str, str]:
    """The quotas of a running guest's vCPUs; none if they have no control groups of their own."""
    found = {}
    with suppress(OSError, UnavailableError):
        for task in (emulator_process(uuid, proc) / "task").iterdir():
            with suppress(OSError):
                group = _GROUP_OF_VCPU.fullmatch((task / "cgroup").read_text().strip())
                if group is None or ".." in Path(group[1]).parts:
                    continue
                text = (_file(cgroups, group[1])).read_text().strip()
                if _QUOTA.fullmatch(text):
                    found[group[1]] = text
    return found


def write_quotas(quotas: VcpuQuotas, cgroups: Path = _CGROUPS) -> None:
    """Set quotas. A control group that is gone is no error: its guest has ended.

    Raises:
        HypervisorError: the kernel refuses one; the others are set.
    """
    refused = ""
    for group, text in quotas.items():
        file = _file(cgroups, group)
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENODEV):
                step = f"as root: echo {text} > {shlex.quote(str(file))}"
                refused = f"cannot be set to '{text}' ({error.strerror}); {step}"
    if refused:
        raise HypervisorError("cpu.max of a vCPU", refused)


def reduced(own: VcpuQuotas, percent: int) -> dict[str, str]:
    """The quotas that leave vCPUs a share of the CPU time that they may use by their own quotas."""
    return {group: _reduced(text, percent) for group, text in own.items()}


def left_reduced(own: VcpuQuotas, now: VcpuQuotas) -> dict[str, str]:
    """The own quotas of those vCPUs whose quotas are still reduced."""
    return {
        group: text
        for group, text in own.items()
        if now.get(group, text) != text and now[group].endswith(f" {_PERIOD_US}")
    }


def _reduced(text: str, percent: int) -> str:
    quota, period = text.split()
    share = 1.0 if quota == "max" else int(quota) / int(period)
    least = _PERIOD_US * LEAST_PERCENT // 100
    return f"{max(least, int(_PERIOD_US * share * percent / 100))} {_PERIOD_US}"


def _file(cgroups: Path, group: str) -> Path:
    return cgroups / group.lstrip("/") / "cpu.max"
