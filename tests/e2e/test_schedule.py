"""Policies on real snapshots: due snapshots are taken, expired ones are deleted, and no others."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes import manifests
from guests.disks import Disk
from guests.guest import Guest
from support import (
    CONFIG,
    assert_clean,
    must,
    one_line_error,
    run,
    snaporch,
    system_config,
    zfs_snapshots,
)

from snaporch.cli.command_host import CommandHost
from snaporch.cli.session import open_session
from snaporch.install_files import UNITS
from snaporch.schedule.apply_retention import apply_retention
from snaporch.schedule.forecast import make_forecasts

POLICIES = """
[schedule]
timezone = "UTC"
jobs = 2

[policy.hourly]
every = "52w"  # with "1h" the hour could turn between two lines of a test
verify = true
keep = { hourly = 2 }

[policy.daily]
cron = "0 3 * * *"
level = "crash"
domains = ["other"]
"""


@pytest.fixture(scope="module", autouse=True)
def policies():
    with system_config(POLICIES):
        yield


@pytest.fixture(scope="module")
def guest():
    made = Guest.create("timed", disks=[Disk("file", "tank/timed"), Disk("zvol", "flash/timed")])
    must("zfs", "set", "snaporch:policy=hourly", "tank/timed")
    yield made
    made.remove()


@pytest.fixture(scope="module")
def other():
    made = Guest.create("other", disks=[Disk("file", "tank/other")])
    yield made
    made.remove()


def planned(name):
    document = snaporch("plan", name, "--json").json
    return {run["policy"]: run for run in document["runs"]}


def names(dataset):
    return [full.split("@")[1] for full in zfs_snapshots() if full.startswith(f"{dataset}@")]


def test_places_that_name_policies(guest, other):
    assert planned("timed")["hourly"]["assigned_by"] == "snaporch:policy of tank/timed"
    assert planned("other")["daily"]["assigned_by"] == "the policy's domains"
    set_metadata = ("virsh", "metadata", "other", "urn:snaporch", "--config", "--key", "snaporch")
    must(*set_metadata, "--set", "<policy>hourly</policy>")
    assert set(planned("other")) == {"hourly"}
    must("virsh", "metadata", "other", "urn:snaporch", "--config", "--remove")
    assert set(planned("other")) == {"daily"}


def test_the_first_ones_are_due_and_taken(guest, other):
    assert planned("timed")["hourly"]["due"]
    marks = {each: each.mark() for each in (guest, other)}
    outcome = snaporch("run-due", "--json")
    assert outcome.status == 0, outcome.err
    assert {run["domain"] for run in outcome.json["runs"]} == {"timed", "other"}
    for each, mark in marks.items():
        each.wait_count()
        each.assert_undisturbed(mark)
        assert_clean(each)
    (name,) = names("tank/timed")
    assert name.endswith("_hourly")
    assert names("flash/timed") == [name]
    assert must("zfs", "get", "-Ho", "value", "snaporch:retention", f"tank/timed@{name}") == (
        "hourly\n"
    )
    levels = {e["domain"]: e["level"] for e in snaporch("list", "--json").json}
    assert levels == {"timed": "ram", "other": "crash"}


def test_nothing_is_due_right_after(guest, other):
    outcome = snaporch("run-due")
    assert (outcome.status, outcome.out) == (0, "")
    assert not planned("timed")["hourly"]["due"]


def test_retention_deletes_what_it_foresaw_and_nothing_else(guest):
    """The library is asked about later times: a test cannot wait for hours."""
    must("zfs", "snapshot", "tank/timed@autosnap_2026-01-01_00:00:00_hourly")
    must("zfs", "snapshot", "tank/timed@snaporch_20260101T000000Z_hourly")
    assert snaporch("snapshot", "timed", "--name", "by-hand", "--level", "crash").status == 0
    for _ in range(2):
        assert snaporch("snapshot", "timed", "--policy", "hourly").status == 0
    entries = snaporch("list", "timed", "--json").json  # names of one second have another order
    oldest, held, newest = [e["snapshot"] for e in entries if e["snapshot"] != "by-hand"]
    age_bundles("timed")
    must("zfs", "hold", "keep", f"flash/timed@{held}")
    with open_session(CommandHost(), None, quiet=True) as context:
        later = datetime.now(UTC) + timedelta(days=2)
        context.config = context.config.model_copy(update={"policy": only_last(context.config)})
        (outlook,) = make_forecasts(context, later, "timed")
        assert [v.taken.snapshot for v in outlook.to_delete] == [oldest]
        done = apply_retention(context, [outlook], later)
        assert ([v.taken.snapshot for _, v in done.deleted], done.failures) == ([oldest], [])
        assert apply_retention(context, make_forecasts(context, later), later).deleted == []
    assert set(names("tank/timed")) == {
        "autosnap_2026-01-01_00:00:00_hourly", "snaporch_20260101T000000Z_hourly",
        "by-hand", held, newest,
    }  # fmt: skip
    assert set(names("flash/timed")) == {"by-hand", held, newest}
    listed = {e["snapshot"]: e["state"] for e in snaporch("list", "timed", "--json").json}
    assert listed == {"by-hand": "complete", held: "complete", newest: "complete"}
    must("zfs", "release", "keep", f"flash/timed@{held}")


def only_last(config):
    hourly = config.policy["hourly"]
    keep = hourly.keep.model_copy(update={"hourly": 0, "last": 1})
    return config.policy | {"hourly": hourly.model_copy(update={"keep": keep})}


def age_bundles(domain):
    """Make every bundle an hour older than the next one, so that none is of the same hour."""
    records = snaporch("list", domain, "--json").json
    for hours, record in enumerate(reversed(records)):
        path = Path(record["bundle"]) / "manifest.json"
        document = manifests.load(path)
        created = datetime.fromisoformat(document["created"]) - timedelta(hours=hours)
        manifests.store(path, document | {"created": created.isoformat()})


def test_what_is_to_be_verified_is_verified_once(guest, other):
    CONFIG.write_text(POLICIES.replace("verify = true", 'verify = "weekly"'))
    newest = max(n for n in names("tank/timed") if n.endswith("_hourly") and "20260101" not in n)
    assert "verify due now" in snaporch("plan", "timed").out
    mark = guest.mark()
    outcome = snaporch("run-due", "--json")
    assert outcome.status == 0, outcome.err
    (verified,) = outcome.json["verified"]
    assert (verified["snapshot"], verified["passed"]) == (newest, True)
    assert verified["reached"] == "resumed"
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert snaporch("verify", "--due", "--json").json == []
    assert "verify next" in snaporch("plan", "timed").out
    CONFIG.write_text(POLICIES)


def test_a_run_that_fails_is_reported_and_stops_no_other(guest, other):
    must("zfs", "set", "snaporch:policy=quick", "tank/timed")
    must("zfs", "set", "snaporch:policy=quiet", "tank/other")
    CONFIG.write_text(
        POLICIES.replace('domains = ["other"]\n', "")
        + '[policy.quick]\nevery = "52w"\n[policy.quiet]\nevery = "52w"\nlevel = "quiesced"\n'
    )
    outcome = snaporch("run-due")
    assert outcome.status == 5, outcome.err
    assert outcome.out.startswith("timed@snaporch_")
    assert "other: quiet: " in outcome.err
    assert "agent" in outcome.err
    again = snaporch("run-due")
    assert (again.status, again.out) == (0, "")
    assert "retry after a failure" in planned("other")["quiet"]["reason"]
    CONFIG.write_text(POLICIES)
    must("zfs", "inherit", "snaporch:policy", "tank/other")
    must("zfs", "set", "snaporch:policy=hourly", "tank/timed")


def test_a_policy_that_there_is_not(guest):
    must("zfs", "set", "snaporch:policy=dayly", "tank/timed")
    outcome = snaporch("plan", "timed")
    assert outcome.status == 3
    assert "names the policy 'dayly'" in outcome.err
    one_line_error(snaporch("snapshot", "timed", "--policy", "dayly"), 4, "dayly", "hourly")
    must("zfs", "set", "snaporch:policy=hourly", "tank/timed")


def test_units_are_what_systemd_can_read(tmp_path):
    place = tmp_path / "etc/systemd/system"
    outcome = snaporch("install", "--root", str(tmp_path))
    assert outcome.status == 0, outcome.err
    units = sorted(place.iterdir())
    assert [unit.name for unit in units] == sorted(UNITS)
    verdict = run("systemd-analyze", "verify", "--man=no", *map(str, units))
    assert [line for line in verdict.err.splitlines() if "snaporch" in line] == []
    assert snaporch("uninstall", "--root", str(tmp_path)).status == 0
    assert list(place.iterdir()) == []
