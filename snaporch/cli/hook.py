"""``snaporch hook``."""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Annotated

import typer

from snaporch.cli.options import ConfigOption, config_path


class HookCaller(StrEnum):
    """Who can call."""

    SANOID = "sanoid"


class HookPhase(StrEnum):
    """When sanoid calls."""

    PRE = "pre"
    POST = "post"
    PRE_PRUNE = "pre-prune"
    PRUNE = "prune"


def hook_command(
    context: typer.Context,
    caller: Annotated[HookCaller, typer.Argument(help="Who calls.", show_default=False)],
    phase: Annotated[HookPhase, typer.Argument(help="When.", show_default=False)],
    config: ConfigOption = None,
) -> int:
    """Answer sanoid's hooks; for sanoid.conf, not for people.

    For pre_snapshot_script, post_snapshot_script, pre_pruning_script and pruning_script. What
    sanoid is about is in its environment. See docs/sanoid.md.
    """
    from snaporch.sanoid.hooks.dispatch import answer

    del caller
    told = config_path(context, config)
    named = {"SNAPORCH_CONFIG": str(told)} if told else {}
    return answer(phase.value, {**os.environ, **named})
