"""What the definition of a snapshot that came from another host may not have, unless accepted.

It may be forged, and libvirt runs as root: a script or an argument of QEMU starts a program, a log
is written, a security label may give the emulator another user. Where the guest's own files are is
known by :mod:`snaporch.restore.own_places`. What an import refuses besides is in
:mod:`snaporch.archive.import_xml`.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Sequence

from snaporch.catalog.records import COPY
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor.clone_allowlist import IsOwn
from snaporch.hypervisor.domain_xml import parse
from snaporch.hypervisor.foreign_allowlist import unlisted_of_another_host
from snaporch.hypervisor.foreign_xml import confining
from snaporch.model import PoolSnapshot

_NAMED = 8
"""Of so much the error has the options; the next try has the rest."""


def came_from_elsewhere(members: Iterable[PoolSnapshot]) -> bool:
    """Whether snapshots came to this host from a replica or source: ``snaporch:copy`` says so."""
    return any(COPY in each.properties for each in members)


def is_foreign(context: Context, members: Iterable[PoolSnapshot]) -> bool:
    """Whether what snapshots have is of another host, which may have been taken over."""
    return context.foreign or came_from_elsewhere(members)


def to_accept(definitions: Iterable[str], is_own: IsOwn) -> dict[str, str]:
    """What an admin has to accept of definitions: each word of ``--accept``, and what has it.

    Args:
        definitions: of the bundle.
        is_own: whether a path is in the guest's own datasets.
    """
    found: dict[str, str] = {}
    for root in map(parse, definitions):
        found |= {each.word: each.shown for each in unlisted_of_another_host(root, is_own)}
        found |= {name: f"<{name}>" for name in confining(root)}
    return dict(sorted(found.items()))


def check_foreign_definitions(
    thing: str,
    definitions: Sequence[str],
    accepted: Collection[str],
    is_own: IsOwn,
    why: str = "its definition comes from another host",
) -> None:
    """Refuse definitions of another host with what no ordinary guest has.

    These are arguments for QEMU, chosen security labels, paths outside of the guest's datasets, and
    what else :mod:`snaporch.hypervisor.foreign_allowlist` does not have.

    Args:
        thing: the subject of the error.
        definitions: of the bundle.
        accepted: what the admin accepts; see :func:`to_accept`.
        is_own: whether a path is in the guest's own datasets.
        why: they are checked.

    Raises:
        RefusedError: with the options that accept them.
    """
    found = to_accept(definitions, is_own)
    words = [each for each in found if each not in accepted]
    if words:
        named = words[:_NAMED]
        names = " and ".join(found[each] for each in named)
        more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
        options = " ".join(f"--accept {shlex.quote(each)}" for each in named)
        step = f"read it first; if that is what you want: {options}"
        raise RefusedError(thing, f"{why}, and has {names}{more}", step)
