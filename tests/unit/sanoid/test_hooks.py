"""pre and post in this process, on a host of fakes; hold processes are threads."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.hooks import failing_once
from fakes.sanoid import hold_on

from snaporch import default_paths
from snaporch.bundle.compression_tuning import RamSaveTimes
from snaporch.bundle.manifest import MANIFEST_NAME, Role, manifest_bytes, read_manifest
from snaporch.catalog.records import all_records
from snaporch.catalog.torn import record_commit
from snaporch.errors import AttentionError, RunFailedError, SnaporchError
from snaporch.interrupt import Interrupt
from snaporch.journal import Journal
from snaporch.locks import domain_lock
from snaporch.model import BundleState, DomainState, Level
from snaporch.recovery.hold_socket import address, remove_if_dead, starter_lock
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.run import restore
from snaporch.sanoid.hooks.caller import Caller
from snaporch.sanoid.hooks.dispatch import answer
from snaporch.sanoid.hooks.guests import guests_on
from snaporch.sanoid.hooks.host import HookHost
from snaporch.sanoid.hooks.post_snapshot import post
from snaporch.sanoid.hooks.pre_snapshot import pre
from snaporch.sanoid.hooks.record_unfrozen import record_unfrozen
from snaporch.sanoid.hooks.request import Request
from snaporch.sanoid.hooks.settings import HookSettings
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.zfs import PoolError

DEFAULTS = """\
[version]
version = 2
[template_default]
recursive =
use_template =
skip_children =
process_children_only =
autosnap = yes
hourly = 10
daily = 0
pre_snapshot_script = pre
post_snapshot_script = post
"""
TWO = {"vda": "tank/web", "vdb": "flash/web"}
_FREEZING = ("hypervisor.capture", "hypervisor.suspend")


class FakeHost(HookHost):
    """Where sanoid runs its hooks; hold processes are threads."""

    def __init__(self, world, tmp_path):
        self.world, self.resolver = world, world.resolver
        self.conf = tmp_path / "sanoid"
        self.conf.mkdir()
        self.pid = 0
        self.threads = []
        self.interrupts = []

    @property
    def settings(self):
        paths = self.world.paths
        return HookSettings(None, {}, "fake", paths.runtime, paths.overlays, paths.bundles)

    @property
    def config(self):
        return self.world.context.config

    @property
    def caller(self):
        return Caller(self.pid, self.conf)

    @property
    def hypervisor(self):
        return self.world.hypervisor

    @property
    def pool(self):
        return self.world.pool

    def check_exist(self, datasets):
        pass

    def start_hold_process(self, uuid):
        self.interrupts.append(Interrupt())
        arguments = (self.world, uuid, self.hold_socket(uuid), self.interrupts[-1])
        self.threads.append(threading.Thread(target=hold_on, args=arguments))
        self.threads[-1].start()

    def configure(self, text):
        (self.conf / "sanoid.defaults.conf").write_text(DEFAULTS)
        (self.conf / "sanoid.conf").write_text(text)

    @staticmethod
    def environment(target, *names, **more):
        return {"SANOID_TARGET": target, "SANOID_SNAPNAMES": ",".join(names or ("hourly",))} | more

    def pre(self, target, *names):
        return pre(self.environment(target, *names), self)

    def post(self, target, *names, **more):
        return post(self.environment(target, *names, **more), self)

    def rest(self):
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()

    def records(self):
        self.rest()
        return all_records(self.world.context.store, self.world.pool.snapshots())


@pytest.fixture
def host(world, tmp_path):
    made = FakeHost(world, tmp_path)
    yield made
    for interrupt in made.interrupts:
        interrupt.signum = 15
    made.rest()


def test_pre_freezes_and_post_releases(host, world):
    world.add_guest()
    assert host.pre("tank/web") == 0
    assert not world.on_bases()
    world.pool.snapshot(["tank/web@hourly"], {})
    assert host.post("tank/web") == 0
    assert world.on_bases()
    (record,) = host.records()
    assert (record.level, record.state) == (Level.RAM, BundleState.COMPLETE)


def test_for_a_dataset_without_a_guest_nothing_is_done(host, world):
    world.add_guest()
    assert host.pre("tank/other") == 0
    assert host.post("tank/other") == 0
    assert host.threads == []
    assert world.hooks.log == []


def test_a_guest_below_is_frozen_only_if_the_snapshot_is_recursive(host, world):
    world.add_guest()
    host.configure("[tank]\n")
    assert host.pre("tank") == 0
    assert host.threads == []
    host.configure("[tank]\nrecursive = zfs\n")
    assert host.pre("tank") == 0
    assert not world.on_bases()
    world.pool.snapshot(["tank/web@hourly"], {})
    assert host.post("tank") == 0
    assert host.records()[0].level is Level.RAM


def test_a_guest_on_overlays_is_found_by_its_bases(host, world):
    world.add_guest(disks=TWO)
    host.configure("[tank/web]\n[flash/web]\n")
    assert host.pre("tank/web") == 0
    world.pool.snapshot(["tank/web@hourly"], {})
    assert host.pre("flash/web") == 0
    world.pool.snapshot(["flash/web@hourly"], {})
    assert host.post("tank/web") == 0
    assert host.post("flash/web") == 0
    (record,) = host.records()
    assert (record.level, record.datasets) == (Level.RAM, ("flash/web", "tank/web"))
    assert len(host.threads) == 1


def test_a_guest_on_an_overlay_is_found_by_the_base_and_not_by_what_lies_below_it(host, world):
    golden = world.image("flash/golden", "golden.img")
    domain = world.add_guest()
    base = domain.disks[0].source
    overlay = world.paths.overlays / "run" / "vda.qcow2"
    end = f'<backingStore type="file"><source file="{golden}"/></backingStore>'
    below = f'<backingStore type="file"><source file="{base}"/>{end}</backingStore>'
    source = f'<source file="{base}" />'
    assert source in world.guest().live
    world.guest().live = world.guest().live.replace(source, f'<source file="{overlay}"/>{below}')
    (found,) = guests_on(host, ["tank/web"])
    assert found.disks == {"vda": "tank/web"}
    assert guests_on(host, ["flash/golden"]) == []


@pytest.mark.parametrize(
    ("state", "found"), [(DomainState.RUNNING, ["web"]), (DomainState.OFF, [])]
)
def test_a_running_guest_whose_image_was_deleted_is_found_by_its_directory(
    host, world, state, found
):
    domain = world.add_guest(state=state)
    Path(domain.disks[0].source).unlink()
    assert [guest.domain.name for guest in guests_on(host, ["tank/web"])] == found


def test_successive_calls_have_windows_of_their_own(host, world):
    world.add_guest()
    for name in ("h1", "h2"):
        assert host.pre("tank/web", name) == 0
        world.pool.snapshot([f"tank/web@{name}"], {})
        assert host.post("tank/web", name) == 0
    assert len({record.run for record in host.records()}) == 2


def test_several_guests_are_frozen_together(host, world):
    for name in ("web", "mail", "files"):
        world.add_guest(name, {"vda": f"tank/{name}"})
    host.configure("[tank]\nrecursive = zfs\n")
    assert host.pre("tank") == 0
    assert not any(world.on_bases(name) for name in ("web", "mail", "files"))
    world.pool.snapshot([f"tank/{name}@hourly" for name in ("web", "mail", "files")], {})
    assert host.post("tank") == 0
    assert {record.level for record in host.records()} == {Level.RAM}
    assert len(host.records()) == 3


def test_if_one_cannot_be_frozen_none_is(host, world):
    world.add_guest("web", {"vda": "tank/web"})
    world.add_guest("mail", {"vda": "tank/mail"})
    config = world.context.config.model_copy(update={"domain": {"mail": {"level": "off"}}})
    world.context.config = config
    host.configure("[tank]\nrecursive = zfs\n")
    with pytest.raises(SnaporchError) as caught:
        host.pre("tank")
    assert caught.value.exit_code == 5
    assert "mail: it runs" in caught.value.line()
    host.rest()
    assert world.is_as_it_was("web")
    assert world.is_as_it_was("mail")
    world.pool.snapshot(["tank/web@hourly", "tank/mail@hourly"], {})
    assert host.post("tank", SANOID_PRE_FAILURE="1") == 0
    assert host.records() == []


def test_a_guest_whose_restore_was_interrupted_is_refused(host, world):
    world.add_guest()
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    plan = make_restore_plan(world.context, "web", "s1")
    world.hooks.at["pool.rollback"] = failing_once(PoolError("zfs rollback", "some failure"))
    with pytest.raises(AttentionError):
        restore(world.context, plan, safety=False)
    world.hooks.log.clear()
    with pytest.raises(SnaporchError) as caught:
        host.pre("tank/web")
    assert "a restore of it was interrupted; run: snaporch recover" in caught.value.line()
    host.rest()
    assert not {"pool.rollback", "pool.snapshot", "hypervisor.start"} & set(world.hooks.acts())


@pytest.fixture
def three(host, world):
    """Three guests that one call of sanoid's concerns."""
    for name in ("web", "mail", "files"):
        world.add_guest(name, {"vda": f"tank/{name}"})
    host.configure("[tank]\nrecursive = zfs\n")
    return host


