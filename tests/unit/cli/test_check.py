import json
import os
import stat
from dataclasses import replace
from datetime import UTC, datetime
from unittest import mock

import pytest
from fakes.domain_xml import DiskSpec
from fakes.hooks import failing
from fakes.hypervisor import Agent
from fakes.sanoid import DEFAULTS

from snaporch import __version__
from snaporch.check.host_files import HostFiles
from snaporch.errors import ExitCode, UnavailableError
from snaporch.hypervisor import DiskWrites, HypervisorError, StartHookProblem
from snaporch.journal import FORMAT
from snaporch.known_faults import Component
from snaporch.locks import domain_lock
from snaporch.model import DomainState
from snaporch.schedule.carried_out_since import record_first_runs


@pytest.fixture
def sanoid(host, command_host, tmp_path_factory):
    """A host with sanoid; writes its configuration."""
    root = tmp_path_factory.mktemp("sanoid")
    programs = root / "bin"
    programs.mkdir()
    for name in ("sanoid", "snaporch"):
        (programs / name).write_text(f"#!/bin/sh\necho snaporch {__version__}\n")
        (programs / name).chmod(0o755)
    files = HostFiles(
        qemu_conf=root / "qemu.conf",
        zfs_module=root / "zfs",
        apparmor=root / "apparmor",
        cron_job=programs,
        systemd=root / "absent",
        unit_directories=(root,),
        path=str(programs),
        sanoid_defaults=DEFAULTS,
    )
    command_host.host_files = lambda: files
    (root / "zfs/parameters").mkdir(parents=True)
    (root / "zfs/version").write_text("2.4.2-1\n")

    def write(text):
        (root / "sanoid.conf").write_text(text)

    write.root, write.programs = root, programs
    return write


@pytest.fixture
def check(sanoid, snaporch):
    """Runs ``check --json``; the findings by their codes."""

    def run(*arguments):
        answer = snaporch("check", "--json", "--configdir", str(sanoid.root), *arguments)
        assert answer.err == ""
        return answer.code, {each["code"]: each for each in answer.json}

    return run


@pytest.fixture
def sound(host, sanoid, snaporch):
    """A guest, and what is rendered for it as sanoid's configuration."""
    host.add_guest()
    answer = snaporch("render", "sanoid")
    assert (answer.code, answer.err) == (0, "")
    sanoid(answer.out)
    return host


def test_rendered_sections_have_no_findings(sound, snaporch, sanoid):
    answer = snaporch("check", "--configdir", str(sanoid.root))
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines() == [
        "RAM is streamed (compression: zstd)",
        "1 guest checked: nothing to fix",
        "next: take a first snapshot: snaporch snapshot web",
        "then: copy them to another pool or host: see docs/how-to/replication.md",
    ]
    assert snaporch("snapshot", "web").code == 0
    answer = snaporch("check", "--configdir", str(sanoid.root))
    assert answer.out.endswith("\n1 guest checked: nothing to fix\n")


def test_overlays_of_a_confined_guest(host, sanoid, snaporch, check):
    """Held by sanoid's hooks it has overlays; snaporch itself takes none."""
    text = host.config_file.read_text()
    host.config_file.write_text(text.replace('ram_strategy = "overlay"', 'ram_strategy = "auto"'))
    uuid = host.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"}).uuid
    sanoid(snaporch("render", "sanoid").out)
    assert "confined-overlays" not in check()[1]
    host.hypervisor.confined.add(uuid)
    assert "its 2 disks" in check()[1]["confined-overlays"]["what"]
    sanoid("[tank/web]\nhourly = 1\n")
    assert "confined-overlays" not in check()[1]


def test_check_changes_nothing(sound, check):
    before = sorted(sound.root.rglob("*"))
    check()
    assert sorted(sound.root.rglob("*")) == before
    assert sound.hooks.log == []


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ({}, "unfinished-run", "the restore r was interrupted"),
        ({"format": FORMAT + 1}, "unreadable-journal", f"expected {FORMAT}"),
    ],
)
def test_an_interrupted_restore_and_a_journal_that_cannot_be_read(sound, check, line, code, said):
    facts = {"uuid": sound.guest().uuid, "domain": "web"}
    first = {"event": "open", "format": FORMAT, "kind": "restore", "facts": facts} | line
    sound.paths.journal.mkdir(parents=True)
    (sound.paths.journal / "r.jsonl").write_text(json.dumps(first) + "\n")
    status, found = check()
    assert (status, set(found)) == (9, {code})
    assert said in found[code]["what"]


