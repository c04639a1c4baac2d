"""Copy the UEFI variables and the TPM state of a snapshot for a clone."""

from __future__ import annotations

import os
from pathlib import Path

from snaporch.bundle.firmware_files import read_host_file, replace_host_file, swtpm_owner
from snaporch.bundle.manifest import Part, Role
from snaporch.context import Context
from snaporch.hypervisor.clone_xml import CloneSpec, SharedError
from snaporch.hypervisor.domain_xml import parse, tpm_state
from snaporch.model import Level
from snaporch.restore.firmware_checks import check_firmware_file
from snaporch.restore.foreign_definition import is_foreign
from snaporch.restore.source import Source

_Access = tuple[int | None, int | None, int | None]
"""Owner, group and mode of a file."""


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


def copy_firmware(context: Context, source: Source, identity: CloneSpec, xml: str) -> None:
    """Copy UEFI variables and TPM state; a resumed clone needs them for its next boot.

    Owners and modes of another host's bundle are not used: its files are root's, or swtpm's.

    Args:
        context: of this host, or of copies of another.
        source: the snapshot.
        identity: the clone's paths.
        xml: the clone's XML, which names the directory where libvirt looks for the TPM state.

    Raises:
        RefusedError: the variables are an image that names another file, or a file is no TPM's.
        HostFileError: a part of the bundle is a link, or too large.
        OSError: a file cannot be written.
    """
    root = parse(xml)
    state = tpm_state(root)
    foreign = is_foreign(context, source.members)
    folders: dict[Path, _Access] = {}
    for part in source.manifest.parts:
        if part.role is Role.NVRAM:
            data, _ = read_host_file(source.directory / part.name)
            check_firmware_file(source.thing, part, data, [root])
            replace_host_file(Path(identity.nvram), data, *_access(part, None, foreign=foreign))
        elif part.role is Role.TPM and part.source is not None and state is not None:
            data, _ = read_host_file(source.directory / part.name)
            folder, name = state.directory, Path(part.source).name
            check_firmware_file(source.thing, part, data, [root])
            place = Path(state.path) if state.is_file else folder / name
            folder.mkdir(mode=0o711, parents=True, exist_ok=True)
            access = _access(part, swtpm_owner(), foreign=foreign)
            replace_host_file(place, data, *access)
            folders[folder] = access
    for folder, (uid, gid, _) in folders.items():  # last: root must not write into another's
        if uid is not None and gid is not None:
            os.chown(folder, uid, gid, follow_symlinks=False)


def _access(part: Part, owner: tuple[int, int] | None, *, foreign: bool) -> _Access:
    """What the bundle has, or for another host's this process's user or ``owner``, and 0600."""
    if not foreign:
        return part.uid, part.gid, part.mode
    return (*owner, 0o600) if owner is not None else (None, None, None)
