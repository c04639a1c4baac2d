"""Bundles are pruned after their ZFS snapshots, destroyed by any program, and only with proof."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    BUNDLES,
    JOURNAL,
    assert_clean,
    config,
    must,
    one_line_error,
    restore,
    run,
    snaporch,
    snapshot,
    stalled_compressor,
    started,
    wait_for,
    wait_for_ram_phase,
    zfs_snapshots,
)

TRASH = BUNDLES / ".trash"
AGES = BUNDLES / "ages.json"
AT_ONCE = '[prune]\ntrash_keep = "0s"\n'
KILLED_BEFORE_DELETING = """
import os, signal
from snaporch.cli import main
from snaporch.prune import prune
prune.remove = lambda path: os.kill(os.getpid(), signal.SIGKILL)
main.run(["prune"])
"""
HOOK = "snaporch hook sanoid"
SANOID_CONF = """
[{dataset}]
    use_template = all

[template_all]
    autosnap = no
    autoprune = yes
    frequently = 0
    hourly = 0
    daily = 0
    weekly = 0
    monthly = 0
    yearly = 0
    script_timeout = 0
    pre_pruning_script = {hook} pre-prune
    pruning_script = {hook} prune
"""


@pytest.fixture(scope="module")
def guest():
    """A running guest."""
    made = Guest.create("pruned", disks=[Disk("file", "tank/pruned"), Disk("zvol", "flash/pruned")])
    yield made
    made.remove()


@pytest.fixture(scope="module")
def still():
    """A guest that is off, on two pools, of which one can be exported."""
    must("truncate", "-s", "128M", "/var/tmp/attic.img")
    must("zpool", "create", "attic", "/var/tmp/attic.img")
    disks = [Disk("file", "tank/still"), Disk("file", "attic/still")]
    made = Guest.create("still", disks=disks, start=False)
    yield made
    made.remove()
    must("zpool", "destroy", "attic")


@pytest.fixture(autouse=True)
def clean_slate():
    """Every test begins with an empty trash and nothing to prune."""
    yield
    if TRASH.is_dir():
        must("rm", "-r", str(TRASH))


def prune(*options, env=None):
    """Prune, which must succeed; snapshot → (action, reason)."""
    outcome = snaporch("prune", "--json", *options, env=env)
    assert outcome.status == 0, outcome.err
    return {
        item["snapshot"]: (item["action"], item["reason"])
        for item in outcome.json["items"]
        if item["snapshot"]
    }


def take(guest, name):
    """Take a snapshot; return its bundle's directory."""
    return Path(snapshot(guest, "--name", name)["bundle"])


def destroy(*names):
    for name in names:
        must("zfs", "destroy", name)


# -- who destroys them --------------------------------------------------------------------------


def test_destroyed_by_hand_one_after_the_other(still):
    bundle = take(still, "hand")
    destroy("tank/still@hand")
    assert prune()["hand"] == ("keep", "attic/still@hand exists")
    destroy("attic/still@hand")
    assert prune("--dry-run")["hand"][0] == "trash"
    assert bundle.is_dir()
    outcome = snaporch("prune")
    assert outcome.status == 0
    assert "still@hand  trashed" in outcome.out
    assert "attic/still@hand and tank/still@hand no longer exist" in outcome.out
    assert not bundle.exists()
    (moved,) = TRASH.iterdir()
    assert (moved / "manifest.json").is_file()
    assert snaporch("list", "still", "--json").json == []


def test_the_next_prune_after_the_grace_deletes_it(still):
    bundle = take(still, "grace")
    destroy("tank/still@grace", "attic/still@grace")
    prune()
    (moved,) = TRASH.iterdir()
    assert prune()["grace"][0] == "keep"
    moved.rename(TRASH / f"20200101T000000Z.{moved.name.partition('.')[2]}")
    assert prune()["grace"][0] == "keep"  # its name is by the clock, which may have been wrong
    ages = json.loads(AGES.read_bytes())
    ages["seconds"] = dict.fromkeys(ages["seconds"], 3 * 86_400)
    AGES.write_text(json.dumps(ages))
    outcome = snaporch("prune")
    assert "still@grace  deleted" in outcome.out
    assert list(TRASH.iterdir()) == []
    assert not bundle.exists()


def test_rolled_back_by_a_restore_and_brought_back_by_its_undo(guest):
    """A restore destroys newer snapshots; undoing it receives them again, with their GUIDs."""
    take(guest, "old")
    newer = take(guest, "new")
    restored = restore(guest, "old", "--discard-newer")
    assert prune()["new"][0] == "trash"
    assert not newer.exists()
    guest.destroy()
    outcome = run("sh", restored["undo"])
    assert outcome.status == 0, outcome.err
    assert prune()["new"] == ("put-back", "flash/pruned@new is back")
    assert newer.is_dir()
    (entry,) = [e for e in snaporch("list", "pruned", "--json").json if e["snapshot"] == "new"]
    assert (entry["level"], entry["state"]) == ("ram", "complete")
    count = guest.snapshot_count("new")
    mark = guest.mark()
    restore(guest, "new", "--discard-newer")
    guest.assert_continues(mark, count)
    assert_clean(guest)


