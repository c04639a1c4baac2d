import pytest

from snaporch.default_paths import HostPaths
from snaporch.errors import NotFoundError
from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor


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

    class Connection:
        def setKeepAlive(self, _interval, _count):  # noqa: N802 - libvirt's
            return 0

        def isAlive(self):  # noqa: N802 - libvirt's
            return 1

        def lookupByUUIDString(self, _uuid):  # noqa: N802 - libvirt's
            return Guest()

    hypervisor = LibvirtHypervisor("qemu:///fake", connect=lambda _uri: Connection())
    assert hypervisor.ram_in_use("uuid") == used


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
