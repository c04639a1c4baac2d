"""``snaporch rebuild``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, YesOption

if TYPE_CHECKING:
    from snaporch.context import Context
    from snaporch.rebuild.plan import Copies, RebuildPlan
    from snaporch.restore.run import Restored


def rebuild_command(
    context: typer.Context,
    replica: Annotated[
        str,
        typer.Option("--from", metavar="REPLICA", help="The replica's name.", show_default=False),
    ],
    domains: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[DOMAIN[@SNAPSHOT]]...",
            help="Names or UUIDs; the newest snapshot of which the replica has all, if none is "
            "named.",
            show_default=False,
        ),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All guests that the replica has snapshots of.")
    ] = False,
    history: Annotated[
        bool,
        typer.Option("--history", help="Also bring back the older snapshots and their bundles."),
    ] = False,
    cold: Annotated[
        bool, typer.Option("--cold", help="Boot from the disks instead of resuming from RAM.")
    ] = False,
    no_restore: Annotated[
        bool,
        typer.Option("--no-restore", help="Bring the data back, and define and start nothing."),
    ] = False,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="HOST",
            help="Read from this host, such as root@nas, instead of the configured one.",
            show_default=False,
        ),
    ] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make the checks, and print what would come back.")
    ] = False,
    yes: YesOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Bring guests back from a replica, to a host that has lost them.

    Receives the datasets of a snapshot under their old names, fetches its bundle, defines the guest
    and restores it, RAM included. A dataset that exists on this host is refused. After an
    interruption the same command continues. It asks first, with the paths that the guest's
    definition names: read them, because the definition comes from the replica.
    """
    from snaporch.cli.session import session

    if bool(domains) == everything:
        raise typer.BadParameter("expected DOMAIN... or --all")
    if cold and no_restore:
        raise typer.BadParameter("--cold and --no-restore exclude one another")
    with session(context, config, quiet=quiet or json) as opened:
        run = _Rebuild(opened, replica, host, history=history, cold=cold, restores=not no_restore)
        return run.all(domains or [], dry_run=dry_run, yes=yes, json=json)


class _Shown(NamedTuple):
    """What comes back, before it moves."""

    document: dict[str, object]
    lines: list[str]


class _Rebuild:
    """One call of the command."""

    def __init__(
        self,
        context: Context,
        replica: str,
        host: str,
        *,
        history: bool,
        cold: bool,
        restores: bool,
    ) -> None:
        from snaporch.rebuild.open_source import open_source

        self._context = context
        self._source, self._local = open_source(context, replica, host)
        self._history = history
        self._cold = cold
        self._restores = restores

    def all(self, domains: list[str], *, dry_run: bool, yes: bool, json: bool) -> int:
        from snaporch.catalog.records import by_dataset
        from snaporch.cli.result_printer import ResultPrinter
        from snaporch.errors import InterruptedRunError, SnaporchError
        from snaporch.output.terminal import print_result
        from snaporch.rebuild.plan import find_domains
        from snaporch.rebuild.run import AlreadyHereError

        snapshots = self._source.snapshots()
        copies = by_dataset(snapshots)
        outcomes = ResultPrinter(json=json)
        for domain in domains or list(find_domains(snapshots)):
            try:
                document, lines = self._one(copies, domain, dry_run=dry_run, yes=yes)
            except InterruptedRunError:
                raise
            except AlreadyHereError as error:
                if domains:
                    outcomes.fail(error)
                else:
                    self._context.progress.note(error.thing, error.reason)
                continue
            except SnaporchError as error:
                outcomes.fail(error)
                continue
            outcomes.add(document, lines[0])
            for line in () if json else lines[1:]:
                print_result(line)
        outcomes.print_documents()
        return outcomes.code

    def _one(
        self, copies: Copies, domain: str, *, dry_run: bool, yes: bool
    ) -> tuple[dict[str, object], list[str]]:
        """Rebuild one guest; the document and the lines of its result."""
        from snaporch.rebuild.run import (
            bring_back,
            guest_lock,
            plan_guest,
            runs_to_fetch,
            set_policies,
        )

        context, source = self._context, self._source
        plan = plan_guest(context, source, self._local, copies, domain, history=self._history)
        shown = self._shown(plan)
        if dry_run:
            return shown.document, shown.lines
        if not yes:
            self._ask(plan, shown.lines)
        runs = runs_to_fetch(source, copies, plan, history=self._history)
        with guest_lock(context, plan):
            bring_back(context, source, self._local, plan, runs)
            restored = self._restore(plan) if self._restores else None
            set_policies(context, source, plan)
        if restored is None:
            line = f"{plan.thing}  came back; snaporch restore {plan.thing} starts it"
            return shown.document, [line]
        document = shown.document | {"state": str(restored.state), "resumed": restored.resumed}
        how = "resumed from RAM" if restored.resumed else "booted from its disks"
        how = how if restored.state != "off" else "as it was"
        return document, [f"{plan.thing}  rebuilt, {restored.state}, {how}"]

    def _shown(self, plan: RebuildPlan) -> _Shown:
        """What the user is shown before anything moves.

        Raises:
            RefusedError: a file would be written where none of libvirt's belongs.
        """
        from snaporch.rebuild.run import check_files, definition, host_paths

        if self._restores:
            check_files(plan)
        xml = definition(self._source, plan)
        cpu = plan.manifest.versions.cpu
        resumes = xml and self._restores and not self._cold
        obstacle = self._context.hypervisor.incompatibility(xml, cpu) if resumes else ""
        paths = host_paths(xml) if xml else []
        return _Shown(_document(plan, obstacle, paths), _lines(plan, obstacle, paths))

    def _ask(self, plan: RebuildPlan, lines: list[str]) -> None:
        from snaporch.cli.confirm import confirm
        from snaporch.output.terminal import print_error

        for line in lines:
            print_error(line)
        confirm(plan.thing)

    def _restore(self, plan: RebuildPlan) -> Restored:
        from snaporch.restore.confirm_and_restore import RestoreRequest, restore_under_lock

        request = RestoreRequest(f"{plan.manifest.uuid}@{plan.name}", cold=self._cold)
        return restore_under_lock(self._context, request)


def _lines(plan: RebuildPlan, obstacle: str, paths: list[str]) -> list[str]:
    """What comes back, for a reader."""
    lines = [f"{plan.thing} comes back ({plan.manifest.level}):"]
    for each in plan.incoming:
        count = len(each.snapshots)
        what = f"{count} snapshots" if count > 1 else f"@{each.snapshots[0].name}"
        lines.append(f"  dataset {each.dataset}: {what}{', encrypted' if each.raw else ''}")
    if paths:
        lines.append("  its definition, which comes from the replica, names these paths here:")
        lines += [f"    {path}" for path in paths]
    if obstacle:
        lines.append(f"  this host cannot run it: {obstacle}; see --cold and --no-restore")
    return lines


def _document(plan: RebuildPlan, obstacle: str, paths: list[str]) -> dict[str, object]:
    return {
        "domain": plan.manifest.domain,
        "uuid": plan.manifest.uuid,
        "snapshot": plan.name,
        "level": str(plan.manifest.level),
        "datasets": [each.dataset for each in plan.incoming],
        "paths": paths,
        "obstacle": obstacle,
    }