def test_brought_back_from_the_trash_by_hand(guest):
    """As docs/how-to/pruning.md says: a bundle in the trash is a plain directory."""
    bundle = take(guest, "byhand")
    must("zfs", "clone", "tank/pruned@byhand", "tank/witness")
    destroy("flash/pruned@byhand")
    must("zfs", "promote", "tank/witness")  # the snapshot is the clone's now, with its GUID
    assert prune()["byhand"] == ("keep", "its snapshot exists as tank/witness@byhand")
    must("zfs", "promote", "tank/pruned")
    destroy("tank/witness", "tank/pruned@byhand")
    prune()
    (moved,) = TRASH.iterdir()
    must("mv", str(moved), str(bundle))
    assert prune("--dry-run")["byhand"][0] == "trash"
    assert (bundle / "ram.save").stat().st_size > 0


# -- what is not proven -------------------------------------------------------------------------


def test_an_exported_pool_keeps_its_bundles_and_is_named(still, tmp_path):
    bundle = take(still, "away")
    destroy("tank/still@away")
    must("zpool", "export", "attic")
    try:
        with config(tmp_path, AT_ONCE) as environment:
            assert prune(env=environment)["away"] == ("keep", "the pool attic is not imported")
            assert "the pool attic is not imported" in snaporch("prune", env=environment).out
    finally:
        must("zpool", "import", "-d", "/var/tmp", "attic")
    assert bundle.is_dir()
    assert prune()["away"] == ("keep", "attic/still@away exists")


def test_a_zfs_that_fails_or_lists_nothing_touches_nothing(still, tmp_path):
    bundle = take(still, "unlisted")
    destroy("tank/still@unlisted", "attic/still@unlisted")
    zfs = tmp_path / "zfs"
    for script, word in (("echo no >&2; exit 1", "no"), ("exit 0", "lists nothing")):
        zfs.write_text(f"#!/bin/sh\n{script}\n")
        zfs.chmod(0o755)
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
        one_line_error(snaporch("prune", env=path), 8, "zfs list", word)
        assert bundle.is_dir()


def test_a_held_snapshot_keeps_its_bundle(still):
    bundle = take(still, "held")
    destroy("attic/still@held")
    must("zfs", "hold", "keep", "tank/still@held")
    assert run("zfs", "destroy", "tank/still@held").status != 0
    assert prune()["held"] == ("keep", "tank/still@held exists")
    must("zfs", "release", "keep", "tank/still@held")
    destroy("tank/still@held")
    assert prune()["held"][0] == "trash"
    assert not bundle.exists()


def test_renamed_replicated_and_destroyed(still):
    bundle = take(still, "wander")
    destroy("tank/still@wander")
    must("zfs", "rename", "attic/still", "attic/renamed")
    assert prune()["wander"] == ("keep", "its snapshot exists as attic/renamed@wander")
    must("sh", "-c", "zfs send attic/renamed@wander | zfs receive -u flash/replica")
    must("zfs", "rename", "attic/renamed", "attic/still")
    destroy("attic/still@wander")
    assert prune()["wander"] == ("keep", "its snapshot exists as flash/replica@wander")
    assert bundle.is_dir()
    must("zfs", "destroy", "-r", "flash/replica")
    assert prune()["wander"][0] == "trash"


# -- at the same time, and interrupted ----------------------------------------------------------


def test_a_run_under_way_keeps_all_of_its_domain(guest, tmp_path):
    lost = take(guest, "lost")
    destroy("tank/pruned@lost", "flash/pruned@lost")
    mark = guest.mark()
    with (
        stalled_compressor(tmp_path) as environment,
        started("snapshot", guest.name, env=environment) as process,
    ):
        wait_for_ram_phase()
        (partial,) = BUNDLES.glob("*/.*.partial")
        (journal,) = JOURNAL.glob("*.jsonl")
        assert partial.name == f".{journal.stem}.partial"
        outcome = snaporch("prune", guest.name, "--json")
        items = {Path(item["path"]): item for item in outcome.json["items"]}
        assert items[partial]["reason"] == "its run is under way"
        assert "held by snapshot" in items[lost]["reason"]
        assert partial.is_dir()
        assert lost.is_dir()
        process.kill()
        process.wait()
    wait_for(lambda: not list(JOURNAL.iterdir()), "the guardian to settle the run")
    assert not partial.exists()
    assert prune()["lost"][0] == "trash"
    guest.wait_count()
    guest.assert_undisturbed(mark)
    assert_clean(guest)


