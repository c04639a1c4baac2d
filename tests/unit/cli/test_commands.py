import os
import shutil
import sys
from contextlib import ExitStack, suppress

import pytest
from fakes.domain_xml import DiskSpec
from fakes.hooks import failing
from fakes.hypervisor import Agent

from snaporch import default_paths
from snaporch.cli import main
from snaporch.errors import ExitCode, UnavailableError
from snaporch.fence import Fence
from snaporch.hypervisor import HypervisorError
from snaporch.interrupt import Interrupt
from snaporch.locks import domain_lock, readers_lock
from snaporch.model import DomainState
from snaporch.verify.verify import VERIFICATION


@pytest.fixture
def taken(host, snaporch):
    """A guest with a snapshot ``s1``."""
    host.add_guest()
    answer = snaporch("snapshot", "web", "--name", "s1", "--quiet")
    assert answer.code == 0
    host.pool.write("tank/web", b"now")
    return host


# -- snapshot -----------------------------------------------------------------------------------


def test_a_snapshot_prints_one_line_of_result(host, snaporch):
    host.add_guest()
    answer = snaporch("snapshot", "web", "--name", "s1")
    assert answer.code == 0
    assert answer.out.startswith("web@s1  ram  complete  paused ")
    assert len(answer.out.splitlines()) == 1
    assert "saving RAM" in answer.err


def test_quiet_prints_only_the_result(host, snaporch):
    host.add_guest()
    assert snaporch("snapshot", "web", "--quiet").err == ""


def test_one_domain_as_json_is_an_object(host, snaporch):
    host.add_guest()
    answer = snaporch("snapshot", "web", "--name", "s1", "--json")
    assert answer.json["snapshot"] == "s1"
    assert answer.json["level"] == "ram"
    assert answer.err == ""


def test_several_domains_as_json_are_an_array(host, snaporch):
    host.add_guest()
    host.add_guest("mail", state=DomainState.OFF)
    answer = snaporch("snapshot", "web", "mail", "--json")
    assert [document["domain"] for document in answer.json] == ["web", "mail"]


def test_a_domain_named_twice_is_snapshotted_once(host, snaporch):
    domain = host.add_guest()
    answer = snaporch("snapshot", "web", "web", domain.uuid)
    assert len(answer.out.splitlines()) == 1


def test_a_misspelt_name_stops_all_snapshots(host, snaporch):
    host.add_guest()
    answer = snaporch("snapshot", "web", "wbe")
    assert answer.code == ExitCode.NOT_FOUND
    assert answer.err == "snaporch: wbe: no such domain\n"
    assert host.hooks.log == []


def test_one_failure_stops_no_other_snapshot(host, snaporch):
    host.add_guest("first")
    host.add_guest("second")
    host.guest("first").job = "migration out"
    answer = snaporch("snapshot", "first", "second", "--quiet")
    assert answer.code == ExitCode.REFUSED
    assert answer.out.startswith("second@")
    assert "first: libvirt is busy with it" in answer.err


def test_a_failed_run_is_exit_code_8(host, snaporch):
    host.add_guest()
    host.hooks.at["capture.switched"] = failing(HypervisorError("web", "no"))
    answer = snaporch("snapshot", "web", "--quiet")
    assert answer.code == ExitCode.FAILED
    assert answer.out == ""
    assert answer.err.splitlines()[-1].startswith("snaporch: web: ")


def test_an_interrupted_run_is_128_and_the_signal(host, snaporch):
    host.add_guest()
    host.hooks.at["capture.writing"] = lambda: os.kill(os.getpid(), 15)
    answer = snaporch("snapshot", "web", "--quiet")
    assert answer.code == 128 + 15
    assert "stopped by SIGTERM" in answer.err


def test_after_a_signal_that_comes_too_late_this_domain_is_finished_and_no_other_begun(
    host, snaporch
):
    host.add_guest("first")
    host.add_guest("second")
    host.hooks.at["pool.snapshot"] = lambda: os.kill(os.getpid(), 2)
    answer = snaporch("snapshot", "first", "second", "--quiet")
    assert answer.code == 128 + 2
    assert answer.out.startswith("first@")
    assert [name.split("@")[0] for name in host.pool.names()] == ["tank/first"]


def test_a_dry_run_in_json(host, snaporch):
    host.add_guest(disks={"vda": "tank/web"}, more=(DiskSpec("sda", None, device="cdrom"),))
    host.add_guest("mail", disks={"vda": "tank/mail"})
    document = snaporch("snapshot", "web", "--name", "s1", "--dry-run", "--json").json
    image = str(host.root / "zfs" / "tank" / "web" / "web-vda.img")
    assert document["disks"] == [
        {"target": "vda", "path": image, "format": "raw", "dataset": "tank/web"}
    ]
    assert [out["target"] for out in document["left_out"]] == ["sda"]
    assert (document["domain"], document["snapshot"], document["level"]) == ("web", "s1", "ram")
    several = snaporch("snapshot", "web", "mail", "--dry-run", "--json").json
    assert [each["domain"] for each in several] == ["web", "mail"]
    assert untouched(host)


@pytest.mark.parametrize("level", ["ram", "quiesced", "paused", "crash"])
def test_a_level_can_be_requested(host, snaporch, level):
    host.add_guest(agent=Agent.ANSWERS)
    answer = snaporch("snapshot", "web", "--level", level, "--json")
    assert (answer.code, answer.json["level"]) == (0, level)
    assert host.is_as_it_was()


def test_an_unknown_level_is_wrong_usage(host, snaporch):
    host.add_guest()
    answer = snaporch("snapshot", "web", "--level", "best")
    assert answer.code == ExitCode.USAGE
    assert "quiesced" in answer.err
    assert host.hooks.log == []


def test_an_unavailable_level_is_refused_with_the_next_step(host, snaporch):
    host.add_guest()
    answer = snaporch("snapshot", "web", "--level", "quiesced")
    assert answer.code == ExitCode.REFUSED
    (line,) = answer.err.splitlines()
    assert "no guest agent is connected; install qemu-guest-agent" in line
    assert host.leftovers() == []


