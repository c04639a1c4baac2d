"""The guests that faults are tried on, and what must be true of them afterwards."""

import json
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from guests.disks import Disk, zfs
from guests.guest import Guest, Kind
from guests.sector import DiskContentError
from other_program import assert_none_is_called_otherwise, judge
from support import BUNDLES, JOURNAL, OVERLAYS, assert_clean, must, wait_for

from faults.machine import locks_held
from faults.matrix import Case
from faults.process import snaporch_here
from snaporch.model import Strategy
from snaporch.zfs import PREFIX

CONFIG = Path("/etc/snaporch-faults")
_OTHER = "other"
_RUN_UP = 3  # counts after a start until nothing of the time before it is left on the disks


@dataclass(frozen=True)
class Before:
    """What a guest had reported and written when the fault struck."""

    counts: list[int]
    """On each disk at least."""
    mark: int
    """Of its serial log, from where on it must be undisturbed if it still runs."""


class Scene:
    """The guests, made when they are first needed and again when a case left one broken."""

    def __init__(self, cache: str | None = None) -> None:
        self._cache = cache
        self._guests: dict[Kind, Guest] = {}

    def guest(self, strategy: Strategy) -> Guest:
        """A guest in the state that the strategy is for."""
        kind = _kind(strategy)
        self._make_room(kind)
        guest = self._guests.get(kind) or self._make(kind)
        if strategy is Strategy.OFF:
            guest.destroy()
            return guest
        if guest.state() == "shut off":
            guest.start()
        guest.wait_count(beyond=_RUN_UP)
        if kind == "linux":
            guest.wait_agent()
        return guest

    def found(self, strategy: Strategy) -> Guest:
        """The guest for a strategy as it is, which must exist."""
        kind = _kind(strategy)
        guest = self._guests[kind] = Guest.existing(_name(kind))
        return guest

    def _make_room(self, kind: Kind) -> None:
        """Shut the other guests off: the lab has one processor."""
        for other, guest in self._guests.items():
            if other != kind:
                guest.destroy()

    def _make(self, kind: Kind) -> Guest:
        name = _name(kind)
        if name in must("virsh", "list", "--all", "--name").split():
            guest = Guest.existing(name)
        else:
            disks = [Disk("file", f"tank/{name}"), Disk("zvol", f"flash/{name}")]
            guest = Guest.create(name, disks=disks, kind=kind, cache=self._cache)
        self._guests[kind] = guest
        return guest

    def wreck(self) -> None:
        """Remove the guests and all that runs left: at the end, and when a case went wrong."""
        for guest in self._guests.values():
            guest.remove()
        self._guests.clear()
        for directory in (OVERLAYS, JOURNAL, *BUNDLES.glob("*")):
            shutil.rmtree(directory, ignore_errors=True)

    def sweep(self) -> None:
        """Remove the snapshots and bundles of the cases so far."""
        for guest in self._guests.values():
            for dataset in guest.datasets():
                with suppress(RuntimeError):  # there is none
                    zfs("destroy", f"{dataset}@%")
        for directory in BUNDLES.glob("*"):  # its marker is a file, and stays
            shutil.rmtree(directory, ignore_errors=True)


def _kind(strategy: Strategy) -> Kind:
    return "linux" if strategy is Strategy.QUIESCED else "probe"


def _name(kind: Kind) -> str:
    return f"faults-{kind}"


def arguments(case: Case, guest: Guest) -> list[str]:
    """The snapshot command that leads to the case's strategy."""
    CONFIG.mkdir(exist_ok=True)
    way = case.strategy.value if case.strategy.level == "ram" else "auto"
    path = CONFIG / f"{way}.toml"
    if not path.exists():
        path.write_text(f'[defaults]\nram_strategy = "{way}"\n')
    command = ["--config", str(path), "snapshot", guest.name]
    if case.strategy is not Strategy.OFF:
        command += ["--level", case.strategy.level.value]
    return command


def look(guest: Guest, since: int) -> Before:
    """What a guest has reported as written by now."""
    if guest.state() == "shut off":
        return Before(guest.disk_counts(), guest.mark())
    reported = guest.counts_since(since)[-1]
    return Before([reported] * len(guest.images), since)


def durable(guest: Guest, before: Before) -> Before:
    """What of it must survive a loss of power: all, but for the last count of a running guest.

    QEMU leaves the first write after a flush of its own (every suspend makes one) unflushed until
    the next one, ``cache=writethrough`` or not: an emulated FUA flushes before the write is counted
    (D. V. Lunev on qemu-devel, 2025-12-29, "add very final sync on QCOW2 image closing").
    """
    if guest.state() != "running":
        return before
    return replace(before, counts=[count - 1 for count in before.counts])


def assert_no_loss(guest: Guest, before: Before) -> None:
    """Every count reported before the fault is on the disks, and the guest finds them there."""
    found = wait_for(lambda: _disk_counts(guest), "whole sectors on the disks")
    lost = [(had, has) for had, has in zip(before.counts, found, strict=True) if has < had]
    assert not lost, f"LOSS: reported {before.counts}, on the disks {found}"
    if guest.state() == "running":
        guest.wait_count(beyond=before.counts[0])
        guest.assert_undisturbed(before.mark)


