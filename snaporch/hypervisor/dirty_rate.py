"""Measure how much of its RAM a guest changes, by the sampling of QEMU's ``calc-dirty-rate``.

QEMU compares samples of the guest's pages at the beginning and the end of a second. The guest is
not slowed down by it: no writes are logged. Blocks of less than 128 MiB are not sampled (QEMU's
``migration/dirtyrate.c``), so a guest with such a block has no rate here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from typing import Any

import libvirt

from snaporch.hypervisor import domain_xml

_SECONDS = 1
_LIMIT_SECONDS = 5
"""For all guests together, from the start of the last measurement."""
_POLL_SECONDS = 0.1
_SMALLEST_BLOCK = 128 << 20


def measure_dirty_rates(
    connection: Any, handles: Mapping[str, Any], sleep: Callable[[float], None] = time.sleep
) -> dict[str, int]:
    """Measure all guests in the same second.

    Args:
        handles: running domains of libvirt, by UUID.
        sleep: waits for so many seconds.

    Returns:
        MiB a second, by UUID. A guest is missing if libvirt or its QEMU cannot measure it, if a job
        runs on it, or if it has a block of memory that QEMU does not sample.
    """
    waiting = {uuid: handle for uuid, handle in handles.items() if _start(handle)}
    found: dict[str, int] = {}
    for _ in range(round(_LIMIT_SECONDS / _POLL_SECONDS)):
        if not waiting:
            break
        sleep(_POLL_SECONDS)
        for uuid, handle in list(waiting.items()):
            rate = _result(connection, handle)
            if rate is not None:
                found[uuid] = rate
                del waiting[uuid]
    return found


def _start(handle: Any) -> bool:
    """Start a measurement; libvirt would wait for the end of a job, so there must be none."""
    with contextlib.suppress(libvirt.libvirtError, ValueError):
        if handle.jobStats().get("type", libvirt.VIR_DOMAIN_JOB_NONE):
            return False
        if domain_xml.smallest_memory(domain_xml.parse(handle.XMLDesc(0))) < _SMALLEST_BLOCK:
            return False
        handle.startDirtyRateCalc(_SECONDS, 0)
        return True
    return False


def _result(connection: Any, handle: Any) -> int | None:
    """The rate, if it has been measured."""
    kind, now = libvirt.VIR_DOMAIN_STATS_DIRTYRATE, libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT
    with contextlib.suppress(libvirt.libvirtError):
        statistics = connection.domainListGetStats([handle], kind, now)
        values = statistics[0][1] if statistics else {}
        if values.get("dirtyrate.calc_status") == libvirt.VIR_DOMAIN_DIRTYRATE_MEASURED:
            return max(int(values.get("dirtyrate.megabytes_per_second", 0)), 0)
    return None