def test_a_level_cannot_be_mistaken_for_a_domain(host, snaporch):
    host.add_guest("crash")
    answer = snaporch("snapshot", "--level", "crash", "crash", "--quiet")
    assert answer.out.startswith("crash@")


# -- snapshot --dry-run -------------------------------------------------------------------------


def untouched(host):
    """Whether nothing was done and no file was made."""
    made = sorted(path.name for path in host.root.iterdir())
    return host.hooks.log == [] and made == ["proc", "snaporch.toml", "zfs"] and host.guarded == []


def test_a_dry_run_prints_the_plan_and_changes_nothing(host, snaporch):
    host.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    answer = snaporch("snapshot", "web", "--name", "s1", "--dry-run")
    images = [str(host.root / "zfs" / pool / "web") for pool in ("tank", "flash")]
    assert answer.code == 0
    assert answer.out.splitlines() == [
        "web@s1  ram, by overlay",
        f"  vda  {images[0]}/web-vda.img (raw) on tank/web",
        f"  vdb  {images[1]}/web-vdb.img (raw) on flash/web",
        "  RAM: 19.5 KiB in use; how fast it changes could not be measured",
    ]
    assert untouched(host)


def test_a_dry_run_forecasts_how_saving_ram_ends(host, snaporch):
    guest = host.guest(host.add_guest().name)
    guest.dirty_rate = 35
    said = snaporch("snapshot", "web", "--dry-run").out
    assert "  RAM: 19.5 KiB in use, 35 MiB of it change a second\n    how fast" in said
    document = snaporch("snapshot", "web", "--dry-run", "--json").json
    assert document["ram"]["changed_mib"] == 35
    guest.dirty_rate, guest.state, guest.live = None, DomainState.OFF, None
    assert snaporch("snapshot", "web", "--dry-run", "--json").json["ram"] is None


@pytest.mark.parametrize("level", ["ram", "quiesced", "paused", "crash"])
def test_a_dry_run_of_a_level(host, snaporch, level):
    host.add_guest(agent=Agent.ANSWERS)
    answer = snaporch("snapshot", "web", "--dry-run", "--level", level)
    assert f"  {level}, by " in answer.out
    assert untouched(host)


def test_a_dry_run_of_several(host, snaporch):
    host.add_guest()
    host.add_guest("mail", state=DomainState.OFF)
    answer = snaporch("snapshot", "web", "mail", "--dry-run")
    assert [line.split("  ")[1] for line in answer.out.splitlines() if "@" in line] == [
        "ram, by overlay",
        "off, by off",
    ]
    assert untouched(host)


def test_a_dry_run_prints_a_downgrade_and_the_disks_left_out(host, snaporch, tmp_path):
    host.add_guest(more=(DiskSpec("sda", None, device="cdrom"),))
    with (tmp_path / "snaporch.toml").open("a") as config:
        config.write('level = "quiesced"\non_unavailable = "crash"\n')
    answer = snaporch("snapshot", "web", "--dry-run")
    assert "crash, by crash" in answer.out
    assert "no quiesced snapshot (no guest agent is connected): taking crash instead" in answer.out
    assert "left out: sda: removable (cdrom)" in answer.out
    assert untouched(host)


def test_a_dry_run_is_refused_as_the_run_would_be(host, snaporch):
    host.add_guest()
    host.guest().job = "migration out"
    answer = snaporch("snapshot", "web", "--dry-run")
    assert answer.code == ExitCode.REFUSED
    assert untouched(host)


def test_a_dry_run_with_a_misspelt_name(host, snaporch):
    host.add_guest()
    assert snaporch("snapshot", "wbe", "--dry-run").code == ExitCode.NOT_FOUND


# -- list ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["list"], ["show", "web@s1"], ["plan"], ["status"]])
def test_commands_that_only_read_do_not_import_libzfs_core(taken, snaporch, command_host, words):
    """The import of libzfs_core takes a fifth of the time of ``snaporch list``."""
    asked = []

    def opened(**how):
        asked.append(how)
        return taken.pool

    command_host.open_pool = opened
    snaporch(*words)
    assert asked == [{"read_only": True}]


def test_list_shows_the_snapshots(taken, snaporch):
    answer = snaporch("list")
    assert answer.code == 0
    assert [line.split()[:2] for line in answer.out.splitlines()] == [
        ["DOMAIN", "SNAPSHOT"],
        ["web", "s1"],
    ]


def test_list_as_json_is_always_an_array(taken, snaporch):
    assert [document["snapshot"] for document in snaporch("list", "--json").json] == ["s1"]
    taken.add_guest("mail")
    assert snaporch("list", "mail", "--json").json == []


@pytest.mark.parametrize("by", ["name", "uuid"])
def test_list_of_one_domain(taken, snaporch, by):
    taken.add_guest("mail")
    assert snaporch("snapshot", "mail", "--quiet").code == 0
    wanted = getattr(taken.hypervisor.domain("web"), by)
    assert [d["domain"] for d in snaporch("list", wanted, "--json").json] == ["web"]


def test_list_of_a_domain_that_was_renamed_has_all_of_it(taken, snaporch):
    guest = taken.guest("web")
    guest.name = "shop"
    for kind in ("live", "inactive"):
        setattr(guest, kind, getattr(guest, kind).replace("<name>web<", "<name>shop<"))
    assert [d["domain"] for d in snaporch("list", "shop", "--json").json] == ["web"]
    assert snaporch("snapshot", "shop", "--name", "s2", "--quiet").code == 0
    for name in ("shop", "web"):
        found = [(d["domain"], d["snapshot"]) for d in snaporch("list", name, "--json").json]
        assert found == [("web", "s1"), ("shop", "s2")]


def test_list_without_snapshots_prints_the_command_that_takes_one(host, snaporch):
    host.add_guest()
    answer = snaporch("list", "web")
    assert (answer.code, answer.out) == (0, "")
    assert "take one: snaporch snapshot" in answer.err


def test_list_of_a_misspelt_domain_is_not_found(taken, snaporch):
    assert snaporch("list", "wbe").code == ExitCode.NOT_FOUND


