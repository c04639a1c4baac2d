import libvirt
import pytest

from snaporch.default_paths import HostPaths
from snaporch.errors import NotFoundError
from snaporch.hypervisor import DiskWrites, HypervisorError
from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor


class Connection:
    """A connection to a libvirt that has one domain, whatever its UUID."""

    def __init__(self, domain):
        self.domain = domain

    def setKeepAlive(self, _interval, _count):  # noqa: N802 - libvirt's
        return 0

    def isAlive(self):  # noqa: N802 - libvirt's
        return 1

    def lookupByUUIDString(self, _uuid):  # noqa: N802 - libvirt's
        return self.domain


@pytest.mark.parametrize(
    ("backing", "used"),
    [("", 1 << 20), ("<memoryBacking><hugepages/></memoryBacking>", 4 << 20)],
)
def test_all_ram_on_huge_pages_is_in_use(backing, used):
    """The kernel does not count it as resident."""

    class Guest:
        def info(self):
            return [1, 4096, 4096, 1, 0]

        def memoryStats(self):  # noqa: N802 - libvirt's
            return {"rss": 1024}

        def XMLDesc(self, _flags):  # noqa: N802 - libvirt's
            return f"<domain><memory>4096</memory>{backing}</domain>"

    hypervisor = LibvirtHypervisor("qemu:///fake", connect=lambda _uri: Connection(Guest()))
    assert hypervisor.ram_in_use("uuid") == used


@pytest.mark.parametrize(
    ("statistics", "writes"),
    [
        ([], {}),  # it is not active, or busy
        ([("guest", {})], {}),
        (
            [
                (
                    "guest",
                    {
                        "block.count": 3,
                        "block.0.name": "vda",
                        "block.0.wr.reqs": 3,
                        "block.0.wr.bytes": 12288,
                        "block.1.name": "sda",  # an empty drive has no counters
                        "block.2.wr.reqs": 4,
                        "block.2.wr.bytes": 4,
                    },
                )
            ],
            {"vda": DiskWrites(3, 12288)},
        ),
    ],
)
def test_what_was_written_is_asked_without_waiting_for_an_emulator(statistics, writes):
    class Guest:
        pass

    class Listing(Connection):
        def domainListGetStats(self, handles, kinds, flags):  # noqa: N802 - libvirt's
            assert [type(each).__name__ for each in handles] == ["Guest"]
            assert kinds == libvirt.VIR_DOMAIN_STATS_BLOCK
            assert flags == libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT
            return statistics

    hypervisor = LibvirtHypervisor("qemu:///fake", connect=lambda _uri: Listing(Guest()))
    assert hypervisor.disk_writes("uuid") == writes


def test_a_domain_without_an_emulator_has_no_downtime_limit():
    """libvirt's Python binding returns None there instead of raising an error."""
    hypervisor = LibvirtHypervisor("test:///default")
    assert hypervisor.downtime_limit(hypervisor.domain("test").uuid) is None


@pytest.mark.parametrize("name", ["absent", "", "00000000-f6a4-8304-79aa-97f2502e193f"])
def test_unknown_domains_and_networks_are_not_found(name):
    hypervisor = LibvirtHypervisor("test:///default")
    for ask in (hypervisor.domain, hypervisor.network_is_isolated):
        with pytest.raises(NotFoundError, match="no such"):
            ask(name)


def test_two_emulators_differ_even_if_libvirtd_repeats_the_id(tmp_path):
    hypervisor = LibvirtHypervisor("test:///default", host=HostPaths(run=tmp_path))
    (tmp_path / "libvirt/qemu").mkdir(parents=True)
    (tmp_path / "libvirt/qemu/test.pid").write_text("100\n")
    first = hypervisor.domain("test").boot
    assert hypervisor.domain("test").boot == first
    (tmp_path / "libvirt/qemu/test.pid").write_text("101\n")
    assert hypervisor.domain("test").boot not in ("", first)


class Screen:
    """A domain, the connection to it and the stream of its screenshot."""

    def __init__(self, code=None, active=True, blocks=(b"picture",)):
        self.code, self.active, self.blocks = code, active, blocks

    def setKeepAlive(self, _interval, _count):  # noqa: N802 - libvirt's
        return 0

    def isAlive(self):  # noqa: N802 - libvirt's
        return 1

    def lookupByUUIDString(self, _uuid):  # noqa: N802 - libvirt's
        return self

    def newStream(self, _flags):  # noqa: N802 - libvirt's
        return self

    def name(self):
        return "web"

    def isActive(self):  # noqa: N802 - libvirt's
        return int(self.active)

    def screenshot(self, _stream, _screen):
        if self.code is not None:
            error = libvirt.libvirtError("failed")
            error.err = (self.code, 0, "why", 0, "", "", "", 0, 0)
            raise error
        return "image/png"

    def recvAll(self, handler, opaque):  # noqa: N802 - libvirt's
        for block in self.blocks:
            handler(self, block, opaque)

    def finish(self):
        return 0


def picture(screen):
    return LibvirtHypervisor("qemu:///fake", connect=lambda _uri: screen).screenshot("uuid")


@pytest.mark.parametrize("code", [libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_ERR_NO_SUPPORT])
def test_only_a_running_domain_is_without_a_screen(code):
    """libvirt has the same answer for one that has ended."""
    assert picture(Screen(code)) is None
    with pytest.raises(HypervisorError, match="taking a screenshot: why"):
        picture(Screen(code, active=False))


def test_a_failed_screenshot_is_no_missing_screen():
    assert picture(Screen()).data == b"picture"
    with pytest.raises(HypervisorError, match="taking a screenshot: why"):
        picture(Screen(libvirt.VIR_ERR_OPERATION_FAILED))


def test_a_huge_screenshot_is_refused():
    with pytest.raises(HypervisorError, match="over 256 MiB"):
        picture(Screen(blocks=[bytes(1 << 20)] * 257))
