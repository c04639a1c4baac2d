"""The contract of every Hypervisor."""

import os
import re
import select
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from contract_hosts import NAME, FakeAgentHost, FakeHost, LinuxHost, ProbeHost
from fakes import images
from fakes.hypervisor import AGENT_PROGRAM

from snaporch.bundle.save_image import read_header
from snaporch.bundle.save_image_copy import copy_with_xml, read_preface
from snaporch.errors import NotFoundError
from snaporch.hypervisor import (
    CaptureRequest,
    CommitStage,
    HypervisorError,
    NotFrozenByUsError,
    PausedBy,
    domain_xml,
)
from snaporch.hypervisor.clone_xml import CloneDisk, CloneSpec, make_clone_xml
from snaporch.hypervisor.commit_timeouts import CommitTimeouts
from snaporch.hypervisor.vcpu_quota import reduced
from snaporch.model import DomainState, Strategy

OTHER = "11111111-2222-3333-4444-555555555555"
ABSENT = "00000000-0000-0000-0000-000000000001"


@contextmanager
def made_in_a_directory(kind):
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # the emulator's user must pass
        made = kind(directory)
        yield made
        made.remove()


IN_LAB = (pytest.mark.lab, pytest.mark.daily(13, "libvirt"))


@pytest.fixture(params=[FakeHost, pytest.param(ProbeHost, marks=IN_LAB)], ids=["fake", "libvirt"])
def host(request):
    with made_in_a_directory(request.param) as made:
        yield made


@pytest.fixture(
    scope="module",
    params=[FakeAgentHost, pytest.param(LinuxHost, marks=pytest.mark.lab)],
    ids=["fake", "libvirt"],
)
def linux(request):
    """A guest with an agent: it takes long to boot, so all tests share it."""
    with made_in_a_directory(request.param) as made:
        yield made


@pytest.fixture
def hypervisor(host):
    return host.hypervisor


def nothing():
    """A tick that does nothing."""


def quiet(_stage):
    """A receiver of stages that does nothing."""


def request_for(host, *disks, manual=()):
    return CaptureRequest(
        uuid=host.uuid,
        disks=disks,
        manual=manual,
        left_out=(),
        ram_path=str(host.directory / "ram.save"),
    )


def exit_of(linux, *words):
    """How a command in the guest ends."""
    pid = linux.hypervisor.start_in_guest(linux.uuid, words, 10)
    end = time.monotonic() + 60
    while (found := linux.hypervisor.exit_in_guest(linux.uuid, pid, 10)) is None:
        assert time.monotonic() < end
    return found


def sources(host):
    live, inactive = host.hypervisor.sources(host.uuid)
    return live and live["vda"], inactive and inactive["vda"]


