"""``snaporch hook``: help for sanoid's hooks, answered by :mod:`snaporch.sanoid.hooks.dispatch`."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, config_path


class HookCaller(StrEnum):
    """Programs that can call a hook."""

    SANOID = "sanoid"


class HookPhase(StrEnum):
    """The events for which sanoid calls a hook."""

    PRE = "pre"
    POST = "post"
    PRE_PRUNE = "pre-prune"
    PRUNE = "prune"


def hook_command(
    context: typer.Context,
    caller: Annotated[HookCaller, typer.Argument(help="The calling program.", show_default=False)],
    phase: Annotated[HookPhase, typer.Argument(help="The event.", show_default=False)],
    config: ConfigOption = None,
) -> int:
    """Entry point for sanoid's hooks; not called by hand.

    Written into sanoid.conf as pre_snapshot_script, post_snapshot_script, pre_pruning_script and
    pruning_script. sanoid passes datasets and snapshots in the environment. See
    docs/how-to/sanoid.md.
    """
    from snaporch.sanoid.hooks.dispatch import answer

    del caller
    path = config_path(context, config)
    named = {"SNAPORCH_CONFIG": str(path)} if path else {}
    return answer(phase.value, {**os.environ, **named})
