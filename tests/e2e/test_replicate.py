"""Copies on another machine (the lab itself, over ssh), and guests that come back from them."""

import json
import os
import shutil
from pathlib import Path

import pytest
from guests.disks import destroy
from other_machine import (
    DISKS,
    ROOT,
    copy,
    create,
    datasets,
    listed,
    other_machine,
    take,
    uuid_of,
)
from pages import RUN, blocks
from support import (
    BUNDLES,
    accepting,
    assert_clean,
    assert_restored,
    must,
    one_line_error,
    run,
    snaporch,
    started,
    wait_for,
    zfs_snapshots,
)


@pytest.fixture(scope="module", autouse=True)
def there(tmp_path_factory):
    """The other machine's directory of bundles."""
    with other_machine(tmp_path_factory.mktemp("there")) as other:
        yield other.bundles


class Guests(dict):
    """Guests, each made when a test first asks for it."""

    def __missing__(self, name):
        self[name] = create(name)
        return self[name]


@pytest.fixture(scope="module")
def guests(there):
    made = Guests()
    yield made
    for guest in made.values():
        guest.remove()


@pytest.fixture(params=list(DISKS))
def guest(request, guests):
    return guests[request.param]


def replicate(guest, *options):
    outcome = snaporch("replicate", guest.name, "--json", *options)
    assert outcome.status == 0, outcome.err
    (document,) = outcome.json
    return document


def guids(*names):
    text = must("zfs", "list", "-Hp", "-d", "1", "-t", "snapshot", "-o", "name,guid", *names)
    return dict(line.split("\t") for line in text.splitlines())


def value(key, name):
    return must("zfs", "get", "-H", "-o", "value", key, name).strip()


KEYS = [
    f"snaporch:{key}" for key in ["run", "uuid", "level", "domain", "bundle", "retention", "ram"]
]


def marks(dataset):
    """The properties of the snapshots of a dataset, by their names."""
    columns = ",".join(["name", *KEYS])
    text = must("zfs", "list", "-Hp", "-d", "1", "-t", "snapshot", "-o", columns, dataset)
    lines = (line.split("\t") for line in text.splitlines())
    return {name.partition("@")[2]: values for name, *values in lines}


PAGE = "docs/how-to/replication.md"
FIND, CHOOSE, BRING = RUN[PAGE][1:4]


def bring_back(guest, there, directory):
    """Run the commands of the page, which choose the newest snapshot of this guest."""
    texts = {block.first: block.text for block in blocks(PAGE)}
    script = "set -e\n" + "".join(texts[each] for each in (FIND, CHOOSE, BRING))
    for said, meant in (
        ("guest=web", f"guest={guest.name}"),
        ("root@nas", "root@localhost"),
        ("/backup/snaporch", str(there)),
    ):
        assert said in script
        script = script.replace(said, meant)
    must("bash", "-c", f"cd {directory}\n{script}")


def same_files(one, other):
    found = {path.name: path.read_bytes() for path in other.iterdir() if path.name != "copy.json"}
    return found == {path.name: path.read_bytes() for path in one.iterdir()}


@pytest.mark.daily(1)
def test_the_replica_has_snapshots_bundles_and_properties(guest, there):
    mark = guest.mark()
    taken = [take(guest) for _ in range(2)]
    names = [each["snapshot"] for each in taken]
    assert "replicate due now" in snaporch("plan", guest.name).out
    document = replicate(guest)
    assert (document["arrived"], document["incomplete"]) == (names, [])
    for dataset in datasets(guest):
        ours, copies = guids(dataset), guids(copy(dataset))
        assert copies == {copy(name): guid for name, guid in ours.items()}
        assert value("readonly", copy(dataset)) == "on"
        assert value("mounted", copy(dataset)) in ("no", "-")
        assert marks(copy(dataset)) == marks(dataset)
        assert all(any(each != "-" for each in said) for said in marks(dataset).values())
    for each in taken:
        bundle = Path(each["bundle"])
        assert same_files(bundle, there / bundle.parent.name / bundle.name)
    assert {each["replicated"][0] for each in listed(guest).values()} == {"offsite"}
    assert "replicate" not in snaporch("plan", guest.name).out
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)


