"""``snaporch prune``: prints and deletes what :mod:`snaporch.prune.decision` does not keep."""

from __future__ import annotations

import json as json_format
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.command_host import CommandHost
from snaporch.cli.options import ConfigOption, JsonOption, config_path

if TYPE_CHECKING:
    from snaporch.config import Config, ResticReplica
    from snaporch.prune.decision import PruneDecision
    from snaporch.prune.prune import PruneResult
    from snaporch.replication.restic import ResticRepository
    from snaporch.zfs import Pool

_REMAINING = {
    "chain": ("chain in repositories", "chains in repositories"),
    "copy": ("copy", "copies"),
    "bundle": ("bundle", "bundles"),
    "trashed": ("bundle in the trash", "bundles in the trash"),
    "safety": ("safety copy", "safety copies"),
}


def prune_command(
    context: typer.Context,
    domain: Annotated[
        str | None,
        typer.Argument(
            metavar="[DOMAIN]", help="Only this domain's, by name or UUID.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the actions without carrying them out.")
    ] = False,
    kept: Annotated[bool, typer.Option("--kept", help="Also print the items that stay.")] = False,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """Delete bundles that no snapshot needs, and old safety copies.

    A bundle is moved to the trash when the last of its ZFS snapshots is destroyed, and is deleted
    some days later. It stays while one of its pools is not imported. The only ZFS snapshots of this
    host's guests that prune destroys are those of pages of RAM that no bundle names.

    On a machine that keeps copies of other hosts' guests, it destroys those that no rule keeps:
    `keep` in [copies.NAME] or [source.NAME]. --kept prints why the others stay. In repositories of
    restic it deletes whole chains, by `keep` in [replica.NAME], but not if a domain is named.
    """
    from snaporch.output.terminal import print_error, print_result
    from snaporch.prune.prune import prune
    from snaporch.schedule.prune_received_copies import prune_copies

    host: CommandHost = context.obj
    settings = host.load_config(config_path(context, config))
    pool = host.open_pool()
    copies = prune_copies(settings, pool, domain=domain, dry_run=dry_run)
    done = prune(
        settings,
        pool,
        domain=domain,
        dry_run=dry_run,
        may_be_barred=lambda uuid: may_be_barred(host, settings, uuid),
    )
    chains = _prune_chains(host, settings, pool, dry_run=dry_run) if domain is None else None
    for each in (chains, copies):
        if each is not None:
            done.decisions[:0] = each.decisions
            done.failures[:0] = each.failures
    if domain is not None and not done.decisions:
        _check_name(host, settings, domain)
    if json:
        items = [each.as_json() for each in done.decisions]
        document = {"dry_run": dry_run, "freed_bytes": done.freed, "items": items}
        print_result(json_format.dumps(document, indent=2))
    else:
        _print_lines(done, dry_run=dry_run, kept=kept)
    for failure in (*done.failures, *done.undecided_items):
        print_error(failure.line())
    return done.exit_code


def _prune_chains(host: CommandHost, config: Config, pool: Pool, *, dry_run: bool) -> PruneResult:
    """Prune the repositories of restic that have ``keep``."""
    from snaporch.interrupt import Interrupt
    from snaporch.output.terminal import TerminalProgress
    from snaporch.schedule.prune_chains import prune_chains

    progress = TerminalProgress(quiet=False)
    with Interrupt().watching() as interrupt:

        def opened(name: str, replica: ResticReplica) -> ResticRepository:
            return host.open_repository(name, replica, interrupt, progress)

        return prune_chains(config, pool, opened, interrupt, dry_run=dry_run)


def _check_name(host: CommandHost, config: Config, domain: str) -> None:
    """Refuse a misspelt name.

    Raises:
        NoSuchDomainError: no domain has it.
    """
    from snaporch.hypervisor import no_guests

    uri = config.libvirt_uri
    has_guests = not config.only_keeps_copies or host.has_libvirt(uri)
    (host.open_hypervisor(uri) if has_guests else no_guests()).domain(domain)


def may_be_barred(host: CommandHost, config: Config, uuid: str) -> bool:
    """Whether an unfinished undo may bar the guest from starting; True if libvirt is away."""
    from snaporch.restore import start_bar

    return start_bar.may_be_barred(
        config.paths.journal, lambda: host.open_hypervisor(config.libvirt_uri).find(uuid)
    )


def _print_lines(done: PruneResult, *, dry_run: bool, kept: bool) -> None:
    from snaporch.output.format import size
    from snaporch.output.terminal import print_result

    for each in done.decisions:
        if (kept or not each.usual) and not each.found.problem:
            print_result(decision_line(each, dry_run=dry_run))
    parts = [text for kind in _REMAINING if (text := _remaining(done, kind))]
    parts.append(f"{'would free' if dry_run else 'freed'} {size(done.freed)}")
    print_result("; ".join(parts))


def decision_line(decision: PruneDecision, *, dry_run: bool = False) -> str:
    """One line: the item, what was done with it (or would be), its size and the reason."""
    from snaporch.errors import one_line
    from snaporch.output.format import size

    action = decision.action.value.replace("-", " ") if dry_run else decision.action.done
    item = decision.found
    return one_line(f"{item.title}  {action}  {size(item.bytes)}  {decision.reason}")


def _remaining(done: PruneResult, kind: str) -> str:
    """The number and size of the items that are now of this kind; empty for none."""
    from snaporch.output.format import size

    items = [each.found for each in done.decisions if each.kind_now == kind]
    if not items:
        return ""
    word = _REMAINING[kind][len(items) != 1]
    return f"{len(items)} {word} ({size(sum(item.bytes for item in items))})"
