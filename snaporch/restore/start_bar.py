"""Bar a guest from being started while its disks are of two instants.

The definition gets a disk that does not exist. So ``virsh start``, autostart and every other start
of the defined domain fail with "Cannot access storage file" and a path that names the command to
run. The real definition is in the journal. The domain stays defined: undefining it would delete its
autostart flag, libvirt's snapshot metadata, UEFI variables and TPM state.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from snaporch.context import Context
from snaporch.default_paths import BARRED_DISK
from snaporch.errors import AttentionError, SnaporchError
from snaporch.hypervisor import domain_xml
from snaporch.journal import other_journals_of
from snaporch.model import Domain
from snaporch.restore.journal import KIND, unfinished
from snaporch.restore.safety_catalog import safety_copies


def with_start_bar(context: Context, xml: str) -> str:
    """Return the definition with the missing disk, which cannot be started."""
    return domain_xml.barred(xml, str(_path(context)))


def is_barred(context: Context, domain: Domain | None) -> bool:
    """Whether the domain cannot be started by mistake: it is barred, or has no definition."""
    if domain is None or domain.inactive_xml is None:
        return True
    return has_bar(context.config.paths.journal, domain)


def has_bar(journal: Path, domain: Domain | None) -> bool:
    """Whether the domain is defined and barred; ``journal`` is the directory of journals."""
    if domain is None or domain.inactive_xml is None:
        return False
    return domain_xml.has_disk_at(domain.inactive_xml, str(journal / BARRED_DISK))


def may_be_barred(journal: Path, find: Callable[[], Domain | None]) -> bool:
    """Whether the domain that ``find`` returns is barred; true if libvirt does not answer."""
    try:
        return has_bar(journal, find())
    except SnaporchError:
        return True


def without_bar(context: Context, domain: Domain | None) -> Domain | None:
    """Return the domain with the definition it had before an interrupted restore barred it."""
    if domain is None or domain.inactive_xml is None or not is_barred(context, domain):
        return domain
    return _without_bar(context.config.paths.journal, domain)


def without_bar_by_path(domain: Domain) -> Domain:
    """Do the same as :func:`without_bar` without a configuration.

    The path of the missing disk is in the directory of journals.

    Raises:
        JournalError: the journal cannot be read.
    """
    for disk in domain.disks:
        if disk.source is not None and disk.source.endswith(f"/{BARRED_DISK}"):
            return _without_bar(Path(disk.source.removesuffix(BARRED_DISK)), domain)
    return domain


def _without_bar(journal: Path, domain: Domain) -> Domain:
    olds = unfinished(journal, domain.uuid)
    before = next((old.facts.before for old in olds if old.facts.before), None)
    if before is None:
        return domain
    disks = domain.disks if domain.active else tuple(domain_xml.disks(domain_xml.parse(before)))
    return replace(domain, inactive_xml=before, disks=disks)


def guests_left_barred(
    context: Context, domains: Iterable[Domain] | None = None
) -> list[AttentionError]:
    """Return an error for each guest that is barred although it has no unfinished restore.

    An interrupted ``undo.sh`` leaves a guest so, because it keeps no journal.

    Args:
        domains: the domains to check, which may have changed since; ``None`` for all.
    """
    journal = context.config.paths.journal
    found = []
    for domain in context.hypervisor.domains() if domains is None else domains:
        if not has_bar(journal, domain):
            continue
        if any(each.kind == KIND for each in other_journals_of(journal, domain.uuid)):
            continue
        if not has_bar(journal, context.hypervisor.find(domain.uuid)):
            continue  # a restore has just ended
        copies = [copy for copy in safety_copies(context.store, domain.uuid) if copy.is_offered]
        words = ["snaporch", "undo", domain.name, *(["--copy", copies[-1].name] if copies else [])]
        found.append(
            AttentionError(
                domain.name,
                "cannot be started, because undoing its restore was interrupted",
                f"{shlex.join(words) if copies else 'define it again'}, or restore it again with "
                "snaporch restore",
            )
        )
    return found


def _path(context: Context) -> Path:
    return context.config.paths.journal / BARRED_DISK
