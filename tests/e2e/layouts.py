"""Layouts: where an image lies and how it is reached; and the changes to that after a snapshot."""

import hashlib
import os
import shutil
import struct
from contextlib import chdir
from pathlib import Path
from xml.etree import ElementTree

import libvirt
from guests.disks import Disk, destroy, mountpoint, zvol_node
from guests.guest import Guest, connect
from support import must, wait_for

from snaporch.restore.newer_snapshot_checks import SAFETY_PREFIX

NAME = "wanderer"
HOME, AWAY, GOLDEN = f"tank/{NAME}", f"flash/{NAME}-away", f"flash/{NAME}-golden"
VOLUME, RENAMED = f"{HOME}-volume", f"{HOME}-renamed"
LINK = Path(f"/var/lib/libvirt/images/{NAME}.link")
_START, _SECTORS = 2048, 8192
"""The start of the partition, in sectors: as tools align it."""


class Layout:
    """The guest, its image, and another image that no guest uses."""

    def make(self, how):
        """Put the image in its place, and define the guest on it."""
        for dataset in (AWAY, GOLDEN):
            must("zfs", "create", dataset)
        self.decoy = mountpoint(AWAY) / "decoy.img"
        self.decoy.write_bytes(os.urandom(4 << 20))
        self.guest = Guest.create(NAME, disks=[Disk("file", HOME)], start=False)
        self.raw = self.guest.images[0].path
        self.folder = self.raw.parent
        self.form = "raw"
        self.path = LAYOUTS[how](self)
        self.dataset = VOLUME if self.path.is_block_device() else HOME
        self.define(self.path, self.form)

    def define(self, path, form):
        """Make the guest's definition name this image."""
        root = ElementTree.fromstring(self.guest.xml(inactive=True))
        kind, attribute = ("block", "dev") if path.is_block_device() else ("file", "file")
        disk = root.find("devices/disk")
        disk.set("type", kind)
        disk.find("driver").set("type", form)
        disk.find("source").attrib = {attribute: str(path)}
        connect().defineXML(ElementTree.tostring(root, "unicode"))

    def is_own(self, thing):
        """Whether a restore brings it back: the guest's images, its volume and its definition."""
        mine = (f"{self.folder}/", VOLUME, f"domain {NAME}", f"active {NAME}")
        return thing.startswith(mine)

    def own(self):
        """The state of everything that belongs to the guest."""
        return {thing: how for thing, how in everything().items() if self.is_own(thing)}

    def remove(self):
        """Remove everything of the layout, also after a change."""
        LINK.unlink(missing_ok=True)
        for domain in connect().listAllDomains():
            Guest.existing(domain.name()).remove()
        for dataset in (HOME, VOLUME, RENAMED, AWAY, GOLDEN):
            destroy(dataset)


