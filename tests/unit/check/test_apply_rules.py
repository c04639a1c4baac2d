"""Each finding: a configuration that has it, and the same one fixed."""

from dataclasses import replace
from pathlib import Path

import pytest

from snaporch.check.apply_rules import apply_rules
from snaporch.check.facts import (
    BundlePrivacy,
    GuestFacts,
    HookProgram,
    HostFacts,
    OpenRunFacts,
    OverlayFacts,
    PageStoreFacts,
    SanoidFacts,
    SourceFacts,
    StoreFacts,
    StrayFence,
    UnmetPolicy,
)
from snaporch.check.findings import Severity
from snaporch.check.gather import late_dataset
from snaporch.hypervisor import StartHookProblem
from snaporch.known_faults import FAULTS, Component, FaultCondition
from snaporch.model import Strategy
from snaporch.sanoid.config.hook_command import parse_hook
from snaporch.sanoid.hooks.freeze_order import FreezeEstimate

GOOD = """\
[tank/web]
use_template = snaporch
[template_snaporch]
pre_snapshot_script = /usr/bin/snaporch hook sanoid pre
post_snapshot_script = /usr/bin/snaporch hook sanoid post
pruning_script = /usr/bin/snaporch hook sanoid prune
script_timeout = 0
no_inconsistent_snapshot = yes
"""
SPARSE = {"releases": {Component.LIBVIRT: "11.3.0"}, "needs": {FaultCondition.SPARSE: ()}}
WEB = GuestFacts("web", "auto", ("tank/web",))
DATASETS = frozenset(
    {"tank", "tank/web", "tank/db", "tank/db/log", "tank/db/data", "flash", "flash/web"}
)


@pytest.fixture
def facts(sanoid_conf):
    """The facts of a host without problems, changed by the arguments."""

    def make(text=GOOD, guests=(WEB,), programs=None, **more):
        config = sanoid_conf(text, *DATASETS)
        scripts = {
            value
            for section in config.sections.values()
            for key, value in section.settings.items()
            if key.endswith("_script")
        }
        found = {parse_hook(value).program: HookProgram(True, True, "1.0") for value in scripts}
        return HostFacts(
            version="1.0",
            command="/usr/bin/snaporch",
            sanoid=SanoidFacts(
                True, True, Path("/etc/sanoid"), config, programs=found | (programs or {})
            ),
            guests=tuple(guests),
            store=more.pop("store", StoreFacts(Path("/store"))),
            overlays=more.pop("overlays", OverlayFacts(Path("/overlays"), 1000, 256)),
            datasets=DATASETS,
            **more,
        )

    return make


def without(key, text=GOOD):
    return "".join(line for line in text.splitlines(True) if not line.startswith(key))


def codes_in(facts):
    return {(finding.code, finding.severity.value) for finding in apply_rules(facts)}


def only(facts):
    (finding,) = apply_rules(facts)
    return finding


def test_a_sound_host_has_no_findings(facts):
    assert apply_rules(facts()) == []


# -- sections -----------------------------------------------------------------------------------


def test_the_default_script_timeout_kills_sanoid(facts):
    finding = only(facts(without("script_timeout")))
    assert (finding.code, finding.severity) == ("script-timeout", Severity.ERROR)
    assert finding.lines == ("script_timeout = 0",)
    assert "5 s" in finding.what
    assert "[tank/web] of /etc/sanoid/sanoid.conf" in finding.fix


def test_snapshots_of_guests_that_could_not_be_frozen(facts):
    finding = only(facts(without("no_inconsistent")))
    assert (finding.code, finding.severity) == ("inconsistent-snapshot", Severity.WARNING)
    assert finding.lines == ("no_inconsistent_snapshot = yes",)


def test_the_lines_of_a_finding_fix_it(facts):
    """Adding the printed lines to the named section fixes every problem."""
    lacking = "[tank/web]\nhourly = 3\n"
    for _ in range(4):
        found = [finding for finding in apply_rules(facts(lacking)) if finding.lines]
        if not found:
            break
        lacking += "".join(f"{line}\n" for finding in found for line in finding.lines)
    assert apply_rules(facts(lacking)) == []
    assert "script_timeout = 0" in lacking


TOGETHER = GOOD.replace("[tank/web]", "[tank]\nrecursive = zfs")