def test_a_restore_that_runs_is_not_interrupted(sound, check):
    uuid, runtime = sound.guest().uuid, sound.context.config.paths.runtime
    first = {"event": "open", "format": FORMAT, "kind": "restore"}
    first["facts"] = {"uuid": uuid, "domain": "web"}
    sound.paths.journal.mkdir(parents=True)
    (sound.paths.journal / "r.jsonl").write_text(json.dumps(first) + "\n")
    with domain_lock(runtime, "web", uuid, "restore", wait=0, interrupt=sound.context.interrupt):
        _, found = check()
    assert "unfinished-run" not in found


def test_policies_that_no_unit_carries_out(sound, check):
    place = sound.root / "schedule"
    text = sound.config_file.read_text().replace("[paths]", f'[paths]\nschedule = "{place}"')
    policy = '[policy.p]\nevery = "1h"\n[domain.web]\npolicies = ["p"]\n'
    sound.config_file.write_text(text + policy)
    sound.unit_states["snaporch.service"] = "inactive"
    code, found = check()
    assert code == 10
    assert found["policies-wait"]["lines"] == ["systemctl enable --now snaporch-run-due.timer"]
    sound.unit_states["snaporch-run-due.timer"] = "active"
    assert "policies-wait" not in check()[1]
    del sound.unit_states["snaporch-run-due.timer"]
    record_first_runs(place, ["uuid/p"], datetime.now(UTC))  # as a crontab does
    assert "policies-wait" not in check()[1]


def test_units_with_another_configuration(sound, check, sanoid):
    (sanoid.root / "snaporch.service").write_text(
        "[Service]\nExecStart=/usr/bin/snaporch --config '/etc/a b.toml' daemon\n".replace("'", '"')
    )
    code, found = check()
    assert (code, set(found)) == (10, {"other-configuration"})
    assert found["other-configuration"]["lines"] == ["snaporch --config '/etc/a b.toml' check"]
    config = str(sound.config_file)
    (sanoid.root / "snaporch.service").write_text(f"ExecStart=/x --config {config} daemon\n")
    assert check("--config", config) == (0, {})


def test_a_host_without_guests_and_without_sanoid(host, check, sanoid):
    (sanoid.programs / "sanoid").unlink()
    assert check() == (0, {"sanoid-missing": check()[1]["sanoid-missing"]})


def test_warnings_and_errors_have_different_exit_codes(sound, check, sanoid):
    sound.add_guest("new")
    assert check()[0] == ExitCode.WARNINGS == 10
    sanoid("[tank/web]\n")
    assert check()[0] == ExitCode.ATTENTION == 9


def test_a_finding_as_text(sound, snaporch, sanoid, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    sound.add_guest("new")
    answer = snaporch("check", "--configdir", str(sanoid.root))
    lines = answer.out.splitlines()
    assert lines[0] == "warning  new  [unscheduled]"
    assert "        snaporch render sanoid new" in lines
    assert "2 guests checked: 1 warning" in lines
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("wanted", "severity", "code"),
    [("auto", "warning", ExitCode.WARNINGS), ("stream", "error", ExitCode.ATTENTION)],
)
def test_ram_that_cannot_be_streamed(sound, check, tmp_path, monkeypatch, wanted, severity, code):
    with (tmp_path / "snaporch.toml").open("a") as config:
        config.write(f'ram_capture = "{wanted}"\n')
    monkeypatch.setattr(os, "mkfifo", mock.Mock(side_effect=OSError(1, "not permitted")))
    status, findings = check()
    assert status == code
    assert findings["no-streaming"]["severity"] == severity
    assert "not permitted" in findings["no-streaming"]["what"]


def test_a_misspelt_domain(sound, snaporch):
    assert snaporch("check", "wbe").code == ExitCode.NOT_FOUND
    assert snaporch("render", "sanoid", "wbe").code == ExitCode.NOT_FOUND


