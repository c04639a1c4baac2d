"""The steps inside the stock host: ``steps.py NAME`` runs one phase of a step, as root.

A phase that ends with the machine prints ``CUT`` or ``OFF`` as its last line; the host then cuts
the power or waits until the machine is off, boots it, and runs the phase ``NAME-after``.
"""

import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

TOP = Path("/opt/acceptance")
CUT, OFF = "acceptance: cut the power", "acceptance: off"
CONFIG = Path("/etc/snaporch/snaporch.toml")
OVERLAYS = Path("/var/lib/snaporch/overlays")
JOURNAL = Path("/var/lib/snaporch/journal")
BUNDLES = Path("/var/lib/snaporch/bundles")
UNITS = ("snaporch.service", "snaporch-recover.service", "snaporch-run-due.timer")
COUNT = re.compile(r"N ([0-9a-f]{8})")
TWO_POOLS = ("file:tank/{}", "zvol:flash/{}-data")
PATIENCE = 900.0


# -- commands, and what they printed ------------------------------------------------------------


def show(*command, timeout=PATIENCE):
    """Run and print a command as an admin would; its output, which is printed, too."""
    status, text = attempt(*command, timeout=timeout)
    assert status == 0, f"{command[0]} ended with {status}"
    return text


def attempt(*command, timeout=PATIENCE):
    """Status and output of a command; both are printed."""
    print("#", *command, flush=True)
    began = time.monotonic()
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", check=False, timeout=timeout,
    )  # fmt: skip
    print(done.stdout, end="")
    print(f"[{done.returncode}, {time.monotonic() - began:.1f} s]", flush=True)
    return done.returncode, done.stdout


def state(unit, name="ActiveState"):
    return subprocess.run(
        ["systemctl", "show", "-P", name, unit], capture_output=True, text=True, check=True
    ).stdout.strip()


def wait(probe, what, seconds=PATIENCE):
    """Poll: the host is ten times slower than a real one, so nothing is gained by an event."""
    end = time.monotonic() + seconds
    while not (found := probe()):
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.5)
    return found


def lines_of(*command):
    """Yield each line of a command that is started, with the process."""
    print("#", *command, flush=True)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip
    for line in process.stdout:
        print(line, end="", flush=True)
        yield process, line
    process.wait()


# -- guests -------------------------------------------------------------------------------------


def create(name, disks=TWO_POOLS, **options):
    """A guest that counts on all its disks, confined as libvirt does by itself."""
    from guests.disks import Disk
    from guests.guest import Guest

    places = [Disk(*disk.format(name).split(":", 1)) for disk in disks]
    began = time.monotonic()
    guest = Guest.create(name, disks=places, timeout=PATIENCE, **options)
    print(f"{name} counts after {time.monotonic() - began:.1f} s", flush=True)
    return guest


def existing(name):
    from guests.guest import Guest

    return Guest.existing(name)


def records(name):
    listing = subprocess.run(
        ["snaporch", "list", name, "--json"], capture_output=True, text=True, check=True
    )
    return json.loads(listing.stdout)


def record(name, snapshot):
    (found,) = [each for each in records(name) if each["snapshot"] == snapshot]
    return found


def assert_on_bases(guest, states=("running",)):
    """The guest is on its own disks, and nothing of a run is left."""
    assert guest.state() in states, guest.state()
    for inactive in (False, True):
        assert not any(str(OVERLAYS) in each for each in guest.sources(inactive).values())
    assert not list(JOURNAL.glob("*.jsonl")), list(JOURNAL.iterdir())
    assert not list(OVERLAYS.glob("[!q]*")), list(OVERLAYS.iterdir())
    assert not list(BUNDLES.glob("*/.*"))


def assert_restored(guest, mark, count):
    from support import assert_restored as restored

    restored(guest, mark, count)


@contextmanager
def configured(text):
    """The package's configuration file has another text meanwhile."""
    packaged = CONFIG.read_text()
    CONFIG.write_text(text)
    yield
    CONFIG.write_text(packaged)


def last_count(guest):
    """The last count that a guest has printed; the host remembers it."""
    count = COUNT.findall(guest.serial())[-1]
    print(f"printed: {count}", flush=True)
    return count


# -- steps --------------------------------------------------------------------------------------