@pytest.mark.parametrize(
    ("lower", "severity"), [("fail", Severity.ERROR), ("paused", Severity.WARNING)]
)
def test_guests_that_cannot_all_be_frozen_in_time(facts, lower, severity):
    long = FreezeEstimate(Strategy.OVERLAY, 1 << 30, 60.0, 90.0)
    guests = [
        GuestFacts(name, "auto", (f"tank/{name}",), estimate=long, on_unavailable=lower)
        for name in ("web", "db", "mail")
    ]
    finding = only(facts(TOGETHER, guests, jobs=1))
    assert (finding.code, finding.severity) == ("hook-deadline", severity)
    assert "on tank: saving the RAM of all 3 guests takes about 180 s" in finding.what
    assert 'hook_deadline = "180s"' in finding.fix
    assert apply_rules(facts(TOGETHER, guests, jobs=2)) == []
    assert apply_rules(facts(TOGETHER, guests[:2], jobs=1)) == []


def test_one_that_is_held_on_overlays_if_it_does_not_fit(facts):
    long = FreezeEstimate(Strategy.MANUAL, 1 << 30, 60.0, 50.0, yields_to_other_program=True)
    guests = [GuestFacts(name, "auto", (f"tank/{name}",), estimate=long) for name in ("web", "db")]
    finding = only(facts(TOGETHER, guests))
    assert (finding.code, finding.severity) == ("hook-deadline", Severity.WARNING)
    assert "held on overlays, and snapshots that other programs take may be torn" in finding.why


@pytest.mark.parametrize(
    ("level", "severity"), [("auto", "error"), ("quiesced", "error"), ("crash", "hint")]
)
def test_no_hooks(facts, level, severity):
    guest = replace(WEB, level=level)
    finding = only(facts("[tank/web]\nautoprune = no\n", [guest]))
    assert (finding.code, finding.severity.value) == ("hooks-missing", severity)
    assert finding.lines == (
        "pre_snapshot_script = /usr/bin/snaporch hook sanoid pre",
        "post_snapshot_script = /usr/bin/snaporch hook sanoid post",
    )


@pytest.mark.parametrize("phase", ["pre", "post"])
def test_one_hook_without_the_other(facts, phase):
    finding = only(facts(without(f"{phase}_snapshot_script")))
    assert (finding.code, finding.severity) == (f"{phase}-missing", Severity.ERROR)
    line = f"{phase}_snapshot_script = /usr/bin/snaporch hook sanoid {phase}"
    assert finding.lines == (line,)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (HookProgram(False, False), "does not exist"),
        (HookProgram(True, False), "is not executable"),
    ],
)
def test_a_hook_that_cannot_be_called(facts, program, words):
    found = apply_rules(facts(programs={"/usr/bin/snaporch": program}))
    assert {finding.code for finding in found} == {"hook-program"}
    assert len(found) == 3
    assert all(words in finding.what for finding in found)


def test_a_hook_that_is_no_command(facts):
    text = GOOD.replace("/usr/bin/snaporch hook sanoid pre", "'/usr/bin/snaporch hook")
    assert only(facts(text)).code == "hook-program"


def test_a_hook_of_another_installation(facts):
    found = apply_rules(facts(programs={"/usr/bin/snaporch": HookProgram(True, True, "0.9")}))
    assert {(finding.code, finding.severity.value) for finding in found} == {
        ("hook-version", "warning")
    }
    assert "0.9" in found[0].what


def test_a_hook_that_calls_another_program(facts):
    finding = only(facts(GOOD.replace("snaporch hook sanoid pre", "freeze-all")))
    assert (finding.code, finding.severity) == ("hook-not-snaporch", Severity.WARNING)


def test_hooks_in_each_others_places(facts):
    text = GOOD.replace("sanoid pre\n", "sanoid x\n").replace("sanoid post\n", "sanoid pre\n")
    assert codes_in(facts(text.replace("sanoid x\n", "sanoid post\n"))) == {("hook-phase", "error")}


def test_the_hooks_directory_is_as_good(facts):
    text = GOOD.replace("/usr/bin/snaporch hook sanoid pre", '"/opt/hooks/sanoid-pre" --x')
    assert apply_rules(facts(text)) == []


def test_bundles_that_no_hook_prunes(facts):
    finding = only(facts(without("pruning_script")))
    assert (finding.code, finding.severity) == ("pruning-missing", Severity.WARNING)
    assert apply_rules(facts(without("pruning_script") + "autoprune = no\n")) == []


def test_a_path_section_runs_no_hooks(facts):
    finding = only(facts(GOOD.replace("[tank/web]", "[web]\npath = tank/web")))
    assert (finding.code, finding.severity) == ("path-section", Severity.ERROR)
    assert finding.lines == ("[tank/web]",)


def test_a_path_section_beside_one_of_the_datasets_name_is_harmless(facts):
    assert apply_rules(facts(f"[other]\npath = tank/web\n{GOOD}")) == []


