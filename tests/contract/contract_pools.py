"""Scratch datasets for the contract of a pool: in memory, and on the lab's pools."""

import itertools
import os
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from fakes.pool import FakePool

from snaporch.model import DatasetKind
from snaporch.zfs import Pool
from snaporch.zfs.resolver import HOST

_BUSY_SECONDS = 60


class FakeScratch:
    """A fake pool."""

    def __init__(self) -> None:
        self.fake = FakePool("tank", "flash")
        self._folder = TemporaryDirectory()
        self.fake.snapshot_files = self._files
        self.pool: Pool = self.fake
        self.root, self.other = "tank/scratch", "flash/scratch"
        self.create(self.root)
        self.create(self.other)

    def create(self, dataset: str) -> None:
        """A file system."""
        self.fake.create(dataset)

    def create_encrypted(self, dataset: str) -> None:
        """A file system whose content is encrypted."""
        self.fake.create(dataset, encrypted=True)

    def write(self, dataset: str, content: bytes) -> None:
        """Write content to it."""
        self.fake.write(dataset, content)

    def read(self, dataset: str) -> bytes:
        """The content written last."""
        return self.fake.read(dataset)

    def create_thick(self, dataset: str, room: int) -> None:
        """A reserved volume of 32 MiB, 8 MiB of it written, with ``room`` bytes available."""
        self.fake.create(dataset, DatasetKind.VOLUME)
        self.fake.write(dataset, bytes(8 << 20))
        self.fake.reserve(dataset, 32 << 20, room=room)

    def write_volume(self, dataset: str, content: bytes) -> None:
        """Write to the beginning of a volume."""
        self.fake.write(dataset, content)

    def import_again(self, pool: str) -> None:
        """Export and import a pool."""
        self.fake.import_again(pool)

    def rename_snapshot(self, snapshot: str, name: str) -> None:
        """``zfs rename`` of a snapshot."""
        self.fake.rename_snapshot(snapshot, name)

    def replicate(self, snapshot: str, dataset: str) -> None:
        """Send and receive, with properties."""
        self.fake.replicate(snapshot, dataset)

    def remove(self) -> None:
        """The files of snapshots."""
        self._folder.cleanup()

    def _files(self, dataset: str, _snapshot: str) -> Path:
        folder = Path(self._folder.name)
        (folder / "content").write_bytes(self.read(dataset))
        return folder


class ZfsScratch:
    """Real datasets, below the lab's pools."""

    _numbers = itertools.count()

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        name = f"scratch-{os.getpid()}-{next(self._numbers)}"
        self.root, self.other = f"tank/{name}", f"flash/{name}"
        self.create(self.root)
        self.create(self.other)

    def create(self, dataset: str) -> None:
        """A file system."""
        _run("zfs", "create", dataset)

    def create_encrypted(self, dataset: str) -> None:
        """A file system whose content is encrypted."""
        key = ["-o", "keyformat=passphrase", "-o", "keylocation=prompt"]
        words = ["zfs", "create", "-o", "encryption=on", *key, dataset]
        subprocess.run(
            words, check=True, input=b"a long passphrase\n" * 2, stdout=subprocess.DEVNULL
        )

    def write(self, dataset: str, content: bytes) -> None:
        """Write content to it, on stable storage."""
        (_mount_point(dataset) / "content").write_bytes(content)
        _run("zpool", "sync", dataset.split("/", maxsplit=1)[0])

    def read(self, dataset: str) -> bytes:
        """The content written last."""
        return (_mount_point(dataset) / "content").read_bytes()

    def create_thick(self, dataset: str, room: int) -> None:
        """A reserved volume of 32 MiB, 8 MiB of it written, with ``room`` bytes available."""
        _run("zfs", "create", dataset.rpartition("/")[0])
        _run("zfs", "create", "-V", "32m", dataset)
        kept = int(_run("zfs", "get", "-Hpo", "value", "refreservation", dataset))
        _run("zfs", "set", f"quota={kept + room + (1 << 20)}", dataset.rpartition("/")[0])
        self.write_volume(dataset, os.urandom(8 << 20))

    def write_volume(self, dataset: str, content: bytes) -> None:
        """Write to the beginning of a volume, on stable storage."""
        with HOST.volume_node(dataset).open("r+b") as node:
            node.write(content)
            os.fsync(node.fileno())
        _run("zpool", "sync", dataset.split("/", maxsplit=1)[0])

    def import_again(self, pool: str) -> None:
        """Export and import a pool of the lab."""
        _run("zpool", "export", pool)
        _run("zpool", "import", "-d", "/dev/lab", pool)
        _run("udevadm", "settle")

    def rename_snapshot(self, snapshot: str, name: str) -> None:
        """``zfs rename`` of a snapshot."""
        _run("zfs", "rename", snapshot, f"{snapshot.partition('@')[0]}@{name}")

    def replicate(self, snapshot: str, dataset: str) -> None:
        """Send and receive, with properties."""
        with subprocess.Popen(["zfs", "send", "-p", snapshot], stdout=subprocess.PIPE) as sender:
            subprocess.run(["zfs", "receive", "-u", dataset], stdin=sender.stdout, check=True)

    def remove(self) -> None:
        """Destroy everything below, with holds and clones."""
        for dataset in (self.root, self.other):
            for snapshot in _run("zfs", "list", "-Hro", "name", "-t", "snap", dataset).split("\n"):
                for tag in self.pool.holds_of([snapshot])[snapshot] if snapshot else []:
                    self.pool.release([snapshot], tag)
            self._destroy(dataset)

    @staticmethod
    def _destroy(dataset: str) -> None:
        """Retry for a while: the kernel opens a new volume, at a time of its own, to read it."""
        end = time.monotonic() + _BUSY_SECONDS
        while subprocess.run(["zfs", "list", dataset], check=False, capture_output=True).stdout:
            try:
                _run("zfs", "destroy", "-R", dataset)
            except subprocess.CalledProcessError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)


def _mount_point(dataset: str) -> Path:
    return Path(_run("zfs", "get", "-Ho", "value", "mountpoint", dataset).strip())


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