def test_only_the_guests_that_were_named(sound, check):
    sound.add_guest("new")
    assert check("web") == (0, {})
    assert set(check("new")[1]) == {"unscheduled"}


def test_a_refused_plan(sound, check):
    sound.add_guest("odd", more=(DiskSpec("vdb", None, kind="network"),), disks={"vda": "tank/web"})
    sound.guest("web").checkpoints = ["c1"]
    code, found = check()
    assert code == ExitCode.ATTENTION
    assert "checkpoints (c1) break a commit" in found["no-snapshot"]["what"]
    assert found["disk-left-out"]["subject"] == "odd"


def test_files_that_belong_to_no_guest(sound, check):
    sound.add_guest("beside", disks={"vda": "tank/web"})
    assert "shared-dataset" not in check()[1]
    (sound.root / "zfs" / "tank" / "web" / "thesis").touch()
    found = check("web")[1]["shared-dataset"]
    assert "tank/web (1 other file: thesis)" in found["what"]
    sound.root.joinpath("zfs/tank/web", *["a"] * 101).mkdir(parents=True)  # deeper than is examined
    assert "tank/web (more than 100000 entries)" in check("web")[1]["shared-dataset"]["what"]


def test_no_agent_for_a_quiesced_snapshot(sound, check, tmp_path):
    with (tmp_path / "snaporch.toml").open("a") as config:
        config.write('level = "quiesced"\n')
    assert "no guest agent" in check()[1]["no-snapshot"]["what"]
    sound.guest().agent = Agent.ANSWERS
    sound.hypervisor.guests.clear()
    sound.add_guest(agent=Agent.ANSWERS)
    assert check() == (0, {})


def test_a_downgrade_is_reported(sound, check, tmp_path):
    with (tmp_path / "snaporch.toml").open("a") as config:
        config.write('level = "quiesced"\non_unavailable = "crash"\n')
    assert set(check()[1]) == {"downgrade"}


def test_a_missing_image(sound, check):
    (image,) = sound.root.glob("zfs/tank/web/*.img")
    image.unlink()
    code, found = check()
    assert (code, set(found)) == (ExitCode.ATTENTION, {"no-snapshot"})


def test_a_disk_left_out_on_purpose_is_not_reported(sound, check, tmp_path):
    sound.add_guest("odd", more=(DiskSpec("vdb", None, kind="network"),), disks={"vda": "tank/web"})
    assert set(check()[1]) == {"disk-left-out"}
    with (tmp_path / "snaporch.toml").open("a") as config:
        config.write('exclude_disks = ["vdb"]\n')
    assert check() == (0, {})


def test_a_disk_excluded_from_a_dataset_that_is_snapshotted(sound, check, tmp_path):
    sound.add_guest("odd", disks={"vda": "tank/web", "vdb": "tank/web", "vdc": "tank/other"})
    with (tmp_path / "snaporch.toml").open("a") as config:
        config.write('[domain.odd]\nexclude_disks = ["vdb", "vdc"]\n')
    found = check()[1]
    assert set(found) == {"excluded-disk"}
    assert "vdb" in found["excluded-disk"]["what"]
    assert "vdc" not in found["excluded-disk"]["what"]


def test_a_guest_off_zfs(sound, check, tmp_path):
    (tmp_path / "x.img").touch()
    sound.add_guest("nas", disks={}, more=(DiskSpec("vda", str(tmp_path / "x.img")),))
    assert {code: each["severity"] for code, each in check()[1].items()} == {"not-on-zfs": "hint"}
    assert check()[0] == 0


def test_an_interrupted_run(sound, check, snaporch):
    sound.hooks.at["hypervisor.commit"] = failing(HypervisorError("vda", "no"))
    assert snaporch("snapshot", "web", "--quiet").code == ExitCode.ATTENTION
    code, found = check()
    assert code == ExitCode.ATTENTION
    assert {name: each["severity"] for name, each in found.items()} == {
        "unfinished-run": "error",
        "busy": "hint",
    }


def test_a_run_under_way_is_a_hint(sound, check, snaporch):
    seen = {}
    sound.hooks.at["capture.switched"] = lambda: seen.update(answer=check())
    assert snaporch("snapshot", "web", "--quiet").code == 0
    code, found = seen["answer"]
    assert (code, set(found)) == (0, {"busy"})
    assert f"pid {os.getpid()}" in found["busy"]["what"]


