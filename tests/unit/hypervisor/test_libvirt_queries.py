from types import SimpleNamespace

import pytest

from snaporch.errors import NotFoundError
from snaporch.hypervisor import domain_reader
from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor


@pytest.mark.parametrize(
    ("backing", "used"),
    [("", 1 << 20), ("<memoryBacking><hugepages/></memoryBacking>", 4 << 20)],
)
def test_all_ram_on_huge_pages_is_in_use(monkeypatch, backing, used):
    """The kernel does not count it as resident."""
    handle = SimpleNamespace(
        info=lambda: [1, 4096, 4096, 1, 0],
        memoryStats=lambda: {"rss": 1024},
        XMLDesc=lambda _flags: f"<domain><memory>4096</memory>{backing}</domain>",
    )
    hypervisor = LibvirtHypervisor("test:///default")
    monkeypatch.setattr(hypervisor, "_handle", lambda _uuid: handle)
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


def test_two_emulators_differ_even_if_libvirtd_repeats_the_id(monkeypatch, tmp_path):
    monkeypatch.setattr(domain_reader, "_PROCESSES", tmp_path)
    hypervisor = LibvirtHypervisor("test:///default")
    (tmp_path / "test.pid").write_text("100\n")
    first = hypervisor.domain("test").boot
    assert hypervisor.domain("test").boot == first
    (tmp_path / "test.pid").write_text("101\n")
    assert hypervisor.domain("test").boot not in ("", first)