def test_list_keeps_snapshots_of_a_domain_that_is_undefined(taken, snaporch):
    taken.hypervisor.guests.clear()
    assert snaporch("list", "web", "--json").json[0]["domain"] == "web"


# -- restore ------------------------------------------------------------------------------------


def test_a_restore_with_yes(taken, snaporch):
    answer = snaporch("restore", "web@s1", "--yes", "--quiet")
    assert answer.code == 0
    assert answer.out == "web@s1  restored, running, resumed from RAM\n"
    assert taken.pool.read("tank/web") == b"first"


def test_a_restore_as_json(taken, snaporch):
    document = snaporch("restore", "web@s1", "--yes", "--json").json
    assert (document["snapshot"], document["resumed"]) == ("s1", True)


def test_a_restore_without_a_terminal_needs_yes(taken, snaporch, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    answer = snaporch("restore", "web@s1")
    assert answer.code == ExitCode.REFUSED
    assert "--yes" in answer.err
    assert "what was written to tank/web since the snapshot" in answer.err
    assert taken.pool.read("tank/web") == b"now"


def state_of(host):
    """What a command that changes nothing leaves as it is."""
    files = {path: path.read_bytes() for path in host.root.rglob("*") if path.is_file()}
    return list(host.hooks.log), host.pool.names(), files


def test_a_dry_run_of_a_restore_prints_the_plan_and_changes_nothing(taken, snaporch):
    guest = taken.guest()
    guest.inactive = guest.inactive.replace("</name>", "</name><title>new</title>")
    before = state_of(taken)
    answer = snaporch("restore", "web@s1", "--dry-run")
    assert (answer.code, answer.err) == (0, "web  checking the bundle's SHA-256\n")
    lines = answer.out.splitlines()
    assert lines[:4] == [
        "restoring web@s1:",
        "  tank/web is rolled back to tank/web@s1",
        "  the guest is resumed from RAM",
        "restoring web@s1 discards:",
    ]
    assert "  the state of the running guest web, which will be stopped" in lines
    assert "  what was written to tank/web since the snapshot (0 KiB)" in lines
    assert any(line.startswith("      - ") and "<title>new" in line for line in lines)
    assert lines[-1] == "  (a copy of the disks is kept; snaporch undo brings it back)"
    assert state_of(taken) == before


@pytest.mark.parametrize(
    ("option", "line", "ending", "paused"),
    [
        ("--cold", "the guest is booted from its disks", "boot", False),
        ("--paused", "the guest is resumed from RAM, and left paused", "resume", True),
        ("--disks-only", "the guest is left off", "off", False),
    ],
)
def test_a_dry_run_of_a_restore_foresees_how_the_guest_starts(
    taken, snaporch, option, line, ending, paused
):
    assert f"  {line}\n" in snaporch("restore", "web@s1", "--dry-run", option).out
    document = snaporch("restore", "web@s1", "--dry-run", option, "--json").json
    assert (document["ending"], document["paused"]) == (ending, paused)


def test_a_dry_run_of_a_restore_in_json(taken, snaporch):
    assert snaporch("snapshot", "web", "--name", "s2", "--quiet").code == 0
    taken.pool.snapshot(["tank/web@gone"], {})
    taken.pool.bookmark("tank/web@gone", "lost")
    taken.pool.destroy_snapshots(["tank/web@gone"])
    before = state_of(taken)
    answer = snaporch("restore", "web@s1", "--dry-run", "--json", "--discard-newer")
    assert (answer.code, answer.err) == (0, "")
    document = answer.json
    assert document["rolled_back"] == [
        {"dataset": "tank/web", "snapshot": "tank/web@s1", "written_bytes": 3}
    ]
    assert document["destroyed"] == ["tank/web@s2", "tank/web#lost"]
    assert document["lost_bookmarks"] == ["tank/web#lost"]
    assert "tank/web@s2, which is newer" in document["discarded"]
    assert (document["domain"], document["snapshot"]) == ("web", "s1")
    assert (document["dry_run"], document["stops_guest"], document["safety_copy"]) == 3 * (True,)
    assert (document["definition"], document["refusals"]) == ([], [])
    assert state_of(taken) == before


def test_a_dry_run_of_a_restore_names_every_refusal_beside_the_plan(taken, snaporch):
    assert snaporch("snapshot", "web", "--name", "s2", "--quiet").code == 0
    taken.pool.hold(["tank/web@s2"], "backup")
    before = state_of(taken)
    answer = snaporch("restore", "web@s1", "--dry-run", "--quiet")
    assert answer.code == ExitCode.REFUSED
    assert "tank/web is rolled back to tank/web@s1" in answer.out
    consent, held = answer.err.splitlines()
    assert "newer snapshots would be destroyed: tank/web@s2; use --discard-newer" in consent
    assert "newer snapshots are held: tank/web@s2" in held
    document = snaporch("restore", "web@s1", "--dry-run", "--json").json
    assert [each["exit_code"] for each in document["refusals"]] == 2 * [ExitCode.REFUSED]
    assert document["refusals"][0]["step"] == "use --discard-newer to destroy them"
    assert state_of(taken) == before


def test_a_dry_run_of_a_restore_leaves_an_interrupted_snapshot_to_recovery(taken, snaporch):
    taken.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "no"))
    assert snaporch("snapshot", "web", "--quiet").code == ExitCode.ATTENTION
    del taken.hooks.at["hypervisor.commit"]
    before = state_of(taken)
    answer = snaporch("restore", "web@s1", "--dry-run", "--discard-newer")
    assert "a snapshot was interrupted, and would be recovered first" in answer.err
    assert state_of(taken) == before


@pytest.mark.parametrize(
    ("words", "code"),
    [(["web@s9"], ExitCode.NOT_FOUND), (["web@s1", "--cold", "--paused"], ExitCode.USAGE)],
)
def test_a_dry_run_without_a_plan_is_one_line(taken, snaporch, words, code):
    answer = snaporch("restore", *words, "--dry-run", "--json")
    assert (answer.code, answer.out, len(answer.err.splitlines())) == (code, "", 1)


