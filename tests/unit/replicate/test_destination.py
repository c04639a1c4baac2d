import time
from pathlib import Path

import pytest

from snaporch.config import Replica
from snaporch.errors import InterruptedRunError
from snaporch.replicate.destination import ReplicaDestination, ReplicaError
from snaporch.replicate.pace import Pace
from snaporch.run.context import Interrupt

SLOW_TO_END = """#!/bin/sh
(trap 'sleep 1; touch {place}/ended; exit' TERM
 touch {place}/begun
 while :; do sleep 0.1; done) &
wait
"""


def test_an_interrupted_transfer_has_ended_with_all_it_started(tmp_path):
    """syncoid ends at once; ``zfs receive`` goes on writing down where it got to."""
    script = tmp_path / "transfer"
    script.write_text(SLOW_TO_END.format(place=tmp_path))
    script.chmod(0o755)
    interrupt = Interrupted(tmp_path / "begun")
    there = ReplicaDestination("nas", Replica(dataset="b/k", bundles=tmp_path), interrupt)
    with pytest.raises(InterruptedRunError):
        there._run([str(script)], counted=False)
    assert (tmp_path / "ended").exists()


def test_a_transfer_that_stands_still_is_ended_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(Pace, "stands_still", lambda _self: True)
    replica = Replica(host="nas", dataset="b/k", bundles=tmp_path)
    there = ReplicaDestination("nas", replica, Interrupt())
    with pytest.raises(
        ReplicaError, match=r"nothing moved for 60 minutes.*see: zpool status, on nas"
    ):
        there._run(["sleep", "1000"], counted=True)


def test_nothing_is_known_of_what_moves_in_the_kernel_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(Pace, "stands_still", lambda _self: True)
    there = ReplicaDestination("nas", Replica(dataset="b/k", bundles=tmp_path), Interrupt())
    assert there._run(["sleep", "1"], counted=False) == (0, [])


SYNC = """#!/bin/sh
printf 'sync %s' "$(basename "$2")" >>{log}
test ! -e {final} || printf ', final there' >>{log}
test ! -e {store}/.run-1.copying/copy.json || printf ', marked' >>{log}
echo >>{log}
"""
RSYNC = """#!/bin/sh
for place; do before=$last last=$place; done
mkdir "$last" && cp -r "$before." "$last"
"""
"""Neither a real disk nor a real rsync: what counts is the order."""


def test_a_copy_gets_its_name_when_it_is_on_stable_storage(tmp_path, monkeypatch):
    there, bundle, tools = (tmp_path / name for name in ("there", "bundle", "tools"))
    for directory in (there, bundle, tools):
        directory.mkdir()
    (bundle / "manifest.json").write_bytes(b"{}")
    store, log = there / "uuid", tmp_path / "log"
    final = store / "run-1"
    for name, text in (("sync", SYNC), ("rsync", RSYNC)):
        (tools / name).write_text(text.format(log=log, store=store, final=final))
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    destination = ReplicaDestination("nas", Replica(dataset="b/k", bundles=there), Interrupt())
    destination.store(bundle, "uuid/run-1")
    assert log.read_text().splitlines() == [
        "sync .run-1.copying, marked",
        "sync uuid, final there",
    ]
    assert sorted(path.name for path in final.iterdir()) == ["copy.json", "manifest.json"]


class Interrupted(Interrupt):
    """A signal comes as soon as the file is there."""

    def __init__(self, begun: Path) -> None:
        super().__init__()
        self._begun = begun

    def check(self, thing: str) -> None:
        end = time.monotonic() + 60
        while not self._begun.exists() and time.monotonic() < end:
            time.sleep(0.01)
        self.signum = 15
        super().check(thing)
