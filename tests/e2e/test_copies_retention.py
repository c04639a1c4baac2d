"""Old copies are destroyed on the machine that holds them (the lab itself, over ssh)."""

import os
from pathlib import Path

import pytest
from other_machine import ROOT, copy, create, datasets, listed, other_machine, take, uuid_of
from support import must, snaporch

GUESTS = ("plain", "paged")
SNAPSHOTS = 2
KEPT = 1


@pytest.fixture(scope="module")
def there(tmp_path_factory):
    with other_machine(tmp_path_factory.mktemp("there")) as other:
        yield other


@pytest.fixture(scope="module")
def guests(there):
    """Each guest has two copies of a policy, and one of another program."""
    made = {name: create(name) for name in GUESTS}
    for name, guest in made.items():
        for number in range(SNAPSHOTS):
            take(guest)
            if number == 0:
                must("zfs", "snapshot", f"{datasets(guest)[0]}@autosnap_first")
        replicate(name)
    yield made
    for guest in made.values():
        guest.remove()


@pytest.fixture(scope="module")
def config(there, tmp_path_factory):
    """The configuration of the machine with the copies."""
    path = tmp_path_factory.mktemp("config") / "copies.toml"
    path.write_text(
        f'[paths]\nbundles = "{there.bundles}-own"\n[copies.vm1]\ndataset = "{ROOT}"\n'
        f'bundles = "{there.bundles}"\nkeep = {{ last = {KEPT} }}\nkeep_all = "0s"\n'
    )
    return path


def replicate(name):
    outcome = snaporch("replicate", name, "--to", "offsite", "--json")
    assert outcome.status == 0, outcome.err
    (document,) = outcome.json
    return document


def names_of(dataset):
    lines = must("zfs", "list", "-H", "-d", "1", "-t", "snapshot", "-o", "name", dataset)
    return {line.partition("@")[2] for line in lines.splitlines()}


def prune(config, *words):
    outcome = snaporch("--config", str(config), "prune", *words, "--json")
    assert outcome.status == 0, outcome.err
    return outcome.json["items"]


def copies(items, action):
    return {
        (each["domain"], each["snapshot"])
        for each in items
        if each["kind"] == "copy" and each["action"] == action
    }


def test_old_copies_go_and_the_next_replication_continues(guests, config, there):
    taken = {name: sorted(listed(guest)) for name, guest in guests.items()}
    old = {(name, each) for name, own in taken.items() for each in own[:-KEPT]}
    held = f"{copy('flash/plain')}@{taken['plain'][0]}"
    before = {each: names_of(copy(each)) for guest in guests.values() for each in datasets(guest)}

    must("zfs", "hold", "mine", held)
    assert copies(prune(config, "--dry-run"), "delete") == {("paged", taken["paged"][0])}
    must("zfs", "release", "mine", held)
    assert copies(prune(config, "--dry-run"), "delete") == old
    assert {each: names_of(copy(each)) for each in before} == before

    done = prune(config)
    assert copies(done, "delete") == old
    for name, guest in guests.items():
        gone = {snapshot for owner, snapshot in old if owner == name}
        for dataset in datasets(guest):
            assert names_of(copy(dataset)) == before[dataset] - gone
    assert "autosnap_first" in names_of(copy("tank/plain"))
    assert copies(prune(config), "delete") == set()

    for name, guest in guests.items():
        new = take(guest)["snapshot"]
        document = replicate(name)
        assert document["arrived"] == [new]
        assert document["damaged"] == []
        marks = listed(guest)
        assert {each for each in marks if "offsite" in marks[each]["replicated"]} >= {
            new,
            *taken[name][-KEPT:],
        }
        assert not {e for e in marks if (name, e) in old and marks[e]["replicated"]}
    outcome = snaporch("verify", f"plain@{taken['plain'][-1]}", "--on", "offsite")
    assert outcome.status == 0, outcome.err


def test_their_bundles_go_to_the_trash_once_no_pool_has_a_snapshot_of_them(guests, config, there):
    guest = guests["plain"]
    store = there.bundles / uuid_of(guest)
    oldest, *_ = sorted(listed(guest))
    bundle = Path(listed(guest)[oldest]["bundle"]).name
    assert bundle in os.listdir(store)  # a pool of this lab has the original
    for dataset in datasets(guest):
        must("zfs", "destroy", f"{dataset}@{oldest}")
    items = prune(config)
    trashed = {
        Path(e["path"]).name for e in items if (e["kind"], e["action"]) == ("bundle", "trash")
    }
    assert trashed == {bundle}
    assert bundle not in os.listdir(store)
    assert any(each.endswith(bundle) for each in os.listdir(there.bundles / ".trash"))
