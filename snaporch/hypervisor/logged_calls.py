"""libvirt's handles, with a log line for each call that changes something."""

from __future__ import annotations

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
        "defineXML",
        "destroy",
        "managedSaveDefineXML",
        "managedSaveRemove",
        "migrateSetMaxDowntime",
        "restoreFlags",
        "resume",
        "saveFlags",
        "setTime",
        "snapshotCreateXML",
        "suspend",
        "undefineFlags",
    }
)
"""Methods of ``virConnect`` and ``virDomain`` that snaporch calls and that change something."""


class LoggedHandle:
    """A ``virDomain`` or ``virConnect`` that logs its :data:`CHANGING` calls.

    Of the arguments only names and paths are logged: XML can hold passwords.

    Args:
        handle: libvirt's own; its other attributes are reached through this one.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._handle, name)
        if name not in CHANGING:
            return found

        def call(*arguments: Any) -> Any:
            texts = [each for each in arguments if isinstance(each, str) and each[:1] != "<"]
            is_domain = isinstance(self._handle, libvirt.virDomain)
            domain = self._handle.name() if is_domain else ""
            with LoggedCommand("libvirt", name, *texts, domain=domain):
                return found(*arguments)

        return call
