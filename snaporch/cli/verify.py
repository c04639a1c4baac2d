"""``snaporch verify``: test restores by :mod:`snaporch.verify.verify`, and what they found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import (
    ConfigOption,
    JsonOption,
    QuietOption,
    config_path,
    parse_wait,
    whole_number,
)

if TYPE_CHECKING:
    from snaporch.cli.command_host import CommandHost
    from snaporch.cli.policy_observers import PolicyObservers
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.context import Context
    from snaporch.errors import SnaporchError
    from snaporch.verify.copies import CopyVerifier, SkippedCopy, VerifiedCopy
    from snaporch.verify.copy_decision import Copy
    from snaporch.verify.verify import Verification, VerifyOptions

_REACHED = {
    "checked": "checksums and GUIDs are correct",
    "booted": "a clone booted",
    "resumed": "a clone resumed from RAM",
}
_COMPARED = {
    "here": "as this host has recorded them",
    "last-verification": "as at its last verification",
    "replica": "as the replica's own manifest says",
}


def verify_command(
    context: typer.Context,
    snapshots: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DOMAIN@SNAPSHOT]...",
            help="As `snaporch list` shows them; with --on, also DOMAIN.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All snapshots.")] = False,
    due: Annotated[
        bool,
        typer.Option("--due", help="Only those due by policy."),
    ] = False,
    replica: Annotated[
        str | None,
        typer.Option(
            "--on",
            metavar="REPLICA",
            help="Verify the copies on this replica, or of this source: GUIDs and checksums, "
            "without libvirt.",
            show_default=False,
        ),
    ] = None,
    test_restore: Annotated[
        bool,
        typer.Option(
            "--test-restore",
            help="With --on: also run a clone of each copy, which must be in a pool of this "
            "machine.",
        ),
    ] = False,
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            parser=whole_number(1, 1 << 20),
            metavar="N",
            help="With --all: only the N whose last verification is longest ago.",
            show_default=False,
        ),
    ] = None,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Run no clone, only compare checksums and GUIDs.")
    ] = False,
    disks: Annotated[
        bool, typer.Option("--disks", help="Also read all data of the disks.")
    ] = False,
    script: Annotated[
        Path | None,
        typer.Option(
            "--script",
            metavar="PATH",
            help="Run this program against each clone.",
            show_default=False,
        ),
    ] = None,
    script_timeout: Annotated[
        int,
        typer.Option(
            "--script-timeout",
            parser=whole_number(1, 7 * 86_400),
            metavar="SECONDS",
            help="The time limit of the script.",
        ),
    ] = 300,
    screenshots: Annotated[
        Path | None,
        typer.Option(
            "--screenshots",
            metavar="DIR",
            help="Save a screenshot of each clone in this directory.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        int | None,
        typer.Option(
            "--wait",
            parser=parse_wait,
            metavar="DURATION",
            help="Wait this long for another verification on this host, with --on for a "
            "replication [default: 0s].",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Verify that snapshots can be restored.

    Checks every checksum and GUID, runs a temporary clone without a network (resumed from RAM, or
    booted if there is none), checks that it is alive, removes it, and writes the result on the
    snapshot. One verification at a time runs on a host, at low priority. With --on it compares the
    copies on a replica with what this host has recorded of them. With --test-restore it runs a
    clone of each copy on the machine that has it, where the guest need not be defined.
    """
    from snaporch.cli.session import session
    from snaporch.verify.verify import VerifyOptions

    if [bool(snapshots), everything, due].count(True) != 1 or (sample and not everything):
        if replica and not test_restore:
            raise typer.BadParameter(
                f"--on {replica}: expected DOMAIN..., DOMAIN@SNAPSHOT... or --all [--sample N]"
            )
        raise typer.BadParameter("expected DOMAIN@SNAPSHOT..., or --all [--sample N], or --due")
    if due and (checksums or disks or script or screenshots or replica or wait is not None):
        raise typer.BadParameter("--due takes only --json and --quiet")
    _check_copies(
        replica,
        test_restore=test_restore,
        of_clone=bool(disks or script or screenshots),
        checksums=checksums,
    )
    if checksums and (script or screenshots):
        raise typer.BadParameter(
            "--checksums runs no clone, so --script and --screenshots do not apply"
        )
    if replica and not test_restore:
        verification = _CopyVerification(context.obj, replica, quiet=quiet or json)
        path = config_path(context, config)
        return verification.run(path, snapshots or [], sample, wait=wait or 0, json=json)
    options = VerifyOptions(
        run=not checksums,
        disks=disks,
        script=script and script.absolute(),
        script_seconds=script_timeout,
        screenshots=screenshots,
    )
    with session(context, config, quiet=quiet or json) as opened:
        if due:
            return _verify_due(opened, json=json)
        if replica:
            return _test_restores(
                opened, replica, snapshots or [], sample, options, wait=wait or 0, json=json
            )
        return _verify(opened, snapshots or [], sample, options, wait=wait or 0, json=json)


