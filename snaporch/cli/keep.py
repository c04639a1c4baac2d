"""``snaporch keep`` and ``snaporch unkeep``."""

from __future__ import annotations

from pathlib import Path

import typer

from snaporch.cli.options import (
    ConfigOption,
    JsonOption,
    SnapshotsArgument,
    WithGroupOption,
)
from snaporch.errors import SnaporchError, one_line


def keep_command(
    context: typer.Context,
    snapshots: SnapshotsArgument,
    group: WithGroupOption = False,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """Keep snapshots: no program can destroy them.

    Puts the ZFS hold `snaporch-keep` on their ZFS snapshots. `snaporch unkeep` releases it.
    """
    return _change(context, snapshots, group=group, json=json, config=config, keeping=True)


def unkeep_command(
    context: typer.Context,
    snapshots: SnapshotsArgument,
    group: WithGroupOption = False,
    json: JsonOption = False,
    config: ConfigOption = None,
) -> int:
    """Release kept snapshots.

    Retention, `delete` and other programs can destroy them again.
    """
    return _change(context, snapshots, group=group, json=json, config=config, keeping=False)


def _change(
    context: typer.Context,
    names: list[str],
    *,
    group: bool,
    json: bool,
    config: Path | None,
    keeping: bool,
) -> int:
    from datetime import UTC, datetime

    from snaporch.catalog.keep import keep, unkeep
    from snaporch.catalog.records import snapshots_of_record
    from snaporch.cli.session import session
    from snaporch.output.terminal import print_error, print_json, print_result
    from snaporch.restore.select import choose_records

    code = 0
    with session(context, config, quiet=True) as opened:
        everything = opened.pool.snapshots()
        for record in choose_records(opened, everything, names, group=group):
            members = snapshots_of_record(opened.store, everything, record)
            try:
                if keeping:
                    keep(opened.pool, members, datetime.now(UTC))
                else:
                    unkeep(opened.pool, members)
            except SnaporchError as error:
                print_error(error.line())
                code = code or int(error.exit_code)
                continue
            if not json:
                word = "kept" if keeping else "no longer kept"
                where = ", ".join(record.datasets)
                print_result(one_line(f"{record.full_name}  {word}: {where}"))
        if json:
            changed = choose_records(opened, opened.pool.snapshots(), names, group=group)
            print_json([record.as_json() for record in changed])
    return code