def test_a_shared_template_is_reported_once_for_each_section(facts):
    text = without("script_timeout").replace("[tank/web]", "[tank]\nrecursive = yes")
    guests = [WEB, GuestFacts("db", "auto", ("tank/db",))]
    finding = only(facts(text, guests))
    assert finding.subject == "[tank]"


# -- guests -------------------------------------------------------------------------------------


def test_a_guest_without_coverage(facts):
    finding = only(facts(guests=[WEB, GuestFacts("new vm", "auto", ("tank/db",))]))
    assert (finding.code, finding.severity) == ("unscheduled", Severity.WARNING)
    assert finding.lines == ("snaporch render sanoid 'new vm'",)


def test_a_guest_of_which_some_disks_are_covered(facts):
    finding = only(facts(guests=[replace(WEB, datasets=("flash/web", "tank/web"))]))
    assert (finding.code, finding.severity) == ("partly-scheduled", Severity.ERROR)
    assert "flash/web" in finding.what
    assert "tank/web" not in finding.what


@pytest.mark.parametrize("datasets", [("tank/db",), ("flash/web", "tank/web")])
@pytest.mark.parametrize("how", [{"policies": ("hourly",)}, {"opted_out": True}])
def test_a_guest_with_a_policy_or_without_one_on_purpose_need_not_be_covered(facts, how, datasets):
    assert codes_in(facts(guests=[WEB, GuestFacts("db", "auto", datasets, **how)])) == set()


POST = "post_snapshot_script = /usr/bin/true\n"


@pytest.mark.parametrize(
    "text",
    [
        "[tank/web]\n",
        "[web]\npath = tank/web\n",
        f"[tank/web]\n{POST}",
        f"[tank/web]\n{POST}pre_snapshot_script = /usr/bin/true\n",
        "[tank/web]\npre_snapshot_script = 'true\n",
    ],
)
@pytest.mark.parametrize("how", [{"policies": ("hourly",)}, {"opted_out": True}])
def test_sanoid_may_take_further_snapshots_of_a_guest_with_a_policy(facts, text, how):
    host = facts(text, [replace(WEB, **how)])
    assert {severity for _, severity in codes_in(host)} == {"hint"}
    both = facts(text, [replace(WEB, **how), replace(WEB, name="two")])
    assert "error" in {severity for _, severity in codes_in(both)}


def test_a_hook_of_snaporchs_must_work_also_for_a_guest_with_a_policy(facts):
    host = facts(without("script_timeout"), [replace(WEB, policies=("hourly",))])
    assert codes_in(host) == {("script-timeout", "error")}


ABSENT = SanoidFacts(False, None, Path("/etc/sanoid"), None)


@pytest.mark.parametrize(("policies", "severity"), [(True, "warning"), (False, "hint")])
def test_a_guest_without_any_snapshots(facts, policies, severity):
    alone = replace(facts(), sanoid=ABSENT, policies=policies)
    assert codes_in(alone) == {("sanoid-missing", "hint"), ("unscheduled", severity)}


@pytest.mark.parametrize(("fails", "severity"), [(True, "error"), (False, "warning")])
def test_a_policy_whose_level_is_not_available(facts, fails, severity):
    unmet = (UnmetPolicy("nightly", "no guest agent answers", "", fails=fails),)
    finding = only(facts(guests=[replace(WEB, policies=("nightly",), unmet=unmet)]))
    assert (finding.code, finding.severity.value) == ("policy-level", severity)
    assert finding.what == "policy nightly: no guest agent answers"
    assert "[policy.nightly]" in finding.fix


@pytest.mark.parametrize(
    ("names", "severity"),
    [(("wbe",), "warning"), (("db-*",), "hint"), (("db-*", "wbe"), "warning")],
)
def test_names_that_match_no_guest(facts, names, severity):
    made = facts(unknown_names={"[policy.hourly] domains": names})
    assert codes_in(made) == {("unknown-name", severity)}
    assert repr(names[0]) in only(made).what


DB = GuestFacts("db", "auto", ("tank/db/data", "tank/db/log"))


def test_a_guest_taken_apart_that_could_be_one_call(facts):
    finding = only(facts(GOOD.replace("[tank/web]", "[tank/db]\nrecursive = yes"), [DB]))
    assert (finding.code, finding.severity) == ("not-atomic", Severity.WARNING)
    assert finding.lines == ("recursive = zfs",)
    assert "in [tank/db], in place of its recursive line" in finding.fix
    assert apply_rules(facts(GOOD.replace("[tank/web]", "[tank/db]\nrecursive = zfs"), [DB])) == []