class TestHypervisorContract:
    def test_a_domain_is_found_by_name_and_uuid(self, host, hypervisor):
        found = hypervisor.domain(NAME)
        assert (found.name, found.uuid) == (NAME, host.uuid)
        assert hypervisor.domain(host.uuid) == found
        assert hypervisor.find(host.uuid) == found
        assert found in hypervisor.domains()
        assert found.state is hypervisor.state(host.uuid) is DomainState.RUNNING
        assert found.active
        assert found.inactive_xml is not None
        assert found.emulator_owner is not None

    def test_a_missing_domain_is_not_found(self, hypervisor):
        with pytest.raises(NotFoundError):
            hypervisor.domain("no such guest")
        assert hypervisor.find(ABSENT) is None
        assert hypervisor.sources(ABSENT) == (None, None)
        hypervisor.abort_job(ABSENT)

    def test_a_disk_has_a_capacity(self, host, hypervisor):
        assert hypervisor.disk_capacity(host.uuid, "vda") >= 1 << 20
        with pytest.raises(HypervisorError):
            hypervisor.disk_capacity(host.uuid, "vdz")

    def test_writes_to_a_disk_are_counted(self, host, hypervisor):
        found = hypervisor.disk_writes(host.uuid)
        assert "vda" in found
        for each in found.values():
            assert each.requests * 512 <= each.bytes
            assert bool(each.requests) == bool(each.bytes)
        with pytest.raises(NotFoundError):
            hypervisor.disk_writes(ABSENT)

    def test_an_idle_guest_is_neither_busy_nor_paused(self, host, hypervisor):
        assert hypervisor.busy_with(host.uuid) is None
        assert hypervisor.paused_by(host.uuid) is None
        hypervisor.abort_job(host.uuid)

    def test_versions_are_reported(self, host, hypervisor):
        versions = hypervisor.versions(hypervisor.domain(NAME))
        assert versions.libvirt.count(".") == 2
        assert versions.machine.startswith("pc")
        assert isinstance(hypervisor.reads_zstd(), bool)

    def test_a_capture_switches_and_a_commit_brings_back(self, host, hypervisor):
        overlay = host.overlay()
        pause = hypervisor.capture(request_for(host, overlay), nothing)
        assert sources(host) == (overlay.overlay, overlay.overlay)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        assert pause.began is not None
        assert pause.milliseconds > 0
        parts = pause.parts
        assert parts.downtime is not None
        assert parts.switch is not None
        assert parts.downtime + parts.switch == pytest.approx(pause.milliseconds, abs=0.5)
        assert read_header(host.directory / "ram.save").was_running
        hypervisor.commit(host.uuid, [overlay], quiet, CommitTimeouts())
        assert sources(host) == (overlay.base, overlay.base)
        assert hypervisor.busy_with(host.uuid) is None
        hypervisor.commit(host.uuid, [overlay], quiet, CommitTimeouts())  # done already

    def test_a_capture_reports_the_pause(self, host, hypervisor):
        reported = []
        request = request_for(host, manual=("vda",))
        pause = hypervisor.capture(request, nothing, lambda _by: reported.append(True))
        assert reported
        assert pause.since is not None
        assert hypervisor.paused_by(host.uuid) is not None
        hypervisor.resume(host.uuid)

    def test_a_downtime_limit_is_set_and_read(self, host, hypervisor):
        own = hypervisor.downtime_limit(host.uuid)
        assert own is not None
        hypervisor.limit_downtime(host.uuid, own // 2)
        assert hypervisor.downtime_limit(host.uuid) == own // 2
        hypervisor.limit_downtime(host.uuid, own)
        assert hypervisor.downtime_limit(ABSENT) is None
        hypervisor.limit_downtime(ABSENT, own)

    def test_quotas_of_vcpus_are_set_and_read_also_while_ram_is_saved(self, host, hypervisor):
        own = hypervisor.vcpu_quotas(host.uuid)
        assert set(own.values()) == {"max 100000"}
        seen = []

        def slow_down():
            hypervisor.set_vcpu_quotas(reduced(own, 50))
            seen.append(set(hypervisor.vcpu_quotas(host.uuid).values()))

        hypervisor.capture(request_for(host, manual=("vda",)), slow_down)
        hypervisor.resume(host.uuid)
        assert seen[0] == {"5000 10000"}
        hypervisor.set_vcpu_quotas(own)
        assert hypervisor.vcpu_quotas(host.uuid) == own
        assert hypervisor.vcpu_quotas(ABSENT) == {}
        hypervisor.set_vcpu_quotas({"/absent/vcpu0": "max 100000"})

    def test_the_memory_that_an_emulator_holds(self, host, hypervisor):
        assert hypervisor.resident_bytes(host.uuid) > 1 << 20
        assert hypervisor.resident_bytes(ABSENT) == 0

    def test_an_aborted_capture_leaves_the_guest_on_its_base(self, host, hypervisor):
        """Even if the host saves RAM fast: no process reads the pipe."""
        overlay = host.overlay()
        pipe = host.directory / "ram.save"
        os.mkfifo(pipe)
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

        def stop():
            if not select.select([reader], [], [], 0)[0]:
                return  # libvirt has not opened the pipe; without a reader it would wait for one
            os.close(reader)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            hypervisor.capture(request_for(host, overlay), stop)
        assert sources(host) == (overlay.base, overlay.base)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        assert hypervisor.busy_with(host.uuid) is None

    def test_a_capture_without_a_pipe_is_an_error_and_the_guest_runs(self, host, hypervisor):
        overlay = host.overlay()
        Path(overlay.overlay).unlink()
        with pytest.raises(HypervisorError):
            hypervisor.capture(request_for(host, overlay), nothing)
        assert sources(host) == (overlay.base, overlay.base)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING

    def test_a_paused_guest_is_captured_and_stays_paused(self, host, hypervisor):
        host.suspend()
        assert hypervisor.paused_by(host.uuid) == "user"
        pause = hypervisor.capture(request_for(host, manual=("vda",)), nothing)
        assert pause.milliseconds == 0
        assert hypervisor.state(host.uuid) is DomainState.PAUSED
        assert not read_header(host.directory / "ram.save").was_running
        hypervisor.resume(host.uuid)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        assert hypervisor.paused_by(host.uuid) is None

    def test_a_guest_comes_back_from_its_ram(self, host, hypervisor):
        overlay = host.overlay()
        hypervisor.capture(request_for(host, overlay), nothing)
        hypervisor.commit(host.uuid, [overlay], quiet, CommitTimeouts())
        ram = host.directory / "ram.save"
        with pytest.raises(HypervisorError):
            hypervisor.restore(ram, running=True)  # it runs
        hypervisor.destroy(host.uuid)
        hypervisor.restore(ram, running=False)
        assert hypervisor.state(host.uuid) is DomainState.PAUSED
        assert sources(host)[0] == overlay.base

    def test_a_file_that_is_no_image_is_not_restored(self, host, hypervisor):
        hypervisor.destroy(host.uuid)
        unfinished = images.image(magic=images.UNFINISHED)
        for name, content in {"empty": b"", "unfinished": unfinished}.items():
            (host.directory / name).write_bytes(content)
            with pytest.raises(HypervisorError):
                hypervisor.restore(host.directory / name, running=True)
        with pytest.raises(HypervisorError):
            hypervisor.restore(host.directory / "absent", running=True)
        assert hypervisor.state(host.uuid) is DomainState.OFF

    def test_a_guest_is_stopped_and_started(self, host, hypervisor):
        hypervisor.destroy(host.uuid)
        hypervisor.destroy(host.uuid)
        assert hypervisor.state(host.uuid) is DomainState.OFF
        assert sources(host)[0] is None
        hypervisor.drop_managed_save(host.uuid)
        hypervisor.start(host.uuid, paused=True)
        assert hypervisor.state(host.uuid) is DomainState.PAUSED
        with pytest.raises(HypervisorError):
            hypervisor.start(host.uuid, paused=False)

    def test_a_definition_is_replaced_and_bases_come_back(self, host, hypervisor):
        overlay = host.overlay()
        before = hypervisor.domain(NAME).inactive_xml
        changed = before.replace(overlay.base, overlay.overlay).replace("'raw'", "'qcow2'")
        hypervisor.define(changed.replace('"raw"', '"qcow2"'))
        assert sources(host)[1] == overlay.overlay
        hypervisor.rebase_inactive(host.uuid, [overlay])
        assert sources(host) == (overlay.base, overlay.base)
        hypervisor.rebase_inactive(host.uuid, [overlay])

    def test_changes_of_domains_are_reported(self, host, hypervisor):
        reported = threading.Event()
        hypervisor.on_change(reported.set)
        xml = hypervisor.domain(host.uuid).inactive_xml
        acts = {
            "stop": lambda: hypervisor.destroy(host.uuid),
            "start": lambda: hypervisor.start(host.uuid, paused=False),
            "define": lambda: hypervisor.define(
                xml.replace(host.uuid, OTHER).replace("contract ", "contract of another ")
            ),
            "undefine": lambda: hypervisor.undefine(OTHER),
        }
        for name, act in acts.items():
            reported.clear()
            act()
            assert reported.wait(60), name

    def test_an_invalid_definition_is_an_error(self, host, hypervisor):
        mine = hypervisor.domain(NAME).inactive_xml
        with pytest.raises(HypervisorError):
            hypervisor.define(mine.replace(host.uuid, ABSENT))

    def test_without_an_agent_no_clock_is_set(self, host, hypervisor):
        assert not hypervisor.set_guest_clock(host.uuid)

    def test_without_an_agent_nothing_freezes(self, host, hypervisor):
        assert not hypervisor.agent_answers(host.uuid, 1)
        with pytest.raises(HypervisorError):
            hypervisor.freeze_file_systems(host.uuid, (), 1)
        with pytest.raises(HypervisorError):
            hypervisor.thaw_file_systems(host.uuid, 1)
        assert not hypervisor.file_systems_frozen(host.uuid)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING

    def test_a_guest_is_suspended_and_resumed(self, host, hypervisor):
        for _ in range(2):
            hypervisor.suspend(host.uuid)
            assert hypervisor.paused_by(host.uuid) == "user"
            assert hypervisor.domain(NAME).state is DomainState.PAUSED
        hypervisor.resume(host.uuid)
        assert hypervisor.paused_by(host.uuid) is None
        assert hypervisor.state(host.uuid) is DomainState.RUNNING

    def test_resuming_a_guest_that_runs_already_is_fine(self, host, hypervisor):
        """Another process, such as a guardian, may have been first."""
        hypervisor.resume(host.uuid)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING

    def test_a_guest_that_is_off_is_not_suspended(self, host, hypervisor):
        hypervisor.destroy(host.uuid)
        with pytest.raises(HypervisorError):
            hypervisor.suspend(host.uuid)
        with pytest.raises(HypervisorError):
            hypervisor.resume(host.uuid)
        with pytest.raises(HypervisorError):
            hypervisor.ram_in_use(host.uuid)
        assert hypervisor.paused_by(host.uuid) is None
        assert hypervisor.busy_with(host.uuid) is None

    def test_missing_domains_are_not_found(self, hypervisor):
        for act in (hypervisor.suspend, hypervisor.resume, hypervisor.paused_by):
            with pytest.raises(NotFoundError):
                act(ABSENT)

    def test_a_manual_capture_leaves_the_guest_paused(self, host, hypervisor):
        before = sources(host)
        pause = hypervisor.capture(request_for(host, manual=("vda",)), nothing)
        assert hypervisor.state(host.uuid) is DomainState.PAUSED
        assert hypervisor.paused_by(host.uuid) not in (None, "user")
        assert sources(host) == before
        assert pause.began is not None
        assert pause.since is not None
        assert not read_header(host.directory / "ram.save").was_running
        hypervisor.resume(host.uuid)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        assert hypervisor.paused_by(host.uuid) is None

    def test_an_aborted_manual_capture_leaves_the_guest_running(self, host, hypervisor):
        def stop():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            hypervisor.capture(request_for(host, manual=("vda",)), stop)
        if hypervisor.paused_by(host.uuid) not in (None, "user"):  # the abort came too late
            hypervisor.resume(host.uuid)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        assert hypervisor.busy_with(host.uuid) is None

    def test_a_guest_comes_back_from_the_ram_of_a_manual_capture(self, host, hypervisor):
        hypervisor.capture(request_for(host, manual=("vda",)), nothing)
        hypervisor.destroy(host.uuid)
        hypervisor.restore(host.directory / "ram.save", running=True)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING

    def test_a_guest_suspended_while_its_ram_is_saved_runs_afterwards(self, host, hypervisor):
        overlay, asked = host.overlay(), []

        def suspend():
            if not asked:
                asked.append(hypervisor.suspend(host.uuid))

        hypervisor.capture(request_for(host, overlay), suspend)
        if hypervisor.paused_by(host.uuid) == "user":  # the suspension came after the capture
            hypervisor.resume(host.uuid)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        hypervisor.commit(host.uuid, [overlay], quiet, CommitTimeouts())
        assert sources(host) == (overlay.base, overlay.base)

    def test_a_guest_suspended_while_its_ram_is_saved_runs_after_an_error(self, host, hypervisor):
        overlay, asked = host.overlay(), []

        def suspend():
            if not asked:
                asked.append(hypervisor.suspend(host.uuid))

        def stop(by):
            if by is PausedBy.ANOTHER:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            hypervisor.capture(request_for(host, overlay), suspend, stop)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        assert sources(host) == (overlay.base, overlay.base)

    def test_a_commit_that_times_out_leaves_the_guest_running(self, host, hypervisor):
        overlay = host.overlay()
        hypervisor.capture(request_for(host, overlay), nothing)
        hypervisor.commit(host.uuid, [overlay], quiet, CommitTimeouts(running=0))
        assert sources(host) == (overlay.base, overlay.base)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING

    def test_a_commit_reports_its_stages(self, host, hypervisor):
        overlay, stages = host.overlay(), []

        def on_stage(stage):
            if stage is not CommitStage.WAITING and stage not in stages:
                stages.append(stage)
                if stage is CommitStage.PIVOTING:
                    assert sources(host) == (overlay.overlay, overlay.overlay)

        hypervisor.capture(request_for(host, overlay), nothing)
        hypervisor.commit(host.uuid, [overlay], on_stage, CommitTimeouts())
        assert stages == [CommitStage.PIVOTING]
        assert hypervisor.busy_disks(host.uuid) == set()

    def test_a_disk_that_is_being_committed_is_busy(self, host, hypervisor):
        overlay, busy = host.overlay(), []

        def on_stage(stage):
            if stage is CommitStage.PIVOTING:
                busy.append(hypervisor.busy_disks(host.uuid))

        hypervisor.capture(request_for(host, overlay), nothing)
        hypervisor.commit(host.uuid, [overlay], on_stage, CommitTimeouts())
        assert busy[0] == {"vda"}

    def test_a_commit_of_a_suspended_guest_leaves_it_suspended(self, host, hypervisor):
        overlay = host.overlay()
        hypervisor.capture(request_for(host, overlay), nothing)
        hypervisor.suspend(host.uuid)
        hypervisor.commit(host.uuid, [overlay], quiet, CommitTimeouts(running=0))
        assert sources(host) == (overlay.base, overlay.base)
        assert hypervisor.paused_by(host.uuid) == "user"

    def test_the_chain_below_a_disk_is_read(self, host, hypervisor):
        assert hypervisor.backing_chain(hypervisor.domain(NAME), "vda") == []
        assert hypervisor.backing_chain(hypervisor.domain(NAME), "vdz") == []
        overlay = host.overlay()
        hypervisor.capture(request_for(host, overlay), nothing)
        assert hypervisor.backing_chain(hypervisor.domain(NAME), "vda") == [overlay.base]
        hypervisor.commit(host.uuid, [overlay], quiet, CommitTimeouts())
        assert hypervisor.backing_chain(hypervisor.domain(NAME), "vda") == []

    def test_ram_in_use_is_reported(self, host, hypervisor):
        assert 0 < hypervisor.ram_in_use(host.uuid) <= 16 << 20

    def test_the_changes_of_a_small_guest_are_not_measured(self, host, hypervisor):
        """QEMU samples no block of less than 128 MiB, and would report that nothing changes."""
        assert hypervisor.dirty_rates([host.uuid, ABSENT]) == {}

    def test_only_an_agent_is_missing(self, host, hypervisor):
        (blocker,) = hypervisor.blockers(hypervisor.domain(NAME))
        assert blocker.strategies == {Strategy.QUIESCED}
        assert blocker.step

    def test_a_block_job_blocks_saving_ram(self, host, hypervisor):
        """libvirt saves no RAM of a domain that has one (its ``qemuMigrationSrcIsAllowed``)."""
        host.copy()
        blocked = [b.strategies for b in hypervisor.blockers(hypervisor.domain(NAME))]
        with pytest.raises(HypervisorError, match="block job"):
            hypervisor.capture(request_for(host, manual=("vda",)), nothing)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        assert {Strategy.OVERLAY, Strategy.MANUAL} in blocked

    def test_a_paused_guest_can_have_no_overlay(self, host, hypervisor):
        host.suspend()
        blocked = [b.strategies for b in hypervisor.blockers(hypervisor.domain(NAME))]
        assert {Strategy.OVERLAY} in blocked
        assert not any(Strategy.MANUAL in strategies for strategies in blocked)

    def test_a_guest_that_is_off_has_no_blockers(self, host, hypervisor):
        hypervisor.destroy(host.uuid)
        assert hypervisor.blockers(hypervisor.domain(NAME)) == []

    def test_two_emulators_differ(self, host, hypervisor):
        first = hypervisor.domain(NAME).boot
        hypervisor.suspend(host.uuid)
        hypervisor.resume(host.uuid)
        assert hypervisor.domain(host.uuid).boot == first
        hypervisor.destroy(host.uuid)
        assert hypervisor.domain(NAME).boot == ""
        hypervisor.start(host.uuid, paused=False)
        assert hypervisor.domain(NAME).boot not in ("", first)

    def test_cpus_that_run_use_time(self, host, hypervisor):
        first = hypervisor.vitals(host.uuid)
        assert first.state is DomainState.RUNNING
        while hypervisor.vitals(host.uuid).vcpu_ns == first.vcpu_ns:
            assert hypervisor.state(host.uuid) is DomainState.RUNNING

    def test_cpus_of_a_paused_guest_use_none(self, host, hypervisor):
        hypervisor.suspend(host.uuid)
        before = hypervisor.vitals(host.uuid)
        assert before.state is DomainState.PAUSED
        while (first := hypervisor.vitals(host.uuid)) != before:
            before = first  # a thread of QEMU's may still be on its way to sleep
        assert hypervisor.vitals(host.uuid) == first

    def test_vitals_of_a_missing_domain(self, hypervisor):
        with pytest.raises(NotFoundError):
            hypervisor.vitals(ABSENT)

    def test_a_guest_without_a_screen_has_no_picture(self, host, hypervisor):
        assert hypervisor.screenshot(host.uuid) is None

    def test_what_no_schema_has_is_refused(self, host, hypervisor):
        """libvirt ignores it otherwise."""
        xml = hypervisor.domain(NAME).inactive_xml
        hypervisor.define(xml, validate=True)
        before = hypervisor.domain(NAME).inactive_xml
        odd = xml.replace("</domain>", "<unknown/></domain>")
        with pytest.raises(HypervisorError):
            hypervisor.define(odd, validate=True)
        assert hypervisor.domain(NAME).inactive_xml == before
        other = odd.replace(host.uuid, OTHER).replace(NAME, f"{NAME}-two")
        with pytest.raises(HypervisorError):
            hypervisor.create(other, paused=True, validate=True)
        assert hypervisor.find(OTHER) is None

    def test_an_undefined_domain_is_forgotten(self, host, hypervisor):
        hypervisor.destroy(host.uuid)
        hypervisor.undefine(host.uuid)
        hypervisor.undefine(host.uuid)
        assert hypervisor.find(host.uuid) is None

    def test_a_transient_domain_ends_with_its_emulator(self, host, hypervisor):
        xml = hypervisor.domain(NAME).inactive_xml
        hypervisor.destroy(host.uuid)
        hypervisor.undefine(host.uuid)
        hypervisor.create(xml, paused=False)
        assert hypervisor.domain(NAME).inactive_xml is None
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        with pytest.raises(HypervisorError):
            hypervisor.create(xml, paused=False)
        hypervisor.destroy(host.uuid)
        assert hypervisor.find(host.uuid) is None

    def test_a_missing_network_is_not_found(self, hypervisor):
        with pytest.raises(NotFoundError):
            hypervisor.network_is_isolated("no such network")

    def test_an_image_with_other_xml_is_another_domain(self, host, hypervisor):
        """The XML of a save image decides which domain is resumed, not its RAM."""
        hypervisor.suspend(host.uuid)
        hypervisor.capture(request_for(host, manual=("vda",)), nothing)
        image, copy = host.directory / "ram.save", host.directory / "copy.save"
        disk = host.directory / "copy.img"
        disk.write_bytes(Path(hypervisor.domain(NAME).disks[0].source).read_bytes())
        xml = read_preface(image).xml
        own = {"vda": CloneDisk(str(disk), "file")}
        who = CloneSpec("two", OTHER, "of", own, str(host.directory), "none", resumed=True)
        copy_with_xml(image, copy, make_clone_xml(xml, who).xml)
        hypervisor.restore(copy, running=True)
        try:
            assert hypervisor.domain("two").uuid == OTHER
            assert hypervisor.domain("two").disks[0].source == str(disk)
            assert hypervisor.state(OTHER) is DomainState.RUNNING
            assert hypervisor.state(host.uuid) is DomainState.PAUSED
        finally:
            hypervisor.destroy(OTHER)

    def test_saving_ends_the_domain_in_the_instant_it_saves(self, host, hypervisor):
        path = host.directory / "running.save"
        hypervisor.save(host.uuid, path)
        assert hypervisor.state(host.uuid) is DomainState.OFF
        assert read_header(path).was_running
        with pytest.raises(HypervisorError):
            hypervisor.save(host.uuid, host.directory / "again.save")
        hypervisor.restore(path, running=True)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        assert not hypervisor.was_booted(host.uuid)

    def test_a_guest_that_boots_is_known_as_such_until_it_is_paused(self, host, hypervisor):
        hypervisor.destroy(host.uuid)
        assert not hypervisor.was_booted(host.uuid)
        hypervisor.start(host.uuid, paused=False)
        assert hypervisor.was_booted(host.uuid)
        hypervisor.suspend(host.uuid)
        assert not hypervisor.was_booted(host.uuid)
        hypervisor.resume(host.uuid)
        assert not hypervisor.was_booted(host.uuid)

    def test_a_guest_restored_paused_differs_from_one_started_paused(self, host, hypervisor):
        path = host.directory / "paused.save"
        hypervisor.suspend(host.uuid)
        hypervisor.save(host.uuid, path)
        hypervisor.restore(path, running=False)
        assert hypervisor.paused_by(host.uuid) == "migration"
        hypervisor.destroy(host.uuid)
        hypervisor.start(host.uuid, paused=True)
        assert hypervisor.paused_by(host.uuid) == "user"

    def test_a_managed_save_image_is_found(self, host, hypervisor):
        assert hypervisor.managed_save_path(host.uuid) is None
        host.managed_save()
        assert read_header(hypervisor.managed_save_path(host.uuid)).was_running
        hypervisor.drop_managed_save(host.uuid)
        assert hypervisor.managed_save_path(host.uuid) is None

    def test_a_managed_save_image_names_the_bases_after_a_commit(self, host, hypervisor):
        overlay = host.overlay()
        assert not hypervisor.rebase_managed_save(host.uuid, [overlay])  # there is none
        assert hypervisor.saved_sources(host.uuid) is None
        hypervisor.capture(request_for(host, overlay), nothing)
        host.managed_save()
        image = hypervisor.managed_save_path(host.uuid)
        assert overlay.overlay.encode() in image.read_bytes()
        assert hypervisor.saved_sources(host.uuid)[overlay.target] == overlay.overlay
        assert hypervisor.rebase_managed_save(host.uuid, [overlay])
        assert overlay.overlay not in read_preface(image).xml
        assert hypervisor.saved_sources(host.uuid)[overlay.target] == overlay.base
        assert not hypervisor.rebase_managed_save(host.uuid, [overlay])
        assert read_header(image).was_running
        hypervisor.drop_managed_save(host.uuid)

    def test_a_managed_save_image_of_a_paused_guest_can_be_set_to_run(self, host, hypervisor):
        hypervisor.unpause_managed_save(host.uuid)  # there is none
        hypervisor.suspend(host.uuid)
        host.managed_save()
        image = hypervisor.managed_save_path(host.uuid)
        assert not read_header(image).was_running
        hypervisor.unpause_managed_save(host.uuid)
        assert read_header(image).was_running
        hypervisor.drop_managed_save(host.uuid)

    def test_a_domain_starts_at_boot_if_autostart_is_set(self, host, hypervisor):
        assert not hypervisor.starts_at_boot(host.uuid)
        host.autostart()
        assert hypervisor.starts_at_boot(host.uuid)

    def test_a_domain_is_set_to_start_at_boot(self, host, hypervisor):
        hypervisor.start_at_boot(host.uuid)
        hypervisor.start_at_boot(host.uuid)
        assert hypervisor.starts_at_boot(host.uuid)
        with pytest.raises(NotFoundError):
            hypervisor.start_at_boot(ABSENT)

    def test_the_emulator_of_a_guest_is_one_of_the_host(self, host, hypervisor):
        found = hypervisor.emulators()
        assert found
        assert all(path.startswith("/") for path in found)

    def test_a_guest_that_runs_here_fits(self, host, hypervisor):
        domain = hypervisor.domain(NAME)
        assert hypervisor.incompatibility(domain.live_xml) == ""
        assert hypervisor.incompatibility(domain.inactive_xml) == ""

    def test_an_unknown_machine_does_not_fit(self, host, hypervisor):
        xml = hypervisor.domain(NAME).live_xml
        future = re.sub(r"machine=(['\"])[^'\"]*", r"machine=\1pc-q35-99.9", xml)
        assert "pc-q35-99.9" in hypervisor.incompatibility(future)

    def test_the_cpu_that_a_guest_sees_of_this_host_fits_and_another_does_not(
        self, host, hypervisor
    ):
        domain = hypervisor.domain(NAME)
        assert hypervisor.versions(domain).cpu == "", "its CPU is a model of libvirt's"
        root = domain_xml.parse(domain.live_xml)
        for cpu in root.findall("cpu"):
            root.remove(cpu)
        ElementTree.SubElement(root, "cpu", mode="maximum")
        xml = ElementTree.tostring(root, encoding="unicode")
        seen = hypervisor.versions(replace(domain, live_xml=xml)).cpu
        assert "<model" in seen
        assert hypervisor.incompatibility(xml) == hypervisor.incompatibility(xml, seen) == ""
        other = ElementTree.fromstring(seen)
        other.find("model").text = "SapphireRapids"
        reason = hypervisor.incompatibility(xml, ElementTree.tostring(other, encoding="unicode"))
        assert "CPU" in reason

    def test_a_barred_definition_cannot_be_started(self, host, hypervisor):
        xml = hypervisor.domain(NAME).inactive_xml
        hypervisor.define(domain_xml.barred(xml, "/absent/run-this-first"))
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        hypervisor.destroy(host.uuid)
        with pytest.raises(HypervisorError, match=r"Cannot access storage file.*run-this-first"):
            hypervisor.start(host.uuid, paused=False)
        assert hypervisor.state(host.uuid) is DomainState.OFF
        hypervisor.define(xml)
        hypervisor.start(host.uuid, paused=False)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING


class TestAgentContract:
    @pytest.fixture(autouse=True)
    def thawed(self, linux):
        """Every test begins and ends with a guest that runs."""
        yield
        if linux.hypervisor.paused_by(linux.uuid) is not None:
            linux.hypervisor.resume(linux.uuid)
        linux.hypervisor.thaw_file_systems(linux.uuid, 10)

    def test_what_it_changes_a_second_is_measured(self, linux):
        rates = linux.hypervisor.dirty_rates([linux.uuid, ABSENT])
        assert list(rates) == [linux.uuid]
        assert 0 <= rates[linux.uuid] <= 128

    def test_it_answers(self, linux):
        assert linux.hypervisor.agent_answers(linux.uuid, 10)
        assert linux.hypervisor.blockers(linux.hypervisor.domain(NAME)) == []

    def test_a_command_ends_with_a_status_and_its_output(self, linux):
        found = [exit_of(linux, AGENT_PROGRAM, word) for word in ("--version", "--nonsense")]
        assert [each.status for each in found] == [0, 1]
        assert found[0].output.startswith("QEMU Guest Agent")
        assert "Unknown option" in found[1].output

    def test_a_program_that_the_guest_does_not_have_is_an_error(self, linux):
        with pytest.raises(HypervisorError, match="No such file"):
            linux.hypervisor.start_in_guest(linux.uuid, ["/no/such/program"], 10)

    def test_a_command_that_the_agent_did_not_start_is_an_error(self, linux):
        with pytest.raises(HypervisorError, match="does not exist"):
            linux.hypervisor.exit_in_guest(linux.uuid, 999_999, 10)

    def test_the_agent_of_a_paused_guest_starts_nothing(self, linux):
        linux.hypervisor.suspend(linux.uuid)
        with pytest.raises(HypervisorError):
            linux.hypervisor.start_in_guest(linux.uuid, [AGENT_PROGRAM, "--version"], 1)
        with pytest.raises(HypervisorError):
            linux.hypervisor.exit_in_guest(linux.uuid, 1, 1)

    def test_file_systems_freeze_and_thaw(self, linux):
        hypervisor = linux.hypervisor
        assert not hypervisor.file_systems_frozen(linux.uuid)
        assert hypervisor.freeze_file_systems(linux.uuid, (), 10) > 0
        assert hypervisor.file_systems_frozen(linux.uuid)
        assert hypervisor.agent_answers(linux.uuid, 10)
        assert hypervisor.state(linux.uuid) is DomainState.RUNNING
        hypervisor.thaw_file_systems(linux.uuid, 10)
        assert not hypervisor.file_systems_frozen(linux.uuid)

    def test_thawing_without_a_freeze_is_no_error(self, linux):
        linux.hypervisor.thaw_file_systems(linux.uuid, 10)
        assert not linux.hypervisor.file_systems_frozen(linux.uuid)

    def test_a_second_freeze_fails_and_leaves_the_first(self, linux):
        linux.hypervisor.freeze_file_systems(linux.uuid, (), 10)
        with pytest.raises(NotFrozenByUsError, match="another program has"):
            linux.hypervisor.freeze_file_systems(linux.uuid, (), 10)
        assert linux.hypervisor.file_systems_frozen(linux.uuid)

    def test_an_agent_of_a_paused_guest_does_not_answer(self, linux):
        hypervisor = linux.hypervisor
        hypervisor.suspend(linux.uuid)
        assert not hypervisor.agent_answers(linux.uuid, 1)
        assert hypervisor.file_systems_frozen(linux.uuid) is None
        with pytest.raises(HypervisorError):
            hypervisor.freeze_file_systems(linux.uuid, (), 1)
        assert hypervisor.paused_by(linux.uuid) == "user"

    def test_a_frozen_guest_can_be_paused_and_thawed_later(self, linux):
        hypervisor = linux.hypervisor
        hypervisor.freeze_file_systems(linux.uuid, (), 10)
        hypervisor.suspend(linux.uuid)
        hypervisor.resume(linux.uuid)
        assert hypervisor.file_systems_frozen(linux.uuid)
        hypervisor.thaw_file_systems(linux.uuid, 10)
        assert not hypervisor.file_systems_frozen(linux.uuid)

    def test_the_clock_is_set(self, linux):
        assert linux.hypervisor.set_guest_clock(linux.uuid)
