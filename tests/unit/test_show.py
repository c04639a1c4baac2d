import json
import subprocess
from pathlib import Path

import pytest
from fakes import manifests

from snaporch.clone.clone import CloneRequest, clone
from snaporch.model import DomainState, VerificationResult
from snaporch.restore.source import IncompleteError, complete_source, find_records
from snaporch.show import describe, provenance
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PoolError


def shown(world, text="web@s1"):
    return describe(world.context, find_records(world.context, text)[-1])


class Tools:
    """``zfs`` and ``virsh`` of a host, which record their commands."""

    def __init__(self, directory, world):
        self.directory, self.done = directory / "bin", directory / "done"
        self.directory.mkdir()
        newer = self.directory / "newer"
        self._write(
            "zfs",
            "for last; do :; done",
            "case $1 in",
            'get) case "$5" in',
            *(f"'{s.full_name}') [ $4 = guid ] && echo {s.guid};;" for s in world.pool.snapshots()),
            f'esac; [ "$4" = guid ] || sed -n "s|^$last ||p" {newer} | tr , "\\n" ;;',
            f"""list) sed -n "s|^\\($last@[^ ]*\\) .*|1\t\\1|p" {newer} ;;""",
            f'*) echo "zfs $*" >>{self.done} ;;',
            "esac",
            "exit 0",
        )
        self.answers("")
        self.has_newer({})

    def has_newer(self, snapshots):
        """Set the newer snapshots, each with its number of holds and its clone."""
        lines = (f"{name} {answer}\n" for name, answer in snapshots.items())
        (self.directory / "newer").write_text("".join(lines))

    def _write(self, name, *lines):
        program = self.directory / name
        program.write_text("\n".join(["#!/bin/sh", *lines, ""]))
        program.chmod(0o755)

    def answers(self, running, status=0):
        """Set the output of ``virsh list --uuid``, or that libvirt does not answer."""
        noted = f'echo "virsh $*" >>{self.done}'
        listing = f"[ $1 != list ] || {{ echo {running}; exit {status}; }}"
        self._write("virsh", listing, noted)

    def paste(self, lines):
        """Run the lines; return the recorded commands."""
        environment = {"PATH": f"{self.directory}:/usr/bin:/bin"}
        subprocess.run(["sh"], input="\n".join(lines), text=True, env=environment, check=False)
        return self.done.read_text().splitlines() if self.done.exists() else []


@pytest.fixture
def tools(tmp_path_factory, world):
    return lambda: Tools(tmp_path_factory.mktemp("tools"), world)


@pytest.mark.parametrize("running", [True, False])
def test_restoring_by_hand(story, world, tools, running):
    bundle, uuid = story.record.bundle, story.domain.uuid
    host = tools()
    host.answers(uuid if running else "")
    assert host.paste(shown(world).by_hand) == [
        *([f"virsh destroy {uuid}"] if running else []),
        "zfs rollback flash/web@s1",
        "zfs rollback tank/web@s1",
        f"virsh define {bundle}/domain.xml",
        f"virsh managedsave-remove {uuid}",
        f"virsh restore {bundle}/ram.save --running",
    ]


def test_the_commands_end_with_the_first_that_fails(story, world, tools):
    """RAM of the snapshot is not resumed on the current disks."""
    host = tools()
    zfs = host.directory / "zfs"
    zfs.write_text(zfs.read_text().replace("exit 0", "[ $1 != rollback ]"))
    assert host.paste(shown(world).by_hand) == ["zfs rollback flash/web@s1"]


def test_the_commands_change_nothing_where_libvirt_does_not_answer(story, world, tools):
    host = tools()
    host.answers("", status=1)
    assert host.paste(shown(world).by_hand) == []


def test_the_commands_change_nothing_without_the_bundle(story, world, tools):
    lines = shown(world).by_hand
    (Path(story.record.bundle) / "ram.save").unlink()
    assert tools().paste(lines) == []


