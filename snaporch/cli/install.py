"""``snaporch install`` and ``snaporch uninstall``."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from snaporch.cli.options import ConfigOption, config_path

if TYPE_CHECKING:
    from snaporch.install_files import FileChange

RootOption = Annotated[
    Path,
    typer.Option(
        "--root",
        metavar="DIR",
        envvar="DESTDIR",
        help="Work below this directory, as package builds do.",
        show_default=False,
        show_envvar=True,
    ),
]
_NEXT_STEPS = (
    "next: systemctl daemon-reload",
    "then: systemctl enable snaporch-recover",
    "then: systemctl try-restart libvirtd  # guests go on; virtqemud, if that is your libvirt",
    "and either: systemctl enable --now snaporch-run-due.timer",
    "or: systemctl enable --now snaporch.service",
)


def install_command(
    context: typer.Context,
    root: RootOption = Path("/"),
    command: Annotated[
        str | None,
        typer.Option(
            "--command",
            metavar="PATH",
            help="The program that the units start [default: this snaporch].",
            show_default=False,
        ),
    ] = None,
    config: ConfigOption = None,
) -> int:
    """Install systemd units, libvirt's hook and a configuration file.

    Enables no unit. A unit that was edited is kept beside the new one; an edited configuration is
    left as it is.
    """
    from snaporch.config import load_config
    from snaporch.config.example import example_text
    from snaporch.errors import UsageError
    from snaporch.install_files import install, install_config, install_hook, render_units
    from snaporch.output.terminal import print_error

    path = config_path(context, config)
    program = command or _own_command()
    if not program.startswith("/") or not program.isprintable() or set(program) & set(" '\"\\$"):
        raise UsageError("--command", f"{program!r} is not a plain absolute path")
    words = [program] if path is None else [program, "--config", str(path.absolute())]
    load_config(path)  # units that start with an invalid configuration would only fail
    _print_steps(install(root, render_units(words)))
    _print_steps([install_hook(root)])
    if path is None:
        _print_steps([install_config(root, example_text())])
    if root == Path("/"):
        for step in _NEXT_STEPS:
            print_error(step)
    return 0


def uninstall_command(
    context: typer.Context, root: RootOption = Path("/"), config: ConfigOption = None
) -> int:
    """Stop the units; remove installed files that were not edited.

    Refuses if a run was interrupted or is under way, because its guest may be on overlays; and if a
    guest is fenced, because libvirt would start it.
    Snapshots and bundles stay, and files of the Debian package too.
    """
    from snaporch.fence import HOST
    from snaporch.install_files import Change, package_of, stop_units, uninstall
    from snaporch.output.terminal import print_error
    from snaporch.recovery.package_removal import (
        check_no_fence,
        check_no_run,
        read_configuration,
    )

    if root == Path("/"):
        path = config_path(context, config)
        journals = read_configuration(path, context.obj.load_config).paths.journal
        check_no_run(journals)
        check_no_fence(HOST)
        stop_units()
        check_no_run(journals)
        done = _print_steps(uninstall(root, package_of))
    else:
        done = _print_steps(uninstall(root))
    if not done:
        print_error(f"no units of snaporch below {root}")
    elif root == Path("/") and any(each.change is Change.REMOVED for each in done):
        print_error("next: systemctl daemon-reload")
    return 0


def _own_command() -> str:
    """The snaporch on the PATH, not a file in an environment that may be removed."""
    import shutil
    import sys

    return shutil.which("snaporch") or str(Path(sys.argv[0]).absolute())


def _print_steps(steps: Iterable[FileChange]) -> list[FileChange]:
    from snaporch.output.terminal import print_result

    done = []
    for each in steps:
        done.append(each)
        print_result(f"{each.path}  {each.change} {each.detail}".rstrip())
    return done