def test_a_dry_run_of_a_restore_reads_the_bundle_and_finds_what_cannot_be_kept(taken, snaporch):
    (ram,) = taken.paths.bundles.glob("*/2*/ram.save")
    data = bytearray(ram.read_bytes())
    data[-1] ^= 1
    ram.write_bytes(data)
    guest = taken.guest()
    guest.live = guest.live.replace("</devices>", "<hostdev type='pci'/></devices>")
    answer = snaporch("restore", "web@s1", "--dry-run", "--keep-running-state", "--quiet")
    assert answer.code == ExitCode.REFUSED
    damaged, kept = answer.err.splitlines()
    assert "ram.save" in damaged
    assert "its running state cannot be kept" in kept


@pytest.mark.parametrize(
    ("said", "code", "content"),
    [
        ("y\n", 0, b"first"),
        ("YES\n", 0, b"first"),
        ("n\n", ExitCode.REFUSED, b"now"),
        ("\n", ExitCode.REFUSED, b"now"),
        ("", ExitCode.REFUSED, b"now"),
    ],
)
def test_a_restore_on_a_terminal_asks(taken, snaporch, monkeypatch, said, code, content):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: said, raising=False)
    answer = snaporch("restore", "web@s1")
    assert answer.code == code
    assert "Go on? [y/N]" in answer.err
    assert taken.pool.read("tank/web") == content


@pytest.fixture
def prompt_open(monkeypatch):
    """Actions to run while the prompt waits for its answer, which is then yes."""
    meanwhile = []

    def answer():
        for act in meanwhile:
            act()
        return "y\n"

    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", answer, raising=False)
    return meanwhile


def test_a_prompt_does_not_hold_the_lock_of_the_domain(taken, snaporch, prompt_open):
    prompt_open.append(lambda: lock(taken, "web"))
    assert snaporch("restore", "web@s1").code == 0
    assert taken.pool.read("tank/web") == b"first"


def lock(world, name):
    uuid = world.hypervisor.domain(name).uuid
    with domain_lock(default_paths.LOCKS, name, uuid, "test", wait=0, interrupt=Interrupt()):
        pass


def newer(world):
    world.pool.snapshot(["tank/web@hourly"], {})


def shut_off(world):
    world.hypervisor.destroy(world.guest().uuid)


def restarted(world):
    world.guest().boot += 1


def another_of_that_name(world):
    found = world.pool.snapshots(["tank/web"])[-1]
    world.pool.destroy_snapshots([found.full_name])
    properties = {f"snaporch:{key}": value for key, value in found.properties.items()}
    world.pool.snapshot([found.full_name], properties)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (newer, "newer snapshots"),
        (shut_off, "the guest"),
        (restarted, "the guest"),
        (another_of_that_name, ""),  # the manifest has the GUID
    ],
)
def test_a_restore_is_refused_if_anything_changed_since_it_was_shown(
    taken, snaporch, prompt_open, change, words
):
    prompt_open.append(lambda: change(taken))
    answer = snaporch("restore", "web@s1", "--discard-newer")
    assert answer.code == ExitCode.REFUSED
    assert f"changed since it was shown: {words}; nothing" in answer.err or not words
    assert taken.pool.read("tank/web") == b"now"


def test_a_restore_of_a_snapshot_that_does_not_exist(taken, snaporch):
    answer = snaporch("restore", "web@s9", "--yes")
    assert answer.code == ExitCode.NOT_FOUND
    assert len(answer.err.splitlines()) == 1


def test_newer_snapshots_need_an_option(taken, snaporch):
    assert snaporch("snapshot", "web", "--name", "s2", "--quiet").code == 0
    assert snaporch("restore", "web@s1", "--yes").code == ExitCode.REFUSED
    assert snaporch("restore", "web@s1", "--yes", "--discard-newer", "--quiet").code == 0


def test_an_interrupted_restore_needs_attention(taken, snaporch):
    taken.hooks.at["hypervisor.restore"] = failing(HypervisorError("web", "no"))
    answer = snaporch("restore", "web@s1", "--yes", "--quiet")
    assert answer.code == ExitCode.ATTENTION
    assert "fix the cause, then: snaporch recover web" in answer.err
    del taken.hooks.at["hypervisor.restore"]
    answer = snaporch("recover", "--dry-run")
    assert "web: the restore of @s1 was interrupted: finish it" in answer.out
    (foreseen,) = snaporch("recover", "--dry-run", "--json").json
    assert foreseen["uuid"] == taken.guest().uuid
    assert foreseen["text"] in answer.out
    answer = snaporch("recover", "web", "--json")
    assert answer.code == 0
    (done,) = answer.json
    assert done["domain"] == "web"
    assert "finished the restore of @s1, which had been interrupted: it is running" in done["text"]
    assert snaporch("recover", "--json").json == []
    assert taken.leftovers() == []


@pytest.mark.parametrize(
    "words",
    [
        ["web@s1", "--cold", "--paused"],
        ["web@s1", "--disks-only", "--cold"],
        ["web@s1", "--no-safety", "--keep-running-state"],
        ["web", "--to-time", "2026-11-21T10:00", "--bundle", "/tmp"],
        ["web", "--to-time", "soon"],
        ["web"],
    ],
)
def test_options_of_restore_that_contradict_each_other(taken, snaporch, words):
    taken.hooks.log.clear()
    answer = snaporch("restore", *words, "--yes")
    assert answer.code == ExitCode.USAGE
    assert len(answer.err.splitlines()) == 1
    assert taken.hooks.log == []


def test_a_restore_to_a_time_prints_the_snapshot_it_chose(taken, snaporch):
    answer = snaporch("restore", "web", "--to-time", "2999-01-01T00:00", "--yes", "--quiet")
    assert answer.code == 0
    assert "chose @s1 of 2" in answer.err
    assert answer.out == "web@s1  restored, running, resumed from RAM\n"


def test_a_restore_to_a_time_before_all_snapshots(taken, snaporch):
    answer = snaporch("restore", "web", "--to-time", "1999-01-01", "--yes")
    assert answer.code == ExitCode.NOT_FOUND
    assert "its oldest snapshot, s1," in answer.err