def test_a_guest_taken_apart_by_a_section_far_above(facts):
    text = GOOD.replace("[tank/web]", "[tank]\nrecursive = yes")
    finding = only(facts(text, [DB]))
    assert "below [tank]" in finding.fix
    assert finding.lines == ("[tank/db]", "recursive = zfs")
    assert apply_rules(facts(f"{text}[tank/db]\nrecursive = zfs\n", [DB])) == []


def test_a_guest_taken_apart_by_sections_of_its_own(facts):
    template = "use_template = snaporch\n"
    text = GOOD.replace("[tank/web]", f"[tank/db/log]\n{template}[tank/db/data]")
    finding = only(facts(text, [DB]))
    assert "in place of [tank/db/data] and [tank/db/log]" in finding.fix
    assert finding.lines == ("[tank/db]", "recursive = zfs")


def test_a_guest_on_two_pools_is_bridged_by_the_window(facts):
    guest = replace(WEB, datasets=("flash/web", "tank/web"))
    finding = only(facts(GOOD + "[flash/web]\nuse_template = snaporch\n", [guest]))
    assert (finding.code, finding.severity) == ("not-atomic", Severity.HINT)


def test_a_refusal_of_the_plan(facts):
    guest = replace(WEB, refusal=("a pci host device cannot be saved", "detach it"))
    finding = only(facts(guests=[guest]))
    assert (finding.code, finding.severity) == ("no-snapshot", Severity.ERROR)
    assert (finding.what, finding.fix) == guest.refusal


@pytest.mark.parametrize(("text", "severity"), [(GOOD, "error"), ("[tank]\n", "hint")])
def test_a_guest_without_a_policy_on_purpose_need_not_be_snapshotted(facts, text, severity):
    guest = replace(WEB, refusal=("a pci host device cannot be saved", ""), opted_out=True)
    assert ("no-snapshot", severity) in codes_in(facts(text, [guest]))


def test_a_downgrade_of_the_plan(facts):
    finding = only(facts(guests=[replace(WEB, downgrade="taking crash instead")]))
    assert (finding.code, finding.severity) == ("downgrade", Severity.WARNING)


def test_a_guest_off_zfs_is_a_hint(facts):
    guest = GuestFacts("nas", "auto", (), ("vda: not on ZFS",), ("no disk on ZFS", ""))
    finding = only(facts(guests=[WEB, guest]))
    assert (finding.code, finding.severity) == ("not-on-zfs", Severity.HINT)


def test_a_disk_off_zfs(facts):
    finding = only(facts(guests=[replace(WEB, off_zfs=("vdb (/x): not on ZFS but on ext4",))]))
    assert (finding.code, finding.severity) == ("disk-left-out", Severity.WARNING)
    assert "vdb (/x)" in finding.what


def test_an_excluded_disk_in_a_dataset_that_is_snapshotted(facts):
    finding = only(facts(guests=[replace(WEB, excluded=("vdb (/tank/web/b): excluded",))]))
    assert (finding.code, finding.severity) == ("excluded-disk", Severity.WARNING)
    assert "vdb (/tank/web/b)" in finding.what


def test_a_dataset_with_files_of_others(facts):
    finding = only(facts(guests=[replace(WEB, shared=("tank/home (1 file: thesis)",))]))
    assert (finding.code, finding.severity) == ("shared-dataset", Severity.HINT)
    assert "tank/home (1 file: thesis)" in finding.what


BY_HAND = "tank/web@by-hand is not snaporch's"


@pytest.mark.parametrize(
    ("guest", "severity"),
    [
        (replace(WEB, other_program=BY_HAND, overlays=True), Severity.WARNING),
        (
            replace(WEB, other_program=BY_HAND),
            Severity.HINT,
        ),  # its hooks hold it while sanoid is at it
    ],
)
def test_another_program_that_snapshots_a_guest(facts, guest, severity):
    finding = only(facts(guests=[guest]))
    assert (finding.code, finding.severity) == ("other-snapshots", severity)
    assert BY_HAND in finding.what
    assert "torn" in finding.why


def test_another_program_matters_only_where_overlays_would_be_used(facts):
    guest = replace(WEB, other_program=BY_HAND)
    assert "other-snapshots" not in {code for code, _ in codes_in(facts("[tank/web]\n", [guest]))}
    hooked = facts("[tank/web]\npre_snapshot_script = /usr/bin/snaporch hook sanoid pre\n", [guest])
    assert ("other-snapshots", "hint") in codes_in(hooked)


@pytest.mark.parametrize(
    ("guest", "found"),
    [
        (replace(WEB, confined_overlays=2), True),
        (replace(WEB, confined_overlays=1), False),  # the pause is short
        (replace(WEB, confined_overlays=2, overlays=True), False),  # ram_strategy wants overlays
    ],
)
def test_many_overlays_of_a_guest_that_apparmor_confines(facts, guest, found):
    expected = {("confined-overlays", "hint")} if found else set()
    assert codes_in(facts(guests=[guest])) == expected


