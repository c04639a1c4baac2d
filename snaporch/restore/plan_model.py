"""The plan of a restore: the snapshot, the guest as it is now, and what is done with both."""

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
from snaporch.restore.journal import KeptDataset
from snaporch.restore.other_files import changed_other_files, excluded_images


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """A restore that may be carried out."""

    record: SnapshotRecord
    manifest: Manifest | None
    domain: Domain | None
    """The domain as it is now; ``None`` when it is undefined."""
    snapshots: tuple[PoolSnapshot, ...]
    newer: tuple[str, ...]
    """Snapshots and bookmarks that have to go."""
    ram: Path | None
    """The image to resume from; ``None`` to boot or to stay off."""
    boot: bool
    running: bool
    """Whether the guest runs when it has been resumed: as it did when it was captured."""
    also_roll_back: bool = False
    """Whether files that are not the guest's may be rolled back with it."""
    damaged: frozenset[str] = frozenset()
    """Parts of the bundle that differ from the manifest, and are not put back."""
    unfit: Mapping[str, RefusedError] = field(default_factory=dict)
    """Parts of the bundle that have no place on this host, and are not put back; and why."""
    despite_other_disks: bool = False
    """Whether disks and what lies beneath them may be of another time."""
    keep_definition: bool = False
    """Whether the domain stays defined as it is."""
    undoes: str = ""
    """The safety copy that is put back, if it is an undo."""
    kept: tuple[KeptDataset, ...] = ()
    """What the copy has of the datasets that it is received on."""

    @property
    def thing(self) -> str:
        """``DOMAIN@SNAPSHOT``."""
        return self.record.full_name

    @property
    def pages(self) -> Part | None:
        """The RAM to resume from, if an image has to be made of it first."""
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
        """A part of the bundle that is XML, if it can be read."""
        for part in self.parts:
            if part.role is role and self.record.bundle is not None:
                with suppress(OSError, UnicodeDecodeError):
                    return (Path(self.record.bundle) / part.name).read_text("utf-8")
        return None

    def others(self, context: Context) -> dict[str, list[str]]:
        """Of each dataset the files that are not in the snapshot and would be rolled back with it.

        These are others' files, and images of the guest that were left out.

        Raises:
            RefusedError: it cannot be told of one.
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
    """The XML, unless it is damaged; its checksum is looked at later."""
    try:
        return xml if xml is not None and domain_xml.parse(xml) is not None else None
    except RefusedError:
        return None