@pytest.mark.parametrize(
    ("option", "state"), [("--paused", "paused, resumed from RAM"), ("--disks-only", "off")]
)
def test_a_restore_that_does_not_end_with_a_running_guest(taken, snaporch, option, state):
    answer = snaporch("restore", "web@s1", "--yes", "--quiet", option)
    assert answer.out == f"web@s1  restored, {state}\n"


def test_a_restore_from_a_bundle_elsewhere(taken, snaporch, tmp_path):
    (bundle,) = taken.paths.bundles.glob("*/2*")
    place = bundle.rename(tmp_path / "elsewhere")
    assert "bundle is missing" in snaporch("restore", "web@s1", "--yes").err
    answer = snaporch("restore", "web@s1", "--yes", "--quiet", "--bundle", str(place))
    assert answer.out == "web@s1  restored, running, resumed from RAM\n"


# -- recover ------------------------------------------------------------------------------------


def test_nothing_to_recover(host, snaporch):
    host.add_guest()
    answer = snaporch("recover", "web")
    assert (answer.code, answer.out) == (0, "")
    assert "nothing to recover" in answer.err


def test_a_guest_on_an_overlay_of_no_known_run_needs_attention(host, snaporch):
    host.add_guest()
    guest = host.guest()
    (base,) = guest.sources()[0].values()
    overlay = host.paths.overlays / "20200101T000000Z-0badcafe" / "vda.qcow2"
    guest.live = guest.live.replace(base, str(overlay))
    for words in ((), ("web",)):
        answer = snaporch("recover", *words)
        assert answer.code == ExitCode.ATTENTION
        assert f"is on an overlay of no known run, and nothing was changed: {overlay}" in answer.err
        assert '"On an overlay of no known run"' in answer.err
        assert "nothing to recover" not in answer.err
    at_boot = snaporch("recover", "--autostart", "--notify")
    assert at_boot.code == 0
    assert f"is on an overlay of no known run, and nothing was changed: {overlay}" in at_boot.err
    assert "nothing to recover" not in at_boot.err
    answer = snaporch("snapshot", "web")
    assert answer.code == ExitCode.REFUSED
    assert f"its disk vda is on {overlay}, an overlay of no known run; see docs" in answer.err


def test_empty_directories_of_overlays_are_removed(host, snaporch):
    run = "20200101T000000Z-0badcafe"
    gone = [host.paths.overlays / run, host.paths.overlays / "quarantine" / run]
    kept, other = host.paths.overlays / "20200101T000001Z-0badcafe", host.paths.overlays / "other"
    for each in (*gone, kept, other):
        each.mkdir(parents=True)
    (kept / "vda.qcow2").touch()
    dry = snaporch("recover", "--dry-run").out.splitlines()
    assert dry == [f"remove the empty directory {path}" for path in gone]
    assert all(path.is_dir() for path in gone)
    done = snaporch("recover").out.splitlines()
    assert done == [f"removed the empty directory {path}" for path in gone]
    assert [path.is_dir() for path in (*gone, kept, other)] == [False, False, True, True]


def test_recovering_a_misspelt_domain_is_not_found(host, snaporch):
    host.add_guest()
    assert snaporch("recover", "wbe").code == ExitCode.NOT_FOUND


@pytest.mark.parametrize("words", [[], ["web"], ["uuid"]])
def test_recovering_a_guest_that_was_left_on_overlays(host, snaporch, words):
    domain = host.add_guest()
    host.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "no"))
    assert snaporch("snapshot", "web", "--quiet").code == ExitCode.ATTENTION
    assert snaporch("recover", "--quiet").code == ExitCode.ATTENTION
    del host.hooks.at["hypervisor.commit"]
    answer = snaporch("recover", *(domain.uuid if word == "uuid" else word for word in words))
    assert answer.code == 0
    assert "web: committed vda" in answer.out
    assert host.on_bases()
    assert host.leftovers() == []


@pytest.mark.parametrize("wanted", [False, True])
def test_a_guest_that_cannot_be_resumed_gets_another_guardian_and_the_admin_is_notified(
    host, snaporch, notified, wanted
):
    text, place = host.config_file.read_text(), host.root / "schedule"
    host.config_file.write_text(text.replace("[paths]", f'[paths]\nschedule = "{place}"'))
    host.add_guest()
    host.hooks.at["hypervisor.resume"] = failing(HypervisorError("web", "locked"))
    words = ["snapshot", "web", "--level", "paused", "--quiet"]
    assert snaporch(*words).code == ExitCode.ATTENTION
    host.kill_guardians()
    options = ["--notify"] if wanted else []
    assert snaporch("recover", *options).code == ExitCode.ATTENTION
    assert [facts.domain for facts in host.guarded_again] == ["web"]
    assert ["locked" in line for line in notified()] == [True] * wanted
    assert snaporch("recover", "--dry-run").code == 0
    assert len(host.guarded_again) == 1


@pytest.mark.parametrize(
    ("words", "autostart", "state"),
    [
        (["--autostart"], True, DomainState.RUNNING),
        (["--autostart"], False, DomainState.OFF),
        ([], True, DomainState.OFF),
    ],
)
def test_a_guest_that_libvirt_could_not_start_at_boot_is_started_when_it_is_recovered(
    host, snaporch, words, autostart, state
):
    domain = host.add_guest()
    host.guest().autostart = autostart
    host.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "no"))
    assert snaporch("snapshot", "web", "--quiet").code == ExitCode.ATTENTION
    host.hypervisor.destroy(domain.uuid)
    host.write_overlay(next(host.paths.overlays.glob("*/*.qcow2")))
    answer = snaporch("recover", *words)
    assert answer.code == 0
    assert ("web: started it" in answer.out) == (state is DomainState.RUNNING)
    assert ("web: is off, and the libvirt hook may have refused" in answer.out) == autostart
    assert host.guest().state is state
    assert host.on_bases()


