"""What is known of saving RAM, from the guest, its last snapshot and the settings."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import manifests

from snaporch.model import DomainState
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.ram_forecast import RamOutcome
from snaporch.snapshot.ram_outlook import ram_outlooks
from snaporch.snapshot.run import take_snapshot

PACE = {"level": 1, "seconds": 10.0, "waited_for_ram": 0.0, "waited_for_store": 0.0}


@pytest.fixture
def guest(world):
    """A guest with 100 MiB of RAM, of which 20 a second were saved the last time."""
    domain = world.add_guest()
    path = Path(take_snapshot(world.context, domain).bundle) / "manifest.json"
    said = manifests.load(path)
    ram = next(part for part in said["parts"] if part["role"] == "ram")
    ram |= {"pace": PACE, "payload_bytes": 200 << 20}
    manifests.store(path, said)
    world.guest(domain.name).ram_bytes = 100 << 20
    return domain


def outlook(world, domain, **defaults):
    context = world.with_defaults(**defaults) if defaults else world.context
    return ram_outlooks(context, [make_plan(context, domain)]).get(domain.uuid)


@pytest.mark.parametrize(
    ("changed", "outcome"),
    [(1, RamOutcome.FITS), (19, RamOutcome.SLOWED), (1000, RamOutcome.SUSPENDED)],
)
def test_the_forecast_depends_on_what_the_guest_changes(world, guest, changed, outcome):
    world.guest(guest.name).dirty_rate = changed
    found = outlook(world, guest)
    assert (found.ram_bytes, found.changed, found.speed) == (100 << 20, changed, 20.0)
    assert found.forecast.outcome is outcome
    assert found.as_json()["outcome"] == outcome.value


def test_the_forecast_depends_on_the_settings(world, guest):
    world.guest(guest.name).dirty_rate = 1000
    assert outlook(world, guest, on_ram_budget="abort").forecast.outcome is RamOutcome.ABORTED
    assert outlook(world, guest, ram_time_budget="0s").forecast.outcome is RamOutcome.ENDLESS
    world.guest(guest.name).dirty_rate = 19
    fits = outlook(world, guest, vcpu_floor=100)
    assert fits.forecast.outcome is RamOutcome.FITS
    world.guest(guest.name).vcpu_quotas = {}
    assert outlook(world, guest).forecast == fits.forecast


def test_without_a_measurement_there_is_no_forecast(world, guest):
    found = outlook(world, guest)
    assert (found.changed, found.forecast) == (None, None)
    assert found.as_json()["outcome"] is None


def test_without_a_snapshot_there_is_no_forecast(world):
    domain = world.add_guest()
    world.guest(domain.name).dirty_rate = 5
    found = outlook(world, domain)
    assert (found.changed, found.speed, found.forecast) == (5, None, None)


def test_only_of_running_guests_whose_ram_is_saved(world, guest):
    world.guest(guest.name).dirty_rate = 5
    plan = make_plan(world.context, guest)
    paused = replace(plan, domain=replace(plan.domain, state=DomainState.PAUSED))
    assert ram_outlooks(world.context, [paused]) == {}
    assert outlook(world, guest, level="paused") is None


def test_a_guest_that_ends_meanwhile_has_none(world, guest):
    plan = make_plan(world.context, guest)
    world.guest(guest.name).live = None
    assert ram_outlooks(world.context, [plan]) == {}