def assert_boots_with(guest: Guest, before: Before) -> None:
    """A guest that was cut off finds at its next start all it had reported."""
    mark = guest.mark()
    guest.start()
    guest.wait_count(beyond=_RUN_UP)
    (cold,) = guest.cold_boots_since(mark)
    found = [cold[index] for index in sorted(cold)]
    lost = [(had, has) for had, has in zip(before.counts, found, strict=True) if has < had]
    assert not lost, f"LOSS: reported {before.counts}, found at the start {found}"
    assert not guest.bad_since(mark)


def _disk_counts(guest: Guest) -> list[int] | None:
    """The counts, unless a disk was read in the middle of a write."""
    try:
        return guest.disk_counts()
    except DiskContentError:
        if guest.state() != "running":
            raise
        return None


def assert_well(
    guest: Guest, state: str, *, may_quarantine: bool = False, busy: bool = False
) -> None:
    """Nothing is left of a run, and the guest is in the state it should be in.

    Args:
        busy: its probe writes more than its counts.
    """
    if may_quarantine:
        shutil.rmtree(OVERLAYS / "quarantine", ignore_errors=True)
    found = guest.state()
    assert found == state, f"the guest is {found}, not {state}"
    assert_clean(guest, state)
    assert locks_held() == []
    _assert_snapshots_whole(guest)
    assert_none_is_called_otherwise(judge(guest, busy=busy))
    again = snaporch_here("recover")
    assert (again.status, again.out) == (0, ""), f"a second recover: {again}"
    assert "nothing to recover" in again.err
    if state == "running" and guest.machine.agent:
        guest.wait_agent()
        status = must(
            "virsh", "qemu-agent-command", guest.name, '{"execute":"guest-fsfreeze-status"}'
        )
        assert json.loads(status)["return"] == "thawed"


def _assert_snapshots_whole(guest: Guest) -> None:
    """Every snapshot of ours is of all datasets or of none, and no hold is left."""
    columns = f"name,userrefs,{PREFIX}run,{PREFIX}level"
    listing = zfs("list", "-Hp", "-t", "snapshot", "-o", columns, *guest.datasets())
    runs: dict[str, list[str]] = {}
    for line in listing.splitlines():
        name, references, run, level = line.split("\t")
        assert references == "0", f"a hold is left on {name}"
        if run != "-":
            runs.setdefault(run, []).append(level)
    for run, levels in runs.items():
        assert len(levels) == len(guest.datasets()), f"{run} is not of all datasets"
        assert len(set(levels)) == 1, f"{run} has several levels: {levels}"
        sealed = [path for path in BUNDLES.glob(f"*/{run}") if path.is_dir()]
        assert sealed or levels[0] == "crash", f"{run} is {levels[0]} without a bundle"


def snapshot_as_other_program(guest: Guest) -> None:
    """Snapshot each dataset, as another program might."""
    for dataset in guest.datasets():
        zfs("snapshot", f"{dataset}@{_OTHER}")


def assert_other_snapshot_is(guest: Guest, *, torn: bool) -> None:
    """The other program's snapshot is recorded as torn if, and only if, a commit was under way."""
    names = [f"{dataset}@{_OTHER}" for dataset in guest.datasets()]
    columns = f"{PREFIX}level,{PREFIX}torn"
    found = set(zfs("list", "-Hp", "-t", "snapshot", "-o", columns, *names).splitlines())
    assert found == {"torn\tyes" if torn else "-\t-"}, f"another program's snapshot: {found}"


def assert_recorded_as_reported(guest: Guest, said: str) -> None:
    """A run that succeeded has a snapshot of each dataset, at the level that it reports."""
    ((level, name),) = re.findall(r"done: (\w+) snapshot (\S+)$", said, re.MULTILINE)
    names = [f"{dataset}@{name}" for dataset in guest.datasets()]
    found = zfs("list", "-Hp", "-t", "snapshot", "-o", f"{PREFIX}level", *names).splitlines()
    assert found == [level] * len(names), f"reported as {level}: {found}"


def assert_worth_its_level(guest: Guest, *, resumed: bool) -> None:
    """What ZFS records as ``ram`` can be restored: its parts have their SHA-256 and GUIDs.

    Args:
        resumed: have a clone of it resumed as well, without a network, until its CPUs have run.
    """
    listing = zfs("list", "-Hp", "-t", "snapshot", "-o", f"name,{PREFIX}level", *guest.datasets())
    lines = (line.split("\t") for line in listing.splitlines())
    names = sorted({name.partition("@")[2] for name, level in lines if level == "ram"})
    options = [] if resumed else ["--checksums"]
    for name in names:
        outcome = snaporch_here("verify", f"{guest.name}@{name}", *options, "--json")
        assert outcome.status == 0, f"recorded as ram: {outcome}"
        assert outcome.json["reached"] == ("resumed" if resumed else "checked"), outcome
