"""Check before a run that the UEFI variables and the TPM state of a domain can be copied.

Whether they can be put back by a restore is checked by :mod:`snaporch.restore.firmware_checks`.
"""

from __future__ import annotations

import os
import stat
from urllib.parse import urlsplit

from snaporch.bundle.firmware_files import PERMANENT_SUFFIX, tpm_files
from snaporch.errors import RefusedError, UnavailableError
from snaporch.hypervisor import domain_xml
from snaporch.model import Domain, TpmState


def check_firmware(domain: Domain, uri: str) -> None:
    """Refuse a domain whose firmware files could not be restored.

    Args:
        domain: the domain.
        uri: libvirt's URI. A session keeps TPM state below the home directory of its user.

    Raises:
        RefusedError: UEFI variables or TPM state are in no file that can be copied.
        UnavailableError: the directory of the TPM's state cannot be read.
    """
    for xml in (domain.live_xml, domain.inactive_xml):
        if xml is None:
            continue
        root = domain_xml.parse(xml)
        if problem := domain_xml.uncapturable_reason(root):
            raise RefusedError(domain.name, *problem)
        if urlsplit(uri).path == "/session" and domain_xml.has_tpm_in_default_place(root):
            raise RefusedError(
                domain.name,
                f"the state of its TPM is below the home directory of the user of {uri}",
                "name a place for it: <source type='dir' path='…'/> in its <backend>",
            )
    tpm = domain.tpm_state
    files = {"UEFI variables": domain.nvram, "TPM's state": tpm.path if tpm and tpm.is_file else ""}
    for what, path in files.items():
        if path and os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise RefusedError(
                domain.name,
                f"its {what} ({path}) cannot be restored: that is not a regular file",
                "have its definition name a file",
            )
    if domain.active and tpm is not None and not _has_state(tpm):
        raise RefusedError(
            domain.name,
            f"its TPM runs, and there is no state of it in {tpm.path}",
            "see where its swtpm keeps it (`ps`), and name that in <backend><source>",
        )


def _has_state(tpm: TpmState) -> bool:
    try:
        return bool(tpm_files(tpm, PERMANENT_SUFFIX))
    except PermissionError as error:
        raise UnavailableError(tpm.path, "permission denied", "run snaporch as root") from error
