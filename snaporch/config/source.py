"""Options of ``[source.NAME]``; part of the schema."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    model_validator,
)

from snaporch.config.copies import Copies, KeepAll, keep_all_field
from snaporch.config.duration import Duration
from snaporch.config.policy import Keep
from snaporch.config.replica import Dataset, Directory, Replica, host_name
from snaporch.config.transfer_window import ALWAYS, Paced, WindowOption

GuestName = Annotated[str, StringConstraints(min_length=1, max_length=255)]


def _host(text: str) -> str:
    if not text:
        raise ValueError("must be a host as ssh knows it, such as 'root@vm1'")
    return host_name(text)


class Source(BaseModel, Paced):
    """A host whose guests this machine copies."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    host: Annotated[str, AfterValidator(_host)] = Field(
        description="The host, as ssh knows it (`root@vm1`). Its `authorized_keys` let this "
        "machine's key run only `snaporch send`.",
    )
    dataset: Dataset = Field(
        description="Dataset of this machine below which each dataset of the host has its copy, "
        "under its whole name: `backup/vm1/tank:vm:web`. It is made if it is missing; its pool "
        "must be there. Each source needs one of its own.",
    )
    bundles: Annotated[Directory, Strict(strict=False)] = Field(
        description="Directory of this machine for the host's bundles, which must exist; no other "
        "source's or replica's, nor inside it.",
    )
    domains: tuple[GuestName, ...] = Field(
        default=(),
        strict=False,
        description="The guests to copy, by name or UUID; all that the host sends if it is empty. "
        "A name that the host does not send is an error.",
    )
    every: Annotated[timedelta | None, Duration("1m")] = Field(
        default=None,
        description="How often `snaporch pull --due`, which the timer runs, copies from this "
        "host. Without it only `snaporch pull` by hand does.",
    )
    newest_within: Annotated[timedelta | None, Duration("1m")] = Field(
        default=None,
        description="How old the newest snapshot of a guest may be that was pulled as a whole; "
        "`status` reports `pull-late` after that. Set it: a source that sends nothing new is "
        "seen by nothing else. Without it no age is checked.",
    )
    rate: int = Field(
        default=0,
        ge=0,
        le=1 << 20,
        description="Most MiB a second that are received; 0 for no limit.",
    )

    window: WindowOption = Field(
        default=ALWAYS,
        description="When a pull starts by itself: `22:00-06:00`, or a list of such, by the clock "
        "on the wall of this machine. One that is under way at the end stops, and continues in the "
        "next window where it stopped. By hand there is no window. Always if it is not set.",
    )
    rate_outside: int | None = Field(
        default=None,
        ge=1,
        le=1 << 20,
        description="Most MiB a second outside of `window`: then a pull starts and continues "
        "there, too.",
    )
    keep: Keep | None = Field(
        default=None,
        description="How many copies of each guest `snaporch prune` keeps on this machine; the "
        "options are those of `[policy.NAME.keep]`. The snapshots of all policies count together. "
        "Without it no copy is deleted.",
    )
    keep_all: KeepAll = keep_all_field()

    @model_validator(mode="after")
    def _rates(self) -> Source:
        self.check_rates()
        return self

    @property
    def copies(self) -> Copies | None:
        """What retention does with the copies; ``None`` if it deletes none."""
        if self.keep is None:
            return None
        return Copies.model_construct(  # each value was validated
            dataset=self.dataset,
            bundles=Path(self.bundles),
            keep=self.keep,
            keep_all=self.keep_all,
        )

    def as_replica(self) -> Replica:
        """The copies as a replica in a pool of this machine, which is what they are."""
        return Replica(dataset=self.dataset, bundles=Path(self.bundles))
