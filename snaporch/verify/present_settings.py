"""The settings by which a snapshot is verified: those of its guest as it is named now."""

from __future__ import annotations

from snaporch.config.schema import DomainSettings
from snaporch.context import Context
from snaporch.model import SnapshotRecord


def present_settings(context: Context, record: SnapshotRecord) -> DomainSettings:
    """Return the settings of the snapshot's guest, which may have been renamed since.

    A guest that is not defined here has those of the name in the snapshot.
    """
    domain = context.hypervisor.find(record.uuid)
    return context.config.settings(domain.name if domain else record.domain, record.uuid)
