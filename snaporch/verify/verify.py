"""Verify a snapshot: check the bundle, then run a temporary clone and check that it is alive.

Copies on a replica are verified by :mod:`snaporch.verify.copies`; when a verification is due is
decided by :mod:`snaporch.schedule.verification_due`; which of two results stays on the snapshot, by
``VerificationResult.after`` in :mod:`snaporch.model`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from snaporch import default_paths
from snaporch.bundle.manifest import Manifest, Role
from snaporch.bundle.save_image import read_header
from snaporch.catalog.records import (
    VERIFIED_HERE,
    is_one_instant,
    marked_by,
    one_per_dataset,
)
from snaporch.clone.clone import Clone, CloneRequest, MarkedError, build_clone, check_clone
from snaporch.clone.find_clones import Purpose, new_clone, remove_leftovers
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
from snaporch.locks import domain_lock, held_by
from snaporch.model import PoolSnapshot, SnapshotRecord, VerificationResult, VerifyDepth, VerifyStep
from snaporch.private_files import replace_private
from snaporch.restore.definition_checks import check_ram_definition
from snaporch.restore.disk_checks import check_beneath
from snaporch.restore.ram_from_pages import check_pages
from snaporch.restore.source import (
    IncompleteError,
    Source,
    complete_source,
    manifest_and_snapshots,
    partition_of,
    reading_lock,
    underlying_devices,
)
from snaporch.verify.liveness import (
    LivenessError,
    run_command,
    run_script,
    wait_for_agent,
    wait_for_cpus,
)
from snaporch.verify.next_step import put_back_step, repeat_command
from snaporch.verify.present_settings import present_settings
from snaporch.zfs import PREFIX
from snaporch.zfs.resolver import Resolver

VERIFIED = "verified"
"""The property for the result of a host's own snapshot; a copy has what its host has written."""
VERIFICATION = "verification"
"""The name of the lock that lets one verification run at a time on a host."""


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The steps of a verification."""

    run: bool = True
    """Resume or boot a clone; if False, only checksums and GUIDs are checked."""
    disks: bool = False
    """Read all data of the disks."""
    script: Path | None = None
    script_seconds: int = 300
    screenshots: Path | None = None
    """A directory for screenshots of the clones."""
    on: str = ""
    """The name in the configuration of the copies that are verified; empty for own snapshots."""

    @property
    def mark(self) -> str:
        """The property for the result, without its prefix."""
        return VERIFIED_HERE if self.on else VERIFIED

    @property
    def repeated(self) -> tuple[str, ...]:
        """The options that have another verification verify the same."""
        return ("--on", self.on, "--test-restore") if self.on else ()


@dataclass
class Verification:
    """The result of verifying one snapshot."""

    record: SnapshotRecord
    passed: bool = False
    reached: VerifyDepth = VerifyDepth.NOTHING
    disks: bool = False
    """Whether all data of its disks was read."""
    command: bool = False
    """Whether its ``verify_command`` passed."""
    step: VerifyStep = VerifyStep.CHECKSUMS
    """The step that is under way, or failed."""
    steps_passed: set[VerifyStep] = field(default_factory=set)
    failed_steps: tuple[VerifyStep, ...] = ()
    """The steps that are failed, those of earlier verifications included."""
    proof: list[str] = field(default_factory=list)
    failure: SnaporchError | None = None
    not_run: str = ""
    """Why no clone was run; empty if one was."""
    screenshot: str | None = None
    at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def add_proof(self, context: Context, text: str) -> None:
        """Record and print a check that the snapshot has passed."""
        self.proof.append(text)
        context.progress.step(self.record.full_name, text)

    @contextmanager
    def testing(self, step: VerifyStep) -> Iterator[None]:
        """Record that a step has passed if the block raises no exception."""
        self.step = step
        yield
        self.steps_passed.add(step)

    def end(self, failed_before: Iterable[VerifyStep], repeated: Sequence[str] = ()) -> None:
        """Set the result: a step that failed before stays failed until it passes.

        Args:
            failed_before: the failed steps of earlier verifications.
            repeated: the options of the command that verifies it again.
        """
        failed = set(failed_before) - self.steps_passed
        if self.failure is None and failed:
            self.failure = _still_failed(self.record.full_name, failed, repeated)
        elif self.failure is not None:
            failed.add(self.step)
        self.failed_steps = tuple(step for step in VerifyStep if step in failed)
        self.passed = self.failure is None
        self.at = datetime.now(UTC)

    @property
    def verdict(self) -> VerificationResult:
        """The result of this verification alone."""
        return VerificationResult(
            self.at,
            self.passed,
            self.reached,
            self.disks,
            self.failed_steps,
            command=self.command,
        )

    @property
    def problem(self) -> SnaporchError | None:
        """The error to print and to notify of; None if the snapshot passed."""
        error, name = self.failure, self.record.full_name
        if error is None:
            return None
        reason = error.reason if error.thing == name else f"{error.thing}: {error.reason}"
        return SnaporchError(name, f"verification failed: {reason}", error.step)

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


def _still_failed(
    thing: str, failed: Iterable[VerifyStep], repeated: Sequence[str]
) -> SnaporchError:
    steps = [step for step in VerifyStep if step in failed]
    names = " and ".join(steps)
    reason = f"what was checked now is right, but it failed before in: {names}"
    return SnaporchError(thing, reason, repeat_command([thing], steps, repeated))


def longest_ago(records: Iterable[SnapshotRecord], count: int | None) -> list[SnapshotRecord]:
    """The ``count`` records whose last verification is longest ago; those without one come first.

    Args:
        count: None for all.
    """
    never = datetime.min.replace(tzinfo=UTC)
    ordered = sorted(records, key=lambda record: record.verified.at if record.verified else never)
    return ordered if count is None else ordered[:count]


def verify(context: Context, record: SnapshotRecord, options: VerifyOptions) -> Verification:
    """Verify one snapshot and write the result on its ZFS snapshots.

    Raises:
        SnaporchError: there is no result, for a reason outside the snapshot (no memory, no libvirt,
            a signal); nothing is written.
    """
    with reading_lock(context, record):
        return _verify(context, record, options)


def _verify(context: Context, record: SnapshotRecord, options: VerifyOptions) -> Verification:
    outcome = Verification(record)
    _, manifest = context.store.state(f"{record.uuid}/{record.run}")
    try:
        with outcome.testing(VerifyStep.CHECKSUMS):
            source = complete_source(context, record)
            _check_sums(context, source, outcome)
            _check_beneath(source)
        if options.disks:
            with outcome.testing(VerifyStep.DISKS):
                _read_disks(context, source, outcome)
        reason, step = _reason_not_to_run(context.resolver, source, options), ""
        if reason is None:
            outcome.step = VerifyStep.CLONE
            if (error := _run_clone(context, source, options, outcome)) is not None:
                reason = _reason_of(source, error)
                step = error.step if isinstance(error, MarkedError) else ""
        if reason is not None:
            outcome.not_run = f"{reason}; {step}" if step else reason
            outcome.add_proof(context, f"not run: {outcome.not_run}")
            has_command = bool(present_settings(context, record).verify_command)
            # a copy of which no clone ran has not passed, with or without a command
            if options.run and not (options.on and has_command):
                with outcome.testing(VerifyStep.COMMAND):
                    _check_no_command(source, reason, step, has_command=has_command)
    except IncompleteError as error:
        _check_unchanged(context, record, manifest)
        outcome.failure = error
    except LivenessError as error:
        outcome.failure = error
    results = _results(context, record, options.mark)
    failed = {step for result in results if result for step in result.failed_steps}
    outcome.end(failed, options.repeated)
    # of results that differ, since writing them was interrupted, only the failures count
    before = results.pop() if len(results) == 1 else None
    write_result(context, record, outcome.verdict.after(before), options.mark)
    return outcome


def _results(context: Context, record: SnapshotRecord, mark: str) -> set[VerificationResult | None]:
    """The results that are on the ZFS snapshots now; ``None`` if one has no result."""
    texts = (member.properties.get(mark) for member in _members(context, record))
    return set(map(VerificationResult.parse, texts))


def _check_unchanged(context: Context, record: SnapshotRecord, manifest: Manifest | None) -> None:
    """Check that no other process has changed the bundle meanwhile, such as by storing pages.

    Raises:
        BusyError: the bundle has changed, or another process works on the domain.
    """
    _, now = context.store.state(f"{record.uuid}/{record.run}")
    holder = held_by(default_paths.LOCKS, record.uuid)
    if now != manifest or (holder is not None and holder.pid != os.getpid()):
        reason = "its bundle was changed while it was read, or may have been changed"
        raise BusyError(record.full_name, reason, "verify it again")


def _check_sums(context: Context, source: Source, outcome: Verification) -> None:
    context.progress.step(source.thing, "checking the bundle's SHA-256")
    on_read = partial(context.progress.amount, source.thing)
    damage = context.store.damage(f"{source.record.uuid}/{source.record.run}", on_read)
    for error in damage.values():
        raise IncompleteError(error.thing, error.reason, put_back_step(source.thing))
    ram = source.part(Role.RAM)
    try:
        if ram is not None:
            read_header(source.directory / ram.name)
            check_ram_definition(source.thing, source.directory, source.manifest)
    except SnaporchError as error:
        step = error.step or put_back_step(source.thing)
        raise IncompleteError(error.thing, error.reason, step) from error
    except OSError as error:  # the checksum was read a moment ago
        reason = f"its RAM cannot be read ({error.strerror})"
        raise UnavailableError(source.thing, reason, "verify it again") from error
    if ram is not None and ram.pages is not None:
        context.progress.step(source.thing, "checking the pages of its RAM")
        check_pages(context, source.thing, ram)
        outcome.add_proof(context, "the pages of its RAM have their checksum")
    outcome.reached = VerifyDepth.CHECKED
    parts, members = len(source.manifest.parts), len(source.members)
    outcome.add_proof(context, _counted(parts, "part", "its SHA-256", "their SHA-256"))
    outcome.add_proof(context, _counted(members, "ZFS snapshot", "its GUID", "their GUIDs"))


def _counted(count: int, noun: str, its: str, theirs: str) -> str:
    return f"1 {noun} has {its}" if count == 1 else f"{count} {noun}s have {theirs}"


def _check_beneath(source: Source) -> None:
    """Check the backing files outside the snapshot.

    If one has changed, the verification fails, but the bundle and its RAM are whole.

    Raises:
        IncompleteError: a file has changed.
        UnavailableError: a file cannot be checked.
    """
    try:
        check_beneath(source.thing, source.manifest, unknown_too=False)
    except RefusedError as changed:
        if isinstance(changed.__cause__, OSError):
            raise UnavailableError(changed.thing, changed.reason, changed.step) from changed
        raise IncompleteError(changed.thing, changed.reason, changed.step) from changed


def _read_disks(context: Context, source: Source, outcome: Verification) -> None:
    count, read = read_disks(context, source)
    outcome.disks = True
    outcome.add_proof(
        context, f"all data of {count} disks and backing files was read ({read >> 10} KiB)"
    )


def _reason_not_to_run(resolver: Resolver, source: Source, options: VerifyOptions) -> str | None:
    """Why no clone is run; None if one can be run."""
    if not options.run:
        return "as requested"
    if not source.has_ram and source.part(Role.INACTIVE_XML) is None:
        return "of a transient domain, without RAM"
    if not source.disks:
        return "it has no disks"
    if parts := [
        disk.target
        for disk in source.disks
        if partition_of(resolver, disk) is not None or underlying_devices(resolver, disk)
    ]:
        return f"its disk {parts[0]} is a part of a volume"
    if unknown := _unknown_files(source):
        return f"it is unknown whether its backing file {unknown[0]} has changed"
    if apart := [disk for disk in source.manifest.disks if disk.is_apart]:
        return f"its disk {apart[0].target} is not in the snapshot"
    return None


def _check_no_command(source: Source, reason: str, step: str, *, has_command: bool) -> None:
    """Check that the guest has no ``verify_command``: without a clone it cannot pass.

    Args:
        source: the snapshot.
        reason: why no clone can be run.
        step: what changes that; empty if it is not known.
        has_command: the guest has one.

    Raises:
        LivenessError: it has one.
    """
    if has_command:
        text = f"its verify_command was not run, since no clone can be run: {reason}"
        change = step or "change what the reason names"
        raise LivenessError(source.thing, text, f"unset verify_command for this guest, or {change}")


def _reason_of(source: Source, error: SnaporchError) -> str:
    return error.reason if error.thing == source.thing else f"{error.thing}: {error.reason}"


def _unknown_files(source: Source) -> list[str]:
    files = (file for disk in source.manifest.disks for file in disk.beneath or ())
    return [file.path for file in files if file.is_unknown]


def _run_clone(
    context: Context, source: Source, options: VerifyOptions, outcome: Verification
) -> SharedError | None:
    """Run a clone and check that it is alive; why it cannot be run beside the original, or None."""
    name = f"{source.record.domain}-verify-{secrets.token_hex(4)}"
    request = CloneRequest(name, resumed=source.has_ram, network=NO_NETWORK, purpose=Purpose.VERIFY)
    try:
        check_clone(context, source, request)
        with new_clone(context, name, Purpose.VERIFY, source.thing) as uuid:
            with outcome.testing(VerifyStep.CLONE):
                made = _build_clone(context, source, request, uuid)
                _check_liveness(context, source, options, outcome, made)
            with outcome.testing(VerifyStep.COMMAND):  # without a command its failure ends, too
                if present_settings(context, source.record).verify_command:
                    _run_command(context, source, outcome, made)
            if options.script is not None:
                with outcome.testing(VerifyStep.SCRIPT):
                    _run_script(
                        context, source, options.script, options.script_seconds, outcome, made
                    )
    except LostLibvirtError as error:  # this says nothing about the snapshot
        raise UnavailableError(error.thing, error.reason, error.step) from error
    except SharedError as error:
        return error
    context.interrupt.check(source.thing)
    return None


def _build_clone(context: Context, source: Source, request: CloneRequest, uuid: str) -> Clone:
    try:
        return build_clone(context, source, request, uuid)
    except LostLibvirtError:
        raise
    except (HypervisorError, NotFoundError) as error:
        action = "resumed" if request.resumed else "booted"
        reason = f"could not be {action} ({error.reason})"
        raise LivenessError(source.thing, reason) from error


def _check_liveness(
    context: Context, source: Source, options: VerifyOptions, outcome: Verification, made: Clone
) -> None:
    context.progress.step(source.thing, "looking for signs of life")
    used = wait_for_cpus(context, source.thing, made.uuid)
    outcome.reached = VerifyDepth.RESUMED if made.resumed else VerifyDepth.BOOTED
    outcome.add_proof(
        context, f"{outcome.reached} without a network; vCPUs ran {used / 1e6:.0f} ms"
    )
    if wait_for_agent(context, source, made.uuid):
        outcome.add_proof(context, "the guest's agent answers")
    if options.screenshots is not None:
        _take_picture(context, source, options.screenshots, outcome, made)


def _run_command(context: Context, source: Source, outcome: Verification, made: Clone) -> None:
    context.progress.step(source.thing, "running its verify_command in the guest")
    name = run_command(context, source, made.uuid)
    outcome.command = True
    outcome.add_proof(context, f"{name} exited with status 0 in the guest")


def _run_script(
    context: Context, source: Source, script: Path, seconds: int, outcome: Verification, made: Clone
) -> None:
    context.progress.step(source.thing, f"running {script}")
    run_script(context, source, made, script, seconds)
    outcome.add_proof(context, f"{script} exited with status 0")


def _take_picture(
    context: Context, source: Source, directory: Path, outcome: Verification, made: Clone
) -> None:
    try:
        picture = context.hypervisor.screenshot(made.uuid)
    except LostLibvirtError:
        raise
    except HypervisorError as error:  # a picture proves nothing of the snapshot
        context.progress.note(source.thing, f"there is no screenshot: {error.reason}")
        return
    if picture is None:
        context.progress.note(source.thing, "has no screen, so there is no screenshot")
        return
    path = directory / f"{source.thing.replace('/', '_')}.{picture.suffix}"
    replace_private(path, picture.data)
    outcome.screenshot = str(path)


def write_result(
    context: Context, record: SnapshotRecord, verdict: VerificationResult, mark: str = VERIFIED
) -> None:
    """Write a result on the run's ZFS snapshots that exist and carry this run's mark.

    Args:
        mark: the property, without its prefix.

    Raises:
        PoolError: it cannot be written.
    """
    names = [member.full_name for member in _members(context, record)]
    if names:
        context.pool.set_properties(names, {f"{PREFIX}{mark}": verdict.as_text()})


def _members(context: Context, record: SnapshotRecord) -> list[PoolSnapshot]:
    """The ZFS snapshots that a result is about, if they carry the run's mark.

    A run may have several names, such as sanoid's hourly and daily. All have the same bundle, and
    the same contents if they are of one instant.
    """
    manifest, own = manifest_and_snapshots(context, record)
    if manifest is not None and not is_one_instant(manifest):
        own = one_per_dataset(manifest, own, record.snapshot)
    return [member for member in own if marked_by(member, record.run)]


def check_options(options: VerifyOptions) -> None:
    """Check the options before the first snapshot is verified.

    Raises:
        RefusedError: the script is not executable, or there is no directory for screenshots.
    """
    if options.script is not None and not os.access(options.script, os.X_OK):
        raise RefusedError(
            str(options.script), "does not exist, or is not executable", "chmod +x it"
        )
    if options.screenshots is not None and not options.screenshots.is_dir():
        raise RefusedError(str(options.screenshots), "is not a directory", "create it first")


@contextmanager
def host_lock(context: Context, wait: int = 0) -> Iterator[None]:
    """Allow one verification at a time on this host, at low priority.

    What killed clones and verifications left is removed first.

    Args:
        wait: seconds to wait for another verification.

    Raises:
        BusyError: another verification still runs after ``wait`` seconds.
    """
    runtime, interrupt = context.config.paths.runtime, context.interrupt
    with domain_lock(
        runtime,
        VERIFICATION,
        VERIFICATION,
        "verify",
        wait=wait,
        interrupt=interrupt,
        can_wait=True,
    ):
        remove_leftovers(context)
        context.lower_priority("verify")
        yield


def verify_all(
    context: Context, records: Sequence[SnapshotRecord], options: VerifyOptions
) -> Iterable[Verification | SnaporchError]:
    """Verify snapshots one after the other; an error of one does not stop the others.

    Yields:
        The result, or the error that kept a snapshot from being verified.

    Raises:
        InterruptedRunError: a signal came.
    """
    for record in records:
        try:
            yield verify(context, record, options)
        except InterruptedRunError:
            raise
        except SnaporchError as error:
            yield error