def test_a_guest_that_cannot_be_recovered_is_not_started(host, snaporch):
    domain = host.add_guest()
    host.guest().autostart = True
    host.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "no"))
    assert snaporch("snapshot", "web", "--quiet").code == ExitCode.ATTENTION
    host.hypervisor.destroy(domain.uuid)
    next(host.paths.overlays.glob("*/*.qcow2")).unlink()
    assert snaporch("recover", "--autostart").code == ExitCode.ATTENTION
    assert host.guest().state is DomainState.OFF


def test_take_needs_one_domain(host, snaporch):
    answer = snaporch("recover", "--take", "overlay")
    assert answer.code == ExitCode.USAGE
    assert "--take needs one domain" in answer.err.replace(": ", " ")


def test_a_dry_recovery_prints_its_actions_and_changes_nothing(host, snaporch):
    host.add_guest()
    host.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "no"))
    assert snaporch("snapshot", "web", "--quiet").code == ExitCode.ATTENTION
    del host.hooks.at["hypervisor.commit"]
    host.hooks.log.clear()
    left = host.leftovers()
    for words in ([], ["web"]):
        answer = snaporch("recover", "--dry-run", *words)
        assert answer.code == 0
        assert "web: vda: commit " in answer.out
    assert host.hooks.log == []
    assert host.leftovers() == left
    assert not host.on_bases()


def test_a_journal_of_a_later_version_stops_only_its_own_domain(host, snaporch):
    domain = host.add_guest()
    host.paths.journal.mkdir(parents=True, exist_ok=True)
    strange = host.paths.journal / "20990101T000000Z-00000001.jsonl"
    strange.write_text('{"format": 2, "facts": {"uuid": "another"}}\n')
    assert snaporch("snapshot", "web", "--quiet").code == 0
    answer = snaporch("recover")
    assert answer.code == ExitCode.ATTENTION
    assert str(strange) in answer.err
    strange.write_text(f'{{"format": 2, "facts": {{"uuid": "{domain.uuid}"}}}}\n')
    answer = snaporch("snapshot", "web", "--quiet")
    assert answer.code != 0
    assert "use the snaporch that wrote it" in answer.err
    assert host.on_bases()


# -- errors -------------------------------------------------------------------------------------


def test_a_host_without_libvirt_is_exit_code_7(host, snaporch, command_host):
    def absent(_uri):
        raise UnavailableError("libvirt", "does not answer")

    command_host.open_hypervisor = absent
    answer = snaporch("snapshot", "web")
    assert (answer.code, answer.err) == (7, "snaporch: libvirt: does not answer\n")


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_configuration_can_be_named_before_or_after_the_command(
    host, snaporch, tmp_path, place
):
    (tmp_path / "other.toml").write_text("nope = 1\n")
    option = ["--config", str(tmp_path / "other.toml")]
    words = [*option, "list"] if place == "before" else ["list", *option]
    answer = snaporch(*words)
    assert answer.code == ExitCode.CONFIG
    assert "other.toml: nope: is not an option" in answer.err


def test_the_configuration_can_be_named_by_the_environment(host, snaporch, tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPORCH_CONFIG", str(tmp_path / "absent.toml"))
    assert snaporch("list").code == ExitCode.CONFIG


def test_a_bug_is_one_line_that_says_how_to_report_it(host, snaporch):
    host.hooks.at["pool.snapshots"] = failing(ZeroDivisionError("oh\nno"))
    answer = snaporch("list")
    assert answer.code == ExitCode.BUG
    (line,) = answer.err.splitlines()
    assert "a bug in snaporch: ZeroDivisionError: oh no" in line
    assert "SNAPORCH_DEBUG=1" in line


def test_a_bug_is_raised_with_snaporch_debug(host, snaporch, monkeypatch):
    monkeypatch.setenv("SNAPORCH_DEBUG", "1")
    host.hooks.at["pool.snapshots"] = failing(ZeroDivisionError("oh no"))
    with pytest.raises(ZeroDivisionError):
        snaporch("list")


def test_an_interrupt_outside_a_run_is_no_traceback(host, snaporch):
    host.hooks.at["pool.snapshots"] = failing(KeyboardInterrupt())
    answer = snaporch("list")
    assert answer.code == 130
    assert answer.err in ("", "snaporch: stopped by SIGINT\n")


def test_a_reader_of_the_list_that_left_early_is_no_error(taken, monkeypatch, command_host):
    reading, writing = os.pipe()
    os.close(reading)
    gone = open(writing, "w")  # noqa: SIM115 - closed below, with what it could not write
    monkeypatch.setattr(sys, "stdout", gone)
    try:
        assert main._run(["list"], command_host) == 0
    finally:
        monkeypatch.undo()
        with suppress(BrokenPipeError):
            gone.close()


def test_disks_of_another_instant_are_reported_by_all_commands(host, snaporch):
    host.add_guest(more=(DiskSpec("vdb", "/dev/null"), DiskSpec("sda", None, device="cdrom")))
    taken = snaporch("snapshot", "web", "--name", "s1")
    assert taken.code == 0
    assert "  without vdb, of another instant after a restore\n" in taken.out
    header, row = snaporch("list").out.splitlines()
    assert (header.split()[-1], row.split()[-1]) == ("WITHOUT", "vdb")
    assert [each["apart"] for each in snaporch("list", "--json").json] == [["vdb"]]
    shown = snaporch("show", "web@s1")
    assert "RAM is of another instant" in shown.out
    assert snaporch("show", "web@s1", "--json").json["apart"] == ["vdb"]
    assert snaporch("snapshot", "web", "--json").json["apart"] == ["vdb"]


def test_disks_of_another_instant_are_reported_of_a_snapshot_without_ram(host, snaporch):
    host.add_guest(more=(DiskSpec("vdb", "/dev/null"),))
    taken = snaporch("snapshot", "web", "--name", "s1", "--level", "crash")
    assert "  without vdb, of another instant" in taken.out
    assert "the others are of another instant" in snaporch("show", "web@s1").out


def test_a_snapshot_of_all_disks_has_no_such_column(host, snaporch):
    host.add_guest(more=(DiskSpec("sda", None, device="cdrom"),))
    assert "without" not in snaporch("snapshot", "web", "--name", "s1").out
    assert "WITHOUT" not in snaporch("list").out
    assert snaporch("list", "--json").json[0]["apart"] == []


# -- undo ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        ("snapshot", "web"),
        ("restore", "web@s1", "--yes", "--discard-newer"),
        ("undo", "web", "--yes", "--discard-newer"),
        ("delete", "web@s2", "--yes", "--also-newest"),
        ("verify", "web@s1", "--checksums"),
        ("clone", "web@s1", "copy", "--network", "none"),
    ],
    ids=lambda command: command[0],
)
def test_a_busy_domain_can_be_waited_for_where_the_command_has_the_option(
    restored, snaporch, command
):
    uuid, runtime = restored.hypervisor.domain("web").uuid, default_paths.LOCKS
    interrupt, config = Interrupt(), restored.context.config
    assert snaporch("snapshot", "web", "--name", "s2", "--quiet").code == 0
    with ExitStack() as locks:
        locks.enter_context(
            domain_lock(runtime, "web", uuid, "restore", wait=0, interrupt=interrupt)
        )
        held = readers_lock(runtime, "web", uuid, alone=True, interrupt=interrupt)
        locks.enter_context(held)
        place = config.paths.runtime
        locks.enter_context(
            domain_lock(place, VERIFICATION, VERIFICATION, "verify", wait=0, interrupt=interrupt)
        )
        answer = snaporch(*command)
    assert answer.code == ExitCode.BUSY, answer.err
    has_option = "--wait" in snaporch(command[0], "--help").out
    assert ("or wait for it with --wait" in answer.err) is has_option


