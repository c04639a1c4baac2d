"""The connection to libvirt, and libvirt's errors as errors of snaporch.

How long a command waits for a libvirtd that restarts is set by ``LibvirtTimes.reconnect`` in
:mod:`snaporch.waiting_times`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import libvirt

from snaporch.default_paths import HOST, HostPaths
from snaporch.errors import NotFoundError, UnavailableError
from snaporch.hypervisor.events import start_event_loop, watch_changes
from snaporch.hypervisor.interface import HypervisorError, LostLibvirtError
from snaporch.hypervisor.logged_calls import log_calls

_KEEPALIVE = (5, 6)
NO_DOMAIN = {libvirt.VIR_ERR_NO_DOMAIN}


class LibvirtConnection:
    """One connection, which is opened again when libvirtd was restarted.

    Args:
        connect: opens a connection to a URI.
        host: where the kernel and libvirt show the host's processes.

    Raises:
        UnavailableError: libvirt does not answer at ``uri``.
    """

    def __init__(
        self, uri: str, connect: Callable[[str], Any] = libvirt.open, host: HostPaths = HOST
    ) -> None:
        libvirt.registerErrorHandler(lambda _context, _error: None, None)
        start_event_loop()
        self._uri = uri
        self._connect = connect
        self._host = host
        self._connection: Any = None
        self._callbacks: list[Callable[[], None]] = []
        self._conn()

    def _conn(self) -> Any:
        if self._connection is not None and self._alive():
            return self._connection
        try:
            self._connection = log_calls(self._connect(self._uri))
        except libvirt.libvirtError as error:
            raise UnavailableError(
                self._uri,
                f"libvirt does not answer ({error.get_error_message()})",
                "check `systemctl status libvirtd` and the setting libvirt_uri",
            ) from error
        with contextlib.suppress(libvirt.libvirtError):  # not every driver has it
            self._connection.setKeepAlive(*_KEEPALIVE)
        for callback in self._callbacks:
            watch_changes(self._connection, callback)
        return self._connection

    def _alive(self) -> bool:
        try:
            return bool(self._connection.isAlive())
        except libvirt.libvirtError:
            return False

    @contextlib.contextmanager
    def _explained(self, thing: str, operation: str) -> Iterator[None]:
        try:
            yield
        except libvirt.libvirtError as error:
            raise self._failure(thing, f"{operation}: {error.get_error_message()}") from error

    def _failure(self, thing: str, reason: str) -> HypervisorError:
        """Whether libvirt has answered that, or does not answer any more."""
        if self._connection is not None and not self._alive():
            step = "check `systemctl status libvirtd`, and try again"
            return LostLibvirtError(thing, f"{reason}: the connection to libvirt was lost", step)
        return HypervisorError(thing, reason)

    def _handle(self, uuid: str) -> Any:
        try:
            return log_calls(self._conn().lookupByUUIDString(uuid))
        except libvirt.libvirtError as error:
            if error.get_error_code() in NO_DOMAIN:
                raise NotFoundError(uuid, "no such domain") from error
            raise self._failure(uuid, error.get_error_message()) from error

    def on_change(self, callback: Callable[[], None]) -> None:
        """See :meth:`~snaporch.hypervisor.interface.Hypervisor.on_change`."""
        with self._explained("libvirt", "asking for events"):
            watch_changes(self._conn(), callback)
        self._callbacks.append(callback)