def ram_took(world, name, seconds):
    """The guest has a bundle whose RAM took so long to save; its snapshot is gone."""
    domain = world.hypervisor.domain(name)
    record = take_snapshot(world.context, domain, SnapshotRequest("before"))
    bundle, times = Path(record.bundle), RamSaveTimes(1, seconds, 0.0, 0.0)
    manifest = read_manifest(bundle)
    parts = [
        part.model_copy(update={"pace": times}) if part.role is Role.RAM else part
        for part in manifest.parts
    ]
    changed = manifest.model_copy(update={"parts": tuple(parts)})
    (bundle / MANIFEST_NAME).write_bytes(manifest_bytes(changed))
    world.pool.destroy_snapshots([f"{dataset}@before" for dataset in record.datasets])
    world.hooks.log.clear()


def configured(world, **domains):
    world.context.config = world.context.config.model_copy(update={"domain": domains})


def test_no_guest_is_paused_while_another_waits_for_its_lock(three, world):
    configured(world, web={"level": "paused"})
    uuid = world.guest("mail").uuid
    with ThreadPoolExecutor(1) as threads:
        with domain_lock(
            default_paths.LOCKS, "mail", uuid, "test", wait="0s", interrupt=Interrupt()
        ):
            pre = threads.submit(three.pre, "tank")
            while len(list(world.paths.journal.glob("*"))) < 2:  # web and files have their plans
                assert not pre.done(), pre.result()
            assert world.guest("web").state is DomainState.RUNNING
            assert world.on_bases("files")
        assert pre.result() == 0
    assert world.guest("web").state is DomainState.PAUSED