def test_a_busy_guest(facts):
    assert codes_in(facts(guests=[replace(WEB, busy="snapshot (pid 7)")])) == {("busy", "hint")}


# -- the host -----------------------------------------------------------------------------------


def test_without_sanoid_no_sections_are_checked(facts):
    covered = facts(guests=[replace(WEB, policies=("hourly",))])
    assert codes_in(replace(covered, sanoid=ABSENT)) == {("sanoid-missing", "hint")}


def test_a_sanoid_installed_for_syncoid_is_no_error(facts):
    unused = SanoidFacts(True, False, Path("/etc/sanoid"), None, unused=True)
    covered = facts(guests=[replace(WEB, policies=("hourly",))])
    assert codes_in(replace(covered, sanoid=unused)) == {("sanoid-unused", "hint")}


def test_a_configuration_that_sanoid_refuses(facts):
    for scheduled, severity in ((True, "error"), (None, "error"), (False, "hint")):
        refusing = SanoidFacts(
            True, scheduled, Path("/etc/sanoid"), None, refusal="no such setting"
        )
        assert codes_in(replace(facts(), sanoid=refusing)) == {("sanoid-refuses", severity)}


@pytest.mark.parametrize(("scheduled", "codes"), [(True, 0), (None, 0), (False, 1)])
def test_the_timer(facts, scheduled, codes):
    made = facts()
    found = codes_in(replace(made, sanoid=replace(made.sanoid, scheduled=scheduled)))
    assert len(found) == codes
    assert found <= {("sanoid-timer", "hint")}


def test_what_sanoid_ignores(facts):
    assert codes_in(facts(GOOD + "script_timeout = 5\n")) == {("sanoid-ignores", "warning")}


def test_a_section_without_a_dataset(facts):
    finding = only(facts(GOOD + "[tank/gone]\n"))
    assert (finding.code, finding.subject) == ("dataset-missing", "[tank/gone]")


def test_unfinished_runs(facts):
    runs = (OpenRunFacts("r1", "web", alive=False), OpenRunFacts("r2", "mail", alive=True))
    finding = only(facts(runs=runs))
    assert (finding.code, finding.subject) == ("unfinished-run", "web")
    assert finding.lines == ("snaporch recover",)


@pytest.mark.parametrize(
    ("overlays", "expected"),
    [
        ({"unknown": ("20261121T000000Z-x",)}, ("overlays-left", "warning")),
        ({"quarantined": ("r/vda.qcow2",)}, ("overlays-quarantined", "warning")),
        ({"free_mib": 255}, ("overlay-space", "error")),
        ({"dataset": "tank/web"}, ("overlays-snapshotted", "warning")),
        ({"dataset": "tank/db"}, None),
    ],
)
def test_overlays(facts, overlays, expected):
    made = facts(overlays=replace(OverlayFacts(Path("/overlays"), 256, 256), **overlays))
    assert codes_in(made) == ({expected} if expected else set())


@pytest.mark.parametrize(
    ("store", "expected"),
    [
        ({"writable": False}, ("store-unwritable", "error")),
        ({"writable": False, "exists": False}, ("store-unwritable", "error")),
        ({"mode": 0o755}, ("store-readable", "warning")),
        ({"mode": 0o755, "exists": False}, None),
        ({"dataset": "tank/web"}, ("store-snapshotted", "warning")),
        ({"dataset": "tank/db"}, None),
    ],
)
def test_store(facts, store, expected):
    made = facts(store=replace(StoreFacts(Path("/store")), **store))
    assert codes_in(made) == ({expected} if expected else set())


def test_ram_of_an_encrypted_guest_is_stored_unencrypted(facts):
    secret = frozenset({"tank/web", "tank/db"})
    finding = only(facts(encrypted=secret))
    assert (finding.code, finding.severity) == ("store-unencrypted", Severity.WARNING)
    assert "tank/db" not in finding.what
    store = StoreFacts(Path("/store"), encrypted=True)
    assert apply_rules(facts(encrypted=secret, store=store)) == []


@pytest.mark.parametrize(
    ("dataset", "encrypted", "secret", "expected"),
    [
        ("tank/ram", False, set(), None),
        ("tank/ram", False, {"tank/web"}, ("pages-unencrypted", "warning")),
        ("tank/ram", False, {"tank/db"}, None),
        ("tank/ram", True, {"tank/web"}, None),
        ("gone/ram", False, {"tank/web"}, ("pages-missing", "error")),
    ],
)
def test_ram_in_pages(facts, dataset, encrypted, secret, expected):
    store = StoreFacts(Path("/store"), encrypted=True)
    pages = PageStoreFacts(dataset, ("web",), encrypted=encrypted)
    made = facts(pages=pages, store=store, encrypted=frozenset(secret))
    assert codes_in(made) == ({expected} if expected else set())


