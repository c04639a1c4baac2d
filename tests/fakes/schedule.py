"""A world with policies, and snapshots of any age."""

from datetime import UTC, datetime, timedelta

from fakes import manifests
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
        document = manifests.load(manifest)
        manifests.store(manifest, document | {"created": iso(created)})
        return record

    def hours_ago(self, *hours, **more):
        """Take snapshots so many hours before now; the oldest is given first."""
        return [self.taken(NOW - timedelta(hours=hour), **more) for hour in hours]

    def copied(self, created, guest="web"):
        """Make a copy that another host sent of the guest; its bundle is in another store."""
        pool, uuid = self.world.pool, self.context.hypervisor.domain(guest).uuid
        dataset = f"tank/copies/ssd:{guest}"
        run, name = (
            f"{created:%Y%m%dT%H%M%SZ}-0badcafe",
            f"snaporch_{created:%Y%m%dT%H%M%SZ}_hourly",
        )
        marks = {
            "run": run, "uuid": uuid, "domain": guest, "bundle": f"{uuid}/{run}",
            "retention": "hourly", "level": "ram", "copy": "nas",
        }  # fmt: skip
        pool.create(dataset)
        pool.snapshot([f"{dataset}@{name}"], {f"snaporch:{k}": v for k, v in marks.items()})
        pool.age(f"{dataset}@{name}", created)
