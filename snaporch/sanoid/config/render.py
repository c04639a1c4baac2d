"""Renders sections of ``sanoid.conf`` that make sanoid's snapshots of guests consistent."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from snaporch import __version__
from snaporch.data_files import shared_file
from snaporch.errors import RefusedError, one_line

TEMPLATE = "templates/sanoid.conf.j2"


class Guest(Protocol):
    """A domain and the datasets of its disks."""

    @property
    def name(self) -> str:
        """The domain's name."""

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets, each once."""


@dataclass(frozen=True, slots=True)
class Stanza:
    """One section of ``sanoid.conf``."""

    dataset: str
    recursive: bool
    """Whether one recursive ZFS snapshot takes all datasets below it too."""
    guests: tuple[str, ...]


def stanzas(guests: Sequence[Guest], existing: Collection[str]) -> list[Stanza]:
    """The sections for all datasets of these guests: where possible, one recursive call per guest.

    A parent gets a recursive section only if all datasets below it belong to the guest.
    """
    parents: dict[str, None] = {}
    for guest in guests:
        parent = fitting_parent(guest.datasets, existing)
        if parent is not None:
            parents[parent] = None
    outer = [p for p in parents if not any(p.startswith(f"{other}/") for other in parents)]

    def section(dataset: str) -> str:
        above = (p for p in outer if dataset == p or dataset.startswith(f"{p}/"))
        return next(above, dataset)

    owners: dict[str, list[str]] = {}
    for guest in guests:
        for dataset in guest.datasets:
            names = owners.setdefault(section(dataset), [])
            if guest.name not in names:
                names.append(guest.name)
    return [Stanza(name, name in outer, tuple(owners[name])) for name in sorted(owners)]


def render_sanoid(guests: Sequence[Guest], existing: Collection[str], command: str) -> str:
    """Render the sections for these guests, and their template.

    Args:
        existing: all datasets of the host.
        command: the snaporch command for hook settings.

    Raises:
        RefusedError: none of the guests has a disk on ZFS.
        UnavailableError: the template is not installed.
    """
    if not any(guest.datasets for guest in guests):
        names = ", ".join(guest.name for guest in guests) or "snaporch render"
        raise RefusedError(names, "no disk on ZFS" if guests else "there are no domains")
    from jinja2 import Environment, StrictUndefined

    environment = Environment(  # noqa: S701 - no HTML
        undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(shared_file(TEMPLATE).read_text("utf-8"))
    return template.render(
        version=__version__,
        command=command,
        stanzas=[
            {
                "dataset": stanza.dataset,
                "recursive": stanza.recursive,
                "guests": ", ".join(map(one_line, stanza.guests)),
            }
            for stanza in stanzas(guests, existing)
        ],
        left_out=[one_line(guest.name) for guest in guests if not guest.datasets],
    )


def fitting_parent(wanted: Collection[str], existing: Collection[str]) -> str | None:
    """The parent of which one recursive snapshot takes these datasets and no others, if any.

    Never a whole pool, which gets other datasets sooner or later. Never a dataset with a blank in
    its name: sanoid finds no children below it.
    """
    if len(wanted) < 2:  # noqa: PLR2004 - one dataset needs no parent
        return None
    paths = [dataset.split("/") for dataset in wanted]
    length = 0
    while all(len(p) > length and p[length] == paths[0][length] for p in paths):
        length += 1
    parent = "/".join(paths[0][:length])
    below = {dataset for dataset in existing if dataset.startswith(f"{parent}/")}
    others = [d for d in below - set(wanted) if not any(w.startswith(f"{d}/") for w in wanted)]
    return None if "/" not in parent or " " in parent or others else parent