def test_a_libvirt_job_is_reported_as_busy(sound, check):
    sound.guest().job = "migration out"
    assert "migration out" in check()[1]["busy"]["what"]


def test_overlays_that_belong_to_no_run(sound, check):
    (sound.paths.overlays / "r1").mkdir(parents=True)
    (sound.paths.overlays / "r1" / "vda.qcow2").touch()
    (sound.paths.overlays / "empty").mkdir()
    aside = sound.paths.overlays / "quarantine" / "r2"
    aside.mkdir(parents=True)
    (aside / "vda.qcow2").touch()
    found = check()[1]
    assert "r1" in found["overlays-left"]["what"]
    assert "quarantine" not in found["overlays-left"]["what"]
    assert "empty" not in found["overlays-left"]["what"]
    assert "r2/vda.qcow2" in found["overlays-quarantined"]["what"]


def test_an_open_store(sound, check):
    sound.paths.bundles.mkdir(mode=0o755)
    sound.paths.bundles.chmod(0o755)
    assert check()[1]["store-readable"]["lines"] == [f"chmod 700 {sound.paths.bundles}"]
    sound.paths.bundles.chmod(0o700)
    assert check() == (0, {})


def test_a_store_that_is_a_file(sound, check):
    sound.paths.bundles.touch()
    assert "store-unwritable" in check()[1]
    assert stat.S_ISREG(sound.paths.bundles.stat().st_mode)


def test_an_encrypted_guest_and_an_unencrypted_store(sound, check):
    sound.pool.create("tank/safe", encrypted=True)
    sound.add_guest("safe", {"vda": "tank/safe"})
    assert "tank/safe is" in check("safe")[1]["store-unencrypted"]["what"]


def test_a_libvirt_that_does_not_call_the_hook(sound, check):
    sound.hypervisor.why_unguarded = StartHookProblem("it is not there", "snaporch install")
    assert check()[1]["unguarded-start"]["lines"] == ["snaporch install"]


def test_sparse_images(sound, check, sanoid):
    sound.hypervisor.installed[Component.LIBVIRT] = "12.8.0"
    (sanoid.root / "qemu.conf").write_text('# snapshot_image_format = "sparse"\n')
    assert check() == (0, {})
    (sanoid.root / "qemu.conf").write_text('user = "root"\nsnapshot_image_format = "sparse"\n')
    assert set(check()[1]) == {"sparse-images"}


def test_guests_that_libvirt_saved_and_a_qemu_that_loads_from_pipes_only(sound, check):
    sound.hypervisor.installed |= {Component.QEMU: "11.1.0", Component.LIBVIRT: "11.3.0"}
    code, found = check()
    assert (code, set(found)) == (10, {"saved-guests"})
    assert "--bypass-cache" in found["saved-guests"]["fix"]
    sound.hypervisor.installed[Component.LIBVIRT] = "12.1.0"
    assert check() == (0, {})


def test_known_faults_of_installed_versions(sound, check, sanoid):
    """Each fault is reported only where it can have an effect."""
    sound.hypervisor.installed |= {Component.QEMU: "10.0.10", Component.LIBVIRT: "11.3.0"}
    (sanoid.root / "zfs/version").write_text("2.3.1-1~bpo\n")
    code, found = check()
    assert (code, set(found)) == (0, {"automount-deadlock"})
    (sanoid.root / "zfs/parameters/zfs_bclone_enabled").write_text("1\n")
    (sanoid.root / "apparmor").write_text("Y\n")
    code, found = check()
    assert (code, set(found)) == (10, {"automount-deadlock", "clone-read", "apparmor-commit"})


