"""What tests leave behind in their lab: a plugin of pytest that fails a module for it.

A run that ended well has taken back everything it made, and did nothing that a host's confinement
denies. So when the tests of a module are over and their guests are gone, there is no process,
mount, loop device, volume, clone, held snapshot, AppArmor profile or file of a run that was not
there before, and AppArmor has denied nothing but what is listed here.
"""

import re
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path

from guests.guest import Guest

PATIENCE_SECONDS = 20
"""How long to wait for what ends by itself: a guardian checks its run once a second."""

EXPECTED_DENIALS = {
    r'name="/sys/devices/virtual/block/zd\d+/queue/zoned"': (
        "QEMU asks whether a volume is a zoned device, and takes no answer for a no"
    ),
    r'profile="virt-aa-helper".* capname="sys_(resource|admin)"': (
        "root's pipes are over the soft limit while RAM goes through a wide one (pipe(7)): those "
        "of a helper without these rights are short, and it goes on all the same"
    ),
    r'operation="unlink" .*profile="libvirt-.* name=[0-9A-F]+6D6F6E69746F722E736F636B ': (
        "of a guest with an odd name QEMU may not unlink monitor.sock: libvirt's line does not "
        "match it, and libvirt removes the directory itself"
    ),
    r'profile="control"': "a test sees whether denials are seen",
}
"""Expressions for AppArmor's lines in the kernel's log, and why each does no harm."""

_COME_AND_GO = re.compile(
    r"\((udev-worker|sd-[a-z]+)\)|libvirtd|systemd(-(journal|udevd|executor|hostnam|userd.*))?|dbus-.*"
)
"""Processes that belong to the host, and that tests or systemd start again."""
_RUNTIME = Path("/run/snaporch")
_STORE = Path("/var/lib/snaporch")
_PROFILES = Path("/sys/kernel/security/apparmor/profiles")


def snapshot_listing() -> set[str]:
    """Everything that a run makes and removes again, one line each."""
    parts = (
        _processes,
        _mounts,
        _loops,
        _datasets,
        _holds,
        _profiles,
        _files,
        _domains,
        _units,
    )
    return {line for part in parts for line in part()}


def left(before: set[str]) -> list[str]:
    """What exists and did not before, after a time for everything that ends by itself."""
    end = time.monotonic() + PATIENCE_SECONDS
    while (found := sorted(snapshot_listing() - before)) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def denied(expected: Iterable[str] = EXPECTED_DENIALS) -> list[str]:
    """What AppArmor denied since the boot, without the expected denials."""
    lines = _said("dmesg", "--notime").splitlines()
    assert "Linux version" in lines[0], "the kernel's log has lost its beginning"
    return [
        line
        for line in lines
        if 'apparmor="DENIED"' in line
        and not any(re.search(expression, line) for expression in expected)
    ]


def remains() -> list[str]:
    """What recovery must not leave on disks after a loss of power.

    Holds by the safety copy of a restore are allowed.
    """
    return [*_holds(but="snaporch-undo"), *_passing_clones(), *_loops(), *denied()]


def _processes() -> list[str]:
    """Processes, without those of the kernel and zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            comm = (path / "comm").read_text().strip()
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            words = words.strip()
        except OSError:  # ended meanwhile
            continue
        if state not in "ZX" and words and not _COME_AND_GO.fullmatch(comm):
            found.append(f"process {path.name} {comm}: {words[:200]}")
    return found


def _mounts() -> list[str]:
    """But for file systems of ZFS: datasets are the tests' own, and ZFS takes its mounts of
    snapshots back itself, after five minutes or to destroy them."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    kinds = ("zfs", "hostfs")
    return [f"mount {fields[1]} of {fields[0]}" for fields in lines if fields[2] not in kinds]


def _loops() -> list[str]:
    return [
        f"loop device {path.parents[1].name}"
        for path in Path("/sys/block").glob("loop*/loop/backing_file")
    ]


def _datasets() -> list[str]:
    lines = _said("zfs", "list", "-H", "-o", "name,type,origin").splitlines()
    return [
        f"{kind} {name}, cloned from {origin}"
        for name, kind, origin in (line.split("\t") for line in lines)
        if kind == "volume" or origin != "-"
    ]


def _passing_clones() -> list[str]:
    """Clones that exist only during a verification or an extraction."""
    marks = "snaporch:verify,snaporch:extract"
    lines = _said("zfs", "list", "-H", "-o", f"name,{marks}").splitlines()
    return [f"clone {line}" for line in lines if not line.endswith("\t-\t-")]


def _holds(but: str = "") -> list[str]:
    lines = _said("zfs", "list", "-Hp", "-t", "snapshot", "-o", "userrefs,name").splitlines()
    held = [line.split("\t")[1] for line in lines if not line.startswith(("0\t", "-\t"))]
    holds = [
        line.split("\t") for name in held for line in _said("zfs", "holds", "-H", name).splitlines()
    ]
    return [f"held snapshot {name} {tag}" for name, tag, _ in holds if tag != but]


def _profiles() -> list[str]:
    """The loaded profiles: libvirt leaves the files of domains that do not exist any more."""
    loaded = _PROFILES.read_text().splitlines() if _PROFILES.exists() else []
    return [f"AppArmor profile {line}" for line in loaded]


def _files() -> list[str]:
    """Files of runs; lock files stay: if one were unlinked, two processes could hold one lock."""
    found = [path for path in _RUNTIME.rglob("*") if path.suffix != ".lock"]
    found += [path for name in ("journal", "overlays") for path in (_STORE / name).rglob("*")]
    found += (_STORE / "bundles").glob("*/.*")
    return [f"file {path}" for path in found]


def _domains() -> list[str]:
    return [f"domain {name}" for name in _said("virsh", "list", "--all", "--name").splitlines()]


def _units() -> list[str]:
    """Units of runs and guardians; the tests install timers and services themselves."""
    if not Path("/run/systemd/system").is_dir():
        return []
    listing = _said("systemctl", "list-units", "--plain", "--no-legend", "snaporch-guardian-*")
    return [f"unit {line.split()[0]}" for line in listing.splitlines()]


def _said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Aftermath:
    """The hooks of pytest."""

    def __init__(self):
        self.before = snapshot_listing()
        self.found = []
        remove, gone = Guest.remove, self.found

        def look_and_remove(guest):
            gone.extend(f"left: {each}" for each in _passing_clones())
            remove(guest)

        Guest.remove = look_and_remove  # it takes clones of a guest's datasets along

    def pytest_sessionfinish(self, session):
        """When the last fixture is torn down."""
        self.found += [*(f"left: {each}" for each in left(self.before)), *denied()]
        if self.found:
            session.exitstatus = 1

    def pytest_terminal_summary(self, terminalreporter):
        """Print it where pytest prints failures."""
        if self.found:
            terminalreporter.section("what the tests left, and what AppArmor denied", red=True)
            for line in self.found:
                terminalreporter.write_line(line)


def pytest_configure(config):
    """Look at the lab before its first test."""
    config.pluginmanager.register(Aftermath())
