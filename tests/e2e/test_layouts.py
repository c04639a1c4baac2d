"""Restores do no harm, on any layout of a guest's images and after any change of the layout.

Verify, clone and extract change nothing that is not the clone's. A restore brings the exact state
of the snapshot, its undo the one before it, or they touch nothing; also if they are killed at a
step and recovered. The oracle is the guest, which checks its disks against its RAM in each cycle,
and the hash of every image.
"""

import os
import zlib
from pathlib import Path

import pytest
from faults.process import Run, snaporch_here
from guests.guest import Guest
from layouts import CHANGES, NAME, Layout, cases, changed, everything, sha256
from support import must, snapshot

REFUSED, FAILED = 5, 8
PLACES = ("safety", "stop", "rollback", "files", "resume", "define")
POINTS = [f"{moment}:{place}" for place in PLACES for moment in ("before", "after")]
REFUSES = ("re-pointed", "dataset-renamed", "domain-renamed", "golden-written", "read-only")
"""Changes that a restore refuses until they are fixed or an option allows them; in any layout."""
MISSED, LINKED = ("moved", "renamed"), ("absolute-link", "relative-link", "link-outside")
"""A rollback brings a missing file back; of a missing link it does not know the target."""
UNCLONED = ("partition", "data-file")
"""Layouts that are not cloned: a clone would share something with its original."""
EXTRACTED = Path("/root/extracted")
CLONES = Path("/var/lib/snaporch/clones")


@pytest.fixture
def layout(request):
    made = Layout()
    try:
        made.make(request.param)
        yield made
    finally:
        made.remove()


def snaporch(*words):
    """Run a command, which must print no traceback."""
    outcome = snaporch_here(*words)
    assert "Traceback" not in outcome.err, outcome.err
    return outcome


def take(layout):
    """Snapshot a paused guest, so that its images are the oracle; then resume it."""
    guest = layout.guest
    guest.start()
    must("virsh", "suspend", NAME)
    assert snapshot(guest, "--name", "s1")["level"] == "ram"
    oracle, image = layout.own(), sha256(layout.path)
    must("virsh", "resume", NAME)
    guest.wait_count()
    guest.wait_count()
    guest.destroy()
    assert layout.own() != oracle
    return oracle, image


def goes_on(guest, mark):
    """The guest was resumed from RAM, and its disks are as its RAM expects."""
    must("virsh", "resume", guest.name)
    for _ in range(3):
        guest.wait_count()
    assert not guest.cold_boots_since(mark)
    assert not guest.bad_since(mark)


def verify(how, change):
    outcome = snaporch("verify", f"{NAME}@s1", "--disks", "--json")
    expected = {"golden-written": FAILED, "dataset-renamed": REFUSED}.get(change, 0)
    assert outcome.status == expected, outcome
    if expected == 0:
        reached = "checked" if how in UNCLONED else "resumed"
        found = {word: outcome.json[word] for word in ("passed", "disks_read", "reached")}
        assert found == {"passed": True, "disks_read": True, "reached": reached}


def clone(how, change):
    outcome = snaporch("clone", f"{NAME}@s1", f"{NAME}-twin", "--running")
    refused = how in UNCLONED or change in ("golden-written", "dataset-renamed")
    assert outcome.status == (REFUSED if refused else 0), outcome
    if not refused:
        twin = Guest.existing(f"{NAME}-twin")
        goes_on(twin, 0)
        assert snaporch("clone", "--delete", twin.name).status == 0


def extract(how, change, image):
    outcome = snaporch("extract", f"{NAME}@s1", str(EXTRACTED))
    refused = how == "partition" or change == "dataset-renamed"
    assert outcome.status == (REFUSED if refused else 0), outcome
    if not refused:
        assert sha256(EXTRACTED) == image
        EXTRACTED.unlink()


def in_two_goes(layout, case, *words):
    """The result of a command that is killed at one of its steps, and recovered.

    The case's text says which step. The command may end before it comes there; where it is undone
    since it had touched nothing, it is run again.
    """
    before, point = everything(), POINTS[zlib.crc32(case.encode()) % len(POINTS)]
    under_way = Run(*words, point=point.replace("rollback", layout.dataset))
    try:
        under_way.wait_stopped()
    except AssertionError:
        return under_way.outcome()
    finally:
        under_way.kill()
        under_way.close()
    outcome = snaporch("recover")
    assert outcome.status == 0, (point, outcome)
    return outcome if changed(before) else snaporch(*words)


@pytest.mark.daily(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("layout", "change"), cases(), indirect=["layout"])
def test_the_way_back_does_no_harm(request, layout, change):
    how, case = request.node.callspec.params["layout"], request.node.name
    oracle, image = take(layout)
    CHANGES[change](layout)
    before = everything()
    verify(how, change)
    assert changed(before) == {}
    clone(how, change)
    assert changed(before) == {}
    extract(how, change, image)
    assert changed(before) == {}
    assert not CLONES.exists() or os.listdir(CLONES) == []
    mark = layout.guest.mark()
    outcome = in_two_goes(layout, case, "restore", f"{NAME}@s1", "--yes", "--also-roll-back")
    if change in REFUSES or (change in MISSED and how in LINKED):
        assert outcome.status == REFUSED, outcome
        assert changed(before) == {}
        return
    assert outcome.status == 0, outcome
    assert layout.own() == oracle
    assert [thing for thing in changed(before) if not layout.is_own(thing)] == []
    goes_on(layout.guest, mark)
    layout.guest.destroy()
    words = ("undo", NAME, "--yes", "--no-safety", "--also-roll-back")
    outcome = in_two_goes(layout, f"{case}, undone", *words)
    assert outcome.status == 0, outcome
    defined = {f"domain {NAME}": (None, oracle[f"domain {NAME}"]), f"active {NAME}": (None, False)}
    assert changed(before) == (defined if change == "undefined" else {})
