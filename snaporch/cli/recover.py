"""``snaporch recover``: recovers runs by :mod:`snaporch.recovery.recover_domains`, and reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, parse_wait
from snaporch.errors import NotFoundError, SnaporchError, UsageError
from snaporch.output.terminal import print_error, print_json, print_result
from snaporch.recovery.decision import UserDecision

if TYPE_CHECKING:
    from collections.abc import Callable

    from snaporch.context import Context
    from snaporch.errors import AttentionError
    from snaporch.recovery.recover_domains import RecoverRequest
    from snaporch.recovery.result import RecoveryResult


def recover_command(
    context: typer.Context,
    domain: Annotated[
        str | None,
        typer.Argument(
            metavar="[DOMAIN]", help="Only this domain, by name or UUID.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")
    ] = False,
    take: Annotated[
        UserDecision | None,
        typer.Option(
            "--take",
            help="For undecided disks, where overlay or base may be the newer one: commit the "
            "overlay, or keep the base and quarantine the overlay. Needs DOMAIN.",
            show_default=False,
        ),
    ] = None,
    autostart: Annotated[
        bool,
        typer.Option(
            "--autostart",
            help="As at boot: then start the guests marked autostart in libvirt. Guests on "
            "overlays of no known run are reported, and do not count as a failure.",
        ),
    ] = False,
    notify: Annotated[
        bool,
        typer.Option("--notify", help="Send a notification ([notify]) for each failure."),
    ] = False,
    wait: Annotated[
        int | None,
        typer.Option(
            "--wait",
            parser=parse_wait,
            metavar="DURATION",
            help="Wait this long for another run on the domain [default: 0s].",
            show_default=False,
        ),
    ] = None,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Return guests to their base images after a killed run.

    Without a domain, also removes leftovers of killed clone, verify and extract, and empty
    directories of overlays.

    Every command that changes a domain recovers it first. An interrupted restore is finished, or
    undone if the guest had not been stopped yet.
    """
    if take is not None and domain is None:
        raise UsageError("--take", "needs one domain", "name it; see: snaporch list")
    from snaporch.cli.policy_observers import observing
    from snaporch.cli.session import session
    from snaporch.recovery.recover_domains import RecoverRequest

    request = RecoverRequest(wait or 0, dry_run=dry_run, autostart=autostart, take=take)
    with (
        session(context, config, quiet=quiet or json) as opened,
        observing(opened) as observers,
    ):

        def report(error: SnaporchError) -> None:
            if notify:
                observers.failed(opened.config, error)

        return _recover(opened, domain, request, _Output(json=json), report)


def _recover(
    context: Context,
    domain: str | None,
    request: RecoverRequest,
    output: _Output,
    report: Callable[[SnaporchError], None],
) -> int:
    """Recover all domains or one; the first error's exit code."""
    from snaporch.recovery.recover_domains import recover_domain, unfinished
    from snaporch.recovery.start_guardian import guard_leftovers
    from snaporch.recovery.unknown_overlays import UnknownOverlayError

    names, unreadable = unfinished(context, domain)
    for each in unreadable:
        output.fail(each)
    for uuid, name in names.items():
        try:
            for result in recover_domain(context, uuid, name, request):
                output.add_result(name, uuid, result)
        except SnaporchError as error:
            output.fail(error)
            report(error)
    if not request.dry_run:
        guard_leftovers(context)  # a guardian retries each run that is still unfinished
    for left in _left_without_run(context, domain):
        # else the unit would be failed at each boot, and a run's failure in it not be noticed
        output.fail(left, counts=not (request.autostart and isinstance(left, UnknownOverlayError)))
        report(left)
    if domain is None:
        _sweep(context, output, dry_run=request.dry_run)
    if output.is_empty:
        context.progress.step(domain or "snaporch", "nothing to recover")
    return output.end()


class _Output:
    """Results are printed at once, a line each, or as one JSON document at the end."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self.lines: list[dict[str, str | None]] = []
        self.is_empty = True
        self._code = 0

    def add(self, text: str, domain: str | None = None, uuid: str | None = None) -> None:
        self.is_empty = False
        self.lines.append({"domain": domain, "uuid": uuid, "text": text})
        if not self._json:
            print_result(text)

    def add_result(self, domain: str, uuid: str, result: RecoveryResult) -> None:
        """Print a result, and the error for one that leaves work for the admin."""
        from snaporch.recovery.recover_domains import needs_attention

        self.add(f"{domain}: {result}", domain, uuid)
        if (left := needs_attention(domain, result)) is not None:
            self.fail(left)

    def fail(self, error: SnaporchError, *, counts: bool = True) -> None:
        """Print an error, which decides the exit code if it is the first one that ``counts``."""
        self.is_empty = False
        if counts and not self._code:
            self._code = int(error.exit_code)
        print_error(error.line())

    def end(self) -> int:
        """Print the JSON document; return the exit code of the first error that counts."""
        if self._json:
            print_json(self.lines)
        return self._code


def _left_without_run(context: Context, domain: str | None) -> list[AttentionError]:
    """The errors for guests that need the admin although no run of them is unfinished."""
    from snaporch.recovery.unknown_overlays import guests_on_unknown_overlays
    from snaporch.restore.undo_command import guests_left_barred

    found = [*guests_left_barred(context), *guests_on_unknown_overlays(context)]
    if domain is None or not found:
        return found
    try:
        name = context.hypervisor.domain(domain).name
    except NotFoundError:  # only its journal was left
        return []
    return [each for each in found if each.thing == name]


def _sweep(context: Context, output: _Output, *, dry_run: bool) -> None:
    """Remove empty directories, and what killed clones and verifications left."""
    from snaporch.clone.find_clones import remove_unfinished
    from snaporch.recovery.unknown_overlays import remove_empty_directories

    for text in remove_empty_directories(context, dry_run=dry_run):
        output.add(text)
    try:
        for text in remove_unfinished(context, dry_run=dry_run):
            output.add(text)
    except SnaporchError as error:
        output.fail(error)