@pytest.fixture
def restored(taken, snaporch):
    """A guest that was restored to ``s1`` and has written to its disk since."""
    assert snaporch("restore", "web@s1", "--yes", "--quiet").code == 0
    taken.pool.write("tank/web", b"since")
    return taken


def test_a_restore_ends_with_the_command_that_undoes_it(taken, snaporch):
    answer = snaporch("restore", "web@s1", "--yes")
    assert answer.err.splitlines()[-1].endswith("undo it with: snaporch undo web")
    assert "undo it" not in snaporch("restore", "web@s1", "--yes", "--no-safety").err


def test_the_command_that_an_undo_prints_is_not_refused(taken, snaporch):
    """It destroys the newer snapshot again, which the undo has brought back."""
    assert snaporch("snapshot", "web", "--name", "s2", "--quiet").code == 0
    assert snaporch("restore", "web@s1", "--yes", "--discard-newer").code == 0
    for _ in range(2):
        said = snaporch("undo", "web", "--yes").err.splitlines()[-1]
        assert said.endswith("undo it with: snaporch undo web --discard-newer")
        assert snaporch("undo", "web").code == ExitCode.REFUSED
        assert snaporch("show", "web@s2").code == 0
        said = snaporch(*said.partition("with: snaporch ")[2].split(), "--yes").err
        assert said.splitlines()[-1].endswith("undo it with: snaporch undo web")
        assert snaporch("show", "web@s2").code == ExitCode.NOT_FOUND


@pytest.mark.parametrize("by", ["name", "uuid"])
def test_an_undo_with_yes(restored, snaporch, by):
    name = getattr(restored.hypervisor.domain("web"), by)
    answer = snaporch("undo", name, "--yes", "--quiet")
    assert (answer.code, answer.out) == (0, "web  undid the restore of web to @s1; off\n")
    assert restored.pool.read("tank/web") == b"now"


def test_an_undo_of_a_guest_that_is_undefined(restored, snaporch):
    restored.hypervisor.guests.clear()
    assert snaporch("undo", "web", "--yes").code == 0
    assert restored.pool.read("tank/web") == b"now"
    assert restored.guest().state is DomainState.OFF


def test_a_dry_run_of_an_undo_changes_nothing(restored, snaporch):
    log = list(restored.hooks.log)
    answer = snaporch("undo", "web", "--dry-run")
    assert answer.code == 0
    assert "undoing the restore of web to @s1 brings back" in answer.out
    assert "the state of the running guest web" in answer.out
    assert restored.hooks.log == log
    assert restored.pool.read("tank/web") == b"since"
    restored.start_process(4711, "tank/web")
    assert snaporch("undo", "web", "--dry-run").code == ExitCode.REFUSED


def test_a_dry_run_of_an_undo_in_json_is_that_of_a_restore(restored, snaporch):
    restored.pool.snapshot(["tank/web@daily"], {})
    before = state_of(restored)
    answer = snaporch("undo", "web", "--dry-run", "--json")
    assert answer.code == ExitCode.REFUSED
    (line,) = answer.err.splitlines()
    assert "newer snapshots would be destroyed: tank/web@daily" in line
    document = answer.json
    assert document["copy"] == document["snapshot"]
    assert (document["restored"], document["other_copies"]) == ("s1", [])
    assert (document["dry_run"], document["ending"]) == (True, "off")
    assert document["destroyed"] == ["tank/web@daily"]
    assert [each["snapshot"] for each in document["rolled_back"]] == ["tank/web@s1"]
    assert document.keys() > snaporch("restore", "web@s1", "--dry-run", "--json").json.keys()
    assert state_of(restored) == before


@pytest.mark.parametrize(("said", "content"), [("y\n", b"now"), ("n\n", b"since"), ("", b"since")])
def test_an_undo_on_a_terminal_asks(restored, snaporch, monkeypatch, said, content):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys.stdin, "readline", lambda: said, raising=False)
    answer = snaporch("undo", "web")
    assert answer.code == (0 if said == "y\n" else ExitCode.REFUSED)
    assert restored.pool.read("tank/web") == content


def test_an_undo_without_a_terminal_needs_yes(restored, snaporch, monkeypatch):
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False, raising=False)
    answer = snaporch("undo", "web")
    assert (answer.code, "use --yes" in answer.err) == (ExitCode.REFUSED, True)
    assert restored.pool.read("tank/web") == b"since"