def test_a_guest_without_a_plan_is_not_waited_for_for_ever(three, world):
    uuid = world.guest("mail").uuid
    three.plan_seconds = lambda settings: 0.5 if settings.ram_rate else 60
    configured(world, mail={"ram_rate": 100})
    with (
        domain_lock(default_paths.LOCKS, "mail", uuid, "test", wait="0s", interrupt=Interrupt()),
        pytest.raises(RunFailedError, match="is to freeze it has no plan after 0 s"),
    ):
        three.pre("tank")
    three.rest()
    assert all(world.is_as_it_was(name) for name in ("web", "mail", "files"))


def test_ram_is_saved_before_any_guest_is_suspended(three, world):
    configured(world, web={"level": "paused"}, mail={"ram_strategy": "manual"})
    assert three.pre("tank") == 0
    frozen = [act for act in world.hooks.log if act.split()[0] in _FREEZING]
    assert frozen == [
        "hypervisor.capture files",
        "hypervisor.capture mail",
        "hypervisor.suspend web",
    ]


@pytest.mark.parametrize("lower", ["fail", "paused"])
def test_a_conflict_is_reported_before_any_guest_is_frozen(three, world, capsys, lower):
    """Two that stay paused may have to wait for one another longer than they may be paused."""
    manual = {"ram_strategy": "manual", "freeze_deadline": "60s", "on_unavailable": lower}
    configured(world, web=manual, mail=manual)
    for name in ("web", "mail", "files"):
        ram_took(world, name, seconds=59)
    if lower == "fail":
        with pytest.raises(SnaporchError, match=r"it may be paused for 59 s .* raise freeze_d"):
            three.pre("tank")
        assert not set(world.hooks.acts()) & set(_FREEZING)
        return
    assert three.pre("tank") == 0
    world.pool.snapshot([f"tank/{name}@hourly" for name in ("web", "mail", "files")], {})
    assert three.post("tank") == 0
    assert sorted(record.level for record in three.records()) == ["paused", "ram", "ram"]
    assert "it may be paused for 59 s" in capsys.readouterr().err


