"""The test restore: read everything, then run a throw-away clone and look for life in it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from snaporch import default_paths
from snaporch.bundle.manifest import Manifest, Role
from snaporch.bundle.save_image import read_header
from snaporch.catalog.records import marked_by
from snaporch.clone.clone import Clone, CloneRequest, build, check_clone
from snaporch.clone.registry import Purpose, workplace
from snaporch.context import Context
from snaporch.errors import (
    BusyError,
    InterruptedRunError,
    NotFoundError,
    RefusedError,
    SnaporchError,
    UnavailableError,
)
from snaporch.extract.disk_reader import read_disks
from snaporch.hypervisor import HypervisorError, LostLibvirtError
from snaporch.hypervisor.clone_xml import NO_NETWORK, SharedError
from snaporch.locks import held_by
from snaporch.model import SnapshotRecord, VerificationResult, VerifyDepth
from snaporch.restore.disk_checks import check_beneath
from snaporch.restore.ram_from_pages import check_pages
from snaporch.restore.source import (
    NotWholeError,
    Source,
    made_of,
    members_of,
    partition_of,
    reading,
    whole_source,
)
from snaporch.verify.liveness import LifeError, run_script, wait_for_agent, wait_for_cpus
from snaporch.zfs import PREFIX


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """What a verification consists of."""

    run: bool = True
    """Resume or boot a clone; without, only what is stored is checked."""
    disks: bool = False
    """Read all of the disks."""
    script: Path | None = None
    script_seconds: int = 300
    screenshots: Path | None = None
    """A directory for pictures of the guests' screens."""


@dataclass
class Verification:
    """What came of one."""

    record: SnapshotRecord
    passed: bool = False
    reached: VerifyDepth = VerifyDepth.NOTHING
    disks: bool = False
    """Whether all of its disks was read."""
    proof: list[str] = field(default_factory=list)
    failure: SnaporchError | None = None
    screenshot: str | None = None
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def prove(self, context: Context, text: str) -> None:
        """Something was seen that speaks for it."""
        self.proof.append(text)
        context.progress.step(self.record.full_name, text)

    @property
    def verdict(self) -> VerificationResult:
        """As it is written on the snapshot."""
        return VerificationResult(self.at, self.passed, self.reached, self.disks)

    @property
    def trouble(self) -> SnaporchError | None:
        """What somebody should be told of a snapshot that did not pass."""
        error, name = self.failure, self.record.full_name
        if error is None:
            return None
        told = error.reason if error.thing == name else f"{error.thing}: {error.reason}"
        return SnaporchError(name, f"verification failed: {told}", error.step)

    def as_json(self) -> dict[str, object]:
        """The documented JSON object."""
        return {
            "domain": self.record.domain,
            "uuid": self.record.uuid,
            "snapshot": self.record.snapshot,
            "run": self.record.run,
            **self.verdict.as_json(),
            "proof": self.proof,
            "failure": self.failure.line() if self.failure else None,
            "screenshot": self.screenshot,
        }


def longest_ago(records: Iterable[SnapshotRecord], count: int | None) -> list[SnapshotRecord]:
    """The ``count`` records whose last verification is longest ago; never comes first."""
    never = datetime.min.replace(tzinfo=UTC)
    ordered = sorted(records, key=lambda record: record.verified.at if record.verified else never)
    return ordered if count is None else ordered[:count]


def verify(context: Context, record: SnapshotRecord, ordeal: VerifyOptions) -> Verification:
    """Verify one snapshot and write the verdict on it.

    Raises:
        SnaporchError: it could not be found out, for a reason that is not the snapshot's
            (no memory, no libvirt, a signal); nothing is written.
    """
    with reading(context, record):
        return _verify(context, record, ordeal)


