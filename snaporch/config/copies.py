"""Options of ``[copies.NAME]``, and retention of copies in general; part of the schema.

Which copies are deleted is decided by :mod:`snaporch.schedule.received_copies_retention`.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, Strict

from snaporch.config.duration import Duration
from snaporch.config.policy import Keep
from snaporch.config.replica import Dataset, Directory, Replica

KeepAll = Annotated[timedelta, Duration("0s")]
"""Copies that were received less long ago are not deleted, and displace none."""
KEEP_ALL = timedelta(days=7)


def keep_all_field() -> timedelta:
    """The option ``keep_all`` of both kinds of sections."""
    field: timedelta = Field(
        default=KEEP_ALL,
        description="No copy that was received less long ago is deleted, and it does not count "
        "for `keep`: so a host that was taken over cannot displace its good copies before, by "
        "sending many new ones.",
    )
    return field


class Copies(BaseModel):
    """Copies on this machine that another one sends, or this one, and how many are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    dataset: Dataset = Field(
        description="Dataset of this machine below which the copies are: the `dataset` of the "
        "replica, in the configuration of the machine that replicates.",
    )
    bundles: Annotated[Directory, Strict(strict=False)] = Field(
        description="Directory of this machine with their bundles: the `bundles` of the replica.",
    )
    keep: Keep = Field(
        description="How many copies of each guest `snaporch prune` keeps; the options are those "
        "of `[policy.NAME.keep]`. The snapshots of all policies count together.",
    )
    keep_all: KeepAll = keep_all_field()

    def as_replica(self) -> Replica:
        """The copies as a replica in a pool of this machine."""
        return Replica(dataset=self.dataset, bundles=Path(self.bundles))
