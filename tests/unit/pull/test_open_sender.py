"""What a host offers, from its own guests, journals and locks."""

import json
from dataclasses import replace

import pytest
from fakes.pulled import Collected

from snaporch import default_paths
from snaporch.errors import BusyError
from snaporch.interrupt import Interrupt
from snaporch.locks import domain_lock, readers_lock
from snaporch.pull.open_sender import open_sender
from snaporch.pull.send_request import Verb, parse_request, request_command


@pytest.fixture
def ask(story):
    def ask(verb, allowed=None, **values):
        output = Collected()
        request = parse_request(request_command(verb, values))
        open_sender(story.world.context, "nas", allowed, output).answer(request)
        return json.loads(output.data)

    return ask


def offered(ask, story):
    found = ask(Verb.SNAPSHOTS, uuid=story.record.uuid)
    names = [f"{d['name']}@{s['name']}" for d in found["datasets"] for s in d["snapshots"]]
    return sorted(names), sorted(found["waiting"])


def test_the_snapshots_of_a_guest_are_offered(ask, story):
    assert ask(Verb.GUESTS)["guests"] == [{"uuid": story.record.uuid, "domain": "web"}]
    assert offered(ask, story) == (["flash/web@s1", "tank/web@s1"], [])


def test_a_guest_is_not_rolled_back_while_it_is_sent(story):
    """With ``paths.runtime`` of the configuration elsewhere, too."""
    world, uuid = story.world, story.record.uuid
    paths = world.paths.model_copy(update={"runtime": world.paths.runtime / "own"})
    config = world.context.config.model_copy(update={"paths": paths})
    context = replace(world.context, config=config)
    lock = readers_lock(default_paths.LOCKS, "web", uuid, alone=True, interrupt=Interrupt())
    newest = world.pool.snapshots(["tank/web"])[-1]
    values = {"uuid": uuid, "dataset": "tank/web", "guid": newest.guid, "base": 0, "token": "-"}
    request = parse_request(request_command(Verb.STREAM, values))
    sender = open_sender(context, "nas", None, Collected())
    with lock, pytest.raises(BusyError, match="it is being rolled back"):
        sender.answer(request)


def test_copies_on_a_replica_of_this_host_are_not(ask, story):
    story.world.pool.replicate("tank/web@s1", "usb/kvm")
    story.world.pool.set_properties(["usb/kvm@s1"], {"snaporch:copy": "usb"})
    assert offered(ask, story) == (["flash/web@s1", "tank/web@s1"], [])


def test_the_newest_run_of_a_guest_whose_lock_is_held_waits(ask, story):
    story.snapshot("s2")
    with domain_lock(
        default_paths.LOCKS, "web", story.record.uuid, "snapshot", wait=0, interrupt=Interrupt()
    ):
        found, waiting = offered(ask, story)
    assert found == ["flash/web@s1", "tank/web@s1"]
    assert waiting == ["flash/web@s2", "tank/web@s2"]


def test_a_dataset_with_a_disk_of_a_guest_that_has_no_snapshot_is_not(ask, story):
    story.world.add_guest("secret", {"vda": "tank/web"})
    found = ask(Verb.SNAPSHOTS, ["web"], uuid=story.record.uuid)
    assert ([each["name"] for each in found["datasets"]], found["shared"]) == (
        ["flash/web"],
        ["tank/web"],
    )
    assert offered(ask, story)[0] == ["flash/web@s1", "tank/web@s1"]  # with --all
    assert ask(Verb.SNAPSHOTS, ["web", "secret"], uuid=story.record.uuid)["shared"] == []


def test_a_guest_whose_snapshots_have_the_marks_of_another_is_offered_by_its_bundle(ask, story):
    names = [f"{each}@s1" for each in story.datasets]
    uuid = "4b1d2f0e-0000-4000-8000-000000000009"
    for name in names:
        marks = {"snaporch:uuid": uuid, "snaporch:run": "r9", "snaporch:domain": "other"}
        story.world.pool.set_properties([name], marks)
    guests = {each["domain"]: each["uuid"] for each in ask(Verb.GUESTS)["guests"]}
    assert guests == {"web": story.record.uuid, "other": uuid}
    assert offered(ask, story) == (names, [])
    (run,) = ask(Verb.SNAPSHOTS, uuid=story.record.uuid)["unmarked"]
    assert (run["run"], len(run["snapshots"])) == (story.record.run, 2)
    found = ask(Verb.MANIFEST, uuid=story.record.uuid, run=story.record.run)
    assert json.loads(found["text"])["domain"] == "web"
    with domain_lock(
        default_paths.LOCKS, "web", story.record.uuid, "snapshot", wait=0, interrupt=Interrupt()
    ):
        assert offered(ask, story) == ([], names)