@pytest.mark.parametrize(
    ("strategy", "by_sanoid", "concerned"),
    [
        ("overlay", False, True),
        ("auto", False, False),
        ("auto", True, True),  # sanoid takes the snapshots, so the disks wait on overlays
        ("manual", True, False),
    ],
)
@pytest.mark.parametrize("state", [DomainState.RUNNING, DomainState.OFF])
def test_a_fault_of_commits_concerns_guests_on_overlays(
    host, check, sanoid, snaporch, tmp_path, strategy, by_sanoid, concerned, state
):
    """A guest that is off may run when a snapshot is taken."""
    host.add_guest('Büro "1"', state=state)
    config = tmp_path / "snaporch.toml"
    config.write_text(config.read_text().replace('"overlay"', f'"{strategy}"'))
    if by_sanoid:
        sanoid(snaporch("render", "sanoid").out)
    host.hypervisor.installed[Component.LIBVIRT] = "11.3.0"
    assert "apparmor-commit" not in check()[1]
    (sanoid.root / "apparmor").write_text("Y\n")
    found = check()[1].get("apparmor-commit")
    assert bool(found) is concerned
    if found:
        with config.open("a") as file:
            file.write("".join(f"{line}\n" for line in found["lines"]))
        assert "apparmor-commit" not in check()[1]


@pytest.mark.parametrize("state", [DomainState.RUNNING, DomainState.OFF])
def test_a_fault_of_commits_concerns_guests_whose_policy_uses_overlays(
    host, check, sanoid, configure, state
):
    host.add_guest(state=state)
    host.hypervisor.installed[Component.LIBVIRT] = "11.3.0"
    (sanoid.root / "apparmor").write_text("Y\n")
    configure('[domain."web"]', 'level = "crash"')
    assert "apparmor-commit" not in check()[1]
    configure(
        *('[domain."web"]', 'level = "crash"'),
        *("[policy.nightly]", 'every = "1d"', 'level = "ram"', 'domains = ["web"]'),
    )
    assert "apparmor-commit" in check()[1]


def test_a_fault_of_qcow2_concerns_guests_that_discard(host, check):
    more = DiskSpec("vdb", str(host.image("tank/web", "more.img")), discard="unmap")
    host.add_guest(more=(more,))
    host.hypervisor.installed[Component.QEMU] = "10.0.10"
    found = check()[1]
    assert "(web)" in found["qcow2-discard"]["why"]
    host.hypervisor.installed[Component.QEMU] = "10.0.11"
    assert "qcow2-discard" not in check()[1]


def test_unknown_versions(sound, check, sanoid):
    (sanoid.root / "zfs/version").unlink()
    sound.hypervisor.hooks.at["hypervisor.releases"] = failing(HypervisorError("libvirt", "no"))
    code, found = check()
    assert (code, set(found)) == (0, {"version-unknown"})


def test_a_hook_of_another_version(sound, check, sanoid):
    old = sanoid.root / "snaporch"
    old.write_text("#!/bin/sh\necho snaporch 0.0.1\n")
    old.chmod(0o755)
    text = (sanoid.root / "sanoid.conf").read_text()
    sanoid(text.replace(str(sanoid.programs / "snaporch"), str(old)))
    assert "0.0.1" in check()[1]["hook-version"]["what"]
    old.chmod(0o644)
    assert set(check()[1]) == {"hook-program"}


def test_a_hook_file_has_the_version_it_was_installed_with(sound, check, sanoid):
    hook = sanoid.root / "old" / "share" / "snaporch" / "hooks" / "sanoid-pre"
    program = sanoid.root / "old" / "bin" / "snaporch"
    for path in (hook, program):
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\necho snaporch 0.0.2\n")
        path.chmod(0o755)
    text = (sanoid.root / "sanoid.conf").read_text()
    sanoid(text.replace(f"{sanoid.programs / 'snaporch'} hook sanoid pre", str(hook)))
    assert "0.0.2" in check()[1]["hook-version"]["what"]
    program.write_text(f"#!/bin/sh\necho snaporch {__version__}\n")
    assert check() == (0, {})


def test_a_hook_without_a_slash_is_searched_where_services_do(sound, check, sanoid):
    text = (sanoid.root / "sanoid.conf").read_text()
    sanoid(text.replace(str(sanoid.programs / "snaporch"), "snaporch"))
    assert check() == (0, {})


def test_a_configuration_that_sanoid_refuses(sound, check, sanoid):
    sanoid("[tank/web]\nsnapshots = yes\n")
    assert "snapshots is no setting" in check()[1]["sanoid-refuses"]["what"]


