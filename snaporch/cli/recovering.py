"""The loop over unfinished runs behind ``snaporch recover``."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable
from dataclasses import dataclass

from snaporch import default_paths
from snaporch.clone.registry import sweep
from snaporch.context import Context
from snaporch.errors import ExitCode, SnaporchError
from snaporch.journal import UnreadableJournal, list_journals, others_of
from snaporch.locks import RECOVERING, domain_lock
from snaporch.output.terminal import print_error, print_result
from snaporch.recovery.decision import UserDecision
from snaporch.recovery.settle import LOOK, SET_ASIDE, foresee, recover
from snaporch.recovery.start_guardian import guard_leftovers
from snaporch.restore.start_lock import left_barred


@dataclass(frozen=True, slots=True)
class RecoverRequest:
    """What was asked for."""

    wait: int | None = None
    dry_run: bool = False
    autostart: bool = False
    """Start the guests that libvirt starts at boot, and was kept from."""
    take: UserDecision | None = None
    """What a human has decided of disks that are undecided."""


class _Words:
    """What was done, or would be: a line each at once, or all of it as JSON at the end."""

    def __init__(self, *, json: bool) -> None:
        self._json = json
        self.said: list[dict[str, str | None]] = []

    def say(self, text: str, domain: str | None = None, uuid: str | None = None) -> None:
        self.said.append({"domain": domain, "uuid": uuid, "text": text})
        if not self._json:
            print_result(text)

    def end(self) -> None:
        if self._json:
            print_result(json_format.dumps(self.said, indent=2, ensure_ascii=False))


def recover_all(
    context: Context,
    domain: str | None,
    wish: RecoverRequest,
    *,
    told: Callable[[SnaporchError], None] = lambda _error: None,
    json: bool = False,
) -> int:
    """Settle every unfinished run, or those of one domain; the first failure's exit code.

    What could not be settled has a guardian again, which goes on trying.

    Args:
        told: hears what could not be settled.
    """
    failures: list[int] = []
    words = _Words(json=json)
    for uuid, name in _unsettled(context, domain, failures).items():
        try:
            _recover_one(context, uuid, name, wish, words, failures)
        except SnaporchError as error:
            print_error(error.line())
            told(error)
            failures.append(int(error.exit_code))
    if not wish.dry_run:
        guard_leftovers(context)
    _tell_barred(context, domain, failures)
    if domain is None:
        _sweep_clones(context, failures, words, dry_run=wish.dry_run)
    if not words.said and not failures:
        context.progress.step(domain or "snaporch", "nothing to recover")
    words.end()
    return failures[0] if failures else 0


def _recover_one(
    context: Context, uuid: str, name: str, wish: RecoverRequest, words: _Words, failures: list[int]
) -> None:
    interrupt = context.interrupt
    with domain_lock(
        default_paths.LOCKS, name, uuid, RECOVERING, wait=wish.wait or 0, interrupt=interrupt
    ):
        kept_off = wish.autostart and not others_of(context.config.paths.journal, uuid)
        for text in (foresee if wish.dry_run else recover)(context, uuid, wish.take):
            words.say(text, name, uuid)
            if SET_ASIDE in text:
                print_error(f"{text}; {LOOK}")
                failures.append(int(ExitCode.ATTENTION))
        if kept_off and not wish.dry_run and (started := _start_at_boot(context, uuid)):
            words.say(started, name, uuid)


def _tell_barred(context: Context, domain: str | None, failures: list[int]) -> None:
    for left in left_barred(context):
        if domain is None or left.thing == domain:
            print_error(left.line())
            failures.append(int(left.exit_code))


def _start_at_boot(context: Context, uuid: str) -> str | None:
    """Do what libvirt's hook kept it from at boot; a restore has left its guest as was wanted."""
    domain = context.hypervisor.find(uuid)
    if domain is None or domain.active or not context.hypervisor.starts_at_boot(uuid):
        return None
    context.hypervisor.start(uuid, paused=False)
    return f"{domain.name}: started it, as libvirt does at boot"


def _unsettled(context: Context, domain: str | None, failures: list[int]) -> dict[str, str]:
    """Domains with unfinished runs, UUID to name."""
    names = {}
    for journal in list_journals(context.config.paths.journal, sweep=False):
        if isinstance(journal, UnreadableJournal):
            print_error(journal.error.line())
            failures.append(int(ExitCode.ATTENTION))
        else:
            names[journal.uuid] = journal.domain
    if domain is not None:
        names = {uuid: name for uuid, name in names.items() if domain in (uuid, name)}
        if not names:
            context.hypervisor.domain(domain)  # a misspelt name is an error
    return names


def _sweep_clones(context: Context, failures: list[int], words: _Words, *, dry_run: bool) -> None:
    """Remove what killed clones and verifications left."""
    try:
        done = sweep(context, dry_run=dry_run)
    except SnaporchError as error:
        print_error(error.line())
        failures.append(int(error.exit_code))
        return
    for text in done:
        words.say(text)
