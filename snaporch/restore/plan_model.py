"""The plan of a restore: the snapshot, the present guest, and how both are handled."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from snaporch.bundle.manifest import Manifest, Part, Role
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.model import Domain, PoolSnapshot, SnapshotRecord
from snaporch.restore.journal import Ending, KeptDataset
from snaporch.restore.other_files import changed_other_files, excluded_images


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A restore that passed the checks and may be carried out."""

    record: SnapshotRecord
    manifest: Manifest | None
    domain: Domain | None
    """The domain as it is now; ``None`` if it is undefined."""
    snapshots: tuple[PoolSnapshot, ...]
    newer: tuple[str, ...]
    """Newer snapshots and bookmarks, which the rollback destroys."""
    bases: frozenset[str]
    """Those of them that are bookmarks of snaporch's own, where later copies begin."""
    ram: Path | None
    """The image to resume from; ``None`` if the guest is booted or left off."""
    boot: bool
    """Whether the guest is booted from its disks."""
    running: bool
    """Whether the resumed guest runs, as it did when it was captured, and is not left paused."""
    also_roll_back: bool = False
    """Whether files that are not the guest's may be rolled back with it."""
    damaged: frozenset[str] = frozenset()
    """Parts of the bundle that differ from the manifest, and are not put back."""
    unfit: Mapping[str, RefusedError] = field(default_factory=dict)
    """Parts of the bundle that cannot be put back on this host, with the reasons."""
    despite_other_disks: bool = False
    """Whether disks outside the snapshot and backing files may have changed since."""
    keep_definition: bool = False
    """Whether the domain stays defined as it is."""
    accepted: tuple[str, ...] = ()
    """What a snapshot that came from another host may name of this one."""
    undoes: str = ""
    """In an undo: the name of the safety copy that is put back."""
    kept: tuple[KeptDataset, ...] = ()
    """In an undo: the data of the safety copy that is received after the rollbacks."""

    @property
    def thing(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return self.record.full_name

    @property
    def ending(self) -> Ending:
        """How the restore leaves the guest."""
        return Ending.RESUME if self.ram else Ending.BOOT if self.boot else Ending.OFF

    @property
    def pages(self) -> Part | None:
        """The RAM part, if it is in pages and an image has to be made from them first."""
        part = self.manifest.part(Role.RAM) if self.manifest and self.ram else None
        return part if part is not None and part.pages is not None else None

    @property
    def parts(self) -> list[Part]:
        """The parts of the bundle that can be put back."""
        if self.manifest is None or self.record.bundle is None:
            return []
        return [
            part
            for part in self.manifest.parts
            if part.name not in self.damaged and part.name not in self.unfit
            if not (self.keep_definition and part.role is Role.INACTIVE_XML)
        ]

    def text(self, role: Role) -> str | None:
        """Return an XML part of the bundle; ``None`` if it is missing or unreadable."""
        for part in self.parts:
            if part.role is role and self.record.bundle is not None:
                with suppress(OSError, UnicodeDecodeError):
                    return (Path(self.record.bundle) / part.name).read_text("utf-8")
        return None

    def others(self, context: Context) -> dict[str, list[str]]:
        """Return for each dataset the other files that the rollback would change.

        These are files that are not the guest's, and images of the guest that were left out of the
        snapshot.

        Raises:
            RefusedError: a dataset cannot be examined.
        """
        texts = [self.text(role) for role in (Role.INACTIVE_XML, Role.LIVE_XML)]
        disks = self.manifest.disks if self.manifest else ()
        beneath = [file.path for disk in disks for file in disk.beneath or ()]
        then = [*(disk.source for disk in disks), *beneath]
        now: list[str | None] = []
        if self.domain is not None:
            texts += [self.domain.inactive_xml, self.domain.live_xml]
            now = [disk.source for disk in self.domain.disks]  # of a storage pool's volumes too
        xmls = [xml for xml in map(readable_xml, texts) if xml is not None]
        paths = [path for path in (*then, *now) if path is not None]
        apart = [disk.source for disk in disks if disk.is_apart and disk.source]
        if self.manifest is None and self.domain is not None:
            apart = excluded_images(context, self.domain)
        return changed_other_files(context, self.snapshots, xmls, paths, apart)


def readable_xml(xml: str | None) -> str | None:
    """Return the XML if it can be parsed. Its checksum is compared later."""
    try:
        return xml if xml is not None and domain_xml.parse(xml) is not None else None
    except RefusedError:
        return None