def test_the_commands_change_nothing_if_a_snapshot_was_replaced(story, world, tools):
    lines = shown(world).by_hand
    world.pool.destroy_snapshots(["tank/web@s1"])
    world.pool.snapshot(["tank/web@s1"], {})
    assert tools().paste(lines) == []


@pytest.mark.parametrize(("held", "runs"), [("0,-", True), ("1,-", False), ("0,tank/copy", False)])
def test_the_commands_change_nothing_if_a_newer_snapshot_cannot_be_destroyed(
    story, world, tools, held, runs
):
    story.snapshot("s2")
    host = tools()
    host.has_newer({"flash/web@s2": "0,-", "tank/web@s2": held})
    assert bool(host.paste(shown(world, "web@s1").by_hand)) is runs


def test_newer_snapshots_are_named_before_they_are_destroyed(story, world):
    story.snapshot("s2")
    lines = shown(world).by_hand
    index = lines.index("zfs rollback -r tank/web@s1")
    assert lines[index - 1] == "echo destroying tank/web@s2"
    (look,) = [line for line in lines if line.startswith("look tank/web@s1")]
    assert look.endswith(" tank/web@s2")


def test_a_paused_guest_is_resumed_paused(make_story, world):
    make_story(state=DomainState.PAUSED)
    assert shown(world).by_hand[-2].endswith(" --paused")


@pytest.mark.parametrize(
    ("state", "last"), [(DomainState.OFF, "managedsave-remove"), (None, "start")]
)
def test_without_ram_it_is_booted_or_stays_off(world, state, last):
    world.add_guest("cold", state=state or DomainState.RUNNING)
    level = "crash" if state is None else None
    take_snapshot(world.context, world.hypervisor.domain("cold"), SnapshotRequest("s1", level))
    assert shown(world, "cold@s1").by_hand[-2].split()[1] == last


def test_uefi_variables_are_put_back_with_their_owner(world, tmp_path):
    variables = tmp_path / "my VARS.fd"
    variables.write_bytes(b"x")
    variables.chmod(0o640)
    world.add_guest("efi", nvram=str(variables))
    record = take_snapshot(world.context, world.hypervisor.domain("efi"), SnapshotRequest("s1"))
    (line,) = [line for line in shown(world, "efi@s1").by_hand if line.startswith("install")]
    owner = variables.stat()
    assert line == (
        f"install -o {owner.st_uid} -g {owner.st_gid} -m 640 {record.bundle}/nvram.fd '{variables}'"
    )


def test_another_libvirt_is_named(story, world):
    config = world.context.config.model_copy(update={"libvirt_uri": "qemu:///session"})
    world.context.config = config
    lines = [line for line in shown(world).by_hand if "virsh" in line]
    assert len(lines) == 5
    assert all("virsh -c qemu:///session " in line for line in lines)


@pytest.mark.parametrize("what", ["snapshot", "part", "bundle"])
def test_an_incomplete_snapshot_has_no_commands_by_hand(story, world, what):
    bundle = Path(story.record.bundle)
    if what == "snapshot":
        world.pool.destroy_snapshots(["tank/web@s1"])
    elif what == "part":
        (bundle / "ram.save").unlink()
    else:
        bundle.rename(bundle.with_name("elsewhere"))
    description = shown(world)
    assert description.by_hand == ()
    if what == "snapshot":
        (gone,) = [d for d in description.datasets if d.name == "tank/web@s1"]
        assert (gone.used, gone.referenced) == (None, None)


def test_clones_are_named(story, world):
    world.pool.clone("tank/web@s1", "tank/copy")
    assert shown(world).clones == ("tank/copy",)


def test_the_document(story, world):
    document = json.loads(json.dumps(shown(world).as_json()))
    assert document["snapshot"] == "s1"
    assert document["manifest"]["run"] == story.record.run
    assert [d["name"] for d in document["snapshots"]] == ["flash/web@s1", "tank/web@s1"]
    assert all(d["guid"].isdecimal() for d in document["snapshots"])
    assert document["by_hand"] == list(shown(world).by_hand)