def _check_copies(
    replica: str | None, *, test_restore: bool, of_clone: bool, checksums: bool
) -> None:
    """Check the options that ``--on`` takes.

    Args:
        replica: the name after ``--on``.
        test_restore: ``--test-restore``.
        of_clone: there is an option for clones.
        checksums: ``--checksums``.
    """
    if replica == "":
        raise typer.BadParameter("--on has no name of a replica")
    if test_restore and not replica:
        raise typer.BadParameter("--test-restore is of copies: --on NAME")
    if test_restore and checksums:
        raise typer.BadParameter("--checksums runs no clone: leave out --test-restore")
    if replica and not test_restore and (checksums or of_clone):
        raise typer.BadParameter(
            "--on takes only --all, --sample, --test-restore, --wait, --json and --quiet"
        )


def _verify(
    context: Context,
    texts: list[str],
    sample: int | None,
    options: VerifyOptions,
    *,
    wait: int,
    json: bool,
) -> int:
    from snaporch.catalog.local_replicas import without_replicas_here
    from snaporch.catalog.records import all_records
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.output.terminal import print_error, print_json
    from snaporch.restore.source import find_records
    from snaporch.verify.verify import check_options, host_lock, longest_ago, verify_all

    check_options(options)
    if texts:
        records = [find_records(context, text)[-1] for text in texts]
    else:
        snapshots = without_replicas_here(context.config, context.pool.snapshots())
        records = longest_ago(all_records(context.store, snapshots), sample)
    outcomes = ResultPrinter(json=json)
    with host_lock(context, wait):
        for outcome in verify_all(context, records, options):
            _report(outcomes, outcome)
    if json:
        documents = outcomes.documents
        shown = documents[0] if len(texts) == 1 and documents else documents
        print_json(shown)
    elif not records:
        print_error("there are no snapshots; take one: snaporch snapshot DOMAIN")
    return outcomes.code


def _test_restores(
    context: Context,
    name: str,
    texts: list[str],
    sample: int | None,
    options: VerifyOptions,
    *,
    wait: int,
    json: bool,
) -> int:
    """Restore copies in a pool of this machine, each in a clone, and print the results."""
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.errors import NotFoundError
    from snaporch.verify.copies_here import CopiesHere, NotRestorableError, find_place
    from snaporch.verify.verify import check_options, host_lock, longest_ago

    check_options(options)
    copies = CopiesHere(context, name, find_place(context.config, name))
    outcomes = ResultPrinter(json=json)
    restored = 0
    with host_lock(context, wait):
        records = copies.find(texts)
        ordered = records if texts else longest_ago(records, None)
        for outcome in copies.verify_all(ordered, options, sample or len(records)):
            if isinstance(outcome, NotRestorableError) and not texts:
                context.progress.note(f"{outcome.thing}  {name}", f"not restored: {outcome.reason}")
            else:
                restored += _report_restore(outcomes, outcome, name, is_named=bool(texts))
    if not restored and not outcomes.code:
        reason = "no copy was restored" if records else "there are no copies yet"
        outcomes.fail(NotFoundError(name, reason, "see `snaporch status`"))
    outcomes.print_documents()
    return outcomes.code


def _verify_due(context: Context, *, json: bool) -> int:
    from snaporch.cli.policy_observers import observing

    with observing(context) as observers:
        outcomes = verify_and_report_due(context, observers, json=json)
    outcomes.print_documents()
    return outcomes.code


def verify_and_report_due(
    context: Context, observers: PolicyObservers, *, json: bool
) -> ResultPrinter:
    """Run the verifications that are due by policy, print the results and notify of failures.

    While another verification runs on the host, only a note is printed.
    """
    from snaporch.cli.result_printer import ResultPrinter
    from snaporch.errors import BusyError
    from snaporch.schedule.run_verifications import verify_due
    from snaporch.verify.verify import host_lock

    outcomes = ResultPrinter(json=json)
    try:
        with host_lock(context):
            for each in verify_due(context):
                _report(outcomes, each.outcome)
                if each.problem is not None:
                    observers.failed(context.config, each.problem)
    except BusyError as error:
        context.progress.note(error.thing, f"{error.reason}; due verifications run later")
    return outcomes


def _report_restore(
    outcomes: ResultPrinter, outcome: Verification | SnaporchError, on: str, *, is_named: bool
) -> bool:
    """Print the outcome of a test restore; return whether a clone of the copy ran.

    Args:
        on: the name of the copies.
        is_named: the copy was asked for, so that it is an error if no clone ran.
    """
    from snaporch.errors import RefusedError, SnaporchError

    if isinstance(outcome, SnaporchError) or not (outcome.passed and outcome.not_run):
        _report(outcomes, outcome, on=on)
        return not isinstance(outcome, SnaporchError) and outcome.passed
    error = RefusedError(outcome.record.full_name, f"not restored: {outcome.not_run}")
    document = outcome.as_json() | {"replica": on, "passed": False, "failure": error.line()}
    text = f"not restored: {outcome.not_run}; {_REACHED[outcome.reached]}"
    outcomes.add(document, f"{outcome.record.full_name}  {on}  {text}")
    if is_named:
        outcomes.fail(error)
    return False