def test_the_timer_off(sound, check, sanoid, command_host, monkeypatch):
    (sanoid.root / "run").mkdir()
    systemctl = sanoid.programs / "systemctl"
    monkeypatch.setenv("PATH", f"{sanoid.programs}:{os.environ['PATH']}")
    files = replace(command_host.host_files(), systemd=sanoid.root / "run")
    command_host.host_files = lambda: files
    for status, expected in ((0, set()), (3, {"sanoid-timer"})):
        systemctl.write_text(f"#!/bin/sh\nexit {status}\n")
        systemctl.chmod(0o755)
        assert set(check()[1]) == expected


# -- --nagios -----------------------------------------------------------------------------------


def nagios(snaporch, sanoid):
    answer = snaporch("check", "--nagios", "--configdir", str(sanoid.root))
    assert answer.err == ""
    assert len(answer.out.splitlines()) == 1
    return answer.code, answer.out


def test_nagios(sound, snaporch, sanoid, command_host):
    assert nagios(snaporch, sanoid) == (0, "SNAPORCH OK - nothing to fix\n")
    sound.add_guest("new|guest")
    code, line = nagios(snaporch, sanoid)
    assert code == 1
    assert line.startswith("SNAPORCH WARNING - 1 warning - new/guest: sanoid takes no snapshots")
    sanoid("[tank/web]\n")
    code, line = nagios(snaporch, sanoid)
    assert code == 2
    assert line.startswith("SNAPORCH CRITICAL - 1 error, 3 warnings - [tank/web]: ")

    def absent(_uri):
        raise UnavailableError("libvirt", "does not answer")

    command_host.open_hypervisor = absent
    code, line = nagios(snaporch, sanoid)
    assert (code, line) == (3, "SNAPORCH UNKNOWN - libvirt: does not answer\n")


def test_nagios_and_json_exclude_one_another(host, snaporch):
    assert snaporch("check", "--nagios", "--json").code == ExitCode.USAGE


# -- render -------------------------------------------------------------------------------------


def test_rendering_some_guests(sound, snaporch):
    sound.add_guest("mail", state=DomainState.OFF)
    answer = snaporch("render", "sanoid", "mail")
    assert "[tank/mail]" in answer.out
    assert "[tank/web]" not in answer.out


def test_rendering_in_the_middle_of_a_run_names_the_bases(sound, snaporch):
    seen = {}
    sound.hooks.at["capture.switched"] = lambda: seen.update(out=snaporch("render", "sanoid").out)
    assert snaporch("snapshot", "web", "--quiet").code == 0
    assert "\n[tank/web]\n" in seen["out"]


def test_rendering_nothing_is_refused(host, snaporch):
    assert snaporch("render", "sanoid").code == ExitCode.REFUSED


def test_the_json_is_as_documented(sound, snaporch, sanoid):
    sanoid("[tank/web]\n")
    answer = snaporch("check", "--json", "--configdir", str(sanoid.root))
    for document in json.loads(answer.out):
        assert list(document) == ["code", "severity", "subject", "what", "why", "fix", "lines"]


def test_a_journal_that_a_power_loss_destroys(sound, check):
    sound.paths.journal.mkdir(parents=True, exist_ok=True)
    sound.resolver.forgetful[sound.paths.journal] = "tmpfs"
    code, found = check()
    assert (code, found["volatile-directory"]["subject"]) == (9, str(sound.paths.journal))


# -- policies -----------------------------------------------------------------------------------


@pytest.fixture
def configure(host, tmp_path):
    """Adds lines to the configuration of snaporch, the first to ``[defaults]``."""
    path = tmp_path / "snaporch.toml"
    first = path.read_text()
    return lambda *lines: path.write_text(first + "\n".join(lines) + "\n")


def test_a_policy_whose_level_is_not_available(sound, check, configure):
    assert check()[0] == 0
    configure("[policy.nightly]", 'every = "1d"', 'level = "quiesced"', 'domains = ["web"]')
    code, found = check()
    assert (code, set(found)) == (ExitCode.ATTENTION, {"policy-level"})
    assert found["policy-level"]["what"].startswith("policy nightly: ")
    assert "agent" in found["policy-level"]["what"]


