"""``snaporch``: the list of commands, and the mapping of errors to messages and exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from snaporch import __version__
from snaporch.cli.check import check_command
from snaporch.cli.clone import CloneCommand, clone_command
from snaporch.cli.command_host import CommandHost
from snaporch.cli.daemon import daemon_command
from snaporch.cli.delete import delete_command
from snaporch.cli.export import export_command
from snaporch.cli.extract import extract_command
from snaporch.cli.failover import failover_command, fence_command
from snaporch.cli.files import files_command
from snaporch.cli.hook import hook_command
from snaporch.cli.import_ import import_command
from snaporch.cli.install import install_command, uninstall_command
from snaporch.cli.keep import keep_command, unkeep_command
from snaporch.cli.list import list_command
from snaporch.cli.mount import mount_command
from snaporch.cli.note import note_command
from snaporch.cli.options import Command, ConfigOption, VerboseOption
from snaporch.cli.plan import plan_command
from snaporch.cli.prune import prune_command
from snaporch.cli.pull import pull_command
from snaporch.cli.rebuild import rebuild_command
from snaporch.cli.receive import receive_command
from snaporch.cli.recover import recover_command
from snaporch.cli.render import render_app
from snaporch.cli.replicate import replicate_command
from snaporch.cli.restore import restore_command
from snaporch.cli.run_due import run_due_command
from snaporch.cli.send import send_command
from snaporch.cli.show import show_command
from snaporch.cli.snapshot import snapshot_command
from snaporch.cli.status import status_command
from snaporch.cli.undo import undo_command
from snaporch.cli.verify import verify_command
from snaporch.data_files import pages_directory
from snaporch.errors import ExitCode, InterruptedRunError, SnaporchError

EXIT_CODES = (
    "Exit codes: 0 done, 2 wrong usage, 3 configuration, 4 not found, 5 refused, 6 busy, "
    "7 libvirt or ZFS unavailable, or no permission, 8 failed and undone, 9 needs attention, "
    "10 warnings or problems."
)
_PAGES = pages_directory()
_EPILOG = EXIT_CODES + (
    f" Messages name pages such as docs/how-to/recovery.md: see below {_PAGES}." if _PAGES else ""
)

app = typer.Typer(
    name="snaporch",
    help="Consistent snapshots of running libvirt/KVM guests on ZFS, RAM included.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("snapshot", cls=Command)(snapshot_command)
app.command("list", cls=Command)(list_command)
app.command("show", cls=Command)(show_command)
app.command("note", cls=Command)(note_command)
app.command("keep", cls=Command)(keep_command)
app.command("unkeep", cls=Command)(unkeep_command)
app.command("delete", cls=Command)(delete_command)
app.command("restore", cls=Command)(restore_command)
app.command("undo", cls=Command)(undo_command)
app.command("clone", cls=CloneCommand)(clone_command)
app.command("verify", cls=Command)(verify_command)
app.command("replicate", cls=Command)(replicate_command)
app.command("rebuild", cls=Command)(rebuild_command)
app.command("failover", cls=Command)(failover_command)
app.command("fence", cls=Command)(fence_command)
app.command("receive", cls=Command)(receive_command)
app.command("pull", cls=Command)(pull_command)
app.command("send", cls=Command)(send_command)
app.command("extract", cls=Command)(extract_command)
app.command("files", cls=Command)(files_command)
app.command("mount", cls=Command)(mount_command)
app.command("export", cls=Command)(export_command)
app.command("import", cls=Command)(import_command)
app.command("recover", cls=Command)(recover_command)
app.command("prune", cls=Command)(prune_command)
app.command("check", cls=Command)(check_command)
app.add_typer(render_app, name="render")
app.command("hook", cls=Command)(hook_command)
app.command("status", cls=Command)(status_command)
app.command("plan", cls=Command)(plan_command)
app.command("run-due", cls=Command)(run_due_command)
app.command("daemon", cls=Command)(daemon_command)
app.command("install", cls=Command)(install_command)
app.command("uninstall", cls=Command)(uninstall_command)


class Invoked:
    """The command of this process."""

    command = ""
    """Its name; empty if none was given, as with ``--version``."""


def _print_version(requested: bool) -> None:
    if requested:
        from snaporch.output.terminal import print_result

        print_result(f"snaporch {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    config: ConfigOption = None,
    verbose: VerboseOption = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Take the options of all commands."""
    del verbose, version
    context.obj = context.obj or CommandHost()
    context.obj.config = config
    Invoked.command = context.invoked_subcommand or ""


def run(arguments: list[str] | None = None) -> None:
    """Run the command line and exit; an error of the user never prints a traceback."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None, host: CommandHost | None = None) -> int:
    from snaporch.output.terminal import print_error, print_result, report_failed_stdout

    report_failed_stdout()
    try:
        result = app(
            args=arguments,
            prog_name="snaporch",
            standalone_mode=False,
            obj=host,
        )
    except SnaporchError as error:
        print_error(error.line())
        if isinstance(error, InterruptedRunError):
            return 128 + error.signum
        return error.exit_code
    except KeyboardInterrupt:
        print_error("stopped by SIGINT")
        return 130
    except Exception as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            print_result(str(error))
            return ExitCode.USAGE
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # click's UsageError
            print_error(_usage_line(error.format_message(), getattr(error, "ctx", None)))
            return int(ExitCode.USAGE)
        if type(error).__name__ in ("Abort", "Exit"):
            return int(getattr(error, "exit_code", ExitCode.USAGE))
        if os.environ.get("SNAPORCH_DEBUG"):
            raise
        print_error(
            f"a bug in snaporch: {type(error).__name__}: {error}; "
            "run it again with SNAPORCH_DEBUG=1 and report the output"
        )
        return ExitCode.BUG
    code = result if isinstance(result, int) else ExitCode.OK
    return code or _code_of_success()


def _usage_line(message: str, context: Any) -> str:
    """Return the line of click's error, with the help of the command that it is about."""
    command = context.command_path if context is not None else "snaporch"
    if message.endswith("?"):
        return f"{message} See `{command} --help`"
    return f"{message.rstrip('.')}; see `{command} --help`"


_PRINTING_ONLY = ("", "check", "list", "plan", "render", "show", "status")
"""Commands that do nothing but print; "" stands for ``--version`` and ``--help``."""


def _code_of_success() -> int:
    """Return 0, unless the command only prints and its result could not be written."""
    from snaporch.output.terminal import Results

    failed = Results.lost and Invoked.command in _PRINTING_ONLY
    return ExitCode.FAILED if failed else ExitCode.OK