def test_a_replica_that_is_inside_a_dataset_of_the_guest_or_around_it(facts):
    nested = {"disk": "tank/web is inside tank, to which it is copied"}
    finding = only(facts(guests=[replace(WEB, policies=("hourly",), nested=nested)]))
    assert (finding.code, finding.severity) == ("replica-nested", Severity.ERROR)
    assert (finding.subject, finding.what) == ("web", f"replica disk: {nested['disk']}")
    assert "[replica.disk]" in finding.fix


def test_replicas(facts):
    finding = only(facts(replicas={"nas": "", "usb": "zfs list: cannot open 'usb': no such pool"}))
    assert (finding.code, finding.severity) == ("replica-unreachable", Severity.WARNING)
    assert (finding.subject, "no such pool" in finding.what) == ("replica usb", True)
    assert "docs/how-to/replication.md" in finding.fix
    finding = only(facts(replicas={"s3": "no server"}, repositories=frozenset(["s3"])))
    assert "docs/how-to/object-storage.md" in finding.fix


def test_a_replica_that_zfs_does_not_protect(facts):
    finding = only(facts(replicas={"nas": ""}, weak_replicas={"nas": "OpenZFS 2.2 is too old"}))
    assert (finding.code, finding.severity) == ("replica-weak", Severity.HINT)
    assert (finding.subject, finding.what) == ("replica nas", "OpenZFS 2.2 is too old")


def test_a_rate_that_nothing_limits(facts):
    finding = only(facts(replicas={"nas": "", "usb": ""}, unlimited=("nas",)))
    assert (finding.code, finding.severity) == ("rate-unlimited", Severity.WARNING)
    assert (finding.subject, finding.what) == ("replica nas", "mbuffer is not installed")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.code)
def test_a_known_fault_is_reported_where_it_matters(facts, fault):
    version = ".".join(map(str, fault.since or (1, 0, 0)))
    releases = {fault.component: version}
    finding = only(facts(releases=releases, needs={fault.need: ("web", "mail")}))
    assert finding.code == fault.code
    assert finding.severity is (Severity.WARNING if fault.harmful else Severity.HINT)
    assert finding.subject == f"{fault.component} {version}"
    assert "web and mail" in finding.why
    assert fault.meanwhile in finding.why
    assert finding.lines == (
        ('[domain."web"]', fault.setting, '[domain."mail"]', fault.setting) if fault.setting else ()
    )
    own = only(facts(releases=releases, needs={fault.need: ("web",)}, domain_sections={"web"}))
    assert own.lines == (('# in [domain."web"]:', fault.setting) if fault.setting else ())
    assert apply_rules(facts(releases=releases)) == []
    if fault.fixed:
        fixed = {fault.component: ".".join(map(str, fault.fixed[-1]))}
        assert apply_rules(facts(releases=fixed, needs={fault.need: ("web",)})) == []


@pytest.mark.parametrize("version", ["", "unknown", "-", "2.x"])
def test_a_version_that_cannot_be_read_is_reported(facts, version):
    finding = only(facts(releases={Component.OPENZFS: version}, needs={FaultCondition.CLONING: ()}))
    assert (finding.code, finding.subject) == ("version-unknown", "OpenZFS")


def test_directories_that_a_power_loss_empties(facts):
    finding = only(facts(volatile={Path("/run/journal"): "tmpfs"}))
    assert (finding.code, finding.severity) == ("volatile-directory", Severity.ERROR)
    assert finding.subject == "/run/journal"


@pytest.mark.parametrize("other", ["old/web", "copies"])
def test_a_guest_whose_mount_point_another_file_system_has(facts, other):
    (dataset,) = WEB.datasets
    finding = only(facts(mountpoints={dataset: "/vm/web", other: "/vm/web"}))
    assert (finding.code, finding.severity) == ("one-mountpoint", Severity.ERROR)
    assert finding.subject == "/vm/web"
    assert f"{dataset}" in finding.what
    assert other in finding.what


def test_file_systems_of_others_may_have_one_mount_point(facts):
    """Boot environments have, say."""
    alone = {"rpool/ROOT/one": "/", "rpool/ROOT/two": "/"}
    apart = {dataset: f"/{dataset}" for dataset in WEB.datasets}
    assert apply_rules(facts(mountpoints=alone | apart)) == []