def test_custody_shows_the_verification(story, world):
    assert dict(provenance(story.record, None))["verified"] == "never"
    text = "2026-01-02T03:04:05Z passed resumed"
    world.pool.set_properties(["tank/web@s1", "flash/web@s1"], {"snaporch:verified": text})
    description = shown(world)
    assert VerificationResult.parse(text) == description.record.verified
    rows = dict(provenance(description.record, description.manifest))
    assert rows["verified"] == "2026-01-02T03:04:05Z passed, resumed"
    assert rows["made by"] == "snaporch 0.0"
    text = "2026-01-02T03:04:05Z failed resumed steps:script"
    world.pool.set_properties(["tank/web@s1", "flash/web@s1"], {"snaporch:verified": text})
    rows = dict(provenance(shown(world).record, None))
    assert rows["verified"] == "2026-01-02T03:04:05Z failed, resumed; failed in: script"
    earlier = "passed resumed@2026-01-01T00:00:00Z disks@2025-12-31T00:00:00Z"
    text = f"2026-01-02T03:04:05Z {earlier}"
    world.pool.set_properties(["tank/web@s1", "flash/web@s1"], {"snaporch:verified": text})
    assert dict(provenance(shown(world).record, None))["verified"] == (
        "2026-01-02T03:04:05Z passed, resumed on 2026-01-01T00:00:00Z, "
        "disks read on 2025-12-31T00:00:00Z"
    )


def test_a_pool_that_fails_is_an_error(story, world):
    def fail():
        raise PoolError("zfs list", "I/O error")

    world.hooks.at["pool.snapshots"] = fail
    with pytest.raises(PoolError):
        shown(world)


# -- one instant, several names -----------------------------------------------------------------


@pytest.fixture
def hourly(story, world):
    """A second name for the same instant, as sanoid gives them."""
    known = {s.dataset: s for s in world.pool.snapshots() if s.name == "s1"}
    for dataset, first in known.items():
        marks = {f"snaporch:{key}": value for key, value in first.properties.items()}
        world.pool.write(dataset, b"first")
        world.pool.snapshot([f"{dataset}@hourly"], marks)
    manifest = Path(story.record.bundle) / "manifest.json"
    document = manifests.load(manifest)
    document["snapshots"] += [
        {"dataset": s.dataset, "name": s.name, "guid": s.guid, "createtxg": s.createtxg}
        for s in world.pool.snapshots()
        if s.name == "hourly"
    ]
    manifests.store(manifest, document)
    return story


def test_each_dataset_is_rolled_back_once_to_the_latest_of_its_names(hourly, world):
    for name in ("s1", "hourly"):
        lines = shown(world, f"web@{name}").by_hand
        assert [line for line in lines if "rollback" in line] == [
            "zfs rollback flash/web@hourly",
            "zfs rollback tank/web@hourly",
        ]


def test_each_name_is_shown_with_its_own_snapshots(hourly, world):
    for name in ("s1", "hourly"):
        names = [dataset.name for dataset in shown(world, f"web@{name}").datasets]
        assert names == [f"flash/web@{name}", f"tank/web@{name}"]


def test_another_name_of_the_same_instant_is_used(hourly, world):
    world.pool.destroy_snapshots(["flash/web@hourly"])
    description = shown(world, "web@hourly")
    assert [d.name for d in description.datasets] == ["flash/web@s1", "tank/web@hourly"]
    source = complete_source(world.context, description.record)
    made = clone(world.context, source, CloneRequest("test", resumed=True))
    origins = world.pool.origins(list(made.datasets.values()))
    assert set(origins.values()) == {"flash/web@s1", "tank/web@hourly"}


def test_without_a_snapshot_of_each_dataset_it_is_incomplete(hourly, world):
    for name in ("s1", "hourly"):
        world.pool.destroy_snapshots([f"flash/web@{name}"])
    description = shown(world, "web@hourly")
    assert description.by_hand == ()
    assert [d.guid is None for d in description.datasets] == [True, False]
    with pytest.raises(IncompleteError, match="flash/web@hourly is missing"):
        complete_source(world.context, description.record)
