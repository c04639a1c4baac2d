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