def _verify(context: Context, record: SnapshotRecord, ordeal: VerifyOptions) -> Verification:
    outcome = Verification(record)
    _, manifest = context.store.state(f"{record.uuid}/{record.run}")
    try:
        source = whole_source(context, record)
        _check_sums(context, source, outcome)
        _check_beneath(source)
        if ordeal.disks:
            _read_disks(context, source, outcome)
        reason = _stays_on_paper(source, ordeal)
        if reason is None:
            reason = _check_life(context, source, ordeal, outcome)
        if reason is not None:
            outcome.prove(context, f"not run: {reason}")
        outcome.passed = True
    except NotWholeError as error:
        _check_settled(context, record, manifest)
        outcome.failure = error
    except LifeError as error:
        outcome.failure = error
    outcome.at = datetime.now(UTC)
    write_verdict(context, record, outcome.verdict)
    return outcome


def _check_settled(context: Context, record: SnapshotRecord, manifest: Manifest | None) -> None:
    """Nobody has moved parts of the bundle meanwhile, as RAM into pages.

    Raises:
        BusyError: somebody has, or may have.
    """
    _, now = context.store.state(f"{record.uuid}/{record.run}")
    holder = held_by(default_paths.LOCKS, record.uuid)
    if now != manifest or (holder is not None and holder.pid != os.getpid()):
        reason = "its bundle was changed while it was read, or may have been"
        raise BusyError(record.full_name, reason, "verify it again")


def _check_sums(context: Context, source: Source, outcome: Verification) -> None:
    context.progress.step(source.thing, "checking the bundle's SHA-256")
    damage = context.store.damage(f"{source.record.uuid}/{source.record.run}")
    for error in damage.values():
        raise NotWholeError(error.thing, error.reason)
    ram = source.part(Role.RAM)
    try:
        if ram is not None:
            read_header(source.directory / ram.name)
    except SnaporchError as error:
        raise NotWholeError(error.thing, error.reason) from error
    except OSError as error:  # it was there just now
        reason = f"its RAM cannot be read ({error.strerror})"
        raise UnavailableError(source.thing, reason, "verify it again") from error
    if ram is not None and ram.pages is not None:
        context.progress.step(source.thing, "checking the pages of its RAM")
        check_pages(context, source.thing, ram)
        outcome.prove(context, "the pages of its RAM have their checksum")
    outcome.reached = VerifyDepth.CHECKED
    outcome.prove(context, f"{len(source.manifest.parts)} parts have their SHA-256")
    outcome.prove(context, f"{len(source.members)} ZFS snapshots have their GUIDs")


def _check_beneath(source: Source) -> None:
    """What is in no snapshot is what it was; if not, the bundle and its RAM are whole all the same.

    Raises:
        NotWholeError: it is not.
        UnavailableError: it cannot be looked at.
    """
    try:
        check_beneath(source.thing, source.manifest, unknown_too=False)
    except RefusedError as changed:
        if isinstance(changed.__cause__, OSError):
            raise UnavailableError(changed.thing, changed.reason, changed.step) from changed
        raise NotWholeError(changed.thing, changed.reason, changed.step) from changed


def _read_disks(context: Context, source: Source, outcome: Verification) -> None:
    count, read = read_disks(context, source)
    outcome.disks = True
    outcome.prove(
        context, f"all data of {count} disks and backing files was read ({read >> 10} KiB)"
    )


def _stays_on_paper(source: Source, ordeal: VerifyOptions) -> str | None:
    """Why it cannot be run, if so, or is not to be."""
    if not ordeal.run:
        return "as asked for"
    if not source.has_ram and source.part(Role.INACTIVE_XML) is None:
        return "of a transient domain, without RAM"
    if not source.disks:
        return "it has no disks"
    if parts := [d.target for d in source.disks if partition_of(d) is not None or made_of(d)]:
        return f"its disk {parts[0]} is a part of a volume"
    if unknown := _unknown(source):
        return f"nobody can tell whether {unknown[0]} beneath its disks is what it was"
    if apart := [disk for disk in source.manifest.disks if disk.is_apart]:
        return f"its disk {apart[0].target} is not in the snapshot"
    return None