@pytest.mark.daily(1, "long")
def test_pruning_all_the_while_disturbs_no_snapshot(guest, tmp_path):
    before = set(zfs_snapshots())
    with config(tmp_path, AT_ONCE) as environment:
        loop = "while :; do snaporch prune >/dev/null || echo failed $?; done"
        pruner = subprocess.Popen(
            ["sh", "-c", loop],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        try:
            taken = [snapshot(guest) for _ in range(3)]
        finally:
            os.killpg(pruner.pid, signal.SIGKILL)
            complaints = pruner.communicate()[0]
    assert complaints == ""
    assert [entry["level"] for entry in taken] == ["ram"] * 3
    for entry in taken:
        assert entry in snaporch("list", guest.name, "--json").json
        assert entry["state"] == "complete"
    assert len(set(zfs_snapshots()) - before) == 6


def test_killed_between_rename_and_delete(still, tmp_path):
    bundle = take(still, "torn")
    destroy("tank/still@torn", "attic/still@torn")
    with config(tmp_path, AT_ONCE) as environment:
        killed = run(sys.executable, "-c", KILLED_BEFORE_DELETING, env=environment)
        assert killed.status == -signal.SIGKILL
        assert not bundle.exists()
        (remains,) = TRASH.iterdir()
        assert remains.name.endswith(".deleting")
        outcome = snaporch("prune", "--json", env=environment)
    (item,) = [item for item in outcome.json["items"] if item["kind"] == "remains"]
    assert (item["action"], item["reason"]) == ("delete", "its removal was interrupted")
    assert outcome.json["freed_bytes"] > 0
    assert list(TRASH.iterdir()) == []


# -- sanoid -------------------------------------------------------------------------------------


@pytest.mark.daily(1, "long")
def test_sanoid_prunes_down_to_zero_and_the_bundles_follow(guest, tmp_path):
    names = [f"autosnap_2025-06-01_{hour:02}:00:00_hourly" for hour in range(3)]
    bundles = [take(guest, name) for name in names]
    must("zfs", "hold", "keep", f"flash/pruned@{names[0]}")
    for dataset in ("tank/pruned", "flash/pruned"):
        sanoid(tmp_path, dataset)
        if dataset == "tank/pruned":
            assert all(bundle.is_dir() for bundle in bundles)
    left = [name for name in zfs_snapshots() if "autosnap" in name]
    assert left == [f"flash/pruned@{names[0]}"]
    assert [bundle.is_dir() for bundle in bundles] == [True, False, False]
    assert len(list(TRASH.iterdir())) == 2
    must("zfs", "release", "keep", left[0])
    sanoid(tmp_path, "flash/pruned")
    assert not bundles[0].exists()
    assert len(list(TRASH.iterdir())) == 3


def sanoid(tmp_path, dataset):
    """Make sanoid prune all its snapshots of the dataset.

    It deletes what was created in a second before the one in which it looks.
    """
    listing = must("zfs", "list", "-Hp", "-d1", "-t", "snapshot", "-o", "creation", dataset)
    newest = max(map(int, listing.split()))
    wait_for(lambda: int(time.time()) > newest, "the second after the newest snapshot's")
    conf = tmp_path / "sanoid"
    conf.mkdir(exist_ok=True)
    must("cp", "/usr/share/sanoid/sanoid.defaults.conf", str(conf))
    (conf / "sanoid.conf").write_text(SANOID_CONF.format(dataset=dataset, hook=HOOK))
    options = [f"--configdir={conf}", f"--cache-dir={tmp_path}", f"--run-dir={tmp_path}"]
    outcome = run("sanoid", *options, "--force-update", "--prune-snapshots", "--verbose")
    assert outcome.status == 0, outcome.err
    assert "Traceback" not in outcome.err
    assert "executing pruning_script" in outcome.out, outcome.out + outcome.err


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    "change",
    [
        {"SANOID_TARGET": ""},
        {"SANOID_TARGET": "tank/still;touch /var/tmp/owned"},
        {"SANOID_TARGET": "tank/still\ntank/still"},
        {"SANOID_TARGET": "x" * 65_536},
        {"SANOID_SNAPNAME": "$(touch /var/tmp/owned)"},
    ],
)
def test_a_hostile_environment_is_refused(still, change):
    environment = {"SANOID_SCRIPT": "prune", "SANOID_TARGET": "tank/still", "SANOID_SNAPNAME": "s"}
    outcome = run(*HOOK.split(), "prune", env=environment | change)
    one_line_error(outcome, 2, *change)
    assert not Path("/var/tmp/owned").exists()