@pytest.mark.parametrize("dataset", ["tank", "tank/web", "tank/web/copies"])
def test_a_replica_around_a_guest_or_inside_it(sound, check, configure, dataset):
    configure(
        *("[policy.hourly]", 'every = "1h"', 'domains = ["web"]', 'replicate = ["disk"]'),
        *("[replica.disk]", f'dataset = "{dataset}"', 'bundles = "/backup/disk"'),
    )
    code, found = check()
    assert code == ExitCode.ATTENTION
    assert found["replica-nested"]["what"].startswith("replica disk: tank")


@pytest.mark.parametrize("option", ["rate = 5", 'window = "22:00-06:00"\nrate_outside = 5', ""])
def test_a_rate_needs_mbuffer(sound, check, configure, tmp_path, monkeypatch, option):
    tools = tmp_path / "tools"
    tools.mkdir()
    monkeypatch.setenv("PATH", str(tools))
    configure(
        *("[policy.hourly]", 'every = "1h"', 'domains = ["web"]', 'replicate = ["disk"]'),
        *("[replica.disk]", 'dataset = "backup/kvm"', 'bundles = "/backup/disk"', option),
    )
    assert ("rate-unlimited" in check()[1]) == bool(option)
    (tools / "mbuffer").touch(0o755)
    assert "rate-unlimited" not in check()[1]


def test_a_guest_with_a_policy_needs_no_section(sound, check, configure):
    sound.add_guest("new")
    assert set(check()[1]) == {"unscheduled"}
    configure("[policy.hourly]", 'every = "1h"', 'domains = ["new"]')
    assert check() == (0, {})
    configure("[policy.byhand]", 'domains = ["new"]')
    assert set(check()[1]) == {"unscheduled"}
    configure("[domain.new]", "policies = []")
    assert check() == (0, {})


def test_without_a_sanoid_conf_there_are_no_errors(sound, check, configure, sanoid):
    (sanoid.root / "sanoid.conf").unlink()
    configure("[policy.hourly]", 'every = "1h"', 'domains = ["web"]')
    assert (check()[0], set(check()[1])) == (0, {"sanoid-unused"})
    sound.add_guest("new")
    code, found = check()
    assert (code, set(found)) == (ExitCode.WARNINGS, {"sanoid-unused", "unscheduled"})
    assert found["unscheduled"]["subject"] == "new"


@pytest.mark.parametrize(
    ("lines", "where", "name", "severity"),
    [
        (["[policy.p]", 'domains = ["web", "wbe"]'], "[policy.p] domains", "wbe", "warning"),
        (["[policy.p]", 'domains = ["db-*", "w*"]'], "[policy.p] domains", "db-*", "hint"),
        (["[domain.wbe]", 'level = "crash"'], '[domain."wbe"]', "wbe", "warning"),
        (
            ["[domain.web]", 'exclude_disks = ["vdq"]'],
            '[domain."web"] exclude_disks', "vdq", "warning",
        ),
        (['exclude_disks = ["vdz"]'], "[defaults] exclude_disks", "vdz", "warning"),
    ],
)  # fmt: skip
def test_names_in_the_configuration_that_match_no_guest(
    sound, check, configure, lines, where, name, severity
):
    configure(*lines)
    _, found = check()
    assert set(found) == {"unknown-name"}
    finding = found["unknown-name"]
    assert (finding["subject"], finding["severity"]) == (where, severity)
    assert finding["what"] == f"no guest has {name!r}"


def test_advice_on_storage_is_a_hint(sound, snaporch, sanoid, check, monkeypatch):
    writes = DiskWrites(200_000, 200_000 * 5000)
    sound.guest().writes["vda"] = writes
    status, found = check()
    assert (status, set(found)) == (0, {"record-size", "disk-discard"})
    assert {each["severity"] for each in found.values()} == {"hint"}
    assert found["record-size"]["lines"] == ["zfs set recordsize=16K tank/web"]
    monkeypatch.setenv("COLUMNS", "80")
    answer = snaporch("check", "--configdir", str(sanoid.root))
    assert max(map(len, answer.out.splitlines())) <= 80
    assert "hint  tank/web  [record-size]\n" in answer.out
    assert "1 guest checked: 2 hints\n" in answer.out
    sound.hypervisor.guests[sound.guest().uuid].job = "save"
    assert "record-size" not in check()[1]
