"""What other programs do to a guest in the middle of a run, and how they find it afterwards."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from xml.etree.ElementTree import SubElement

import libvirt
from faults.machine import end_emulator, restart_libvirtd
from faults.others import Act
from support import must, wait_for

SCRATCH = Path("/var/lib/libvirt/images/others.scratch")
_GROWN_BYTES = 1 << 20


def beside(guest, name):
    """A path for an image, in the dataset of the guest's first disk."""
    return guest.images[0].path.with_name(name)


def take_disks_at_any_time(domain):
    """Add a controller from which a disk can be detached without the guest's cooperation."""
    SubElement(domain.find("devices"), "controller", type="scsi", model="virtio-scsi")


class Deed:
    """An act."""

    refusals: tuple[str, ...] = ()
    """Texts: a run that the act makes refuse prints one of these."""
    reboots = False
    """Whether the guest boots again because of the act."""

    def get_ready(self, guest):
        """Before the run is planned."""

    def do(self, guest):
        raise NotImplementedError

    def meanwhile(self, run):
        """Act while the run continues."""

    def undo(self, guest):
        """Check that the other program finds its work as it left it, and end that work."""

    def put_away(self, guest):
        """Clean up after all checks."""


class Shutdown(Deed):
    """The guest's QEMU exits by itself, as when a guest has shut down."""

    refusals = ("was started or stopped meanwhile", "its guest agent does not answer")
    reboots = True

    def do(self, guest):
        end_emulator(guest)
        wait_for(lambda: guest.state() == "shut off", "libvirt to see that QEMU is gone")

    def undo(self, guest):
        assert guest.state() == "shut off"
        guest.start()


class Reset(Deed):
    reboots = True

    def do(self, guest):
        must("virsh", "reset", guest.name)

    def undo(self, guest):
        guest.wait_count()


class Restart(Deed):
    """The guest is not started on a run's overlays: libvirt's hook prevents it."""

    refusals = ("was started or stopped meanwhile", "its guest agent does not answer")
    reboots = True

    def do(self, guest):
        guest.destroy()
        with suppress(libvirt.libvirtError):
            guest.start(wait=False)

    def undo(self, guest):
        if guest.state() == "shut off":
            guest.start()
        guest.wait_count()


class Suspend(Deed):
    refusals = ("it is paused, and was running",)

    def do(self, guest):
        must("virsh", "suspend", guest.name)

    def undo(self, guest):
        assert guest.state() == "paused"
        must("virsh", "resume", guest.name)


class ManagedSave(Deed):
    """Saves the guest's RAM as libvirt-guests does when the host shuts down."""

    refusals = ("was started or stopped meanwhile",)

    def do(self, guest):
        must("virsh", "managedsave", guest.name)

    def undo(self, guest):
        assert guest.state() == "shut off"
        must("virsh", "start", guest.name)


class JobAbort(Deed):
    refusals = ("canceled by client",)

    def do(self, guest):
        must("virsh", "domjobabort", guest.name)


class Snapshot(Deed):
    """Puts an overlay over the base and reads the base, as many backup tools do."""

    refusals = ("its disk vda is on ",)

    def do(self, guest):
        image = beside(guest, "tool.qcow2")
        words = ["--disk-only", "--no-metadata", "--diskspec", f"vda,file={image}"]
        for target in guest.sources():
            words += [] if target == "vda" else ["--diskspec", f"{target},snapshot=no"]
        must("virsh", "snapshot-create-as", guest.name, *words)

    def undo(self, guest):
        image = beside(guest, "tool.qcow2")
        assert guest.sources()["vda"] == str(image)
        words = ("--shallow", "--active", "--pivot", "--wait")
        must("virsh", "blockcommit", guest.name, "vda", *words)
        image.unlink()


class Backup(Deed):
    """Starts a backup in pull mode: the job lasts until its client ends it."""

    def do(self, guest):
        disks = "".join(
            f"<disk name='{target}' backup='yes' type='file'><scratch file='{SCRATCH}'/></disk>"
            if target == "vda"
            else f"<disk name='{target}' backup='no'/>"
            for target in guest.sources()
        )
        server = "<server transport='tcp' name='127.0.0.1' port='10809'/>"
        xml = Path("/root/backup.xml")
        xml.write_text(f"<domainbackup mode='pull'>{server}<disks>{disks}</disks></domainbackup>")
        must("virsh", "backup-begin", guest.name, str(xml))
        xml.unlink()

    def undo(self, guest):
        assert "Backup" in must("virsh", "domjobinfo", guest.name)
        must("virsh", "domjobabort", guest.name)
        wait_for(lambda: "None" in must("virsh", "domjobinfo", guest.name), "the backup's end")
        SCRATCH.unlink(missing_ok=True)


