"""``snaporch failover`` and ``snaporch fence``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, JsonOption, QuietOption, YesOption

if TYPE_CHECKING:
    from snaporch.model import Domain

_Domain = Annotated[str, typer.Argument(metavar="DOMAIN", help="Name or UUID.", show_default=False)]


def failover_command(
    context: typer.Context,
    domain: _Domain,
    to: Annotated[
        str,
        typer.Option("--to", metavar="REPLICA", help="The replica's name.", show_default=False),
    ],
    accept: Annotated[
        list[str] | None,
        typer.Option(
            "--accept",
            metavar="WHAT",
            help="Something of the other host that the guest's definition names, as the error has "
            "it; the command there has it, too.",
            show_default=False,
        ),
    ] = None,
    yes: YesOption = False,
    json: JsonOption = False,
    quiet: QuietOption = False,
    config: ConfigOption = None,
) -> int:
    """Move a guest to the host of its replica.

    Copies the guest while it runs, pauses it, takes a last snapshot with RAM, fences the guest,
    ends it and copies that snapshot. It prints the command that resumes the guest on the other
    host. A fenced guest does not start here. Before the fence each failure lets the guest run on
    here. After an interruption the same command goes on. A guest that is off is moved without RAM.
    """
    from snaporch.cli.confirm import confirm
    from snaporch.cli.session import session
    from snaporch.failover.fail_over import fail_over
    from snaporch.model import Level
    from snaporch.output.terminal import print_error, print_json, print_result

    def ask(guest: Domain) -> None:
        if not yes:
            how = "is ended here, and does" if guest.active else "is off; it does"
            print_error(f"{guest.name} {how} not start here again until it comes back")
            if guest.active:
                print_error(f"its downtime is the time to copy its RAM to {to} and to rebuild it")
            confirm(guest.name)

    with session(context, config, quiet=quiet or json) as opened:
        done = fail_over(opened, domain, to, context.obj.open_replica, ask, accept or ())
    if json:
        print_json(done.as_json())
        return 0
    print_result(f"{done.record.full_name}  ended and fenced here; replica {to} has all of it")
    goes_on = "resume it" if done.record.level is Level.RAM else "bring it back, off,"
    print_result(f"{done.record.domain}  {goes_on} on the replica's host: {done.command}")
    return 0


def fence_command(
    context: typer.Context,
    domain: _Domain,
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the fence, so that the guest starts again.")
    ] = False,
    yes: YesOption = False,
    config: ConfigOption = None,
) -> int:
    """Prevent a guest that is off from being started on this host.

    For a host that comes back after its guest was rebuilt on another one: two copies that run would
    have one address, and writes on one of them would be lost.

    --remove asks first. Never remove the fence while a copy of the guest runs elsewhere.
    """
    from snaporch.cli.confirm import confirm
    from snaporch.cli.session import session
    from snaporch.failover.fence_by_hand import find_fence, make_fence, remove_fence
    from snaporch.model import BundleState, Level
    from snaporch.output.terminal import print_error, print_result

    with session(context, config, quiet=True) as opened:
        if not remove:
            fence = make_fence(opened, domain)
            print_result(f"{fence.domain}  fenced: it does not start on this host")
            if opened.hypervisor.domain(fence.uuid).managed_save:
                discard = f"virsh managedsave-remove {fence.uuid}"
                print_result(f"{fence.domain}  has saved RAM; before it comes back run: {discard}")
            return 0
        fence = find_fence(opened, domain)
        if not yes:
            print_error(f"{fence.domain} {fence.reason}")
            print_error("two copies that run lose writes; go on only if no other one runs")
            confirm(fence.domain)
        last = remove_fence(opened, fence)
    print_result(f"{fence.domain}  its fence is removed: it starts again")
    if last is not None and last.state is BundleState.COMPLETE:
        ram = ", RAM included" if last.level is Level.RAM else ""
        words = shlex.join(["snaporch", "restore", last.full_name])
        print_result(f"{last.full_name}  takes it back here{ram}: {words}")
        there = fence.replica or "the replica"
        print_result(
            f"{last.full_name}  {there} may have it: never resume it there, destroy it there"
        )
    elif fence.run:
        words = f"snaporch rebuild --from REPLICA {shlex.quote(fence.domain)}"
        reason = f"@{fence.snapshot} is not here with all of its datasets"
        print_result(f"{fence.domain}  {reason}; all of it comes from a replica by: {words}")
    return 0
