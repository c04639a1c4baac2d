"""Copy the UEFI variables and the TPM state of a snapshot for a clone."""

from __future__ import annotations

import os
from pathlib import Path

from snaporch.bundle.firmware_files import replace_host_file
from snaporch.bundle.manifest import Part, Role
from snaporch.hypervisor.clone_xml import CloneSpec, SharedError
from snaporch.hypervisor.domain_xml import parse, tpm_state
from snaporch.model import Level
from snaporch.restore.source import Source


def check_tpm(source: Source, xml: str, *, resumed: bool) -> None:
    """Refuse a clone whose bundle lacks the state of the TPM that ``xml`` defines.

    Args:
        source: the snapshot.
        xml: the XML that the clone starts from.
        resumed: the clone resumes from RAM, which holds the state of a running TPM.

    Raises:
        SharedError: the bundle has no TPM state, or that of another path. A guest that was off may
            have none: it may never have run.
    """
    state = tpm_state(parse(xml))
    parts = [part for part in source.manifest.parts if part.role is Role.TPM]
    if state is None:
        return
    if any(not state.holds(Path(part.source or "")) for part in parts):
        raise SharedError(
            source.thing,
            f"the state of its TPM is not from {state.path}, where its XML has it",
            "snapshot it again",
        )
    if not parts and not resumed and source.manifest.level is not Level.OFF:
        raise SharedError(
            source.thing,
            f"the state of its TPM ({state.path}) is not in the bundle",
            "clone it with --running if it has RAM, or snapshot it again",
        )


def copy_firmware(source: Source, identity: CloneSpec, xml: str) -> None:
    """Copy UEFI variables and TPM state; a resumed clone needs them for its next boot.

    Args:
        source: the snapshot.
        identity: the clone's paths.
        xml: the clone's XML, which names the directory where libvirt looks for the TPM state.

    Raises:
        OSError: a file cannot be written.
    """
    state = tpm_state(parse(xml))
    folders: dict[Path, Part] = {}
    for part in source.manifest.parts:
        if part.role is Role.NVRAM:
            _put(source.directory / part.name, Path(identity.nvram), part)
        elif part.role is Role.TPM and part.source is not None and state is not None:
            folder = state.directory
            place = Path(state.path) if state.is_file else folder / Path(part.source).name
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)
            _put(source.directory / part.name, place, part)
            folders[folder] = part
    for folder, part in folders.items():  # last, since root must not write into another's directory
        if part.uid is not None and part.gid is not None:
            os.chown(folder, part.uid, part.gid, follow_symlinks=False)


def _put(source: Path, target: Path, part: Part) -> None:
    replace_host_file(target, source.read_bytes(), part.uid, part.gid, part.mode)
