"""Whether this host can run a domain: its machine type and its CPU."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import libvirt

from snaporch.hypervisor import xml as domain_xml

_SILENT = {
    libvirt.VIR_ERR_NO_SUPPORT,
    libvirt.VIR_ERR_OPERATION_UNSUPPORTED,
    libvirt.VIR_ERR_CONFIG_UNSUPPORTED,
}
"""libvirt cannot compare CPUs here, which is no reason to refuse."""


def find_misfit(connection: Any, xml: str) -> str:
    """Why the host behind a connection cannot run a domain with this XML; empty when it can.

    Asks for the domain capabilities of emulator, architecture, machine and accelerator, then
    compares the CPU with what the hypervisor offers (virConnectCompareHypervisorCPU).
    """
    root = domain_xml.parse(xml)
    kind = root.find("os/type")
    arch, machine = (kind.get("arch"), kind.get("machine")) if kind is not None else (None, None)
    emulator = domain_xml.text(root, "devices/emulator") or None
    try:
        connection.getDomainCapabilities(emulator, arch, machine, root.get("type"))
    except libvirt.libvirtError as error:
        return "" if error.get_error_code() in _SILENT else _reason(error)
    cpu = root.find("cpu")
    if cpu is None or cpu.get("mode", "custom") != "custom":
        return ""  # the host's own, whatever it is
    return _compare(connection, (emulator, arch, machine, root.get("type")), cpu)


def _compare(connection: Any, where: tuple[str | None, ...], cpu: Element) -> str:
    flag = libvirt.VIR_CONNECT_COMPARE_CPU_FAIL_INCOMPATIBLE
    text = ElementTree.tostring(cpu, encoding="unicode")
    try:
        connection.compareHypervisorCPU(*where, text, flag)
    except libvirt.libvirtError as error:
        return "" if error.get_error_code() in _SILENT else _reason(error)
    return ""


def _reason(error: Any) -> str:
    return str(error.get_error_message())