def install():
    """README, "Install"."""
    (deb,) = TOP.glob("snaporch*.deb")
    show("apt-get", "-q", "install", "-y", str(deb))
    assert show("snaporch", "--version").split()[0] == "snaporch"
    for unit in UNITS:
        assert attempt("systemctl", "is-enabled", unit)[1].strip() == "disabled"
    show("systemctl", "enable", "snaporch-recover")
    show("systemctl", "try-restart", "libvirtd")
    for number, pool in ((1, "tank"), (2, "flash"), (3, "backup")):
        show("zpool", "create", pool, f"/dev/vd{'abcd'[number]}")
    show_check()
    show("snaporch", "status")


def show_check():
    """No finding but hints, and the known fault of libvirt before 12.1 with QEMU 11."""
    text = attempt("snaporch", "check")[1]
    assert "Traceback" not in text
    listing = subprocess.run(
        ["snaporch", "check", "--json"], capture_output=True, text=True, check=False
    )
    found = json.loads(listing.stdout)
    wrong = {each["code"] for each in found if each["severity"] != "hint"}
    assert wrong <= {"saved-guests"}, wrong


def confined():
    """A guest of one pool is confined as Debian does it; `manual` saves it."""
    guest = create("confined", ("file:tank/{}",))
    from support import assert_confined

    assert_confined(guest)
    assert Path("/run/snaporch-hook").exists()
    show("ps", "-eo", "label,user,comm")
    text = attempt("snaporch", "check")[1]
    assert "unguarded" not in text
    assert "manual" in show("snaporch", "snapshot", "confined", "--name", "s1")
    count, mark = guest.snapshot_count("s1"), guest.mark()
    show("snaporch", "restore", "confined@s1", "--yes")
    assert_restored(guest, mark, count)
    assert_on_bases(guest)
    guest.remove()


def five_minutes():
    """README, "Five minutes"."""
    guest = create("demo")
    show("snaporch", "snapshot", "demo", "--dry-run")
    mark = guest.mark()
    show("snaporch", "snapshot", "demo", "--name", "before-upgrade")
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_on_bases(guest)
    taken = record("demo", "before-upgrade")
    assert (taken["level"], taken["state"]) == ("ram", "complete"), taken
    show("snaporch", "list")
    count = guest.snapshot_count("before-upgrade")
    guest.wait_count(beyond=count + 20)
    mark = guest.mark()
    show("snaporch", "restore", "demo@before-upgrade", "--yes")
    assert_restored(guest, mark, count)
    show("snaporch", "undo", "demo", "--yes")
    show("virsh", "start", "demo")
    guest.wait_count(beyond=count + 19)
    assert_on_bases(guest)
    show("snaporch", "status")


def copies():
    """Clone, verify and replicate the snapshot of the README's guest."""
    guest = existing("demo")
    show("snaporch", "snapshot", "demo", "--name", "copied")
    count = guest.snapshot_count("copied")
    mark = guest.mark()
    show("snaporch", "verify", "demo@copied")
    show("snaporch", "clone", "demo@copied", "twin", "--running")
    twin = existing("twin")
    twin.assert_continues(0, count)
    show("snaporch", "clone", "--delete", "twin")
    BUNDLES_THERE.mkdir(mode=0o700, exist_ok=True)
    with configured(REPLICA):
        show("snaporch", "replicate", "demo", "--to", "second")
    show("zfs", "list", "-r", "-t", "all", "backup")
    assert record("demo", "copied")["replicated"] == ["second"]
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_on_bases(guest)


BUNDLES_THERE = Path("/backup/snaporch")
REPLICA = '[replica.second]\ndataset = "backup/kvm"\nbundles = "/backup/snaporch"\n'


