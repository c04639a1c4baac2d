"""Copies in pools of this host do not count as its guests' snapshots."""

from datetime import UTC, datetime

import pytest

from snaporch.catalog.local_replicas import without_replicas_here
from snaporch.config import Config, Replica, Source
from snaporch.model import PoolSnapshot

CONFIG = Config(
    source={"vm1": Source(host="vm1", dataset="backup/vm1", bundles="/srv/vm1")},
    replica={"usb": Replica(dataset="usb/kvm", bundles="/usb")},
)


@pytest.mark.parametrize(
    ("dataset", "copy", "is_own"),
    [
        ("tank/web", "", True),
        ("backup/vm1/tank:web", "vm1", False),
        ("usb/kvm/tank:web", "usb", False),
        ("tank/web", "vm1", True),
        ("backup/vm10/tank:web", "vm1", True),
    ],
)
def test_copies_of_replicas_and_sources_are_left_out(dataset, copy, is_own):
    marks = {"run": "r1", **({"copy": copy} if copy else {})}
    found = PoolSnapshot(dataset, "r1", 1, 9, datetime(2026, 1, 1, tzinfo=UTC), marks)
    assert without_replicas_here(CONFIG, [found]) == ([found] if is_own else [])
