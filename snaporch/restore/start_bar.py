"""Bar a guest from being started while its disks are of two instants.

The definition gets a disk that does not exist. So ``virsh start``, autostart and every other start
of the defined domain fail with "Cannot access storage file" and a path that names the command to
run. The real definition is in the journal. The domain stays defined: undefining it would delete its
autostart flag, libvirt's snapshot metadata, UEFI variables and TPM state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from snaporch.context import Context
from snaporch.default_paths import BARRED_DISK
from snaporch.errors import SnaporchError
from snaporch.hypervisor import domain_xml
from snaporch.model import Domain
from snaporch.restore.journal import unfinished


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


def _path(context: Context) -> Path:
    return context.config.paths.journal / BARRED_DISK