def _unknown(source: Source) -> list[str]:
    files = (file for disk in source.manifest.disks for file in disk.beneath or ())
    return [file.path for file in files if file.is_unknown]


def _check_life(
    context: Context, source: Source, ordeal: VerifyOptions, outcome: Verification
) -> str | None:
    """Run a clone; why it cannot be run beside the original, if so."""
    name = f"{source.record.domain}-verify-{secrets.token_hex(4)}"
    wish = CloneRequest(name, resumed=source.has_ram, network=NO_NETWORK, purpose=Purpose.VERIFY)
    try:
        check_clone(context, source, wish)
        with workplace(context, name, Purpose.VERIFY, source.thing) as uuid:
            try:
                made = build(context, source, wish, uuid)
            except LostLibvirtError:
                raise
            except (HypervisorError, NotFoundError) as error:
                deed = "resumed" if wish.resumed else "booted"
                raise LifeError(source.thing, f"could not be {deed} ({error.reason})") from error
            _look_for_life(context, source, ordeal, outcome, made)
    except LostLibvirtError as error:  # nothing was found out
        raise UnavailableError(error.thing, error.reason, error.step) from error
    except SharedError as error:
        return error.reason if error.thing == source.thing else f"{error.thing}: {error.reason}"
    context.interrupt.check(source.thing)
    return None


def _look_for_life(
    context: Context, source: Source, ordeal: VerifyOptions, outcome: Verification, made: Clone
) -> None:
    context.progress.step(source.thing, "looking for signs of life")
    used = wait_for_cpus(context, source.thing, made.uuid)
    outcome.reached = VerifyDepth.RESUMED if made.resumed else VerifyDepth.BOOTED
    outcome.prove(context, f"{outcome.reached} without a network; vCPUs ran {used / 1e6:.0f} ms")
    if wait_for_agent(context, source, made.uuid):
        outcome.prove(context, "the guest's agent answers")
    if ordeal.screenshots is not None:
        _take_picture(context, source, ordeal.screenshots, outcome, made)
    if ordeal.script is not None:
        context.progress.step(source.thing, f"running {ordeal.script}")
        run_script(context, source, made, ordeal.script, ordeal.script_seconds)
        outcome.prove(context, f"{ordeal.script} ended with 0")


def _take_picture(
    context: Context, source: Source, directory: Path, outcome: Verification, made: Clone
) -> None:
    picture = context.hypervisor.screenshot(made.uuid)
    if picture is None:
        context.progress.note(source.thing, "has no screen to take a picture of")
        return
    path = directory / f"{source.thing.replace('/', '_')}.{picture.suffix}"
    path.write_bytes(picture.data)
    outcome.screenshot = str(path)


def write_verdict(context: Context, record: SnapshotRecord, verdict: VerificationResult) -> None:
    """On the ZFS snapshots that there are and that carry the guest's marks, not another's.

    Raises:
        PoolError: it cannot be written.
    """
    members = members_of(context, record)
    names = [member.full_name for member in members if marked_by(member, record.run)]
    if names:
        context.pool.set_properties(names, {f"{PREFIX}verified": verdict.as_text()})


def check_ordeal(ordeal: VerifyOptions) -> None:
    """What can be known before the first snapshot is looked at.

    Raises:
        RefusedError: the script cannot be run, or pictures cannot be kept.
    """
    if ordeal.script is not None and not os.access(ordeal.script, os.X_OK):
        raise RefusedError(str(ordeal.script), "is not there, or not executable", "chmod +x it")
    if ordeal.screenshots is not None and not ordeal.screenshots.is_dir():
        raise RefusedError(str(ordeal.screenshots), "is not a directory", "make it first")


def verify_all(
    context: Context, records: Sequence[SnapshotRecord], ordeal: VerifyOptions
) -> Iterable[Verification | SnaporchError]:
    """Verify one after the other; an error that is not the snapshot's does not stop the others."""
    for record in records:
        try:
            yield verify(context, record, ordeal)
        except InterruptedRunError:
            raise
        except SnaporchError as error:
            yield error