def test_an_undo_as_json_and_another_one(restored, snaporch):
    document = snaporch("undo", "web", "--yes", "--json").json
    assert (document["restored"], document["domain_state"]) == ("s1", "off")
    assert f"--copy {document['copy']} would undo" in snaporch("undo", "web", "--dry-run").out
    again = snaporch("undo", "web", "--yes", "--copy", document["copy"], "--json").json
    assert again["copy"] == document["copy"]
    for _ in range(4):
        snaporch("undo", "web", "--yes")
    out = snaporch("undo", "web", "--dry-run").out
    assert out.count(" would undo ") == 3
    bundle = snaporch("show", "web@s1", "--json").json["bundle"]
    assert f"  (3 older copies are in {bundle.rpartition('/')[0]})\n" in out


def test_an_undo_without_a_safety_copy(taken, snaporch):
    answer = snaporch("undo", "web", "--yes")
    assert (answer.code, "no safety copy" in answer.err) == (ExitCode.NOT_FOUND, True)
    assert snaporch("undo", "wbe", "--yes").code == ExitCode.NOT_FOUND


@pytest.mark.parametrize("json", [False, True])
def test_an_undo_of_a_restore_that_had_rolled_back_nothing(taken, snaporch, monkeypatch, json):
    """Its safety copy is not needed, and is deleted."""

    class Killed(BaseException):
        """The process ends."""

    def die(*_arguments):
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("snaporch.restore.run.cancel_restore", die)
        taken.hooks.at["hypervisor.destroy"] = die
        with pytest.raises(Killed):
            snaporch("restore", "web@s1", "--yes")
    taken.hooks.at.clear()
    words = ["--json"] if json else []
    foreseen = snaporch("undo", "web", "--dry-run", *words)
    assert "web: the restore of @s1 was interrupted" in (foreseen.err if json else foreseen.out)
    answer = snaporch("undo", "web", "--yes", *words)
    assert answer.code == 0, answer.err
    assert "web: undid the restore of @s1" in (answer.err if json else answer.out)
    if json:
        assert (foreseen.json["dry_run"], foreseen.json["copy"]) == (True, None)
        assert (answer.json["domain"], answer.json["copy"], answer.json["undo"]) == (
            "web",
            None,
            None,
        )
    assert taken.is_as_it_was()


def test_the_list_names_the_guests_that_are_fenced(restored, snaporch):
    assert "is fenced" not in snaporch("list").err
    restored.fences.put(Fence(restored.hypervisor.domain("web").uuid, "web"))
    assert "web is fenced: a copy of it may run on another host" in snaporch("list").err


@pytest.mark.parametrize("is_moved_away", [False, True])
def test_a_fence_is_removed_with_the_next_step_that_is_possible(taken, snaporch, is_moved_away):
    (run,) = (each["run"] for each in snaporch("list", "--json").json)
    uuid = taken.hypervisor.domain("web").uuid
    taken.fences.put(Fence(uuid, "web", "2026-01-01T00:00:00+00:00", run, "s1", "nas"))
    if is_moved_away:
        taken.pool.rename("tank/web", "tank/web-before")
    said = snaporch("fence", "--remove", "web", "--yes").out
    assert ("snaporch restore web@s1" in said) != is_moved_away
    assert ("by: snaporch rebuild --from REPLICA web" in said) == is_moved_away


def test_the_list_names_the_restore_that_can_be_undone(restored, snaporch):
    (record,) = restored.paths.bundles.glob("*/safety-*/undo.json")
    first = f"snaporch undo web --copy {record.parent.name} (--dry-run names"
    assert f"the restore of web to @s1 can be undone: {first}" in snaporch("list").err
    assert snaporch("list", "--json").json
    assert snaporch("restore", "web@s1", "--yes").code == 0
    (second,) = set(restored.paths.bundles.glob("*/safety-*/undo.json")) - {record}
    assert f"snaporch undo web --copy {second.parent.name} (" in snaporch("list").err
    (second.parent / "undone").touch()
    assert first in snaporch("list").err
    (record.parent / "undone").touch()
    assert "can be undone" not in snaporch("list").err


def test_the_list_names_the_way_to_missing_bundles(taken, snaporch):
    assert "have no bundle" not in snaporch("list").err
    (bundle,) = taken.paths.bundles.glob("*/2*")
    shutil.rmtree(bundle)
    said = snaporch("list").err
    assert "1 of these snapshots have no bundle on this host; to put a bundle back" in said
    assert "from a replica: see docs/how-to/verify.md" in said


def test_an_undo_that_was_given_up_is_not_listed(restored, snaporch):
    """It would be refused: the base of its streams was destroyed."""
    snaporch("snapshot", "web", "--name", "s9")
    restored.pool.release(["tank/web@s1"], "snaporch-undo")
    assert "can be undone" in snaporch("list").err
    assert snaporch("delete", "web@s1", "--yes").code == 0
    assert "can be undone" not in snaporch("list").err
    assert snaporch("undo", "web", "--yes").code != 0


def test_list_chooses_orders_and_adds_columns(host, snaporch):
    host.add_guest()
    for name, level in (("s1", "ram"), ("s2", "crash")):
        snaporch("snapshot", "web", "--name", name, "--level", level)

    def names(*words):
        return [each["snapshot"] for each in snaporch("list", "--json", *words).json]

    assert names("--level", "crash") == ["s2"]
    assert names("--since", "1h", "--policy", "") == ["s1", "s2"]
    assert names("--since", "2100-01-01") == []
    assert names("--sort", "stored") == ["s1", "s2"]
    header, row, _ = snaporch("list", "--wide").out.splitlines()
    assert header.split()[-3:] == ["USED", "POLICY", "REPLICAS"]
    assert row.split()[-3:] == ["0B", "-", "-"]
    answer = snaporch("list", "--policy", "hourly")
    assert (answer.code, answer.out) == (0, "")
    assert answer.err == "snaporch: no snapshots match; without options there are 2\n"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--since", "yesterday"], "time 'yesterday': is not understood; write it as 2026"),
        (["--level", "good"], "'good' is not one of"),
        (["--sort", "size"], "'size' is not one of"),
    ],
)
def test_wrong_filters_are_one_line(host, snaporch, words, text):
    answer = snaporch("list", *words)
    assert answer.code == 2
    (line,) = answer.err.splitlines()
    assert text in line
