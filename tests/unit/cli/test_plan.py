from datetime import UTC, datetime, timedelta

import pytest
from fakes.schedule import Scheduled

from snaporch.errors import ExitCode


@pytest.fixture
def policies(host):
    """A guest with three snapshots: one more than the policy keeps, and one by hand."""
    host.add_guest()
    with host.config_file.open("a") as stream:
        stream.write('[policy.hourly]\nevery = "1h"\ndomains = ["web"]\nkeep = { last = 1 }\n')
    scheduled = Scheduled(host)
    scheduled.configure(policy={"hourly": {}})
    now = datetime.now(UTC)
    for days, policy in ((3, "hourly"), (2, None), (1, "hourly")):
        scheduled.taken(now - timedelta(days=days), policy=policy)
    host.hooks.log.clear()
    return host


def test_what_is_due_and_what_would_be_deleted(policies, snaporch):
    answer = snaporch("plan")
    assert answer.code == 0
    due, to_delete, total = answer.out.splitlines()
    assert due == "web  hourly  due now  (every 1h)"
    assert to_delete.startswith("web@snaporch_")
    assert to_delete.endswith("_hourly  would be deleted: not in last=1")
    assert total == "web  2 snapshots of policies, 1 would be deleted; 1 of no policy"
    assert policies.hooks.log == []


def test_one_snapshot_is_counted_as_one(host, snaporch):
    host.add_guest()
    scheduled = Scheduled(host)
    scheduled.configure(policy={"hourly": {}})
    scheduled.taken(datetime.now(UTC), policy="hourly")
    assert "web  1 snapshot of policies, 0 would be deleted\n" in snaporch("plan").out


def test_kept_snapshots_are_listed_with_verbose(policies, snaporch):
    lines = snaporch("plan", "web", "--kept").out.splitlines()
    assert any(line.endswith("stays: last 1 of 1, the last good RAM snapshot") for line in lines)


SOURCES = """
[source.vm1]
host = "vm1"
dataset = "backup/vm1"
bundles = "/srv/vm1"
every = "1h"
[source.vm2]
host = "vm2"
dataset = "backup/vm2"
bundles = "/srv/vm2"
every = "1h"
window = "{}"
[source.by-hand]
host = "vm3"
dataset = "backup/vm3"
bundles = "/srv/vm3"
"""


def test_the_next_pulls_are_in_the_plan_and_wait_for_their_window(policies, snaporch):
    later = datetime.now().astimezone() + timedelta(hours=2)
    window = f"{later:%H:%M}-{later + timedelta(minutes=5):%H:%M}"
    with policies.config_file.open("a") as stream:
        stream.write(SOURCES.format(window))
    *_, first, second = snaporch("plan").out.splitlines()
    assert first == "vm1  pull due now  (by every)"
    assert second.startswith("vm2  pull next ")
    assert second.endswith(f"(its window: {window})")
    found = [(each["source"], each["due"]) for each in snaporch("plan", "--json").json["pulls"]]
    assert found == [("vm1", True), ("vm2", False)]
    assert "pull" not in snaporch("plan", "web").out


def test_the_plan_as_json(policies, snaporch):
    document = snaporch("plan", "--json").json
    (run,) = document["runs"]
    assert (run["domain"], run["policy"], run["due"]) == ("web", "hourly", True)
    assert run["assigned_by"] == "the policy's domains"
    assert [each["action"] for each in document["retention"]] == ["delete", "keep"]


def test_a_domain_without_policies(policies, snaporch):
    policies.add_guest("mail")
    assert snaporch("plan", "mail").out == "mail  no policy takes snapshots of it\n"


def test_a_misspelt_domain(policies, snaporch):
    assert snaporch("plan", "wbe").code == ExitCode.NOT_FOUND


def test_a_missing_policy_is_reported_after_the_plan(policies, snaporch):
    policies.add_guest("mail")
    policies.pool.set_properties(["tank/mail"], {"snaporch:policy": "dayly"})
    answer = snaporch("plan")
    assert answer.code == ExitCode.CONFIG
    assert "due now" in answer.out
    assert "mail: snaporch:policy of tank/mail names the policy 'dayly'" in answer.err


# -- snapshot --policy --------------------------------------------------------------------------


def test_a_snapshot_for_a_policy_is_marked(policies, snaporch):
    taken = snaporch("snapshot", "web", "--policy", "hourly", "--json").json
    assert taken["policy"] == "hourly"
    assert taken["snapshot"].endswith("_hourly")
    (found,) = [s for s in policies.pool.snapshots() if s.name == taken["snapshot"]]
    assert found.properties["retention"] == "hourly"


def test_a_snapshot_by_hand_belongs_to_no_policy(policies, snaporch):
    taken = snaporch("snapshot", "web", "--json").json
    assert taken["policy"] is None


def test_a_policy_sets_its_level(policies, snaporch):
    with policies.config_file.open("a") as stream:
        stream.write('[policy.quick]\nlevel = "crash"\n')
    assert snaporch("snapshot", "web", "--policy", "quick", "--json").json["level"] == "crash"
    document = snaporch("snapshot", "web", "--policy", "quick", "--level", "paused", "--json").json
    assert document["level"] == "paused"
    assert "crash, by crash" in snaporch("snapshot", "web", "--policy", "quick", "--dry-run").out


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--policy", "daily"], ExitCode.NOT_FOUND, "no such policy in the configuration"),
        (["--policy", "hourly", "--name", "x"], ExitCode.USAGE, "leave out --name"),
    ],
)
def test_options_that_contradict_a_policy(policies, snaporch, options, code, words):
    before = policies.pool.names()
    answer = snaporch("snapshot", "web", *options)
    assert answer.code == code
    assert words in answer.err
    assert policies.pool.names() == before


def test_a_bundle_that_differs_when_read_back_is_a_failure(policies, snaporch):
    with policies.config_file.open("a") as stream:
        stream.write("[policy.checked]\nverify = true\n")
    assert snaporch("snapshot", "web", "--policy", "checked").code == 0

    def damage():
        """The store's disk loses what was written."""
        for image in policies.paths.bundles.glob("*/*/ram.save"):
            image.write_bytes(bytes(image.stat().st_size))

    policies.hooks.at["pool.set_properties"] = damage
    answer = snaporch("snapshot", "web", "--policy", "checked")
    assert answer.code == ExitCode.FAILED
    assert "SHA-256" in answer.err
    taken = [found for found in policies.pool.snapshots() if found.name.endswith("_checked")]
    verdicts = [snapshot.properties.get("verified", "").partition(" ")[2] for snapshot in taken]
    assert verdicts == ["", "failed nothing"]
