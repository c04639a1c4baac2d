"""Whether this host can run a domain: its machine type and its CPU."""

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
"""libvirt cannot compare CPUs here, which is no reason to refuse."""
_OF_THE_HOST = ("host-passthrough", "maximum")


def find_misfit(connection: Any, xml: str, seen: str = "") -> str:
    """Why the host behind a connection cannot run a domain with this XML; empty when it can.

    Asks for the domain capabilities of emulator, architecture, machine and accelerator, then
    compares the CPU with what the hypervisor offers (virConnectCompareHypervisorCPU).

    Args:
        seen: what the guest saw of a host's CPU, as :func:`seen_cpu` told it.
    """
    root = domain_xml.parse(xml)
    where = _where(root)
    try:
        connection.getDomainCapabilities(*where)
    except libvirt.libvirtError as error:
        return "" if error.get_error_code() in _SILENT else _reason(error)
    cpu = root.find("cpu")
    if cpu is not None and cpu.get("mode", "custom") == "custom":
        return _compare(connection, where, ElementTree.tostring(cpu, encoding="unicode"))
    return _compare(connection, where, seen) if seen else ""  # or the host's own, whatever it is


def seen_cpu(connection: Any, xml: str) -> str:
    """The host's CPU as a guest with this XML sees it, to be compared with another host's.

    Returns: a ``<cpu>`` with the model and the features of what libvirt calls ``host-model``; empty
        if the guest's CPU does not depend on the host, or libvirt does not know.
    """
    root = domain_xml.parse(xml)
    cpu = root.find("cpu")
    if cpu is None or cpu.get("mode") not in _OF_THE_HOST:
        return ""
    try:
        known = fromstring(connection.getDomainCapabilities(*_where(root)), forbid_dtd=True)
    except (libvirt.libvirtError, ElementTree.ParseError, DefusedXmlException):
        return ""
    model = known.find("cpu/mode[@name='host-model'][@supported='yes']")
    if model is None or model.find("model") is None:
        return ""
    told = Element("cpu", mode="custom", match="exact")
    told.extend(child for child in model if child.tag in ("model", "vendor", "feature"))
    return ElementTree.tostring(told, encoding="unicode")


def _where(root: Element) -> tuple[str | None, ...]:
    """Emulator, architecture, machine and accelerator: what capabilities depend on."""
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
