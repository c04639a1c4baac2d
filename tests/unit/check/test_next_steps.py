from pathlib import Path

import pytest

from snaporch.check.facts import GuestFacts, HostFacts, OverlayFacts, SanoidFacts, StoreFacts
from snaporch.check.next_steps import next_steps

WEB = GuestFacts("my web", "auto", ("tank/web",))
FIRST = "take a first snapshot: snaporch snapshot 'my web'"
POLICY = "have snapshots taken by a policy: see docs/how-to/schedule.md"
REPLICA = "copy them to another pool or host: see docs/how-to/replication.md"


@pytest.fixture
def steps(sanoid_conf):
    """The next steps on a host."""

    def find(sanoid="", *, bundles=False, guests=(WEB,), **more):
        config = sanoid_conf(sanoid, "tank", "tank/web") if sanoid else None
        facts = HostFacts(
            version="1.0",
            command="/usr/bin/snaporch",
            sanoid=SanoidFacts(True, True, Path("/etc/sanoid"), config),
            guests=guests,
            store=StoreFacts(Path("/store"), has_bundles=bundles),
            overlays=OverlayFacts(Path("/overlays"), 1000, 256),
            **more,
        )
        return next_steps(facts)

    return find


def test_a_new_host(steps):
    assert steps() == [f"next: {FIRST}", f"then: {POLICY}", f"then: {REPLICA}"]


def test_what_is_done_is_left_out(steps):
    assert steps(bundles=True) == [f"next: {POLICY}", f"then: {REPLICA}"]
    assert steps(policies=True, replicas={"nas": ""}) == [f"next: {FIRST}"]
    assert steps("[tank/web]\n") == [f"next: {FIRST}", f"then: {REPLICA}"]


def test_a_host_that_is_set_up_needs_nothing(steps):
    assert steps(bundles=True, policies=True) == []
    assert steps("[tank/web]\n", bundles=True) == []


def test_without_a_guest_that_can_be_snapshotted_there_is_no_step(steps):
    assert steps(guests=()) == []
    assert steps(guests=(GuestFacts("nas", "auto", (), refusal=("no disk on ZFS", "")),)) == []
