"""The loop over unfinished runs behind ``snaporch recover``."""

from __future__ import annotations

from collections.abc import Callable

from snaporch import places
from snaporch.errors import ExitCode, SnaporchError
from snaporch.report.terminal import print_error, print_result
from snaporch.restore.barrier import left_barred
from snaporch.restore.clones import sweep
from snaporch.run.context import Context
from snaporch.run.decision import Take
from snaporch.run.guardian import guard_leftovers
from snaporch.run.journal import StrangeJournal, list_journals, others_of
from snaporch.run.lock import RECOVERING, domain_lock
from snaporch.run.settle import LOOK, SET_ASIDE, foresee, recover


def recover_all(
    context: Context,
    domain: str | None,
    *,
    wait: int | None,
    dry_run: bool,
    autostart: bool,
    take: Take | None,
    told: Callable[[SnaporchError], None] = lambda _error: None,
) -> int:
    """Settle every unfinished run, or those of one domain; the first failure's exit code.

    What could not be settled has a guardian again, which goes on trying.

    Args:
        autostart: start the guests that libvirt starts at boot, and was kept from.
        take: what a human has decided of disks that are undecided.
        told: hears what could not be settled.
    """
    failures: list[int] = []
    names = _unsettled(context, domain, failures)
    settled = False
    for uuid, name in names.items():
        try:
            with domain_lock(
                places.LOCKS,
                name,
                uuid,
                RECOVERING,
                wait=wait or 0,
                interrupt=context.interrupt,
            ):
                kept_off = autostart and not others_of(context.config.paths.journal, uuid)
                for text in (foresee if dry_run else recover)(context, uuid, take):
                    settled = True
                    print_result(text)
                    if SET_ASIDE in text:
                        print_error(f"{text}; {LOOK}")
                        failures.append(int(ExitCode.ATTENTION))
                if kept_off and not dry_run:
                    _start_at_boot(context, uuid)
        except SnaporchError as error:
            print_error(error.line())
            told(error)
            failures.append(int(error.exit_code))
    if not dry_run:
        guard_leftovers(context)
    _tell_barred(context, domain, failures)
    if domain is None:
        settled |= _sweep_clones(context, failures, dry_run=dry_run)
    if not settled and not failures:
        context.progress.step(domain or "snaporch", "nothing to recover")
    return failures[0] if failures else 0


def _tell_barred(context: Context, domain: str | None, failures: list[int]) -> None:
    for left in left_barred(context):
        if domain is None or left.thing == domain:
            print_error(left.line())
            failures.append(int(left.exit_code))


def _start_at_boot(context: Context, uuid: str) -> None:
    """Do what libvirt's hook kept it from at boot; a restore has left its guest as was wanted."""
    domain = context.hypervisor.find(uuid)
    if domain is not None and not domain.active and context.hypervisor.starts_at_boot(uuid):
        context.hypervisor.start(uuid, paused=False)
        print_result(f"{domain.name}: started it, as libvirt does at boot")


def _unsettled(context: Context, domain: str | None, failures: list[int]) -> dict[str, str]:
    """Domains with unfinished runs, UUID to name."""
    names = {}
    for journal in list_journals(context.config.paths.journal, sweep=False):
        if isinstance(journal, StrangeJournal):
            print_error(journal.error.line())
            failures.append(int(ExitCode.ATTENTION))
        else:
            names[journal.uuid] = journal.domain
    if domain is not None:
        names = {uuid: name for uuid, name in names.items() if domain in (uuid, name)}
        if not names:
            context.hypervisor.domain(domain)  # a misspelt name is an error
    return names


def _sweep_clones(context: Context, failures: list[int], *, dry_run: bool) -> bool:
    """Remove what killed clones and verifications left; whether there was any."""
    try:
        done = sweep(context, dry_run=dry_run)
    except SnaporchError as error:
        print_error(error.line())
        failures.append(int(error.exit_code))
        return False
    for text in done:
        print_result(text)
    return bool(done)
