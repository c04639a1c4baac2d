"""What surrounds a guest on its host, for a rebuild elsewhere: read before the guest is frozen.

What of it comes back is decided by :mod:`snaporch.rebuild.surroundings`.

None of it is needed to restore the guest. So a fact that cannot be read, or not in time, is left
out with a note, and the snapshot continues.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from snaporch.bundle.manifest import (
    DatasetEntry,
    HostObjectEntry,
    SurroundingsEntry,
)
from snaporch.context import Context
from snaporch.errors import SnaporchError
from snaporch.hypervisor import HostObject, domain_xml
from snaporch.snapshot.plan import Plan

SETTINGS = (
    *("recordsize", "compression", "reservation", "refreservation", "quota", "refquota"),
    *("primarycache", "secondarycache", "sync", "logbias", "atime", "relatime"),
    *("xattr", "acltype", "snapdir", "copies"),
)
"""The properties of datasets that are saved (zfsprops(7)).

``volblocksize`` and ``volsize`` are in each stream of ``zfs send``.
"""
SECONDS = 10.0
"""The longest time for all facts together."""
MAX_XML = 1 << 16
"""Bytes of all definitions of a kind; one of libvirt's has about a thousand."""
_POLL_SECONDS = 0.1


class _TooMuchError(SnaporchError):
    """Definitions are too large to be saved."""


@dataclass
class _Reading:
    """What a thread has read so far."""

    values: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, BaseException] = field(default_factory=dict)

    def run(self, facts: dict[str, Callable[[], Any]]) -> None:
        for what, read in facts.items():
            try:
                self.values[what] = read()
            except BaseException as error:  # noqa: BLE001 - the caller raises it, or notes it
                self.failures[what] = error


def read_surroundings(context: Context, plan: Plan, seconds: float = SECONDS) -> SurroundingsEntry:
    """Read what surrounds a guest. Each fact that cannot be read is a note, never an error.

    Args:
        context: libvirt, the pools and the progress display.
        plan: of the snapshot.
        seconds: the longest time for all facts together.

    Raises:
        InterruptedRunError: a signal came.
    """
    name, facts = plan.domain.name, _facts(context, plan)
    reading = _Reading()
    run = contextvars.copy_context().run
    thread = threading.Thread(
        target=run, args=(reading.run, facts), name="surroundings", daemon=True
    )
    thread.start()
    end = time.monotonic() + seconds
    while thread.is_alive() and time.monotonic() < end:
        context.interrupt.check(name)
        thread.join(_POLL_SECONDS)
    values, failures = dict(reading.values), dict(reading.failures)
    for what in facts:
        if what not in values:
            late = TimeoutError(f"takes over {seconds:g} s")
            _note(context, name, what, failures.get(what, late))
    return SurroundingsEntry(
        starts_at_boot=values.get(_BOOT),
        datasets=values.get(_DATASETS, ()),
        networks=values.get(_NETWORKS, ()),
        storage_pools=values.get(_POOLS, ()),
    )


_BOOT = "whether it starts at boot"
_DATASETS = "the properties of its datasets"
_NETWORKS = "its networks"
_POOLS = "its storage pools"


def _facts(context: Context, plan: Plan) -> dict[str, Callable[[], Any]]:
    """The facts, by their names for a note: functions that read them."""
    domain, hypervisor = plan.domain, context.hypervisor
    roots = [domain_xml.parse(xml) for xml in (domain.live_xml, domain.inactive_xml) if xml]
    networks = set().union(*map(domain_xml.networks, roots))
    pools = set().union(*map(domain_xml.storage_pools, roots))
    datasets = sorted({each.name for each in plan.datasets})
    facts: dict[str, Callable[[], Any]] = {_DATASETS: lambda: _datasets(context, datasets)}
    if domain.inactive_xml is not None:
        facts[_BOOT] = lambda: hypervisor.starts_at_boot(domain.uuid)
    if networks:
        facts[_NETWORKS] = lambda: _objects(hypervisor.defined_networks(), networks)
    if pools:
        facts[_POOLS] = lambda: _objects(hypervisor.defined_storage_pools(), pools)
    return facts


def _datasets(context: Context, datasets: Sequence[str]) -> tuple[DatasetEntry, ...]:
    found = context.pool.local_properties(SETTINGS, datasets)
    roots = context.pool.encryption_roots(datasets)
    entries = tuple(
        DatasetEntry(dataset=each, properties=found.get(each, {}), encryption_root=roots.get(each))
        for each in datasets
    )
    for each in entries:
        each.model_dump_json()  # a manifest cannot have what is no valid text
    return entries


def _objects(found: Sequence[HostObject], names: set[str]) -> tuple[HostObjectEntry, ...]:
    wanted = sorted((each for each in found if each.name in names), key=lambda each: each.name)
    if sum(len(each.xml.encode()) for each in wanted) > MAX_XML:
        raise _TooMuchError("libvirt", f"their definitions have over {MAX_XML >> 10} KiB")
    return tuple(
        HostObjectEntry(name=each.name, xml=each.xml, starts_at_boot=each.starts_at_boot)
        for each in wanted
    )


def _note(context: Context, name: str, what: str, error: BaseException) -> None:
    if not isinstance(error, Exception):
        raise error
    reason = error.line() if isinstance(error, SnaporchError) else str(error)
    context.progress.note(name, f"not saved for a rebuild: {what}: {reason}")
