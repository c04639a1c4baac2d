"""Read a new bundle back, for policies that ask for it (``verify = "checksums"``)."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

from snaporch.bundle.manifest import ManifestError
from snaporch.bundle.store import BundleError
from snaporch.context import Context
from snaporch.model import SnapshotRecord, VerificationResult, VerifyDepth


def read_back(context: Context, record: SnapshotRecord, policy: str | None) -> None:
    """Compare a bundle with its checksums if the policy wants that.

    A bundle that differs is recorded as failed on its ZFS snapshots.

    Raises:
        BundleError, ManifestError: a part is missing or differs.
    """
    if policy is None or not context.config.policy[policy].reads_back or not record.bundle:
        return
    context.progress.step(record.domain, "reading the bundle back")
    try:
        on_read = partial(context.progress.amount, record.domain)
        context.store.verify(f"{record.uuid}/{record.run}", on_read)
    except (BundleError, ManifestError):
        from snaporch.verify.verify import write_result

        failed = VerificationResult(datetime.now(UTC), passed=False, reached=VerifyDepth.NOTHING)
        write_result(context, record, failed)
        raise