def test_a_mount_point_above_the_guest(facts):
    (dataset,) = WEB.datasets
    above = dataset.rpartition("/")[0]
    finding = only(facts(mountpoints={above: "/vm", "old": "/vm", dataset: "/vm/web"}))
    assert (finding.code, finding.subject) == ("one-mountpoint", "/vm")


@pytest.mark.parametrize("is_volume", [True, False])
def test_a_guest_that_is_not_at_the_shared_mount_point(facts, is_volume):
    """A volume, or a file system with a mount point of its own."""
    (dataset,) = WEB.datasets
    own = {} if is_volume else {dataset: "/var/lib/libvirt/images"}
    above = dataset.partition("/")[0]
    assert apply_rules(facts(mountpoints={above: "/srv", "backup": "/srv"} | own)) == []


def test_a_libvirt_that_starts_guests_on_overlays(facts):
    finding = only(facts(start_hook_problem=StartHookProblem("no hook", "snaporch install")))
    assert (finding.code, finding.severity) == ("unguarded-start", Severity.WARNING)
    assert (finding.what, finding.lines) == ("no hook", ("snaporch install",))


@pytest.mark.parametrize(
    ("namesake", "severity", "command"),
    [
        ("", Severity.HINT, "snaporch fence --remove u1"),
        ("u2", Severity.WARNING, "snaporch fence u2"),
    ],
)
def test_a_fence_that_holds_no_guest_of_this_host(facts, namesake, severity, command):
    finding = only(facts(stray_fences=(StrayFence("u1", "web", namesake),)))
    assert (finding.code, finding.severity) == ("stray-fence", severity)
    assert (finding.subject, finding.lines) == ("web", (command,))


def test_fences_on_a_dataset_that_may_be_mounted_late(facts):
    finding = only(facts(late_fences="tank/var"))
    assert (finding.code, finding.severity) == ("late-fences", Severity.HINT)
    assert finding.subject == "tank/var"


def test_fences_are_late_if_they_are_in_another_pool_than_the_hook(world):
    for dataset in ("tank/var", "tank/root", "rpool/root"):
        world.pool.create(dataset)
        (world.root / "zfs" / dataset).mkdir(parents=True, exist_ok=True)
    fences = world.root / "zfs/tank/var/fences"
    for hook, late in (("zfs/tank/root", ""), ("zfs/rpool/root", "tank/var"), ("", "tank/var")):
        assert late_dataset(world.resolver, fences, world.root / hook / "hook") == late
    assert late_dataset(world.resolver, world.root / "fences", world.root / "hook") == ""


def test_the_worst_comes_first(facts):
    made = facts(without("script_timeout", without("pruning_script")), **SPARSE)
    kinds = [finding.severity for finding in apply_rules(made)]
    assert kinds == [Severity.ERROR, Severity.WARNING, Severity.HINT]


PRIVACY = {"nas": BundlePrivacy.CLEAR, "usb": BundlePrivacy.ENCRYPTED_DATASET}


def copied(*replicas):
    return replace(WEB, policies=("hourly",), replicas=replicas)


def test_ram_in_clear_beside_encrypted_disks_is_not_sent(facts):
    store = StoreFacts(Path("/store"), encrypted=True)
    more = {"store": store, "encrypted": frozenset({"tank/web"}), "bundle_privacy": PRIVACY}
    finding = only(facts(guests=[copied("nas", "usb")], **more))
    assert (finding.code, finding.severity) == ("ram-not-replicated", Severity.ERROR)
    assert (finding.subject, "tank/web is encrypted" in finding.what) == ("web", True)
    assert "encrypt_to in [replica.nas]" in finding.fix
    assert apply_rules(facts(guests=[copied("usb")], **more)) == []
    encrypted = more | {"bundle_privacy": {"nas": BundlePrivacy.ENCRYPTED}}
    assert apply_rules(facts(guests=[copied("nas")], **encrypted)) == []


@pytest.mark.parametrize(
    ("guest", "codes"),
    [
        (copied("nas"), {("ram-not-replicated", "error")}),
        (replace(copied("nas"), has_ram=False), set()),
        (
            replace(copied("nas"), has_ram=False, firmware=("UEFI variables",)),
            {("ram-not-replicated", "error")},
        ),
        (
            replace(copied("nas"), datasets=("tank/db",), left_out=("tank/web",)),
            {("ram-not-replicated", "error")},
        ),
    ],
)
def test_only_ram_that_has_encrypted_data_counts(facts, guest, codes):
    store = StoreFacts(Path("/store"), encrypted=True)
    more = {"store": store, "encrypted": frozenset({"tank/web"}), "bundle_privacy": PRIVACY}
    assert codes_in(facts(guests=[guest], **more)) == codes


