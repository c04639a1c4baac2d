"""Options of ``[schedule]`` and ``[policy.NAME]``; part of the schema."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

RULES = ("last", "hourly", "daily", "weekly", "monthly", "yearly")
_MOST = 100_000


def _count(what: str) -> int:
    number: int = Field(default=0, ge=0, le=_MOST, description=what)
    return number


class Keep(BaseModel):
    """How many of a policy's snapshots stay."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    last: int = _count("The newest ones, whenever they were taken.")
    hourly: int = _count("The newest one of each of this many hours that have any.")
    daily: int = _count("The newest one of each of this many days that have any.")
    weekly: int = _count("The newest one of each of this many weeks (from Monday on).")
    monthly: int = _count("The newest one of each of this many months that have any.")
    yearly: int = _count("The newest one of each of this many years that have any.")

    @model_validator(mode="after")
    def _something(self) -> Keep:
        if not any(getattr(self, rule) for rule in RULES):
            raise ValueError("must keep something: give at least one count")
        return self

    def describe(self) -> str:
        """The rules that keep something: ``hourly=24 daily=7``."""
        counts = ((rule, getattr(self, rule)) for rule in RULES)
        return " ".join(f"{rule}={count}" for rule, count in counts if count)
