"""Run snaporch as a user would, and ask the guest and libvirt for the results."""

import itertools
import os
import pwd
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from faults.process import snaporch_here
from guests.disks import Disk
from guests.guest import LOG_DIRECTORY, Guest
from outcome import Outcome

T = TypeVar("T")
OVERLAYS = Path("/var/lib/snaporch/overlays")
BUNDLES = Path("/var/lib/snaporch/bundles")
CONFIG = Path("/etc/snaporch/snaporch.toml")
JOURNAL = Path("/var/lib/snaporch/journal")
PATIENCE_SECONDS = 600
STALLED = Path("/run/stalled-compressor")
RUNTIME = Path("/run/snaporch")
_COUNT = re.compile(r"N ([0-9a-f]{8})")


def snaporch(*arguments: str, env: dict[str, str] | None = None) -> Outcome:
    """Run snaporch; any status is an answer.

    In a fork of this process, which has its modules: starting one takes most of a second in the
    lab. Where other threads run, a fork could wait for ever for what they hold.
    """
    if len(os.listdir("/proc/self/task")) > 1:
        return run("snaporch", *arguments, env=env)
    return snaporch_here(*arguments, env=env)


def run(*command: str, env: dict[str, str] | None = None) -> Outcome:
    """Run a command to its end."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
        timeout=PATIENCE_SECONDS,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


def must(*command: str) -> str:
    """The output of a command that must succeed."""
    outcome = run(*command)
    assert outcome.status == 0, f"{command}: {outcome.status}\n{outcome.out}{outcome.err}"
    return outcome.out


def accepting(*names: str) -> tuple[str, ...]:
    """The options that accept the logs of these guests, which are in none of their datasets."""
    return tuple(word for name in names for word in ("--accept", f"{LOG_DIRECTORY}/{name}.serial"))


def snapshot(guest: Guest, *options: str) -> dict[str, Any]:
    """Snapshot a guest, which must succeed; the JSON object."""
    outcome = snaporch("snapshot", guest.name, "--json", *options)
    assert outcome.status == 0, outcome.err
    return outcome.json


def restore(guest: Guest, name: str, *options: str) -> dict[str, Any]:
    """Restore a guest, which must succeed; the JSON object."""
    outcome = snaporch("restore", f"{guest.name}@{name}", "--yes", "--json", *options)
    assert outcome.status == 0, outcome.err
    return outcome.json


def assert_restored(guest: Guest, mark: int, expected: int) -> None:
    """The guest went on from ``expected`` (or the count in flight): no boot, no complaint.

    ``mark`` was taken before the restore, while the guest still counted; what it printed until it
    was stopped comes first, maybe with a torn line, so the restored run begins where counts drop.
    """
    # With the last count before it, should it print none before it ends; an older one may have
    # dropped itself, if the guest was restored a moment ago.
    since = max((each.start() for each in _COUNT.finditer(guest.serial()[:mark])), default=0)
    first = wait_for(lambda: first_after_drop(guest.serial()[since:]), "the restored guest counts")
    seen = f"went on at {first:#x}, not at {expected:#x}:\n{guest.serial()[since:]}"
    assert first in (expected, expected + 1), seen
    guest.wait_count()
    guest.wait_count()
    assert not guest.cold_boots_since(mark)
    assert not guest.bad_since(mark)


def first_after_drop(text: str) -> int | None:
    """The first count of a restored run in a serial log; torn lines do not matter."""
    counts = [int(digits, 16) for digits in _COUNT.findall(text)]
    return next((after for before, after in itertools.pairwise(counts) if after <= before), None)


def assert_clean(guest: Guest, state: str = "running") -> None:
    """The guest is on its base images in both XMLs, and nothing of a run is left."""
    assert guest.state() == state
    for inactive in (False, True):
        for source in guest.sources(inactive=inactive).values():
            assert not source.startswith(str(OVERLAYS)), f"{source} (inactive: {inactive})"
    assert "<mirror" not in guest.xml()
    assert _entries(OVERLAYS) == []
    assert _entries(JOURNAL) == []
    assert [path for path in _entries(RUNTIME) if path.suffix != ".lock"] == []
    assert list(BUNDLES.glob("*/.*")) == []


def assert_confined(guest: Guest) -> None:
    """Its emulator is as a stock Debian host has it."""
    process = Path("/proc", Path(f"/run/libvirt/qemu/{guest.name}.pid").read_text().strip())
    uuid = must("virsh", "domuuid", guest.name).strip()
    assert (process / "attr/current").read_text().strip("\n\0") == f"libvirt-{uuid} (enforce)"
    assert process.stat().st_uid == pwd.getpwnam("libvirt-qemu").pw_uid
    assert os.readlink(process / "ns/mnt") != os.readlink("/proc/self/ns/mnt")
    assert "/machine" in (process / "cgroup").read_text()
    assert "Seccomp:\t2" in (process / "status").read_text()
    libvirtd = Path("/proc", must("pidof", "libvirtd").strip(), "attr/current").read_text()
    assert libvirtd.startswith("libvirtd (enforce)")
    assert "shared" in must("findmnt", "-n", "-o", "PROPAGATION", "/")


def _entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []


def assert_went_on(guest: Guest, mark: int) -> None:
    """From RAM; in each cycle it reads all its disks, and complains of what it did not write."""
    guest.first_count_since(mark)
    guest.wait_count()
    guest.wait_count()
    assert not guest.cold_boots_since(mark)
    assert not guest.bad_since(mark)


def one_line_error(outcome: Outcome, status: int, *words: str) -> None:
    """The documented exit status, one line on standard error, nothing on standard output."""
    assert outcome.status == status, f"{outcome.status}: {outcome.err}"
    lines = [line for line in outcome.err.splitlines() if line.startswith("snaporch:")]
    assert len(lines) == 1, outcome.err
    assert "Traceback" not in outcome.err
    assert outcome.out == ""
    for word in words:
        assert word in lines[0], f"{word!r} is not in {lines[0]!r}"


def wait_for(probe: Callable[[], T | None], what: str, timeout: float = 120) -> T:
    """Poll until ``probe`` returns something; for states of which no program sends an event."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        found = probe()
        if found:
            return found
        time.sleep(0.05)
    if found := probe():  # the whole lab may have been paused
        return found
    raise TimeoutError(what)


