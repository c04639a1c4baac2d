"""Makes the Linux guest's kernel, initramfs and disk from unpacked packages."""

import lzma
import re
import shutil
import struct
import subprocess
from pathlib import Path

# What the cloud kernel has as modules; names it has built in are passed over.
_MODULES = ["virtio_blk"]
_AGENT = "usr/sbin/qemu-ga"
_LOADER = "usr/lib64/ld-linux-x86-64.so.2"
_LIBRARIES = "usr/lib/x86_64-linux-gnu"
_FOLDERS = ["dev", "proc", "sys", "run", "tmp", "mnt", "modules", "usr/sbin",
            "usr/lib64", _LIBRARIES]  # fmt: skip
_LINKS = {
    "sbin": "usr/sbin",
    "lib": "usr/lib",
    "lib64": "usr/lib64",
    "usr/sbin/shutdown": "/init",
    "usr/sbin/hwclock": "/init",
}
_ZSTD = b"\x28\xb5\x2f\xfd"
_SECTOR = 512


def kernel(root: Path) -> bytes:
    """The kernel as an ELF file, which QEMU starts without unpacking it.

    Under emulation the unpacking would take longer than the rest of the boot.
    """
    (packed,) = (root / "boot").glob("vmlinuz-*")
    image = packed.read_bytes()
    place = image.find(_ZSTD)
    while place >= 0:
        unpacked = subprocess.run(
            ["zstd", "-dcq"], input=image[place:], capture_output=True, check=False
        ).stdout
        if unpacked.startswith(b"\x7fELF"):
            return unpacked
        place = image.find(_ZSTD, place + 1)
    raise ValueError(f"no zstd-packed kernel in {packed}")


def initramfs(root: Path, init: Path) -> bytes:
    """A cpio archive with init, the modules, the agent and its libraries."""
    archive = _Cpio()
    for folder in _parents(_FOLDERS):
        archive.add(folder, 0o040755)
    for name, target in _LINKS.items():
        archive.add(name, 0o120777, target.encode())
    archive.add("init", 0o100755, init.read_bytes())
    modules = _modules(root)
    for name, content in modules.items():
        archive.add(f"modules/{name}", 0o100644, content)
    archive.add("modules/order", 0o100644, "\n".join(modules).encode())
    # The console of the kernel's own start, before devtmpfs is there.
    archive.add("dev/console", 0o020600, device=(5, 1))
    for name in [_AGENT, _LOADER]:
        archive.add(name, 0o100755, (root / name).read_bytes())
    for library in _needed(root, root / _AGENT):
        content = (root / _LIBRARIES / library).read_bytes()
        archive.add(f"{_LIBRARIES}/{library}", 0o100755, content)
    return archive.finish()


def disk(work: Path) -> bytes:
    """The first disk: an MBR, and ext4 in a partition from 1 to 8 MiB."""
    start, end = 2048, 16384
    table = struct.pack("<B3sB3sII", 0, b"\xff" * 3, 0x83, b"\xff" * 3, start,
                        end - start)  # fmt: skip
    image = work / "disk"
    with image.open("wb") as target:
        target.truncate(end * _SECTOR)
        target.seek(446)
        target.write(table.ljust(64, b"\0") + b"\x55\xaa")
    mkfs = shutil.which("mkfs.ext4", path="/usr/sbin:/sbin:/usr/bin:/bin")
    subprocess.run(
        [mkfs or "mkfs.ext4", "-q", "-F", "-b", "1024", "-J", "size=1",
         "-E", f"offset={start * _SECTOR},lazy_itable_init=0", image,
         f"{(end - start) * _SECTOR // 1024}k"],
        check=True,
    )  # fmt: skip
    return image.read_bytes()


def _parents(folders: list[str]) -> list[str]:
    found: dict[str, None] = {}
    for folder in folders:
        parts = folder.split("/")
        for end in range(1, len(parts) + 1):
            found["/".join(parts[:end])] = None
    return list(found)


def _modules(root: Path) -> dict[str, bytes]:
    """File name to content of the wanted modules, in loading order."""
    files = {
        path.name.split(".")[0].replace("-", "_"): path
        for path in root.glob("usr/lib/modules/**/*.ko.xz")
    }
    loaded: dict[str, bytes] = {}

    def load(name: str) -> None:
        if name in files and f"{name}.ko" not in loaded:
            content = lzma.decompress(files[name].read_bytes())
            depends = re.search(rb"\0depends=([^\0]*)\0", content)
            for other in depends[1].decode().split(",") if depends else []:
                load(other.replace("-", "_"))
            loaded[f"{name}.ko"] = content

    for name in _MODULES:
        load(name)
    return loaded


def _needed(root: Path, program: Path) -> list[str]:
    """The shared libraries a program needs, directly or not."""
    found: dict[str, None] = {}
    left = [program]
    while left:
        said = subprocess.run(
            ["readelf", "-d", left.pop()], capture_output=True, text=True, check=True
        ).stdout
        for name in re.findall(r"\(NEEDED\).*\[(.*)\]", said):
            if name not in found and name != Path(_LOADER).name:
                found[name] = None
                left.append(root / _LIBRARIES / name)
    return list(found)


class _Cpio:
    """A "newc" archive."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._inode = 0

    def add(
        self,
        name: str,
        mode: int,
        content: bytes = b"",
        device: tuple[int, int] = (0, 0),
    ) -> None:
        self._inode += 1
        fields = [self._inode, mode, 0, 0, 1, 0, len(content), 0, 0, *device,
                  len(name.encode()) + 1, 0]  # fmt: skip
        header = b"070701" + b"".join(b"%08x" % field for field in fields)
        self._padded(header + name.encode() + b"\0")
        self._padded(content)

    def finish(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return b"".join(self._parts)

    def _padded(self, data: bytes) -> None:
        self._parts.append(data + bytes(-len(data) % 4))