@pytest.mark.daily(1)
def test_the_next_one_is_an_increment_although_its_base_is_gone_here(guest):
    new = take(guest)
    for dataset in datasets(guest):
        for name in list(guids(dataset))[1:-1]:  # both still have an older one
            must("zfs", "destroy", name)
    document = replicate(guest)
    assert document["arrived"] == [new["snapshot"]]
    for dataset in datasets(guest):
        assert len(guids(copy(dataset))) == 3
    assert replicate(guest)["arrived"] == []


@pytest.mark.daily(1)
def test_a_guest_that_is_lost_comes_back_and_goes_on(guest, there, tmp_path):
    """The commands are those of docs/how-to/replication.md."""
    name = list(listed(guest))[-1]
    expected = guest.snapshot_count(name)
    mark = guest.mark()
    lost = datasets(guest)
    guest.destroy()
    for dataset in lost:
        destroy(dataset)
    shutil.rmtree(BUNDLES / uuid_of(guest))
    refused = snaporch("restore", f"{guest.name}@{name}", "--yes", "--json")
    assert refused.status == 5, refused.err  # the lab is its own backup: it sees the copies
    assert all(guids(copy(dataset)) for dataset in lost)
    bring_back(guest, there, tmp_path)
    assert [value("readonly", dataset) for dataset in lost] == ["off"] * len(lost)
    newer = f"{lost[0]}@taken-here"
    must("zfs", "snapshot", newer)
    bring_back(guest, there, tmp_path)
    assert zfs_snapshots(newer), "what exists is not received into"
    must("zfs", "destroy", newer)
    must("zpool", "export", "backup")  # the copies are on another machine
    try:
        back = listed(guest)
        assert back[name]["level"] == "ram"
        assert len(back) == 3
        outcome = snaporch(
            "restore", f"{guest.name}@{name}", "--yes", "--json", *accepting(guest.name)
        )
        assert outcome.status == 0, outcome.err
    finally:
        must("zpool", "import", "-d", str(there.parent), "backup")
    assert_restored(guest, mark, expected)
    assert_clean(guest)
    again = take(guest)
    part = json.loads((Path(again["bundle"]) / "manifest.json").read_text())["parts"][0]
    assert (part["compression"] == "pages") is (guest.name == "paged")


@pytest.mark.daily(1, "long")
def test_after_a_restore_the_replica_keeps_what_it_has_and_says_so(guests):
    guest = guests["plain"]
    kept = take(guest)["snapshot"]
    assert kept in replicate(guest)["arrived"]
    gone = take(guest)["snapshot"]
    assert replicate(guest)["arrived"] == [gone]
    outcome = snaporch("restore", f"{guest.name}@{kept}", "--yes", "--discard-newer", "--json")
    assert outcome.status == 0, outcome.err
    new = take(guest)["snapshot"]
    one_line_error(
        snaporch("replicate", guest.name), 8, "on root@localhost has diverged",
        "docs/how-to/replication.md",
    )  # fmt: skip
    assert zfs_snapshots(f"{copy('tank/plain')}@{gone}")
    assert "[replica-failed]" in snaporch("status").out
    assert listed(guest)[new]["replicated"] == []
    for dataset in datasets(guest):
        must("zfs", "rollback", "-r", f"{copy(dataset)}@{kept}")
    assert replicate(guest)["arrived"] == [new]