def test_the_secrets_are_named(facts):
    guest = replace(copied("nas"), firmware=("TPM state", "UEFI variables"))
    more = {"store": StoreFacts(Path("/store"), encrypted=True)}
    more |= {"encrypted": frozenset({"tank/web"}), "bundle_privacy": PRIVACY}
    for has_ram, text in ((True, "its RAM and TPM state and"), (False, "its TPM state and")):
        finding = only(facts(guests=[replace(guest, has_ram=has_ram)], **more))
        assert f"{text} UEFI variables would be there in clear" in finding.what


def test_an_append_only_replica_is_not_advised_to_encrypt_its_dataset(facts):
    more = {"store": StoreFacts(Path("/store"), encrypted=True)}
    more |= {"encrypted": frozenset({"tank/web"})}
    for privacy, is_advised in ((BundlePrivacy.CLEAR, True), (BundlePrivacy.NOT_ASKED, False)):
        finding = only(facts(guests=[copied("nas")], bundle_privacy={"nas": privacy}, **more))
        assert ("on an encrypted dataset" in finding.fix) is is_advised


@pytest.mark.parametrize(("privacy", "refused"), [("encrypted-dataset", True), ("all", False)])
def test_pages_in_clear_beside_encrypted_disks_need_an_encrypted_replica(facts, privacy, refused):
    pages = PageStoreFacts("tank/ram", ("web",), encrypted=False)
    more = {"store": StoreFacts(Path("/store"), encrypted=True), "pages": pages}
    more |= {"encrypted": frozenset({"tank/web"})}
    more |= {"bundle_privacy": {"nas": BundlePrivacy(privacy)}}
    codes = {code for code, _ in codes_in(facts(guests=[copied("nas")], **more))}
    assert ("ram-not-replicated" in codes) is refused


def test_ram_in_clear_beside_disks_in_clear_is_a_hint(facts):
    finding = only(facts(guests=[copied("nas", "usb")], bundle_privacy=PRIVACY))
    assert (finding.code, finding.severity) == ("ram-in-clear", Severity.HINT)
    assert (finding.subject, "RAM of web" in finding.what) == ("replica nas", True)
    assert apply_rules(facts(guests=[copied()], bundle_privacy=PRIVACY)) == []


@pytest.mark.parametrize(("encrypted", "privacy"), [(True, "encrypted"), (False, "clear")])
def test_pages_in_clear_are_not_sent_to_a_replica_that_has_ram_encrypted(facts, encrypted, privacy):
    pages = PageStoreFacts("tank/ram", ("web",), encrypted=encrypted)
    given = {"pages": pages, "bundle_privacy": {"nas": BundlePrivacy(privacy)}}
    codes = {code for code, _ in codes_in(facts(guests=[copied("nas")], **given))}
    assert "ram-not-replicated" not in codes
    given |= {"pages": replace(pages, encrypted=False)}
    given |= {"bundle_privacy": {"nas": BundlePrivacy.ENCRYPTED}}
    finding = only(facts(guests=[copied("nas")], **given))
    assert (finding.code, finding.severity) == ("ram-not-replicated", Severity.ERROR)
    assert "pages of RAM are not sent to replica nas" in finding.what


@pytest.mark.parametrize(
    ("source", "code", "what"),
    [
        (SourceFacts(unreachable="no route"), "source-unreachable", "no route"),
        (SourceFacts(has_shell=True), "source-shell", "may run any command there"),
        (SourceFacts(unsent=("wbe",)), "source-guests", "it does not send 'wbe'"),
        (SourceFacts(sends_none=True), "source-guests", "it sends no guest"),
        (SourceFacts(no_place="no pool"), "source-place", "no pool"),
        (SourceFacts(free_mib=7), "source-room", "7 MiB are free"),
        (SourceFacts(locked=("b/v/tank:web",)), "source-in-clear", "b/v/tank:web is encrypted"),
        (SourceFacts(ahead_seconds=301), "source-clock", "its clock is 301 s ahead of"),
        (SourceFacts(ahead_seconds=-301), "source-clock", "its clock is 301 s behind"),
        (SourceFacts(version="0.1~x"), "source-version", "it has snaporch 0.1~x"),
    ],
)
def test_sources(facts, source, code, what):
    finding = only(replace(facts(), sources={"vm1": source}))
    assert (finding.code, finding.subject) == (code, "source vm1")
    assert what in finding.what


def test_a_good_source_is_no_finding(facts):
    good = SourceFacts(free_mib=1024, ahead_seconds=300, version=facts().version)
    assert apply_rules(replace(facts(), sources={"vm1": good})) == []
