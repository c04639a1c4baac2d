"""The bindings and libvirt's own test driver: real calls, no guests."""

import pytest
from fakes.domain_xml import DiskSpec, domain_xml

from snaporch.errors import ExitCode, NotFoundError, UnavailableError
from snaporch.hypervisor import HypervisorError, OverlayDisk, open_hypervisor
from snaporch.hypervisor.domain_reader import DomainReader
from snaporch.model import DomainState

UUID = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
NAME = "Bärs <vm> & Co"


@pytest.fixture
def hypervisor(tmp_path):
    """A test driver of our own: one running guest, and nothing kept."""
    node = tmp_path / "node.xml"
    node.write_text(
        "<node><domain type='test'><name>test</name><memory>1024</memory>"
        "<os><type>hvm</type></os></domain></node>"
    )
    return open_hypervisor(f"test://{node}")


def guest_xml(*disks, uuid=UUID, name=NAME):
    return (
        domain_xml(name, uuid, disks)
        .replace('type="kvm"', 'type="test"')
        .replace('machine="pc-q35-9.2"', "")
    )


def test_the_drivers_guest_is_listed(hypervisor):
    (domain,) = hypervisor.domains()
    assert (domain.name, domain.state) == ("test", DomainState.RUNNING)
    assert domain.active
    assert domain.disks == ()
    assert hypervisor.find(domain.uuid) == domain
    assert hypervisor.state(domain.uuid) is DomainState.RUNNING


def test_a_domain_is_found_by_name_and_uuid(hypervisor):
    domain = hypervisor.domain("test")
    assert hypervisor.domain(domain.uuid).name == "test"


def test_an_unknown_domain_is_not_found(hypervisor):
    with pytest.raises(NotFoundError, match="absent: no such domain"):
        hypervisor.domain("absent")
    assert hypervisor.find(UUID) is None
    assert hypervisor.sources(UUID) == (None, None)
    assert hypervisor.state(UUID) is DomainState.OFF


def test_a_definition_arrives_with_its_disks(hypervisor):
    disks = (DiskSpec("vda", "/tank/web/a b.img", format="qcow2"), DiskSpec("vdb", "/x.img"))
    hypervisor.define(guest_xml(*disks))
    domain = hypervisor.domain(NAME)
    assert (domain.uuid, domain.state, domain.active) == (UUID, DomainState.OFF, False)
    assert [(d.target, d.source, d.format) for d in domain.disks] == [
        ("vda", "/tank/web/a b.img", "qcow2"),
        ("vdb", "/x.img", "raw"),
    ]
    assert [found.name for found in hypervisor.domains()] == sorted([NAME, "test"])


def test_a_definition_that_libvirt_refuses_is_reported_in_its_words(hypervisor):
    with pytest.raises(HypervisorError) as caught:
        hypervisor.define("<domain type='test'/>")
    assert "name" in str(caught.value)
    assert caught.value.exit_code == ExitCode.FAILED


def test_bases_come_back_into_a_definition(hypervisor):
    overlay = OverlayDisk("vda", "/tank/web/base.img", "file", "raw", "/overlays/r/vda.qcow2")
    hypervisor.define(guest_xml(DiskSpec("vda", overlay.overlay, format="qcow2")))
    hypervisor.rebase_inactive(UUID, [overlay])
    assert hypervisor.sources(UUID) == (None, {"vda": overlay.base})
    assert hypervisor.domain(UUID).disks[0].format == "raw"


def test_a_guest_is_stopped_and_started(hypervisor):
    domain = hypervisor.domain("test")
    hypervisor.destroy(domain.uuid)
    hypervisor.destroy(domain.uuid)
    assert hypervisor.state(domain.uuid) is DomainState.OFF
    hypervisor.start(domain.uuid, paused=False)
    assert hypervisor.state(domain.uuid) is DomainState.RUNNING
    assert hypervisor.paused_by(domain.uuid) is None


def test_starting_twice_is_reported_in_libvirts_words(hypervisor):
    domain = hypervisor.domain("test")
    with pytest.raises(HypervisorError, match="start: "):
        hypervisor.start(domain.uuid, paused=False)


def test_versions_are_dotted(hypervisor):
    versions = hypervisor.versions(hypervisor.domain("test"))
    assert all(part.isdigit() for part in versions.libvirt.split("."))


def test_a_libvirt_that_does_not_answer_is_unavailable(tmp_path):
    with pytest.raises(UnavailableError, match="libvirt does not answer") as caught:
        open_hypervisor(f"qemu+unix:///system?socket={tmp_path}/none")
    assert caught.value.exit_code == ExitCode.UNAVAILABLE


def test_libvirt_prints_nothing_by_itself(hypervisor, capfd):
    with pytest.raises(NotFoundError):
        hypervisor.domain("absent")
    assert capfd.readouterr() == ("", "")


def test_a_guest_that_does_not_answer_does_not_hide_the_others(hypervisor, monkeypatch):
    """libvirt 11 and later wait half a minute for a stuck monitor, and then fail."""
    stuck = DomainReader._live_xml

    def live_xml(reader, handle):
        if handle.name() == "test":
            handle.snapshotLookupByName("stuck")
        return stuck(reader, handle)

    hypervisor.define(guest_xml(DiskSpec("vda", "/tank/web/base.img")))
    monkeypatch.setattr(DomainReader, "_live_xml", live_xml)
    other, test = hypervisor.domains()
    assert (other.name, other.problem) == (NAME, "")
    assert test.active
    assert "stuck" in test.problem
    with pytest.raises(HypervisorError, match="stuck"):
        hypervisor.domain("test")
    assert hypervisor.domain(NAME) == other
