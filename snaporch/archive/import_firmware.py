"""UEFI variables and TPM state of an imported guest.

Owners and modes in an archive are those of another host, and could be chosen to harm this one. So
the files are root's, or of the user of this host's swtpm, and only their owner reads them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from snaporch.archive.unpack import Head
from snaporch.bundle.firmware_files import replace_host_file, swtpm_owner
from snaporch.bundle.manifest import Role
from snaporch.errors import RefusedError
from snaporch.hypervisor.clone_xml import CloneSpec
from snaporch.hypervisor.domain_xml import nvram, parse, tpm_state
from snaporch.model import TpmState
from snaporch.private_files import write_private
from snaporch.restore.firmware_checks import check_firmware_file


def check_firmware(head: Head, xml: str, thing: str, *, overwrites: bool) -> None:
    """Refuse firmware files that do not fit the definition, or a TPM state that is here.

    Args:
        xml: the definition that was made for this host.
        overwrites: an interrupted import has left what is here.

    Raises:
        RefusedError: they do not fit, or are here.
    """
    root = parse(xml)
    state = tpm_state(root)
    for part in head.manifest.parts:
        check_firmware_file(thing, part, head.parts.get(part.name, b""), [root])
    if state is not None and not overwrites and _directory(state).exists():
        step = "import it with another --name, or move that directory away"
        raise RefusedError(
            thing, f"the TPM of a guest with its UUID is in {_directory(state)}", step
        )


def lacks_variables(head: Head, xml: str) -> bool:
    """Whether the guest has a file of UEFI variables that the archive does not have."""
    return nvram(parse(xml)) is not None and head.manifest.part(Role.NVRAM) is None


def place_firmware(head: Head, spec: CloneSpec, xml: str) -> None:
    """Write the UEFI variables and the TPM state where the definition has them.

    Raises:
        HostFileError, OSError: a file cannot be written.
    """
    state = tpm_state(parse(xml))
    owner = swtpm_owner()
    for part in head.manifest.parts:
        if part.role is Role.NVRAM:
            write_private(Path(spec.nvram), head.parts[part.name])
        elif part.role is Role.TPM and state is not None:
            name = Path(part.source or "").name
            file = Path(state.path) if state.is_file else state.directory / name
            file.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
            replace_host_file(file, head.parts[part.name], *owner, 0o600)
    if (
        state is not None and state.directory.is_dir()
    ):  # last: root writes into no other's directory
        os.chown(state.directory, *owner, follow_symlinks=False)


def discard_tpm(head: Head, xml: str) -> None:
    """Remove the TPM state of a guest that was not defined."""
    state = tpm_state(parse(xml))
    if state is not None and head.manifest.part(Role.TPM) is not None:
        shutil.rmtree(_directory(state), ignore_errors=True)


def _directory(state: TpmState) -> Path:
    """The directory that libvirt has for the TPM of one guest, named after its UUID."""
    return state.directory.parent
