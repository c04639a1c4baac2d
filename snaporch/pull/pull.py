"""On the machine that pulls: sources one after another, each guest by itself, with a record."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

from snaporch.config import Config, Source
from snaporch.config.transfer_window import ALWAYS
from snaporch.context import Context
from snaporch.errors import (
    InterruptedRunError,
    NotFoundError,
    SnaporchError,
    UnavailableError,
    WindowClosedError,
)
from snaporch.interrupt import WindowInterrupt
from snaporch.locks import domain_lock
from snaporch.pull.local_copies import LocalCopies
from snaporch.pull.pull_guest import GuestPull, GuestResult
from snaporch.pull.record import (
    PullRecord,
    after_failure,
    after_success,
    choose_guests,
    read_records,
    record_key,
    write_records,
)
from snaporch.pull.source import PullSource
from snaporch.pull.source_listing import MAX_GUESTS
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.zfs.pulled import PulledZfs

PULLING = "pull"
"""The name of the lock that lets one pull run at a time on a machine."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """The result of one guest, or the failure of a source."""

    source: str
    result: GuestResult | None
    """None for a failure that is of no single guest."""
    failures: Sequence[SnaporchError]
    succeeded: datetime | None = None
    """When the last pull of the guest, or else of the source, ended without a failure."""


Open = Callable[[Context, str], tuple[PullSource, LocalCopies, GuestPull]]
"""Opens a source of the configuration by its name."""


@contextmanager
def pull_lock(context: Context) -> Iterator[None]:
    """Allow one pull at a time on this machine, at low priority.

    Raises:
        BusyError: another pull runs.
    """
    runtime, interrupt = context.config.paths.runtime, context.interrupt
    with domain_lock(runtime, PULLING, PULLING, PULLING, wait=0, interrupt=interrupt):
        context.lower_priority(PULLING)
        yield


def find_sources(config: Config, names: Iterable[str]) -> dict[str, Source]:
    """The sources with these names in the configuration; all without names.

    Raises:
        NotFoundError: there is none of this name, or none at all.
    """
    wanted = list(names) or list(config.source)
    for name in wanted or [""]:
        if name not in config.source:
            known = ", ".join(config.source) or "none is configured"
            step = "see docs/how-to/pull.md"
            raise NotFoundError(name or "pull", f"no such source ({known})", step)
    return {name: config.source[name] for name in wanted}


@dataclass(frozen=True, slots=True)
class NextPull:
    """The next pull of a source that has ``every``."""

    source: str
    at: datetime
    """When it may begin: it is due, and its window is open."""
    reason: str

    def due(self, now: datetime) -> bool:
        """Whether it may begin now."""
        return self.at <= now


def next_pulls(config: Config, now: datetime) -> list[NextPull]:
    """The next pull of each source that has ``every``, as the configuration orders them.

    Args:
        config: has the sources, and where their records are.
        now: the time, with a time zone.
    """
    records = read_records(config.paths.schedule)
    found = []
    for name, source in config.source.items():
        if source.every is None:
            continue
        record = records.get(record_key(name))
        due = max(now, _due_at(record, source.every, config.schedule.retry, now))
        at, window = source.start_window.opens(due), source.start_window
        reason = "the last one failed" if record and record.failed else "by every"
        reason = f"its window: {window}" if at > due else reason
        found.append(NextPull(name, at, reason))
    return found


def due_sources(context: Context, now: datetime) -> list[str]:
    """The names of the sources that are due, or whose failed pull is to be retried.

    Only those whose window is open; those that were served last come last.
    """
    config = context.config
    records = read_records(config.paths.schedule)
    due = [each.source for each in next_pulls(config, now) if each.due(now)]
    served = {
        name: max(
            (_tried(e) for key, e in records.items() if key.startswith(record_key(name))),
            default=_NEVER,
        )
        for name in due
    }
    return sorted(due, key=lambda name: served[name])


def without_windows(context: Context, names: Iterable[str], now: datetime) -> Context:
    """The context for a pull by hand: sources have no windows. A note names those closed now."""
    sources = dict(context.config.source)
    for name in names:
        window = sources[name].window
        if not window.is_open(now):
            context.progress.note(name, f"its window ({window}) is closed; by hand it has none")
        changes = {"window": ALWAYS, "rate_outside": None}
        sources[name] = sources[name].model_copy(update=changes)
    return replace(context, config=context.config.model_copy(update={"source": sources}))


def _bounded(context: Context, name: str, now: Callable[[], datetime]) -> Context:
    """The context whose work on a source also stops at the end of its window."""
    window = context.config.source[name].start_window
    if not window:
        return context

    def closed() -> str:
        return "" if window.is_open(now()) else f"its window ({window}) has ended"

    return replace(context, interrupt=WindowInterrupt(outer=context.interrupt, closed=closed))


_NEVER = datetime.min.replace(tzinfo=UTC)


def _tried(record: PullRecord | None) -> datetime:
    return record.tried if record and record.tried else _NEVER


def _due_at(
    record: PullRecord | None, every: timedelta, retry: timedelta, now: datetime
) -> datetime:
    if record is None or record.tried is None or record.tried > now:
        return now
    return record.tried + (min(retry, every) if record.failed else every)


def open_pull(context: Context, name: str) -> tuple[PullSource, LocalCopies, GuestPull]:
    """Open a source of the configuration.

    Raises:
        UnavailableError: ZFS cannot be used here.
    """
    settings = context.config.source[name]
    source = PullSource(name, settings, context.interrupt, context.progress)
    copies = LocalCopies(name, settings.dataset, PulledZfs.open())
    bundles = ReceivedBundles(settings.bundles, settings.dataset)
    bundles.check()
    guests = GuestPull(name, source, copies, bundles, settings.bundles, context.progress)
    return source, copies, guests


def pull_sources(
    context: Context,
    names: Iterable[str],
    open_source: Open = open_pull,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> Iterator[Pulled]:
    """Pull sources one after another; a failure of a source or guest does not stop the others.

    The caller holds :func:`pull_lock`. Guests that were served last come last. At the end of its
    window a source stops, and the next one begins.

    Raises:
        InterruptedRunError: a signal came; the next pull continues.
    """
    directory, signals = context.config.paths.schedule, context
    for name in names:
        context = _bounded(signals, name, now)
        failures: list[SnaporchError] = []
        before, new = read_records(directory), dict[str, PullRecord]()
        start = record_key(name)
        known = {key.removeprefix(start): e for key, e in before.items() if key.startswith(start)}
        known.pop("", None)
        gone: set[str] = set()
        stopped: list[tuple[str, str]] = []
        ended = False
        try:
            for each in _pull(context, name, open_source, known, gone, stopped):
                failures += each.failures
                key = record_key(name, each.result.uuid if each.result is not None else "")
                if each.result is not None:
                    new[key] = _record(before.get(key), each.result, now())
                last = before.get(key)
                yield replace(each, succeeded=last.pulled if last else None)
            at, key = now(), record_key(name)
            failed = failures[0].line() if failures else ""
            record = PullRecord("", pulled=at, tried=at, failed=failed)
            after = after_failure if failures else after_success
            new[key] = after(before.get(key), record)
            ended = True
        except WindowClosedError as error:
            context.progress.note(name, f"{error.reason}; the next one continues")
            for uuid, domain in stopped:  # so that it comes after the others
                key = record_key(name, uuid)
                new[key] = replace(before.get(key) or PullRecord(domain), tried=now())
        finally:  # also after a signal, which lets the next pull report those that are gone
            unrecorded = _write(directory, new, gone if ended else ())
        if unrecorded is not None:
            yield Pulled(name, None, (unrecorded,))


def _write(
    directory: Path, records: Mapping[str, PullRecord], gone: Collection[str]
) -> UnavailableError | None:
    """Write records; return why they cannot be written, which must not stop the other sources."""
    try:
        write_records(directory, records, gone)
    except UnavailableError as error:
        return error
    return None


def _pull(
    context: Context,
    name: str,
    open_source: Open,
    known: Mapping[str, PullRecord],
    gone: set[str],
    stopped: list[tuple[str, str]],
) -> Iterator[Pulled]:
    """Pull a source; see :func:`pull_sources`.

    Args:
        known: the records of its guests, by UUID.
        gone: gets the keys of those that are not needed any more.
        stopped: gets the UUID and name of the guest at which the end of a window stopped the pull.
    """
    settings = context.config.source[name]
    try:
        source, copies, puller = open_source(context, name)
        copies.prepare()
        guests = source.guests()
    except InterruptedRunError:
        raise
    except SnaporchError as error:
        yield Pulled(name, None, (error,))
        return
    chosen, _ = choose_guests(guests, settings.domains)
    gone.update(record_key(name, uuid) for uuid in _not_needed(settings, chosen, known))
    for missing in _missing(name, settings, guests, known):
        yield Pulled(name, None, (missing,))
    for uuid, domain in sorted(chosen.items(), key=lambda each: _tried(known.get(each[0]))):
        context.interrupt.check(name)
        result = GuestResult(uuid, domain)
        try:
            result = puller.pull(source.guest(uuid, domain))
        except WindowClosedError:
            stopped.append((uuid, domain))
            raise
        except InterruptedRunError:
            raise
        except SnaporchError as error:
            result.failures.append(error)
        yield Pulled(name, result, result.failures)


def _not_needed(
    settings: Source, chosen: Collection[str], known: Mapping[str, PullRecord]
) -> list[str]:
    """The guests whose records are not needed any more, once their absence was reported.

    Without ``domains``, but with ``newest_within``, all guests that have copies stay expected, so
    that ``status`` reports their age. A hostile source may send any number of guests.
    """
    absent = [uuid for uuid in known if uuid not in chosen]
    if settings.newest_within is None or settings.domains:
        return absent
    expected = [uuid for uuid in absent if known[uuid].newest is not None]
    return [uuid for uuid in absent if known[uuid].newest is None] + expected[MAX_GUESTS:]


def _missing(
    name: str, settings: Source, guests: Mapping[str, str], known: Mapping[str, PullRecord]
) -> Iterator[NotFoundError]:
    """The guests that the source should send, and does not."""
    chosen, unknown = choose_guests(guests, settings.domains)
    there = f"authorized_keys on {settings.host}"
    for each in unknown:
        reason = "the source sends no such guest: it does not exist, has no snapshot, or the key "
        reason += "may not have it"
        step = f"see: source.{name}.domains here, and {there}"
        yield NotFoundError(f"{name}: {each}", reason, step)
    for uuid, before in known.items():
        if uuid not in guests and not {uuid, before.domain} & {*unknown}:
            reason = "the source does not send this guest any more, and its copies stay as they are"
            step = f"see: {there}; a name in source.{name}.domains is looked for each time"
            if settings.newest_within is not None and not settings.domains:
                step = f"see: {there}; if it is to end: [source.{name}] domains = [...] here"
            yield NotFoundError(f"{name}: {before.domain}", reason, step)
    if not chosen and not unknown:
        step = f"see {there}; has any guest a snapshot?"
        yield NotFoundError(name, "the source sends no guest", step)


def _record(before: PullRecord | None, result: GuestResult, at: datetime) -> PullRecord:
    since = before.waiting_since if before else None
    if not result.failures:
        same = since if result.waiting and not result.arrived else None
        since = (same or at) if result.waiting else None
    record = PullRecord(
        result.domain,
        pulled=at,
        newest=result.newest,
        tried=at,
        failed=result.failures[0].line() if result.failures else "",
        skipped=len(result.skipped),
        waiting=len(result.waiting),
        waiting_since=since,
    )
    return (after_failure if result.failures else after_success)(before, record)
