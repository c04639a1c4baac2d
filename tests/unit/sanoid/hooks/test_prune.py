"""sanoid's pruning hooks, whose environment may have any content."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from snaporch.errors import ConfigError, UsageError
from snaporch.sanoid.hooks.prune import pre_prune, prune
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot

DESTROYED = {"SANOID_SCRIPT": "prune", "SANOID_TARGET": "tank/web", "SANOID_SNAPNAME": "s1"}
HEAVY = ("typer", "rich", "pydantic", "tenacity", "libvirt", "libzfs_core", "subprocess")


@pytest.fixture
def host(world, tmp_path):
    """A guest on two pools with a bundle; the configuration is named in the environment."""
    config = tmp_path / "snaporch.toml"
    names = ("overlays", "bundles", "journal", "runtime")
    lines = [f"{name} = {json.dumps(str(getattr(world.paths, name)))}" for name in names]
    config.write_text("\n".join(["[paths]", *lines]) + "\n")
    world.prune = partial(prune, open_pool=lambda: world.pool)
    world.environment = DESTROYED | {"SNAPORCH_CONFIG": str(config)}
    domain = world.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    world.bundle = Path(take_snapshot(world.context, domain, SnapshotRequest("s1")).bundle)
    return world


def destroy(world, *names):
    for name in names:
        world.pool.destroy_snapshots([name])


def test_a_bundle_is_deleted_with_its_last_snapshot_and_not_before(host, capsys):
    destroy(host, "tank/web@s1")
    assert host.prune(host.environment) == 0
    assert host.bundle.is_dir()
    assert capsys.readouterr().out == ""
    destroy(host, "flash/web@s1")
    assert host.prune(host.environment | {"SANOID_TARGET": "flash/web"}) == 0
    assert not host.bundle.exists()
    (moved,) = (host.paths.bundles / ".trash").iterdir()
    assert moved.name.endswith(host.bundle.name)
    assert capsys.readouterr().out == (
        "web@s1  trashed: flash/web@s1 and tank/web@s1 no longer exist\n"
    )


def test_a_snapshot_that_still_exists_keeps_its_bundle(host):
    assert host.prune(host.environment) == 0
    assert host.bundle.is_dir()


def test_a_replica_elsewhere_keeps_it(host):
    host.pool.replicate("tank/web@s1", "backup/web")
    destroy(host, "tank/web@s1", "flash/web@s1")
    assert host.prune(host.environment) == 0
    assert host.bundle.is_dir()


def test_only_named_datasets_are_listed_while_a_snapshot_is_left(host):
    asked = []
    host.hooks.at["pool.snapshot_listing"] = lambda: asked.append("all")
    destroy(host, "tank/web@s1")
    host.prune(host.environment)
    assert asked == []


@pytest.mark.parametrize("change", [{"SANOID_TARGET": "tank/home"}, {"SANOID_SNAPNAME": "s2"}])
def test_zfs_is_not_asked_about_a_snapshot_that_no_bundle_names(host, change):
    def unwanted():
        raise AssertionError

    assert prune(host.environment | change, unwanted) == 0
    assert host.bundle.is_dir()


def test_sanoid_2_0_3_sets_no_script(host):
    destroy(host, "tank/web@s1", "flash/web@s1")
    environment = {k: v for k, v in host.environment.items() if k != "SANOID_SCRIPT"}
    assert host.prune(environment) == 0
    assert not host.bundle.exists()


def test_before_a_snapshot_is_destroyed_nothing_is_done(host):
    environment = {k: v for k, v in host.environment.items() if k != "SANOID_SCRIPT"}
    host.hooks.log.clear()
    assert pre_prune(environment) == 0
    assert host.bundle.is_dir()
    assert host.hooks.log == []


def test_the_trash_is_emptied_too(host):
    destroy(host, "tank/web@s1", "flash/web@s1")
    host.prune(host.environment)
    trash = host.paths.bundles / ".trash"
    ages = host.paths.bundles / "ages.json"
    document = json.loads(ages.read_bytes())
    document["seconds"] = dict.fromkeys(document["seconds"], 3 * 86_400)
    ages.write_text(json.dumps(document))
    guest = host.hypervisor.domain("web")
    bundle = Path(take_snapshot(host.context, guest, SnapshotRequest("s2")).bundle)
    destroy(host, "tank/web@s2", "flash/web@s2")
    host.prune(host.environment | {"SANOID_SNAPNAME": "s2"})
    assert [path.name.endswith(bundle.name) for path in trash.iterdir()] == [True]


HOSTILE = [
    "",
    " ",
    "tank/web,tank/web",
    "tank/web\ntank/web",
    "tank/web\n",
    "tank/web\0",
    "$(touch /tmp/x)",
    "; rm -rf /",
    "`id`",
    "tank/../web",
    "/tank/web",
    "tank//web",
    "tank/web/",
    "tank/web@s1",
    "tank/web ",
    "../../etc",
    "-r",
    "tänk/wéb",
    "\udcff\udcfe",
    "tank/" + "x" * 65_536,
    "%s%n",
    "tank/web*",
]


@pytest.mark.parametrize("function", [prune, pre_prune])
@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_dataset_is_refused_in_one_short_line(host, function, value):
    before = sorted(host.root.rglob("*"))
    with pytest.raises(UsageError) as refused:
        function(host.environment | {"SANOID_TARGET": value})
    line = refused.value.line()
    assert line.startswith("SANOID_TARGET=")
    assert "\n" not in line
    assert len(line) < 200
    assert sorted(host.root.rglob("*")) == before


@pytest.mark.parametrize("function", [prune, pre_prune])
@pytest.mark.parametrize("value", [*(h for h in HOSTILE if h != "-r"), "s1,s1", "a/b", ".", ".."])
def test_a_hostile_snapshot_is_refused(host, function, value):
    with pytest.raises(UsageError, match="SANOID_SNAPNAME="):
        function(host.environment | {"SANOID_SNAPNAME": value})
    assert host.bundle.is_dir()


@pytest.mark.parametrize("script", ["pre", "post", "", "prune\n"])
def test_another_phase_is_refused(host, script):
    with pytest.raises(UsageError, match="SANOID_SCRIPT="):
        prune(host.environment | {"SANOID_SCRIPT": script})


@pytest.mark.parametrize("function", [prune, pre_prune])
def test_an_empty_environment_is_refused(function):
    with pytest.raises(UsageError, match="SANOID_TARGET=''"):
        function({})


@pytest.mark.parametrize("text", ["[paths", "[paths]\nbundles = 3", "paths = 1", "\xff"])
def test_an_invalid_configuration_is_reported_by_the_schema(host, tmp_path, text):
    config = tmp_path / "odd.toml"
    config.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"odd\.toml"):
        prune(host.environment | {"SNAPORCH_CONFIG": str(config)})


def test_a_hook_that_has_nothing_to_do_loads_nothing_heavy(host, tmp_path):
    """sanoid calls it for every snapshot that it destroys, of any dataset."""
    code = (
        "import os, sys\n"
        "from snaporch.sanoid.hooks.prune import prune\n"
        "assert prune(os.environ) == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    environment = os.environ | host.environment | {"SANOID_TARGET": "tank/home"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
