"""A host of a fake pool whose ``zfs send`` and ``restic`` are small programs."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from fakes import restic
from fakes.pool import FakePool
from fakes.world import Heard
from fakes.zfs_stream import zfs_stream
from snaporch.config import ResticReplica
from snaporch.interrupt import Interrupt
from snaporch.rebuild.restic_source import ResticSource
from snaporch.replication.restic import ResticRepository
from snaporch.replication.restic_destination import ResticDestination

_ZFS = """#!/bin/sh
for last; do :; done
case "$*" in
send\\ -nP*) printf 'size\\t99\\n' ;;
send\\ *)
    echo "$*" >>{place}/sent
    test ! -p {place}/under-way || {{ echo >{place}/under-way; exec sleep 600; }}
    test ! -e {place}/cut || {{ head -c 400 {place}/streams/"$(echo "$last" | tr / :)"; exit 1; }}
    stream={place}/streams/"$(echo "$last" | tr / :)"
    case "$3" in
    -i) head -c 48 "$stream"; cat {place}/guids/"$(echo "$4" | tr / :)"; tail -c +57 "$stream" ;;
    *) cat "$stream" ;;
    esac ;;
esac
"""


class Cloud:
    """A host, and an empty repository."""

    def __init__(self, place: Path, pool: FakePool) -> None:
        self.place, self.pool, self.heard = place, pool, Heard()
        self.tools = place / "tools"
        for directory in ("tools", "streams", "guids", "repository/data", "repository/snapshots"):
            (place / directory).mkdir(parents=True)
        (place / "repository" / "config").write_text("{}")
        restic.put_in(self.tools)
        (self.tools / "zfs").write_text(_ZFS.format(place=place))
        (self.tools / "zfs").chmod(0o755)
        self.options: dict[str, object] = {}
        """Of the replica's section, beside its defaults."""
        self.secret = place / "password"
        self.secret.write_text("open sesame\n")
        self.secret.chmod(0o600)

    def section(self, **more: object) -> ResticReplica:
        """The replica's section of the configuration."""
        given = {"repository": str(self.place / "repository"), "password_file": self.secret}
        options = {"engine": "restic", **given, **self.options, **more}
        return ResticReplica.model_validate(options)

    def destination(self, interrupt: Interrupt | None = None, **more: object) -> ResticDestination:
        """The repository, as a new command sees it."""
        return ResticDestination(self.repository(interrupt, **more), self.pool)

    def slow(self) -> Path:
        """Let streams take as long as this named pipe is there; reading it awaits the next one."""
        path = self.place / "under-way"
        os.mkfifo(path)
        return path

    def source(self) -> ResticSource:
        """The repository, as a new rebuild sees it."""
        return ResticSource(self.repository())

    def repository(self, interrupt: Interrupt | None = None, **more: object) -> ResticRepository:
        """The repository itself."""
        section, cache = self.section(**more), self.place / "cache"
        signals = interrupt or Interrupt()
        return ResticRepository("cloud", section, signals, self.heard, cache=cache)

    def take(self, *names: str, **properties: str) -> None:
        """Take ZFS snapshots; the names are full."""
        for name in names:
            marks = {f"snaporch:{key}": value for key, value in properties.items()}
            self.pool.snapshot([name], marks)
        self.prepare()

    def prepare(self) -> None:
        """Let ``zfs send`` know the snapshots of the pool."""
        guids = {}
        for each in self.pool.snapshots():
            (self.place / "streams" / each.full_name.replace("/", ":")).write_bytes(
                self.stream(each.full_name)
            )
            guids[each.full_name] = each.guid
            guids |= {name: mark.guid for name, mark in self.pool.bookmarks(each.dataset).items()}
        for name, guid in guids.items():
            (self.place / "guids" / name.replace("/", ":")).write_bytes(struct.pack("<Q", guid))

    def stream(self, full: str, base: str = "") -> bytes:
        """What ``zfs send`` prints for a snapshot, and with ``-i`` for the base."""
        guids = {each.full_name: each.guid for each in self.pool.snapshots()}
        content = full.encode() * 5000
        return zfs_stream(full.partition("@")[2], guids[full], content, guids.get(base, 0))

    def sent(self) -> list[str]:
        """The arguments of each ``zfs send`` so far."""
        path = self.place / "sent"
        return path.read_text().splitlines() if path.exists() else []

    def damage(self, content: bytes) -> None:
        """Change one byte of some data in the repository."""
        for path in (self.place / "repository" / "data").iterdir():
            data = path.read_bytes()
            if data == restic.MIGHT_BE_READ + content:
                path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    def forget(self, tag: str) -> None:
        """``restic forget --tag``"""
        for path in (self.place / "repository" / "snapshots").iterdir():
            if f'"{tag}' in path.read_text():
                path.unlink()

    def change_record(self, name: str, old: str, new: str) -> None:
        """Change the record of a stream, as an admin with the password could."""
        for path in (self.place / "repository" / "snapshots").iterdir():
            text = path.read_text()
            if '"kind=stream-record"' in text and f'"snapshot={name}"' in text:
                path.write_text(text.replace(old, new))

    def fail(self, command: str, times: int) -> None:
        """Let a command of restic fail so often, as without a server."""
        (self.place / "repository" / f"fail-{command}").write_text(str(times))