@pytest.mark.daily(1, "long")
def test_a_failure_of_what_is_due_is_reported_until_it_is_fixed(guests, there):
    guest = guests["plain"]
    take(guest)
    replicate(guest)
    new = take(guest)["snapshot"]
    must("zfs", "snapshot", f"{copy('tank/plain')}@only-there")
    outcome = snaporch("replicate", "--due", "--quiet")
    assert outcome.status == 8
    assert "offsite: tank/plain" in outcome.err
    assert "has diverged" in outcome.err
    assert "plain" not in outcome.out  # the other guest may have something due, too
    status = snaporch("status")
    assert status.status == 10
    assert "[replica-failed]" in status.out
    assert "retry after a failure" in snaporch("plan", guest.name).out
    must("zfs", "destroy", f"{copy('tank/plain')}@only-there")
    assert replicate(guest)["arrived"] == [new]
    assert "replicate" not in snaporch("plan", guest.name).out
    assert "replica-failed" not in snaporch("status").out


@pytest.mark.daily(1, "long")
def test_what_was_killed_goes_on(guests, there):
    guest = guests["plain"]
    image = Path(guest.sources()["vda"])
    (image.parent / "noise").write_bytes(os.urandom(12 << 20))
    new = take(guest)["snapshot"]
    with started("replicate", guest.name, "--to", "slow", env={}) as process:
        wait_for(lambda: run("pgrep", "-f", "zfs send.*plain").status == 0, "something is sent")
        process.kill()
        process.wait()
    run("pkill", "-f", "zfs send.*plain")  # no process is left that ends it
    wait_for(lambda: run("pgrep", "-f", "zfs (send|receive)").status == 1, "the streams end")
    assert "slow" not in listed(guest)[new]["replicated"]
    assert new in replicate(guest, "--to", "slow")["arrived"]
    assert "slow" in listed(guest)[new]["replicated"]
    bundle = Path(listed(guest)[new]["bundle"])
    other = Path(f"{there}-slow") / bundle.parent.name / bundle.name
    assert same_files(bundle, other)
    assert list(other.parent.glob(".*")) == []


def test_a_replicas_bundles_are_pruned_over_there(guests, there, tmp_path):
    guest = guests["plain"]
    to_delete = take(guest)["snapshot"]
    assert to_delete in replicate(guest)["arrived"]
    taken = listed(guest)
    config = tmp_path / "there.toml"
    config.write_text(f'[paths]\nbundles = "{there}"\n')
    must("snaporch", "--config", str(config), "prune")  # what other tests destroyed
    for dataset in datasets(guest):
        for name in (dataset, copy(dataset), copy(dataset, "backup/slow")):
            run("zfs", "destroy", f"{name}@{to_delete}")
    bundle = Path(taken[to_delete]["bundle"])
    outcome = snaporch("--config", str(config), "prune", "--json")
    assert outcome.status == 0, outcome.err
    trashed = [item for item in outcome.json["items"] if item["action"] == "trash"]
    assert [Path(item["path"]).name for item in trashed] == [bundle.name]
    assert not (there / bundle.parent.name / bundle.name).exists()
    assert json.loads(next((there / ".trash").glob(f"*{bundle.name}/copy.json")).read_text()) == {
        "dataset": ROOT
    }


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["plain", "--to", "nowhere"], 4, "nowhere: no such replica"),
        (["--due", "--to", "offsite"], 2, "expected DOMAIN"),
        ([], 2, "expected DOMAIN"),
    ],
)
def test_what_it_refuses(guests, words, status, reason):
    outcome = snaporch("replicate", *words)
    assert outcome.status == status, outcome.err
    assert reason in outcome.err
    assert "Traceback" not in outcome.err


def test_a_host_that_does_not_answer_is_reported(guests, tmp_path):
    config = tmp_path / "away.toml"
    text = Path(os.environ["SNAPORCH_CONFIG"]).read_text()
    config.write_text(text.replace("root@localhost", "root@127.0.0.2"))
    outcome = snaporch("--config", str(config), "replicate", "plain")
    one_line_error(outcome, 8, "root@127.0.0.2", "cannot be reached", "ssh -o BatchMode=yes")
    (found,) = [
        each
        for each in snaporch("--config", str(config), "check", "--json").json
        if each["code"] == "replica-unreachable"
    ]
    assert "cannot be reached" in found["what"]
    assert "replica-unreachable" not in snaporch("check").out
