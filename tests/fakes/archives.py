"""Archives of a guest: exported, and changed as damage or an attacker would."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable
from pathlib import Path

import zstandard

from snaporch.archive.contents import Contents, parse_contents
from snaporch.archive.export import check_export, export
from snaporch.archive.tar_header import BLOCK
from snaporch.archive.write_archive import END_MARK, archive_writer, checksums_bytes
from snaporch.bundle.manifest import Manifest, manifest_bytes, parse_manifest
from snaporch.restore.source import complete_source, find_records

VDA = b"x" * 1000 + bytes(3 << 20) + b"y" * 5000
VDB = b"z" * 700


def in_snapshot(world, dataset, name, content):
    """The file as a snapshot of a mounted dataset shows it."""
    folder = world.root / "zfs" / dataset / ".zfs" / "snapshot" / "s1"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("wb") as stream:
        stream.truncate(len(content))
        for offset in range(0, len(content), 4096):
            if block := content[offset : offset + 4096].rstrip(b"\0"):
                os.pwrite(stream.fileno(), block, offset)


def exported(world, text: str = "web@s1", **options) -> bytes:
    """The archive of a snapshot."""
    source = complete_source(world.context, find_records(world.context, text)[-1])
    check_export(world.context, source)
    stream = io.BytesIO()
    export(world.context, source, "x", stream, **options)
    return stream.getvalue()


def tar_of(archive: bytes) -> bytes:
    """The tar file in an archive."""
    with zstandard.ZstdDecompressor().stream_reader(archive) as stream:
        return stream.read()


def packed(tar: bytes) -> bytes:
    """An archive with this tar file."""
    return zstandard.ZstdCompressor().compress(tar) + END_MARK


class Opened:
    """The members of an archive, to be changed and written again with right checksums."""

    def __init__(self, archive: bytes) -> None:
        tar = tar_of(archive)
        size = int(tar[124:135], 8)
        self.contents: Contents = parse_contents(tar[BLOCK : BLOCK + size], "x")
        self.data: dict[str, bytes] = {}
        at = BLOCK + -(-size // BLOCK) * BLOCK
        for member in self.contents.members:
            at += BLOCK * (3 if member.disk else 1)
            self.data[member.name] = tar[at : at + member.bytes]
            at += -(-member.bytes // BLOCK) * BLOCK
        self.manifest: Manifest = parse_manifest(self.data["manifest.json"], "x")

    def change_manifest(self, **changes) -> Opened:
        """Change fields of the manifest."""
        self.manifest = self.manifest.model_copy(update=changes)
        return self.change("manifest.json", manifest_bytes(self.manifest))

    def change_part(self, name: str, content: bytes, /, **changes) -> Opened:
        """Change a part of the bundle, and what the manifest says of it."""
        facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), **changes}
        parts = [
            part.model_copy(update=facts) if part.name == name else part
            for part in self.manifest.parts
        ]
        return self.change(name, content).change_manifest(parts=tuple(parts))

    def change(self, name: str, content: bytes, /, **disk) -> Opened:
        """Change the content of a member, and fields of its disk."""
        self.data[name] = content
        return self.change_entry(name, bytes=len(content), **disk)

    def change_entry(self, name: str, /, **changes) -> Opened:
        """Change what the table says of a member."""
        disk = {key: changes.pop(key) for key in ("size", "map_bytes", "format") if key in changes}
        members = []
        for member in self.contents.members:
            if member.name == name:
                entry = member.disk.model_copy(update=disk) if member.disk else None
                members.append(member.model_copy(update={**changes, "disk": entry}))
            else:
                members.append(member)
        self.contents = self.contents.model_copy(update={"members": tuple(members)})
        return self

    def written(self, then: Callable[[bytes], bytes] = lambda tar: tar) -> bytes:
        """The archive; ``then`` changes its tar file."""
        names = ["contents.json", *(each.name for each in self.contents.members[:-1])]
        self.change_entry(
            "checksums.json", bytes=len(checksums_bytes(dict.fromkeys(names, "0" * 64)))
        )
        stream = io.BytesIO()
        with archive_writer(self.contents, stream.write) as writer:
            for member in self.contents.members[:-1]:
                writer.begin()
                writer.data(self.data[member.name])
                writer.end()
        return packed(then(tar_of(stream.getvalue())))


def write(path: Path, archive: bytes) -> Path:
    """Write an archive into a file."""
    path.write_bytes(archive)
    return path
