"""The request in the environment of sanoid's pre and post hooks. As input, it is checked.

sanoid 2.0.3 sets only ``SANOID_TARGET`` and ``SANOID_SNAPNAME``; later releases set lists too. For
post ``SANOID_SNAPNAME`` is ``dataset@name`` by mistake, so the list of names is preferred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from snaporch.errors import UsageError
from snaporch.zfs_names import MAX_FULL_NAME, SHOWN, is_dataset, is_snapshot, quoted

_MAX_VALUES = 1000
_STEP = "this is called by sanoid's pre and post scripts; nothing was touched"


@dataclass(frozen=True, slots=True)
class Request:
    """A call of the pre or the post hook."""

    targets: tuple[str, ...]
    """The datasets of sanoid's snapshots; of recursive ones only the top."""
    names: tuple[str, ...]
    """Bare names of the snapshots."""
    pre_failed: bool = False
    """For post: whether the pre hook failed."""


def read_request(phase: str, environment: Mapping[str, str]) -> Request:
    """Read and check the request.

    Args:
        phase: ``pre`` or ``post``.

    Raises:
        UsageError: the environment is not sanoid's for this phase; nothing was touched.
    """
    script = environment.get("SANOID_SCRIPT", phase)
    if script != phase:
        raise _wrong("SANOID_SCRIPT", script, f"is not {phase!r}")
    targets = _list(environment, "SANOID_TARGETS", "SANOID_TARGET", is_dataset, "a dataset")
    names = _names(phase, environment)
    for target in targets:
        for name in names:
            if len(f"{target}@{name}") > MAX_FULL_NAME:
                raise _wrong("SANOID_SNAPNAMES", name, f"is too long a name for {target[:SHOWN]}")
    failed = environment.get("SANOID_PRE_FAILURE", "0")
    if failed not in ("0", "1"):
        raise _wrong("SANOID_PRE_FAILURE", failed, "is neither 0 nor 1")
    return Request(targets, names, failed == "1")


def _names(phase: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    if phase == "post" and "SANOID_SNAPNAMES" not in environment:
        full = environment.get("SANOID_SNAPNAME", "")
        environment = {"SANOID_SNAPNAME": full.rsplit("@", 1)[-1]}
    return _list(
        environment, "SANOID_SNAPNAMES", "SANOID_SNAPNAME", is_snapshot, "a snapshot's name"
    )


def _list(
    environment: Mapping[str, str], many: str, one: str, known: Callable[[str], bool], what: str
) -> tuple[str, ...]:
    """The comma-separated values of ``many``, or the single value of ``one``; each is checked."""
    variable = many if many in environment else one
    if variable not in environment:
        raise UsageError(one, "is not set", _STEP)
    text = environment[variable]
    values = text.split(",", _MAX_VALUES)
    for value in values:
        if not known(value):
            raise _wrong(variable, value, f"is not {what}")
    if len(set(values)) != len(values):
        raise _wrong(variable, text, "names something twice")
    return tuple(values)


def _wrong(variable: str, value: str, reason: str) -> UsageError:
    return UsageError(f"{variable}={quoted(value)}", reason, _STEP)
