"""A status as Prometheus metrics, by its naming rules: base units, times as Unix timestamps.

Metrics hold points in time, not ages, so that they stay correct between two collections. They are
served by :mod:`snaporch.status.metrics_exporter`, and written into a file by
:mod:`snaporch.status.metrics_textfile`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from snaporch import __version__
from snaporch.errors import UnavailableError
from snaporch.model import SnapshotRecord
from snaporch.status.model import DomainStatus, Problem, ProblemGrade, SourceStatus, Status

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import CollectorRegistry

    from snaporch.verify.copy_results import CopyResult
    from snaporch.verify.restore_results import RestoreResult

_MILLI = 1000.0


def as_text(status: Status, problems: Sequence[Problem]) -> bytes:
    """The metrics in Prometheus' text format.

    Raises:
        UnavailableError: ``prometheus_client`` is not installed.
    """
    made = registry(lambda: (status, problems))
    from prometheus_client import generate_latest

    text: bytes = generate_latest(made)
    return text


def registry(
    current: Callable[[], tuple[Status, Sequence[Problem]] | None],
) -> CollectorRegistry:
    """A registry that asks ``current`` for the status at each collection.

    Raises:
        UnavailableError: ``prometheus_client`` is not installed.
    """
    try:
        from prometheus_client import CollectorRegistry
        from prometheus_client.registry import Collector
    except ImportError as error:
        raise UnavailableError(
            "prometheus_client", "is not installed", "apt install python3-prometheus-client"
        ) from error

    class Collected(Collector):
        def collect(self) -> Iterator[GaugeMetricFamily]:
            found = current()
            if found is not None:
                yield from families(*found)

    made = CollectorRegistry()
    made.register(Collected())
    return made


def families(status: Status, problems: Sequence[Problem]) -> Iterator[GaugeMetricFamily]:
    """All metrics."""
    yield _one("info", "The version of snaporch.", 1, version=__version__)
    yield _one("status_timestamp_seconds", "When the status was collected.", status.at.timestamp())
    yield _one(
        "scheduler_active", "Whether the daemon or the timer is active.", status.scheduler.is_active
    )
    grades = [({"grade": g.value}, sum(t.grade is g for t in problems)) for g in ProblemGrade]
    yield _many("problems", "Problems by grade.", ("grade",), grades)
    held = [run for run in status.runs if run.locked]
    yield _one("runs_under_way", "Runs in progress.", len(held))
    yield _one("runs_interrupted", "Interrupted runs to recover.", len(status.runs) - len(held))
    yield _one(
        "guests_barred", "Guests barred until an undo is finished.", len(status.barred_guests)
    )
    yield _many(
        "fence_timestamp_seconds",
        "When a guest was fenced, which does not start on this host; 0 if not known.",
        ("domain", "replica"),
        [
            (
                {"domain": name, "replica": fence.replica},
                fence.made.timestamp() if fence.made else 0,
            )
            for name, fence in status.fences
        ],
    )
    yield _one(
        "windows_open", "Guests frozen or on overlays.", sum(r.in_window for r in status.runs)
    )
    yield from _of_snapshots(status.domains)
    yield from _of_policies(status.domains)
    yield from _of_replicas(status.domains)
    yield from _of_copies(status.copies)
    yield from _of_test_restores(status.test_restores)
    yield from _of_sources(status.sources)
    store = status.store
    kinds = {
        "bundles": store.bundle_bytes, "trash": store.trash_bytes, "other": store.other_bytes,
    }  # fmt: skip
    sizes = [({"kind": kind}, count) for kind, count in kinds.items()]
    yield _many("store_bytes", "Size of the contents of the bundle store.", ("kind",), sizes)
    yield _one("store_bundles", "Bundles in the store.", store.bundles)
    yield _one("store_free_bytes", "Free space of the store's file system.", store.free_bytes)
    yield _one("store_size_bytes", "Size of the store's file system.", store.size_bytes)


def _of_snapshots(domains: Sequence[DomainStatus]) -> Iterator[GaugeMetricFamily]:
    labels = ("domain", "level")
    yield _many(
        "newest_snapshot_timestamp_seconds",
        "When the newest snapshot of a level was taken.",
        labels,
        [
            ({"domain": domain.name, "level": level.value}, at.timestamp())
            for domain in domains
            for level, at in domain.newest.items()
        ],
    )
    yield _many(
        "snapshots",
        "Snapshots that exist.",
        labels,
        [
            ({"domain": domain.name, "level": level.value}, count)
            for domain in domains
            for level, count in domain.counts.items()
        ],
    )
    yield _many(
        "newest_snapshot_pause_seconds",
        "Pause of the guest for its newest snapshot.",
        ("domain",),
        [
            ({"domain": domain.name}, domain.last.pause_ms / _MILLI)
            for domain in domains
            if domain.last is not None and domain.last.pause_ms is not None
        ],
    )
    yield _many(
        "verify_command_passed_timestamp_seconds",
        "When the verify_command of a guest last passed in a clone of a snapshot that passes; 0 if "
        "it never did.",
        ("domain",),
        [
            ({"domain": domain.name}, max(passed).timestamp() if passed else 0)
            for domain in domains
            if (passed := [at for record in domain.verified if (at := _command_at(record))])
            or domain.has_verify_command
        ],
    )


def _command_at(record: SnapshotRecord) -> datetime | None:
    return record.verified.command_at if record.verified and record.verified.passed else None


def _of_policies(domains: Sequence[DomainStatus]) -> Iterator[GaugeMetricFamily]:
    labels = ("domain", "policy")
    pairs = [
        ({"domain": domain.name, "policy": each.policy}, each)
        for domain in domains
        for each in domain.policies
    ]
    yield _many(
        "policy_newest_snapshot_timestamp_seconds",
        "When a policy took its newest snapshot.",
        labels,
        [(words, each.last.timestamp()) for words, each in pairs if each.last],
    )
    yield _many(
        "policy_next_run_timestamp_seconds",
        "When a policy's next snapshot is due, apart from failures; in the past if late.",
        labels,
        [(words, each.next.due_but_for_failures.timestamp()) for words, each in pairs if each.next],
    )
    yield _many(
        "policy_missed_runs",
        "Times of a policy without a snapshot; 2 for two or more.",
        labels,
        [(words, each.missed) for words, each in pairs],
    )
    yield _many(
        "policy_last_run_failed",
        "Whether the last run for a policy failed.",
        labels,
        [(words, bool(each.next and each.next.failed)) for words, each in pairs],
    )


def _of_replicas(domains: Sequence[DomainStatus]) -> Iterator[GaugeMetricFamily]:
    labels = ("domain", "replica")
    pairs = [
        ({"domain": domain.name, "replica": each.replica}, each)
        for domain in domains
        for each in domain.replicas
    ]
    yield _many(
        "replica_newest_snapshot_timestamp_seconds",
        "When the newest snapshot that a replica has was taken.",
        labels,
        [(words, each.last.timestamp()) for words, each in pairs if each.last],
    )
    yield _many(
        "replica_last_try_failed",
        "Whether the last replication failed.",
        labels,
        [(words, each.failed is not None) for words, each in pairs],
    )


def _of_copies(results: Sequence[CopyResult]) -> Iterator[GaugeMetricFamily]:
    places: dict[tuple[str, str], list[CopyResult]] = {}
    for result in results:
        places.setdefault((result.domain, result.replica), []).append(result)
    pairs = [({"domain": key[0], "replica": key[1]}, each) for key, each in places.items()]
    yield _many(
        "copies_verified",
        "Copies on a replica by the result of their last verification.",
        ("domain", "replica", "result"),
        [
            (words | {"result": result}, sum(each.passed is passed for each in own))
            for words, own in pairs
            for result, passed in (("passed", True), ("failed", False))
        ],
    )
    for name, choose in (("newest", max), ("oldest", min)):
        yield _many(
            f"copies_{name}_verification_timestamp_seconds",
            f"When the copy whose verification is the {name} was verified.",
            ("domain", "replica"),
            [(words, choose(each.at for each in own).timestamp()) for words, own in pairs],
        )


def _of_test_restores(results: Sequence[RestoreResult]) -> Iterator[GaugeMetricFamily]:
    from snaporch.verify.restore_results import RestoreOutcome

    places: dict[tuple[str, str], list[RestoreResult]] = {}
    for each in results:
        places.setdefault((each.domain, each.replica), []).append(each)
    pairs = [({"domain": key[0], "replica": key[1]}, each) for key, each in places.items()]
    yield _many(
        "copies_test_restored",
        "Copies in pools of this machine by the result of their last test restore.",
        ("domain", "replica", "result"),
        [
            (words | {"result": outcome}, sum(each.outcome is outcome for each in own))
            for words, own in pairs
            for outcome in RestoreOutcome
        ],
    )
    yield _many(
        "copies_newest_test_restore_timestamp_seconds",
        "When the last test restore that passed ended.",
        ("domain", "replica"),
        [
            (words, max(each.result.reached_at for each in passed).timestamp())
            for words, own in pairs
            if (passed := [each for each in own if each.outcome is RestoreOutcome.PASSED])
        ],
    )


def _of_sources(sources: Sequence[SourceStatus]) -> Iterator[GaugeMetricFamily]:
    labels = ("source", "domain", "uuid")
    pairs = [
        ({"source": source.source, "domain": each.domain, "uuid": uuid}, each)
        for source in sources
        for uuid, each in [*([("", source.whole)] if source.whole else []), *source.guests.items()]
    ]
    yield _many(
        "source_last_success_timestamp_seconds",
        "When the last pull without a failure ended; without a domain, of the whole source.",
        labels,
        [(words, each.pulled.timestamp()) for words, each in pairs if each.pulled],
    )
    yield _many(
        "source_newest_snapshot_timestamp_seconds",
        "When the newest snapshot that was pulled as a whole was taken.",
        labels,
        [(words, each.newest.timestamp()) for words, each in pairs if each.newest],
    )
    yield _many(
        "source_last_try_failed",
        "Whether the last pull failed.",
        labels,
        [(words, bool(each.failed)) for words, each in pairs],
    )
    yield _many(
        "source_skipped_snapshots",
        "Snapshots that the last pull could not copy.",
        labels,
        [(words, each.skipped) for words, each in pairs if each.domain],
    )


def _one(name: str, text: str, value: float, **labels: str) -> GaugeMetricFamily:
    return _many(name, text, tuple(labels), [(labels, value)])


def _many(
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Sequence[tuple[Mapping[str, str], float]],
) -> GaugeMetricFamily:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"snaporch_{name}", text, labels=labels)
    for words, value in samples:
        family.add_metric([words[label] for label in labels], float(value))
    return family
