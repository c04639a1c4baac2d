"""Check whether this host can run a domain: its machine type and its CPU.

What else a restore needs of the host is checked by :mod:`snaporch.restore.host_requirements`.
"""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import libvirt
from defusedxml import DefusedXmlException
from defusedxml.ElementTree import fromstring

from snaporch.hypervisor import domain_xml

_SILENT = {
    libvirt.VIR_ERR_NO_SUPPORT,
    libvirt.VIR_ERR_OPERATION_UNSUPPORTED,
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED,
}
"""libvirt cannot compare CPUs here; that is no reason to refuse."""
_OF_THE_HOST = ("host-passthrough", "maximum")


def find_incompatibility(connection: Any, xml: str, seen: str = "") -> str:
    """Why the connected host cannot run a domain with this XML; empty if it can.

    Asks for the domain capabilities of emulator, architecture, machine and accelerator. Then
    compares the CPU with the one that the hypervisor offers (virConnectCompareHypervisorCPU).

    Args:
        seen: the host's CPU as the guest saw it, from :func:`guest_cpu`.
    """
    root = domain_xml.parse(xml)
    where = _capability_keys(root)
    try:
        connection.getDomainCapabilities(*where)
    except libvirt.libvirtError as error:
        return "" if error.get_error_code() in _SILENT else _reason(error)
    cpu = root.find("cpu")
    if cpu is not None and cpu.get("mode", "custom") == "custom":
        return _compare(connection, where, ElementTree.tostring(cpu, encoding="unicode"))
    return _compare(connection, where, seen) if seen else ""  # otherwise it is the host's own


def guest_cpu(connection: Any, xml: str) -> str:
    """The host's CPU as a guest with this XML sees it, for a comparison with another host's.

    Returns: a ``<cpu>`` with the model and features of libvirt's ``host-model``. Empty if the
    guest's CPU does not depend on the host, or libvirt does not know it.
    """
    root = domain_xml.parse(xml)
    cpu = root.find("cpu")
    if cpu is None or cpu.get("mode") not in _OF_THE_HOST:
        return ""
    try:
        known = fromstring(
            connection.getDomainCapabilities(*_capability_keys(root)), forbid_dtd=True
        )
    except (libvirt.libvirtError, ElementTree.ParseError, DefusedXmlException):
        return ""
    model = known.find("cpu/mode[@name='host-model'][@supported='yes']")
    if model is None or model.find("model") is None:
        return ""
    cpu = Element("cpu", mode="custom", match="exact")
    cpu.extend(child for child in model if child.tag in ("model", "vendor", "feature"))
    return ElementTree.tostring(cpu, encoding="unicode")


def emulators_in(capabilities: str) -> frozenset[str]:
    """The paths of the emulators in libvirt's capabilities of the host (virConnectGetCapabilities).

    libvirt lists what it has found on its own search path, whatever any definition says.
    """
    root = fromstring(capabilities, forbid_dtd=True)
    found = [*root.iterfind("guest/arch/emulator"), *root.iterfind("guest/arch/domain/emulator")]
    return frozenset(each.text.strip() for each in found if each.text)


def _capability_keys(root: Element) -> tuple[str | None, ...]:
    """Emulator, architecture, machine and accelerator, on which capabilities depend."""
    kind = root.find("os/type")
    arch, machine = (kind.get("arch"), kind.get("machine")) if kind is not None else (None, None)
    return domain_xml.text(root, "devices/emulator") or None, arch, machine, root.get("type")


def _compare(connection: Any, where: tuple[str | None, ...], cpu: str) -> str:
    flag = libvirt.VIR_CONNECT_COMPARE_CPU_FAIL_INCOMPATIBLE
    try:
        connection.compareHypervisorCPU(*where, cpu, flag)
    except libvirt.libvirtError as error:
        return "" if error.get_error_code() in _SILENT else _reason(error)
    return ""


def _reason(error: Any) -> str:
    return str(error.get_error_message())