def sanoid():
    """docs/how-to/sanoid.md: the rendered sections, and sanoid's own timer."""
    guest = existing("demo")
    mark = guest.mark()
    sections = subprocess.run(
        ["snaporch", "render", "sanoid"], capture_output=True, text=True, check=True
    ).stdout
    print(sections)
    conf = Path("/etc/sanoid/sanoid.conf")
    conf.parent.mkdir(exist_ok=True)
    conf.write_text(sections)
    attempt("snaporch", "check")
    now = datetime.now()  # noqa: DTZ005 - systemd's calendar is local, too
    quarter = now.replace(minute=now.minute // 15 * 15, second=0) + timedelta(seconds=895)
    if before := new_names("demo", []):  # of this hour
        quarter += timedelta(hours=1)
    show("systemctl", "enable", "--now", "sanoid.timer")
    show("date", "-s", quarter.strftime("%Y-%m-%d %H:%M:%S"))
    wait(lambda: new_names("demo", before), "sanoid's snapshot")
    wait(lambda: state("sanoid.service") in ENDED, "the end of sanoid")
    wait(lambda: all(each["state"] == "complete" for each in records("demo")), "its bundle")
    show("systemctl", "disable", "--now", "sanoid.timer")
    attempt("journalctl", "-u", "sanoid", "-u", "sanoid-prune", "-t", "snaporch", "--no-pager")
    show("snaporch", "list", "demo")
    assert state("sanoid.service", "Result") == "success"
    names = new_names("demo", before)
    name = names[0]
    assert record("demo", name)["level"] == "ram"
    guest.wait_count()
    guest.assert_undisturbed(mark)
    count, mark = count_of_instant(guest, names), guest.mark()
    show("snaporch", "restore", f"demo@{name}", "--yes")
    assert_restored(guest, mark, count)
    assert_on_bases(guest)
    conf.unlink()


def new_names(domain, before):
    names = [each["snapshot"] for each in records(domain)]
    return [name for name in names if name.startswith("autosnap") and name not in before]


def count_of_instant(guest, names):
    """The count on all disks, where sanoid has given each dataset a name of its own second."""
    from guests.sector import agreed_count
    from support import zfs_snapshots

    there = zfs_snapshots()
    return agreed_count([
        image.count(next(name for name in names if f"{image.dataset}@{name}" in there))
        for image in guest.images
    ])  # fmt: skip


def timer():
    """docs/how-to/schedule.md: a policy, and snaporch's own timer."""
    guest = existing("demo")
    mark = guest.mark()
    with configured(POLICY):
        show("snaporch", "plan")
        show("systemctl", "enable", "--now", "snaporch-run-due.timer")
        wait(lambda: [each for each in records("demo") if each["policy"] == "often"], "a snapshot")
        show("systemctl", "disable", "--now", "snaporch-run-due.timer")
        wait(lambda: state("snaporch-run-due.service") in ENDED, "the end of run-due")
        show("snaporch", "status")
    attempt("journalctl", "-u", "snaporch-run-due", "--no-pager")
    assert state("snaporch-run-due.service", "Result") == "success"
    (first, *_) = [each for each in records("demo") if each["policy"] == "often"]
    assert (first["level"], first["state"]) == ("ram", "complete"), first
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_on_bases(guest)


POLICY = '[policy.often]\nevery = "5m"\ndomains = ["demo"]\nkeep = { last = 2 }\n'
ENDED = ("inactive", "failed")


def libvirtd_restart():
    """libvirtd is restarted while RAM is saved, and while overlays are committed."""
    guest = existing("demo")
    for word in ("saving RAM", "committing"):
        mark = guest.mark()
        status = None
        for process, line in lines_of("snaporch", "snapshot", "demo"):
            if word in line:
                show("systemctl", "restart", "libvirtd")
            status = process
        print(f"[{status.returncode}]", flush=True)
        wait(lambda: not list(JOURNAL.glob("*.jsonl")), "the guardian")
        guest.wait_count()
        guest.assert_undisturbed(mark)
        assert_on_bases(guest)
    show("snaporch", "snapshot", "demo")
    assert_on_bases(guest)


def firmware():
    """A guest with UEFI and a TPM: snapshot, restore, clone."""

    def add_tpm(domain):
        tpm = ET.SubElement(domain.find("devices"), "tpm", model="tpm-tis")
        ET.SubElement(tpm, "backend", type="emulator", version="2.0")

    guest = create("firm", ("zvol:tank/{}",), firmware="uefi", mutate=add_tpm)
    show("snaporch", "snapshot", "firm", "--name", "s1")
    parts = {path.name for path in Path(record("firm", "s1")["bundle"]).iterdir()}
    print(parts)
    assert "nvram.fd" in parts
    assert any("tpm" in name for name in parts)
    count, mark = guest.snapshot_count("s1"), guest.mark()
    show("snaporch", "restore", "firm@s1", "--yes")
    assert_restored(guest, mark, count)
    show("snaporch", "verify", "firm@s1")
    assert_on_bases(guest)
    guest.remove()


def power_loss():
    """The power is lost while a guest is on overlays."""
    # So each count is on stable storage before it is printed.
    guest = create("flushed", cache="writethrough")
    show("virsh", "autostart", "flushed")
    for _, line in lines_of("snaporch", "snapshot", "flushed"):
        if "committing" in line:
            last_count(guest)
            print(CUT, flush=True)
            time.sleep(3600)
    raise AssertionError("the window was missed")


def power_loss_after():
    wait(lambda: state("snaporch-recover.service") in ENDED, "recovery at boot")
    attempt("journalctl", "-b", "-u", "snaporch-recover", "-u", "libvirtd", "--no-pager")
    assert state("snaporch-recover.service", "Result") == "success"
    guest = existing("flushed")
    wait(lambda: guest.state() == "running", "the guest to be started")
    guest.wait_count()
    assert_on_bases(guest)
    found = guest.cold_boots_since(0)[-1]
    printed = int(os.environ["PRINTED"], 16)
    print(f"printed before: {printed}, found on the disks: {found}")
    assert all(count >= printed for count in found.values())
    assert max(found.values()) - min(found.values()) <= 1
    show("snaporch", "list", "flushed")
    attempt("snaporch", "status")  # 10: the snapshot is only crash-consistent
    show("snaporch", "snapshot", "flushed")
    assert_on_bases(guest)


def power_loss_restore():
    """The power is lost while a restore rolls back."""
    guest = existing("flushed")
    show("snaporch", "snapshot", "flushed", "--name", "wanted")
    count = guest.snapshot_count("wanted")
    guest.wait_count(beyond=count + 20)
    MARK.write_text(json.dumps([guest.mark(), count]))
    os.sync()
    for _, line in lines_of("snaporch", "restore", "flushed@wanted", "--yes"):
        if "rolling back" in line:
            print(CUT, flush=True)
            time.sleep(3600)
    raise AssertionError("the window was missed")


def power_loss_restore_after():
    wait(lambda: state("snaporch-recover.service") in ENDED, "recovery at boot")
    attempt("journalctl", "-b", "-u", "snaporch-recover", "--no-pager")
    attempt("snaporch", "list", "flushed")
    assert state("snaporch-recover.service", "Result") == "success"
    guest = existing("flushed")
    mark, count = json.loads(MARK.read_text())
    wait(lambda: guest.state() == "running", "the guest to be resumed")
    assert_restored(guest, mark, count)
    assert_on_bases(guest)


MARK = TOP / "mark"


def shutdown():
    """The host shuts down while a snapshot runs; libvirt-guests saves the guests."""
    guest = existing("flushed")
    show("virsh", "autostart", "--disable", "flushed")
    advice = "BYPASS_CACHE=1\n" if "saved-guests" in attempt("snaporch", "check")[1] else ""
    Path("/etc/default/libvirt-guests").write_text(f"ON_BOOT=start\nON_SHUTDOWN=suspend\n{advice}")
    assert state("libvirt-guests") == "active"
    MARK.write_text(str(guest.mark()))
    for _, line in lines_of("snaporch", "snapshot", "flushed"):
        if "committing" in line:
            show("systemctl", "poweroff", "--no-block")
            os.sync()
            print(OFF, flush=True)


def shutdown_after():
    attempt("journalctl", "-b", "-1", "--no-pager", "-n", "200")
    wait(lambda: state("libvirt-guests") == "active", "libvirt-guests")
    guest = existing("flushed")
    wait(lambda: guest.state() == "running", "the guest to be resumed")
    guest.wait_count()
    # It went on in RAM: no boot, and no complaint of the guest about the counts on its disks.
    # Counts may be left out of the log: virtlogd, which writes it, is stopped before the guest.
    said = guest.log.report(int(MARK.read_text()))
    assert not said.cold, f"booted: {said.cold}"
    assert not said.bad, f"the guest complains: {said.bad[:4]}"
    assert said.counts == sorted(set(said.counts)), said.counts
    assert_on_bases(guest)
    show("snaporch", "list", "flushed")
    attempt("snaporch", "status")  # 10: the snapshot is only crash-consistent


def upgrade():
    """A newer version is installed while the timer or the daemon runs, and others in the slice."""
    (deb,) = TOP.glob("snaporch*.deb")
    work = TOP / "upgrade"
    show("dpkg-deb", "-R", str(deb), str(work))
    control = work / "DEBIAN/control"
    control.write_text(re.sub("(?m)^(Version: .*)$", r"\1+next", control.read_text()))
    show("dpkg-deb", "-b", str(work), f"{work}.deb")
    other = ["systemd-run", "--unit=other", "--slice=snaporch.slice", "sleep", "infinity"]
    show(*other)
    for unit in ("snaporch-run-due.timer", "snaporch.service"):
        show("systemctl", "start", unit)
        for package in (f"{work}.deb", str(deb)):
            show("dpkg", "--force-confold", "--force-downgrade", "-i", package)
            assert state(unit) == "active", unit
        show("systemctl", "stop", unit)
    assert state("other") == "active"
    show("systemctl", "stop", "other")


def running_state():
    """The undo of a restore resumes the guest from uncompressed RAM."""
    guest = existing("demo")
    attempt("virsh", "start", "demo")  # off if the machine was booted meanwhile
    guest.wait_count()
    show("snaporch", "snapshot", "demo", "--name", "running")
    count = guest.snapshot_count("running")
    guest.wait_count(beyond=count + 20)
    mark = guest.mark()
    show("snaporch", "restore", "demo@running", "--keep-running-state", "--yes")
    assert_restored(guest, mark, count)
    mark = guest.mark()
    show("snaporch", "undo", "demo", "--yes")
    guest.wait_count(beyond=count + 20)
    said = guest.log.report(mark)
    assert not said.cold, f"booted: {said.cold}"
    assert not said.bad, f"the guest complains: {said.bad[:4]}"
    assert_on_bases(guest)


def removal():
    """docs/how-to/install.md, "Remove": what stays is named, and guests go on."""
    guest = existing("flushed")
    (deb,) = TOP.glob("snaporch*.deb")
    package = show("dpkg-deb", "-f", str(deb), "Package").strip()
    text = show("apt-get", "remove", "-y", package)
    assert "stay" in text
    assert not Path("/usr/bin/snaporch").exists()
    if guest.state() != "running":  # libvirt-guests could not resume it
        attempt("virsh", "managedsave-remove", "flushed")
        guest.start()
    guest.wait_count()
    show("apt-get", "purge", "-y", package)
    assert not CONFIG.parent.exists()
    assert BUNDLES.is_dir()
    show("systemctl", "restart", "libvirtd")
    guest.destroy()
    guest.start()
    attempt("find", "/etc", "/usr", "/lib", "-name", "*snaporch*")
    guest.remove()


DENIED = re.compile(r'apparmor="DENIED".*')
HARMLESS = (
    re.compile(r'profile="virt-aa-helper".*capname="sys_(resource|admin)"'),
    re.compile(
        r'profile="libvirt-.*name="/sys/devices/virtual/block/zd\d+/queue/'
        r'(zoned|discard_granularity)"'
    ),
    re.compile(r'profile="libvirt-.*name="/etc/ssl/openssl\.cnf".*comm="swtpm"'),
)
"""The table in docs/reference/hosts.md."""


def log():
    """What the kernel and systemd have logged in all boots."""
    text = subprocess.run(
        ["journalctl", "--no-pager", "-o", "cat"], capture_output=True, text=True, check=True
    ).stdout
    denied = [line for line in DENIED.findall(text) if not any(p.search(line) for p in HARMLESS)]
    print(*denied, sep="\n")
    attempt("systemctl", "--failed", "--no-pager")
    attempt("journalctl", "-p", "err", "--no-pager", "-n", "100")
    assert not denied
    assert "Traceback" not in text


if __name__ == "__main__":
    sys.path[:0] = [str(TOP / "tests/e2e"), str(TOP / "tests/lab")]
    os.environ["SNAPORCH_GUESTS"] = str(TOP / "guests")
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    globals()[sys.argv[1].replace("-", "_")]()
