"""Verifying one snapshot after the other, and telling of it, behind ``snaporch verify``."""

from __future__ import annotations

import json as json_format

from snaporch.cli.cloning import sweep_first
from snaporch.errors import ExitCode, SnaporchError
from snaporch.model import Reached
from snaporch.report.terminal import print_error, print_result
from snaporch.restore.source import records_called
from snaporch.restore.verify import Ordeal, Verification, check_ordeal, longest_ago, verify_all
from snaporch.run.context import Context
from snaporch.run.records import all_records

_REACHED = {
    Reached.NOTHING: "it is not whole",
    Reached.CHECKED: "checksums and GUIDs are right",
    Reached.BOOTED: "a clone booted",
    Reached.RESUMED: "a clone resumed from RAM",
}


def verify_several(
    context: Context, texts: list[str], *, sample: int | None, ordeal: Ordeal, json: bool
) -> int:
    """Verify the snapshots named, or all; the first failure's exit code."""
    check_ordeal(ordeal)
    sweep_first(context)
    if texts:
        records = [records_called(context, text)[-1] for text in texts]
    else:
        records = longest_ago(all_records(context.store, context.pool.snapshots()), sample)
    outcomes: list[Verification] = []
    codes: list[int] = []
    for outcome in verify_all(context, records, ordeal):
        if isinstance(outcome, SnaporchError):
            print_error(outcome.line())
            codes.append(int(outcome.exit_code))
            continue
        outcomes.append(outcome)
        if not json:
            print_result(_line(outcome))
        if not outcome.passed:
            print_error(f"verification failed: {outcome.failure}")
            codes.append(int(ExitCode.FAILED))
    if json:
        documents = [outcome.as_json() for outcome in outcomes]
        single = len(texts) == 1 and documents
        shown = documents[0] if single else documents
        print_result(json_format.dumps(shown, indent=2, ensure_ascii=False))
    elif not records:
        print_error("there are no snapshots; take one: snaporch snapshot DOMAIN")
    return codes[0] if codes else 0


def _line(outcome: Verification) -> str:
    name = f"{outcome.record.domain}@{outcome.record.snapshot}"
    return f"{name}  {'passed' if outcome.passed else 'FAILED'}, {_REACHED[outcome.reached]}"
