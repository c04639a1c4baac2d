"""A world with policies, and snapshots of any age."""

import json
from datetime import UTC, datetime, timedelta

from snaporch.config import Config
from snaporch.model import iso
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

NOW = datetime(2026, 6, 10, 12, 30, tzinfo=UTC)
HOURLY = {"every": "1h", "keep": {"hourly": 2}}


class Scheduled:
    """Shortcuts for tests."""

    def __init__(self, world):
        self.world = world
        self.configure(policy={"hourly": HOURLY}, defaults={"policies": ["hourly"]})

    @property
    def context(self):
        return self.world.context

    def configure(self, **document):
        """Use this configuration, with the world's paths."""
        paths = self.world.paths.model_dump() | {"schedule": self.world.root / "schedule"}
        self.context.config = Config.model_validate({"paths": paths} | document)

    def taken(self, created, policy="hourly", guest="web", level=None):
        """Take a snapshot of that time; returns its record."""
        domain = self.context.hypervisor.domain(guest)
        name = None if policy else f"s{created:%H%M%S}"
        record = take_snapshot(self.context, domain, SnapshotRequest(name, level, policy))
        for dataset in record.datasets:
            self.world.pool.age(f"{dataset}@{record.snapshot}", created)
        manifest = self.world.paths.bundles / record.uuid / record.run / "manifest.json"
        document = json.loads(manifest.read_text())
        manifest.write_text(json.dumps(document | {"created": iso(created)}))
        return record

    def hours_ago(self, *hours, **more):
        """Take snapshots so many hours before now; the oldest is given first."""
        return [self.taken(NOW - timedelta(hours=hour), **more) for hour in hours]
