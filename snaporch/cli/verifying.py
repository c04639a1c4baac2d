"""Verifying one snapshot after the other, and telling of it, behind ``snaporch verify``."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from contextlib import contextmanager

from snaporch.catalog.records import all_records
from snaporch.cli.cloning import sweep_first
from snaporch.cli.outcomes import Outcomes
from snaporch.cli.watching import PolicyObservers, watchers
from snaporch.context import Context
from snaporch.errors import BusyError, SnaporchError
from snaporch.locks import domain_lock
from snaporch.model import VerifyDepth
from snaporch.output.terminal import print_error, print_result
from snaporch.restore.source import records_called
from snaporch.systemd.low_priority import lower_priority
from snaporch.verify.verify import (
    Verification,
    VerifyOptions,
    check_ordeal,
    longest_ago,
    verify_all,
)

VERIFICATION = "verification"
_REACHED = {
    VerifyDepth.NOTHING: "it is not whole",
    VerifyDepth.CHECKED: "checksums and GUIDs are right",
    VerifyDepth.BOOTED: "a clone booted",
    VerifyDepth.RESUMED: "a clone resumed from RAM",
}


def verify_several(
    context: Context,
    texts: list[str],
    *,
    sample: int | None,
    ordeal: VerifyOptions,
    wait: int | None,
    json: bool,
) -> int:
    """Verify the snapshots named, or all; the first failure's exit code.

    Raises:
        BusyError: another verification is under way on this host.
    """
    check_ordeal(ordeal)
    if texts:
        records = [records_called(context, text)[-1] for text in texts]
    else:
        records = longest_ago(all_records(context.store, context.pool.snapshots()), sample)
    told = VerificationReport(json=json)
    with alone(context, wait or 0):
        for outcome in verify_all(context, records, ordeal):
            told.tell(outcome)
    if json:
        documents = told.documents
        shown = documents[0] if len(texts) == 1 and documents else documents
        print_result(json_format.dumps(shown, indent=2, ensure_ascii=False))
    elif not records:
        print_error("there are no snapshots; take one: snaporch snapshot DOMAIN")
    return told.code


def verify_what_is_due(context: Context, *, json: bool) -> int:
    """Verify what policies have due; the first failure's exit code."""
    with watchers(context) as watching:
        told = tell_due(context, watching, json=json)
    told.print_documents()
    return told.code


def tell_due(context: Context, watching: PolicyObservers, *, json: bool) -> VerificationReport:
    """Verify what policies have due; nothing while another verification is under way.

    Whoever is to be notified of failures is.
    """
    from snaporch.schedule.run_verifications import verify_due

    told = VerificationReport(json=json)
    try:
        with alone(context, 0):
            for checked in verify_due(context):
                told.tell(checked.outcome)
                if checked.trouble is not None:
                    watching.failed(context.config, checked.trouble)
    except BusyError as error:
        context.progress.note(error.thing, f"{error.reason}: what is due has to wait")
    return told


@contextmanager
def alone(context: Context, wait: int) -> Iterator[None]:
    """One verification at a time on a host, behind everything else on it.

    Raises:
        BusyError: another one is under way after ``wait`` seconds.
    """
    runtime = context.config.paths.runtime
    what = VERIFICATION
    with domain_lock(runtime, what, what, "verify", wait=wait, interrupt=context.interrupt):
        sweep_first(context)
        lower_priority("verify")
        yield


class VerificationReport(Outcomes):
    """Verifications."""

    def tell(self, outcome: Verification | SnaporchError) -> None:
        """Print one."""
        if isinstance(outcome, SnaporchError):
            self.fail(outcome)
            return
        self.add(outcome.as_json(), _line(outcome))
        if outcome.trouble is not None:
            self.fail(outcome.trouble)


def _line(outcome: Verification) -> str:
    name = outcome.record.full_name
    return f"{name}  {'passed' if outcome.passed else 'FAILED'}, {_REACHED[outcome.reached]}"