def _report(
    outcomes: ResultPrinter, outcome: Verification | SnaporchError, *, on: str = ""
) -> None:
    """Print an outcome.

    Args:
        on: the name of the copies that were verified; empty for own snapshots.
    """
    from snaporch.errors import SnaporchError

    if isinstance(outcome, SnaporchError):
        outcomes.fail(outcome)
        return
    if outcome.passed:
        result = f"passed, {_REACHED[outcome.reached]}"
    else:
        result = f"FAILED in: {', '.join(outcome.failed_steps)}"
    thing = f"{outcome.record.full_name}  {on}".rstrip()
    document = outcome.as_json() | ({"replica": on} if on else {})
    outcomes.add(document, f"{thing}  {result}")
    if outcome.problem is not None:
        outcomes.fail(outcome.problem)


class _CopyVerification:
    """One call with ``--on``, which needs no libvirt."""

    def __init__(self, host: CommandHost, replica: str, *, quiet: bool) -> None:
        self._host = host
        self._replica = replica
        self._quiet = quiet

    def run(
        self, config: Path | None, names: list[str], sample: int | None, *, wait: int, json: bool
    ) -> int:
        from snaporch.cli.result_printer import ResultPrinter
        from snaporch.errors import NotFoundError
        from snaporch.interrupt import Interrupt
        from snaporch.output.terminal import TerminalProgress
        from snaporch.verify.copies import CopyHost, CopyVerifier, choose_copies, copies_lock

        settings = self._host.load_config(config)
        pool = self._host.open_pool(read_only=True)
        progress = TerminalProgress(quiet=self._quiet)
        outcomes = ResultPrinter(json=json)
        with Interrupt().watching() as interrupt:
            source = self._host.open_copies(settings, self._replica, pool, interrupt, progress)
            host = CopyHost(settings, pool, progress, interrupt)
            with copies_lock(host, wait):
                self._host.lower_priority("verify")
                verifier = CopyVerifier(host, self._replica, source)
                found = verifier.find()
                for error in verifier.lost:
                    outcomes.fail(error)
                try:
                    copies = choose_copies(found, self._replica, names)
                except NotFoundError as error:  # the losses count, too
                    outcomes.fail(error)
                    copies = []
                count = self._verify(verifier, copies, sample, outcomes, is_named=bool(names))
        if not count and not outcomes.code:
            step = f"see: snaporch replicate --all --to {self._replica}"
            outcomes.fail(NotFoundError(f"replica {self._replica}", "no copy was verified", step))
        outcomes.print_documents()
        return outcomes.code

    def _verify(
        self,
        verifier: CopyVerifier,
        copies: Sequence[Copy],
        sample: int | None,
        outcomes: ResultPrinter,
        *,
        is_named: bool,
    ) -> int:
        """Verify copies and print the outcomes; return how many were verified."""
        from snaporch.errors import InterruptedRunError, SnaporchError

        done = count = 0
        try:
            sampled = verifier.verify_sample(copies, sample) if sample else verifier.verify(copies)
            for outcome in sampled:
                done += 1
                if isinstance(outcome, SnaporchError):
                    outcomes.fail(outcome)
                else:
                    count += self._report(outcomes, outcome, is_named=is_named)
        except InterruptedRunError:
            raise
        except SnaporchError as error:
            left = len(copies) - done
            text = f"{min(left, sample - count) if sample else left} copies were not verified"
            outcomes.fail(error)
            outcomes.fail(SnaporchError(f"replica {self._replica}", text, "try again"))
        return count

    def _report(
        self, outcomes: ResultPrinter, outcome: VerifiedCopy | SkippedCopy, *, is_named: bool
    ) -> bool:
        """Print an outcome; return whether the copy was verified."""
        from snaporch.errors import NotFoundError
        from snaporch.verify.copies import SkippedCopy

        start = f"{outcome.copy.full_name}  {self._replica}"
        if isinstance(outcome, SkippedCopy):
            document = outcome.as_json(self._replica)
            outcomes.add(document, f"{start}  not verified: {outcome.reason}")
            if is_named:
                thing = f"{self._replica}: {outcome.copy.full_name}"
                outcomes.fail(NotFoundError(thing, f"its copy was not verified: {outcome.reason}"))
            return False
        compared = _COMPARED[outcome.result.source]
        files = f"{outcome.files} files and " if outcome.files else ""
        what = "the records of its streams" if outcome.has_streams else "its ZFS snapshots"
        passed = f"passed, {files}{what} are {compared}"
        if outcome.has_streams:
            passed += "; the streams were not read"
        outcomes.add(outcome.as_json(), f"{start}  {passed if outcome.result.passed else 'FAILED'}")
        if outcome.problem is not None:
            outcomes.fail(outcome.problem)
        if outcome.unrecorded is not None:
            outcomes.fail(outcome.unrecorded)
        return True