@pytest.mark.parametrize("lower", ["fail", "paused"])
def test_guests_that_other_programs_snapshot_take_overlays_if_they_do_not_fit(
    three, world, capsys, lower
):
    """Because of another program all would be paused, for longer than they may be."""
    deadlines = {"freeze_deadline": "60s", "hook_deadline": "200s"}
    world.with_defaults(ram_strategy="auto", on_unavailable=lower, **deadlines)
    for name in ("web", "mail", "files"):
        ram_took(world, name, seconds=59)
    guests = ("web", "mail", "files")
    world.pool.snapshot([f"tank/{name}@by-hand" for name in guests], {})
    assert three.pre("tank") == 0
    world.pool.snapshot([f"tank/{name}@hourly" for name in guests], {})
    assert three.post("tank") == 0
    assert {record.level for record in three.records()} == {Level.RAM}
    said = capsys.readouterr().err
    assert "is not snaporch's: manual, without overlays" in said
    assert "taking overlay instead" in said
    assert "is not snaporch's; what it takes during the commit will be torn" in said


def test_a_holder_that_does_not_start_is_reported(host, world):
    world.add_guest()
    host.start_hold_process = lambda _uuid: None
    host.start_seconds = 0.05
    with pytest.raises(RunFailedError, match="did not start"):
        host.pre("tank/web")


def test_the_socket_of_a_killed_holder_is_replaced(host, world):
    uuid = world.add_guest().uuid
    world.paths.runtime.mkdir()
    (world.paths.runtime / f"{uuid}.window").touch()
    assert host.pre("tank/web") == 0
    world.pool.snapshot(["tank/web@hourly"], {})
    assert host.post("tank/web") == 0


def test_recovery_removes_a_socket_that_no_holder_uses(host, world):
    uuid = world.add_guest().uuid
    world.paths.runtime.mkdir()
    path = world.paths.runtime / f"{uuid}.window"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, address(path) as name:
        listener.bind(name)
        listener.listen()
        remove_if_dead(world.paths.runtime, uuid)
        assert path.exists()
    with starter_lock(path, wait=True):
        remove_if_dead(world.paths.runtime, uuid)
        assert path.exists()
    remove_if_dead(world.paths.runtime, uuid)
    assert not path.exists()
    remove_if_dead(world.paths.runtime, uuid)