def everything():
    """All that verify, clone and extract have to leave as it is, and a refused restore.

    Datasets and snapshots, definitions, links, and the hash of each image. The snapshot that a
    safety copy ends with stays when it is brought back, and is of no account.
    """
    os.sync()  # a partition's pages in the host's cache are not those of its volume
    listed = must("zfs", "list", "-H", "-t", "all", "-o", "name,guid,readonly,volsize").splitlines()
    found = dict(line.split("\t", 1) for line in listed if SAFETY_PREFIX not in line)
    for name in must("zfs", "list", "-H", "-t", "volume", "-o", "name").split():
        found[f"{name} data"] = sha256(zvol_node(name))
    for domain in connect().listAllDomains():
        found[f"domain {domain.name()}"] = domain.XMLDesc(libvirt.VIR_DOMAIN_XML_INACTIVE)
        found[f"active {domain.name()}"] = bool(domain.isActive())
    for path in (LINK, *Path("/tank").rglob("*"), *Path("/flash").rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file():
            found[str(path)] = sha256(path)
    return found


def changed(before):
    """What has changed: pairs of the former and the present state."""
    now = everything()
    things = before.keys() | now.keys()
    return {
        thing: (before.get(thing), now.get(thing))
        for thing in things
        if before.get(thing) != now.get(thing)
    }


def sha256(path):
    """Of all of a file, or of a device past the host's cache."""
    if path.is_block_device():
        command = f"dd if={path} iflag=direct bs=1M status=none | sha256sum"
        return must("sh", "-c", command).split()[0]
    with path.open("rb") as image:
        return hashlib.file_digest(image, "sha256").hexdigest()


# -- how it lies --------------------------------------------------------------------------------


def _file(layout):
    return layout.raw


def _linked(layout, target):
    layout.raw.rename(layout.folder / "real.img")
    layout.raw.symlink_to(target)
    return layout.raw


def _link_outside(layout):
    LINK.symlink_to(layout.raw)
    return LINK


def _over(layout, base, named):
    layout.form = "qcow2"
    top = layout.folder / "top.qcow2"
    shutil.move(layout.raw, base)
    must("sh", "-c", f"cd {layout.folder} && qemu-img create -q -f qcow2 -F raw -b {named} {top}")
    return top


def _golden(layout):
    base = mountpoint(GOLDEN) / "golden.img"
    return _over(layout, base, base)


def _data_file(layout, named):
    layout.form = "qcow2"
    top, options = layout.folder / "top.qcow2", f"data_file={named},data_file_raw=on"
    create = f"qemu-img create -q -f qcow2 -o {options} {top} 4M"
    copy = f"qemu-img convert -n -f raw -O qcow2 {layout.raw} {top}"
    must("sh", "-c", f"cd {layout.folder} && {create} && {copy}")
    layout.raw.unlink()
    return top


def _volume(layout):
    must("zfs", "create", "-s", "-V", "8M", VOLUME)
    return _moved_to(layout, zvol_node(VOLUME))


def _partition(layout):
    must("zfs", "create", "-s", "-V", "8M", VOLUME)
    node = zvol_node(VOLUME)
    entry = struct.pack("<B3sB3sII", 0, b"", 0x83, b"", _START, _SECTORS)
    with node.open("r+b", buffering=0) as device:
        device.write(bytes(446) + entry + bytes(48) + b"\x55\xaa")
    must("blockdev", "--rereadpt", str(node))
    must("udevadm", "settle")
    partition = Path(f"{node}-part1")
    wait_for(partition.exists, "the partition's node")
    return _moved_to(layout, partition)


def _moved_to(layout, node):
    must("dd", f"if={layout.raw}", f"of={node}", "bs=1M", "oflag=direct", "conv=nocreat")
    must("udevadm", "settle")  # a writer's end has it make the nodes again, owned by root
    layout.raw.unlink()
    return node


LAYOUTS = {
    "file": _file,
    "volume": _volume,
    "partition": _partition,
    "absolute-link": lambda layout: _linked(layout, layout.folder / "real.img"),
    "relative-link": lambda layout: _linked(layout, "real.img"),
    "link-outside": _link_outside,
    "chain": lambda layout: _over(layout, layout.folder / "base.img", layout.folder / "base.img"),
    "relative-chain": lambda layout: _over(layout, layout.folder / "base.img", "base.img"),
    "golden": _golden,
    "data-file": lambda layout: _data_file(layout, layout.folder / "data.raw"),
    "relative-data-file": lambda layout: _data_file(layout, "data.raw"),
}


# -- what becomes of it -------------------------------------------------------------------------


def _nothing(_layout):
    pass


def _move(layout):
    """Move the image to another pool; nothing remains in its old place."""
    moved = mountpoint(AWAY) / "moved.img"
    with chdir(layout.folder):  # from where QEMU takes the name of a data file
        form = layout.form
        must("qemu-img", "convert", "-f", form, "-O", form, str(layout.path), str(moved))
    layout.path.unlink()
    layout.define(moved, layout.form)


def _point_elsewhere(layout):
    """Make the path lead to the other image."""
    if layout.path.is_symlink():
        layout.path.unlink()
    else:
        layout.path.rename(layout.path.with_name("was.img"))
    layout.path.symlink_to(layout.decoy)


def _rename(layout):
    renamed = layout.path.with_name("renamed.img")
    layout.path.rename(renamed)
    layout.define(renamed, layout.form)


def _rename_dataset(layout):
    must("zfs", "rename", layout.dataset, RENAMED)
    must("udevadm", "settle")


def _resize(layout):
    if layout.dataset == VOLUME:
        must("zfs", "set", "volsize=16M", VOLUME)
    else:
        with chdir(layout.folder):
            image = os.path.realpath(layout.path)
            must("qemu-img", "resize", "-q", "-f", layout.form, image, "+1M")


def _redefine(layout):
    """Define the guest with another image."""
    layout.define(layout.decoy, "raw")


def _undefine(layout):
    layout.guest.undefine()


def _rename_domain(_layout):
    must("virsh", "domrename", NAME, f"{NAME}-renamed")


def _write_golden(_layout):
    with next(mountpoint(GOLDEN).iterdir()).open("r+b") as image:
        image.seek(1 << 20)
        image.write(b"changed")


def _make_read_only(layout):
    must("zfs", "set", "readonly=on", layout.dataset)


CHANGES = {
    "nothing": _nothing,
    "moved": _move,
    "re-pointed": _point_elsewhere,
    "renamed": _rename,
    "dataset-renamed": _rename_dataset,
    "resized": _resize,
    "redefined": _redefine,
    "undefined": _undefine,
    "domain-renamed": _rename_domain,
    "golden-written": _write_golden,
    "read-only": _make_read_only,
}
_OF_FILES = ("moved", "re-pointed", "renamed")
_FOR_ONE = {"golden-written": "golden"}
_UNCERTAIN = ("partition", "dataset-renamed")
"""udev may leave the link of the partition, which then leads to the renamed volume."""


def cases():
    """Each layout with each change that is possible to it."""
    for how in LAYOUTS:
        for change in CHANGES:
            is_volume = how in ("volume", "partition")
            if (how, change) == _UNCERTAIN or (is_volume and change in _OF_FILES):
                continue
            if _FOR_ONE.get(change, how) == how:
                yield how, change
