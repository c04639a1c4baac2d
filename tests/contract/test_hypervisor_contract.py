"""What any Hypervisor must do, whichever it is."""

import tempfile
from pathlib import Path

import pytest
from contract_hosts import NAME, FakeHost, ProbeHost
from fakes import images

from snaporch.bundle.ramimage import read_header
from snaporch.errors import NotFoundError
from snaporch.hypervisor import CaptureRequest, HypervisorError
from snaporch.model import DomainState

ABSENT = "00000000-0000-0000-0000-000000000001"


@pytest.fixture(
    params=[FakeHost, pytest.param(ProbeHost, marks=pytest.mark.lab)], ids=["fake", "libvirt"]
)
def host(request):
    with tempfile.TemporaryDirectory(prefix="contract-") as name:
        directory = Path(name)
        directory.chmod(0o711)  # the emulator's user must pass
        made = request.param(directory)
        yield made
        made.remove()


@pytest.fixture
def hypervisor(host):
    return host.hypervisor


def nothing():
    """A tick that lets things go on."""


def request_for(host, *disks, manual=()):
    return CaptureRequest(
        uuid=host.uuid,
        disks=disks,
        manual=manual,
        left_out=(),
        ram_path=str(host.directory / "ram.save"),
    )


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

    def test_a_domain_that_is_not_there(self, hypervisor):
        with pytest.raises(NotFoundError):
            hypervisor.domain("no such guest")
        assert hypervisor.find(ABSENT) is None
        assert hypervisor.sources(ABSENT) == (None, None)
        hypervisor.abort_job(ABSENT)

    def test_a_disk_has_a_capacity(self, host, hypervisor):
        assert hypervisor.disk_capacity(host.uuid, "vda") >= 1 << 20
        with pytest.raises(HypervisorError):
            hypervisor.disk_capacity(host.uuid, "vdz")

    def test_an_idle_guest_is_neither_busy_nor_paused(self, host, hypervisor):
        assert hypervisor.busy_with(host.uuid) is None
        assert hypervisor.paused_by(host.uuid) is None
        assert hypervisor.ram_progress(host.uuid) is None
        hypervisor.abort_job(host.uuid)

    def test_versions_are_told(self, host, hypervisor):
        told = hypervisor.versions(hypervisor.domain(NAME))
        assert told.libvirt.count(".") == 2
        assert told.machine.startswith("pc")
        assert isinstance(hypervisor.reads_zstd(), bool)

    def test_a_capture_switches_and_a_commit_brings_back(self, host, hypervisor):
        overlay = host.overlay()
        pause = hypervisor.capture(request_for(host, overlay), nothing)
        assert sources(host) == (overlay.overlay, overlay.overlay)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        assert pause.began is not None
        assert pause.milliseconds > 0
        assert read_header(host.directory / "ram.save").was_running
        hypervisor.commit(host.uuid, [overlay], nothing)
        assert sources(host) == (overlay.base, overlay.base)
        assert hypervisor.busy_with(host.uuid) is None
        hypervisor.commit(host.uuid, [overlay], nothing)  # done already

    def test_a_capture_that_is_broken_off_leaves_the_guest_on_its_base(self, host, hypervisor):
        overlay = host.overlay()

        def stop():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            hypervisor.capture(request_for(host, overlay), stop)
        assert sources(host) == (overlay.base, overlay.base)
        assert hypervisor.state(host.uuid) is DomainState.RUNNING
        assert hypervisor.busy_with(host.uuid) is None

    def test_a_capture_into_nowhere_is_an_error_and_the_guest_goes_on(self, host, hypervisor):
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
        hypervisor.commit(host.uuid, [overlay], nothing)
        ram = host.directory / "ram.save"
        with pytest.raises(HypervisorError):
            hypervisor.restore(ram, running=True)  # it runs
        hypervisor.destroy(host.uuid)
        hypervisor.restore(ram, running=False)
        assert hypervisor.state(host.uuid) is DomainState.PAUSED
        assert sources(host)[0] == overlay.base

    def test_what_is_no_image_is_not_restored(self, host, hypervisor):
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

    def test_what_cannot_be_defined_is_an_error(self, host, hypervisor):
        mine = hypervisor.domain(NAME).inactive_xml
        with pytest.raises(HypervisorError):
            hypervisor.define(mine.replace(host.uuid, ABSENT))

    def test_without_an_agent_no_clock_is_set(self, host, hypervisor):
        assert not hypervisor.set_guest_clock(host.uuid)