def zfs_snapshots(name: str = "") -> list[str]:
    """Full names of the ZFS snapshots that end in ``name``."""
    listing = must("zfs", "list", "-H", "-t", "snapshot", "-o", "name").splitlines()
    return [full for full in listing if full.endswith(name)]


@contextmanager
def config(tmp_path: Path, text: str) -> Iterator[dict[str, str]]:
    """An environment that names a configuration file with ``text``."""
    path = tmp_path / "snaporch.toml"
    path.write_text(text)
    yield {"SNAPORCH_CONFIG": str(path)}


@contextmanager
def system_config(text: str) -> Iterator[None]:
    """The configuration in its usual place."""
    CONFIG.parent.mkdir(exist_ok=True)
    CONFIG.write_text(text)
    try:
        yield
    finally:
        CONFIG.unlink()


@contextmanager
def stalled_compressor(tmp_path: Path, *, spared: bool = False) -> Iterator[dict[str, str]]:
    """An environment in which RAM cannot flow: a ``pigz`` that waits for :func:`open_gate`.

    The RAM phase then lasts until the test ends it, whatever the machine's speed. With ``spared``
    the first call is of the real one: a daemon's, which tries out whether it works.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    held = os.open(gate, os.O_RDWR)  # an opening stays in the pipe until the compressor reads it
    programs = tmp_path / "bin"
    programs.mkdir()
    pigz = programs / "pigz"
    STALLED.unlink(missing_ok=True)
    spare = tmp_path / "spare"
    if spared:
        spare.touch()
    pigz.write_text(
        f'#!/bin/sh\nif [ -e {spare} ]; then rm {spare}; exec {shutil.which("pigz")} "$@"; fi\n'
        f": > {STALLED}\nread -r _ < {gate}\n"
    )
    pigz.chmod(0o755)
    text = '[defaults]\ncompression = "gzip"\n'
    with config(tmp_path, text) as environment:
        try:
            yield environment | {"PATH": f"{programs}:{os.environ['PATH']}"}
        finally:
            open_gate(tmp_path)
            passed = tmp_path / "passed"  # no test writes for a compressor that starts later
            passed.write_text("\n")
            passed.replace(gate)
            os.close(held)


def open_gate(tmp_path: Path) -> None:
    """Make the stalled compressor end, now or when it reaches the gate."""
    (tmp_path / "gate").write_text("\n")


@contextmanager
def started(*arguments: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A snaporch that runs beside the test; killed at the end if it still runs."""
    process = subprocess.Popen(
        ["snaporch", *arguments],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):  # not read to their ends: a compressor
            stream.close()  # that outlived a killed snaporch may hold the other side


def wait_for_ram_phase() -> None:
    """Until RAM has reached the stalled compressor, which is started by its first bytes.

    libvirt is not asked: QEMU's monitor may not answer while a full pipe holds it up.
    """
    wait_for(STALLED.exists, "the RAM phase")


def rewriting_guest(name: str, mib: int) -> Guest:
    """A guest that rewrites so much of its RAM as fast as it can; it has filled that once."""
    made = Guest.create(
        name,
        disks=[Disk("file", f"tank/{name}")],
        kind="linux",
        command_line=f"dirty_mib={mib} dirty_rate=40000 noise=90 interval_ms=20",
    )
    made.wait_filled()
    return made