def test_a_snapshot_of_a_guest_that_was_not_frozen_is_recorded_as_crash(host, world, capsys):
    world.add_guest()
    world.pool.snapshot(["tank/web@hourly"], {})
    assert host.post("tank/web") == 8
    (record,) = host.records()
    assert (record.level, record.bundle) == (Level.CRASH, None)
    assert "was not frozen for tank/web@hourly" in capsys.readouterr().err


def test_a_snapshot_that_a_run_has_marked_keeps_its_marks(host, world):
    """Of two guests on one dataset only one was frozen."""
    request = SnapshotRequest("hourly")
    record = take_snapshot(world.context, world.add_guest(), request)
    world.add_guest("db", {"vda": "tank/web"})
    (before,) = world.pool.snapshots()
    guests = guests_on(host, ["tank/web"])
    assert [guest.domain.name for guest in guests] == ["db", "web"]
    assert record_unfrozen(Request(("tank/web",), ("hourly",)), host, guests) == 0
    (after,) = world.pool.snapshots()
    assert after.properties == before.properties
    assert after.properties["run"] == record.run


def test_snapshots_of_a_failed_run_are_recorded_as_crash(host, world, capsys):
    """Without properties the next run would take it for another program's."""
    world.add_guest()
    assert host.pre("tank/web") == 0
    world.pool.snapshot(["tank/web@hourly"], {})

    world.hooks.at["pool.snapshots"] = failing_once(PoolError("tank", "suspended"))
    assert host.post("tank/web") == 8
    (record,) = host.records()
    assert (record.level, record.bundle) == (Level.CRASH, None)
    said = capsys.readouterr().err
    assert "tank: suspended" in said
    assert "recorded as crash-consistent" in said
    assert world.is_as_it_was()


def test_a_torn_snapshot_of_a_guest_that_was_not_frozen_stays_torn(host, world, capsys):
    """Its hold process was killed, and the guardian has committed and marked the snapshot."""
    world.add_guest()
    world.pool.snapshot(["tank/web@hourly"], {"snaporch:level": "torn"})
    assert host.post("tank/web") == 8
    (record,) = host.records()
    assert (record.level, record.bundle) == (Level.TORN, None)
    assert "recorded as torn" in capsys.readouterr().err


def test_a_snapshot_that_sanoid_takes_while_a_guardian_commits(host, world, capsys):
    """Its hold process was killed; the guardian still commits, and has marked nothing yet."""
    domain = world.add_guest()
    journal = Journal(world.paths.journal, make_plan(world.context, domain).facts)
    record_commit(world.pool, ["tank/web"], journal.path)
    world.pool.snapshot(["tank/web@hourly"], {})
    assert host.post("tank/web") == 8
    (record,) = host.records()
    assert record.level is Level.TORN
    assert "recorded as torn" in capsys.readouterr().err


def test_excluded_disks_are_not_frozen(host, world):
    world.add_guest(disks=TWO)
    world.with_defaults(exclude_disks=["vdb"])
    assert host.pre("flash/web") == 0
    assert host.threads == []


def test_a_guest_that_is_off_gets_level_off(host, world):
    world.add_guest(state=DomainState.OFF)
    assert host.pre("tank/web") == 0
    world.pool.snapshot(["tank/web@hourly"], {})
    assert host.post("tank/web") == 0
    assert host.records()[0].level is Level.OFF


def test_sanoid_that_runs_but_whose_configuration_cannot_be_read(host, world):
    world.add_guest(disks=TWO)
    host.pid = 1
    with pytest.raises(SnaporchError, match="sanoid"):
        host.pre("tank/web")
    assert host.threads == []


def test_an_error_is_one_line_with_its_exit_code(capsys):
    assert answer("pre", {"SANOID_TARGET": "tank/x", "SANOID_SCRIPT": "post"}) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("snaporch: SANOID_SCRIPT=")


def test_a_bug_is_reported_on_one_line(capsys):
    assert answer("no-such-phase", {}) == 1
    assert "a bug in snaporch: KeyError" in capsys.readouterr().err
