"""A storm of guests that are all due at once, under systemd's timer unit."""

import json
from datetime import datetime

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import BUNDLES, assert_clean, must, run, snaporch, system_config, zfs_snapshots

AFTERWARDS = ("snaporch-replicate.service", "snaporch-verify.service")
"""Started at the end of each run of what is due."""
COUNT = 12
RUNNING = 2
POLICY = """
[schedule]
jobs = 2
jobs_per_pool = 2
[policy.storm]
every = "1w"
stagger = "1d"
domains = ["storm-*"]
"""


@pytest.fixture(scope="module")
def guests():
    """Most are off: it is their number that counts."""
    made = []
    with system_config(POLICY):
        for number in range(COUNT):
            pool, name = ("tank", "flash")[number % 2], f"storm-{number}"
            disks = [Disk("file", f"{pool}/{name}")]
            made.append(Guest.create(name, disks=disks, start=number < RUNNING))
        assert snaporch("install").status == 0
        must("systemctl", "daemon-reload")
        yield made
        must("systemctl", "stop", *AFTERWARDS)
        for guest in made:
            guest.remove()


def windows():
    """From when to when each run went, by the bundles' manifests."""
    for path in BUNDLES.glob("*/*/manifest.json"):
        manifest = json.loads(path.read_text())
        yield (
            datetime.fromisoformat(manifest["started"]),
            datetime.fromisoformat(manifest["finished"]),
        )


def most_at_once(spans):
    ends = [(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans]
    inside = most = 0
    for _, step in sorted(ends):  # at one time, ends come first
        inside += step
        most = max(most, inside)
    return most


def test_never_more_than_jobs_at_once(guests):
    marks = [guest.mark() for guest in guests[:RUNNING]]
    outcome = run("systemctl", "start", "snaporch-run-due.service")
    assert outcome.status == 0, run("journalctl", "--no-pager", "-u", "snaporch-run-due").out
    assert len(zfs_snapshots("_storm")) == COUNT
    spans = list(windows())
    assert len(spans) == COUNT
    assert most_at_once(spans) == 2
    for guest, mark in zip(guests, marks, strict=False):
        guest.wait_count()
        guest.assert_undisturbed(mark)
        assert_clean(guest)


def test_the_next_ones_are_staggered(guests):
    times = [each["at"] for each in snaporch("plan", "--json").json["runs"]]
    assert len(times) == COUNT
    assert len(set(times)) == COUNT


def test_all_is_well(guests):
    outcome = snaporch("status", "--json")
    problems = [each["code"] for each in outcome.json["problems"]]
    assert problems == []
    assert len(outcome.json["domains"]) == COUNT
    assert outcome.json["store"]["bundles"] == COUNT
