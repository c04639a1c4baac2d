"""A log line for each call of libvirt that changes something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import libvirt

from snaporch.command_log import LoggedCommand

CHANGING = frozenset(
    {
        "abortJob",
        "blockCommit",
        "blockJobAbort",
        "create",
        "createWithFlags",
        "createXML",
        "defineXMLFlags",
        "destroy",
        "managedSaveDefineXML",
        "managedSaveRemove",
        "migrateSetMaxDowntime",
        "networkDefineXML",
        "restoreFlags",
        "resume",
        "saveFlags",
        "setAutostart",
        "setTime",
        "snapshotCreateXML",
        "storagePoolDefineXML",
        "suspend",
        "undefine",
        "undefineFlags",
    }
)
"""Methods of libvirt's handles that snaporch calls and that change something."""


_LOGGED: dict[type, type] = {}
"""Classes that log, by the classes they stand for."""


def log_calls(handle: Any) -> Any:
    """Have a handle of libvirt, or the connection, log its :data:`CHANGING` calls from now on.

    Of the arguments only names and paths are logged: XML can hold passwords.

    Returns: the same object. It stays an instance of libvirt's class, because libvirt's own methods
    check that (``virConnect.domainListGetStats``).
    """
    plain = type(handle)
    if plain not in _LOGGED:
        _LOGGED[plain] = _logged_class(plain)
    handle.__class__ = _LOGGED[plain]
    return handle


def _logged(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def call(handle: Any, *arguments: Any) -> Any:
        texts = [each for each in arguments if isinstance(each, str) and each.lstrip()[:1] != "<"]
        domain = handle.name() if isinstance(handle, libvirt.virDomain) else ""
        with LoggedCommand("libvirt", name, *texts, domain=domain):
            return method(handle, *arguments)

    return call


def _logged_class(plain: type) -> type:
    names = CHANGING.intersection(dir(plain))
    return type(plain.__name__, (plain,), {n: _logged(getattr(plain, n), n) for n in names})
