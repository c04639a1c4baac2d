"""``snaporch rebuild``: brings guests back by :mod:`snaporch.rebuild.rebuild_guest`; reports."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from snaporch.cli.options import (
    AcceptOption,
    ConfigOption,
    JsonOption,
    QuietOption,
    YesOption,
)

if TYPE_CHECKING:
    from snaporch.bundle.age import Identity
    from snaporch.context import Context
    from snaporch.rebuild.local_checks import AlreadyHereError
    from snaporch.rebuild.local_datasets import Local
    from snaporch.rebuild.plan import Copies, Guests, RebuildPlan
    from snaporch.rebuild.rebuild_guest import Rebuilt
    from snaporch.rebuild.replica_source import Source
    from snaporch.rebuild.surroundings import Surroundings


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
    identity: Annotated[
        Path | None,
        typer.Option(
            "--identity",
            metavar="FILE",
            help="The private key of age that decrypts the bundles.",
            show_default=False,
        ),
    ] = None,
    accept: AcceptOption = None,
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
        source, local = context.obj.open_source(opened, replica, host)
        accepted = tuple(accept or ())
        options = RebuildOptions(history, cold, not no_restore, dry_run, yes, json, accepted)
        with opened_identity(identity) as key:
            return Rebuild(opened, source, local, options, key).run(domains or [])


@contextmanager
def opened_identity(file: Path | None) -> Iterator[Identity | None]:
    """The private keys in a file; None without one.

    Raises:
        RefusedError: it cannot be read.
    """
    if file is None:
        yield None
        return
    from snaporch.bundle.age import Identity

    with closing(Identity(file)) as opened:
        yield opened


class RebuildOptions(NamedTuple):
    """The options of a rebuild, for all of its guests."""

    history: bool = False
    cold: bool = False
    restores: bool = True
    dry_run: bool = False
    yes: bool = False
    json: bool = False
    accepted: tuple[str, ...] = ()
    """What the guest may have of this host, although it comes from another one."""


class _Shown(NamedTuple):
    """What comes back, before it moves."""

    document: dict[str, object]
    lines: list[str]
    missing: list[str]
    """What this host lacks."""


class Rebuild:
    """One call of the command, or of ``restore --from``."""

    def __init__(
        self,
        context: Context,
        source: Source,
        local: Local,
        options: RebuildOptions,
        identity: Identity | None = None,
    ) -> None:
        from snaporch.cli.result_printer import ResultPrinter

        self._context = context
        self._source, self._local = source, local
        self._options = options
        self._identity = identity
        self._guests: Guests = {}
        self._outcomes = ResultPrinter(json=options.json)

    def run(self, domains: list[str]) -> int:
        """Rebuild these guests, or all; the exit code."""
        from snaporch.catalog.records import by_dataset
        from snaporch.errors import InterruptedRunError, SnaporchError
        from snaporch.rebuild.local_checks import AlreadyHereError
        from snaporch.rebuild.plan import bundled_guests, find_domains, no_guest, note_of_damage

        snapshots = self._source.snapshots()
        copies = by_dataset(snapshots)
        self._guests = bundled_guests(self._source, copies)
        if domains and (note := note_of_damage(self._guests)):
            self._context.progress.note(self._source.name, note)
        chosen = domains or list(find_domains(snapshots, self._guests))
        if not chosen:
            raise no_guest("--all", self._source)
        for domain in chosen:
            try:
                self._one(copies, domain)
            except InterruptedRunError:
                raise
            except AlreadyHereError as error:
                self._finish(error, is_named=bool(domains))
            except SnaporchError as error:
                self._outcomes.fail(error)
        self._outcomes.print_documents()
        return self._outcomes.code

    def _one(self, copies: Copies, domain: str) -> None:
        """Rebuild one guest, and print its result."""
        from snaporch.catalog.records import by_dataset
        from snaporch.rebuild.bring_back import policies_of
        from snaporch.rebuild.definitions import check_definitions, definitions
        from snaporch.rebuild.fetch_bundle import runs_to_fetch
        from snaporch.rebuild.plan_guest import plan_guest
        from snaporch.rebuild.rebuild_guest import rebuild_guest
        from snaporch.rebuild.surroundings import plan_surroundings

        context, source, options = self._context, self._source, self._options
        history = options.history

        def make_plan(copies: Copies) -> RebuildPlan:
            local, guests = self._local, self._guests
            return plan_guest(
                context, source, local, copies, domain, history=history, guests=guests
            )

        plan = make_plan(copies)
        for note in plan.notes(history=history):
            context.progress.note(plan.thing, note)
        is_closed = plan.sent is not None and self._identity is None
        xmls = (
            definitions(source, plan, self._identity) if options.restores or not is_closed else []
        )
        surroundings = plan_surroundings(context, self._local, plan, copies, xmls)
        policies = policies_of(source, plan)
        shown = self._shown(plan, surroundings, xmls, policies)
        if options.dry_run:
            self._print_plan(plan, shown)
        if options.restores:
            check_definitions(context, plan, surroundings, xmls, options.accepted)
        if options.dry_run:
            return
        if is_closed:
            note = "its bundle is encrypted, and does not come back without --identity"
            context.progress.note(plan.thing, note)
        if options.yes:
            for each in (e for e in shown.missing if e not in surroundings.absent):
                context.progress.note(plan.thing, f"this host: {each}")
        else:
            self._ask(plan, shown.lines)
        rebuilt = rebuild_guest(
            context,
            source,
            self._local,
            plan,
            surroundings,
            [] if is_closed else runs_to_fetch(source, copies, plan, history=history),
            policies,
            plan_again=lambda: make_plan(by_dataset(source.snapshots())),
            cold=options.cold,
            restores=options.restores,
            accepted=options.accepted,
            identity=self._identity,
        )
        self._print(plan, shown, rebuilt, is_closed=is_closed)

    def _print_plan(self, plan: RebuildPlan, shown: _Shown) -> None:
        """Print what would come back, and what this host lacks for it."""
        from snaporch.errors import RefusedError
        from snaporch.output.terminal import print_result

        self._outcomes.add(shown.document, shown.lines[0])
        for line in () if self._options.json else shown.lines[1:]:
            print_result(line)
        if shown.missing:
            reason = "this host lacks what it needs"
            self._outcomes.fail(RefusedError(plan.thing, reason, "; ".join(shown.missing)))

    def _print(
        self, plan: RebuildPlan, shown: _Shown, rebuilt: Rebuilt, *, is_closed: bool
    ) -> None:
        for note in rebuilt.notes:
            self._context.progress.note(plan.thing, note)
        notes = plan.notes(history=self._options.history)
        document = shown.document | {"notes": [*notes, *rebuilt.notes]}
        restored = rebuilt.restored
        if restored is not None:
            document |= {"state": str(restored.state), "resumed": restored.resumed}
            how = "resumed from RAM" if restored.resumed else "booted from its disks"
            how = how if restored.state != "off" else "as it was"
            self._outcomes.add(document, f"{plan.thing}  rebuilt, {restored.state}, {how}")
        elif not self._options.restores:
            again = ["snaporch", "rebuild", "--from", self._source.name, plan.thing]
            fenced = self._context.fences.find(plan.manifest.uuid) is not None
            words = shlex.join(again if fenced else ["snaporch", "restore", plan.thing])
            words += " --identity FILE" if fenced and plan.sent is not None else ""
            line = f"{plan.thing}  came back; {words} starts it"
            if is_closed:
                words = shlex.join([*again, "--identity"])
                line = f"{plan.thing}  its disks came back; with the key: {words} FILE"
            self._outcomes.add(document | {"needs_identity": is_closed}, line)
        else:
            self._outcomes.documents.append(document | {"state": None, "resumed": False})
        for error in rebuilt.failures:
            self._outcomes.fail(error)

    def _finish(self, here: AlreadyHereError, *, is_named: bool) -> None:
        """Of a guest that is here: set what an earlier rebuild did not."""
        from snaporch.errors import RefusedError, SnaporchError
        from snaporch.rebuild.local_checks import restore_command
        from snaporch.rebuild.rebuild_guest import finish
        from snaporch.rebuild.stages import Stage, stage_of
        from snaporch.rebuild.surroundings import attempt
        from snaporch.zfs import REBUILD_PROPERTY

        plan = here.plan
        stage = stage_of(self._context, plan) if plan else None
        if plan is None or stage is None:
            if is_named:
                self._outcomes.fail(here)
            else:
                self._context.progress.note(here.thing, here.reason)
            return
        domain = self._context.hypervisor.find(plan.manifest.uuid)
        if stage is Stage.RESTORE and not (domain and domain.active):
            names = [each.dataset for each in plan.incoming]
            done = shlex.join(["zfs", "inherit", REBUILD_PROPERTY, *names])
            step = f"{restore_command(plan)}; or, if it is as it is to be: {done}"
            reason = "came back by a rebuild, and was not restored"
            self._outcomes.fail(RefusedError(plan.manifest.domain, reason, step))
            return
        document: dict[str, object] = {"domain": here.thing, "uuid": plan.manifest.uuid}
        if self._options.dry_run:
            self._outcomes.add(document, f"{here.thing}  is here; its policies and autostart come")
            return
        failures: list[SnaporchError] = []
        attempt(failures, lambda: failures.extend(finish(self._context, self._source, plan)))
        if not failures:
            state = "is here"
            if stage is Stage.RESTORE:  # by virsh start, for example: then its RAM was discarded
                state += ", and runs, but not by this command"
            self._outcomes.add(
                document, f"{here.thing}  {state}; its policies and autostart are set"
            )
        for error in failures:
            self._outcomes.fail(error)

    def _shown(
        self,
        plan: RebuildPlan,
        surroundings: Surroundings,
        xmls: list[str],
        policies: dict[str, str],
    ) -> _Shown:
        """What the user is shown before anything moves.

        Raises:
            RefusedError: a file would be written where none of libvirt's belongs.
        """
        from snaporch.rebuild.definitions import host_paths, other_host_values
        from snaporch.rebuild.fetch_bundle import check_files
        from snaporch.rebuild.host_report import find_missing

        options = self._options
        check_files(plan.thing, plan.manifest)
        missing = find_missing(
            self._context,
            self._source,
            plan,
            surroundings,
            xmls,
            restores=options.restores,
            cold=options.cold,
        )
        paths, values = host_paths(*xmls), other_host_values(*xmls)
        notes = plan.notes(history=options.history)
        document = _document(plan, paths) | surroundings.as_json()
        document["host_values"] = values
        document |= {"missing": missing, "notes": [*notes, *surroundings.refused]}
        document["policies"] = policies
        lines = _lines(plan, surroundings, missing, [*paths, *values], policies)
        return _Shown(document, lines, missing)

    def _ask(self, plan: RebuildPlan, lines: list[str]) -> None:
        from snaporch.cli.confirm import confirm
        from snaporch.output.terminal import print_error

        for line in lines:
            print_error(line)
        confirm(plan.thing)


def _lines(
    plan: RebuildPlan,
    surroundings: Surroundings,
    missing: list[str],
    values: list[str],
    policies: dict[str, str],
) -> list[str]:
    """What comes back, for a reader."""
    from snaporch.errors import one_line

    lines = [f"{plan.thing} comes back ({plan.manifest.level}):"]
    for each in plan.incoming:
        count = len(each.snapshots)
        what = f"{count} snapshots" if count > 1 else f"@{each.snapshots[0].name}"
        lines.append(f"  dataset {each.dataset}: {what}{', encrypted' if each.raw else ''}")
    lines += [f"  policy of {each}: {policy}" for each, policy in policies.items()]
    lines += [f"  {each}" for each in surroundings.lines()]
    lines += [f"  not: {each}" for each in surroundings.refused if each not in missing]
    if values:
        lines.append("  its definition, which comes from the replica, names these here:")
        lines += [f"    {value}" for value in values]
    lines += [f"  this host: {each}" for each in missing]
    return [f"{line[: len(line) - len(line.lstrip(' '))]}{one_line(line)}" for line in lines]


def _document(plan: RebuildPlan, paths: list[str]) -> dict[str, object]:
    return {
        "domain": plan.manifest.domain,
        "uuid": plan.manifest.uuid,
        "snapshot": plan.name,
        "level": str(plan.manifest.level),
        "datasets": [each.dataset for each in plan.incoming],
        "paths": paths,
    }