class BlockCopy(Deed):
    """Copies a disk onto another image, to which the guest is about to be switched."""

    def do(self, guest):
        image = str(beside(guest, "copy.raw"))
        must("virsh", "blockcopy", guest.name, "vda", image, "--transient-job")

    def undo(self, guest):
        job = guest.domain().blockJobInfo("vda")
        assert job["type"] == libvirt.VIR_DOMAIN_BLOCK_JOB_TYPE_COPY
        must("virsh", "blockjob", guest.name, "vda", "--abort")
        beside(guest, "copy.raw").unlink()


class Plug(Deed):
    refusals = ("the disk sda was attached", "its definition was changed")

    def do(self, guest):
        plug(guest)

    def undo(self, guest):
        for inactive in (False, True):
            assert guest.sources(inactive=inactive)["sda"] == str(beside(guest, "extra.raw"))
        unplug(guest)


class Unplug(Deed):
    refusals = ("its disk sda was detached", "its definition was changed")

    def get_ready(self, guest):
        plug(guest)

    def do(self, guest):
        unplug(guest)

    def undo(self, guest):
        for inactive in (False, True):
            assert "sda" not in guest.sources(inactive=inactive)
        plug(guest)

    def put_away(self, guest):
        unplug(guest)


def plug(guest):
    """Attach one more disk, also to the inactive definition."""
    image = beside(guest, "extra.raw")
    image.touch()
    os.truncate(image, 1 << 20)
    must("virsh", "attach-disk", guest.name, str(image), "sda", "--persistent")


def unplug(guest):
    """Detach that disk, also from the inactive definition."""
    must("virsh", "detach-disk", guest.name, "sda", "--persistent")


class Resize(Deed):
    def do(self, guest):
        path = guest.images[0].path
        self.size = path.stat().st_size + _GROWN_BYTES
        must("virsh", "blockresize", guest.name, "vda", f"{self.size}B")

    def undo(self, guest):
        assert guest.images[0].path.stat().st_size == self.size
        assert guest.domain().blockInfo("vda")[0] == self.size


class Define(Deed):
    refusals = ("its definition was changed",)

    def do(self, guest):
        must("virsh", "setvcpus", guest.name, "2", "--config", "--maximum")

    def undo(self, guest):
        assert ">2</vcpu>" in guest.xml(inactive=True)
        must("virsh", "setvcpus", guest.name, "1", "--config", "--maximum")


class Freeze(Deed):
    """Freezes the guest's file systems by its agent."""

    refusals = ("frozen already",)

    def do(self, guest):
        must("virsh", "domfsfreeze", guest.name)

    def undo(self, guest):
        question = '{"execute":"guest-fsfreeze-status"}'
        answer = must("virsh", "qemu-agent-command", guest.name, question)
        assert json.loads(answer)["return"] == "frozen"
        must("virsh", "domfsthaw", guest.name)


class Lock(Deed):
    """Locks an image, as a script does that reads it."""

    def do(self, guest):
        words = ["qemu-io", "-f", "raw", str(guest.images[0].path)]
        self.locker = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.locker.stdin.write(b"read 0 512\n")
        self.locker.stdin.flush()
        while b"read 512/512" not in self.locker.stdout.readline():
            assert self.locker.poll() is None, "it could not have it"

    def meanwhile(self, run):
        wait_for(lambda: "trying again" in run.outcome().err or run.has_ended(), "a try in vain")
        self.locker.communicate(timeout=60)


class Libvirtd(Deed):
    def do(self, guest):
        restart_libvirtd()


DEEDS = {
    Act.SHUTDOWN: Shutdown,
    Act.RESET: Reset,
    Act.RESTART: Restart,
    Act.SUSPEND: Suspend,
    Act.MANAGED_SAVE: ManagedSave,
    Act.JOB_ABORT: JobAbort,
    Act.SNAPSHOT: Snapshot,
    Act.BACKUP: Backup,
    Act.BLOCK_COPY: BlockCopy,
    Act.PLUG: Plug,
    Act.UNPLUG: Unplug,
    Act.RESIZE: Resize,
    Act.DEFINE: Define,
    Act.FREEZE: Freeze,
    Act.LOCK: Lock,
    Act.LIBVIRTD: Libvirtd,
}
