"""The guest's agent: freezing and thawing its file systems.

Every question has a time limit (``virDomainAgentSetResponseTimeout``): a dead agent would block for
ever otherwise. The status is ``guest-fsfreeze-status`` of the QEMU Guest Agent protocol reference.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import libvirt
import libvirt_qemu

from snaporch.hypervisor.protocol import HypervisorError

_STATUS_SECONDS = 5
_THAW_TRIES = 3


def answers(domain: Any, seconds: int) -> bool:
    """See :meth:`Hypervisor.agent_answers`."""
    return _ask(domain, "guest-ping", seconds) is not None


def freeze(domain: Any, mountpoints: Sequence[Path], seconds: int) -> int:
    """Freeze; see :meth:`Hypervisor.freeze_file_systems`."""
    names = [str(path) for path in mountpoints] or None
    try:
        domain.agentSetResponseTimeout(seconds, 0)
        return int(domain.fsFreeze(names, 0))
    except libvirt.libvirtError as error:
        # It may have frozen some of them, or do so later: leave nothing to chance.
        with suppress(HypervisorError):
            thaw(domain, seconds)
        raise HypervisorError(
            domain.name(), f"its agent did not freeze: {error.get_error_message()}"
        ) from error


def thaw(domain: Any, seconds: int) -> None:
    """Thaw until the agent says so; see :meth:`Hypervisor.thaw_file_systems`."""
    last = "it says that file systems are still frozen"
    for _ in range(_THAW_TRIES):
        try:
            domain.agentSetResponseTimeout(seconds, 0)
            domain.fsThaw(None, 0)
        except libvirt.libvirtError as error:
            last = error.get_error_message()
        if _status(domain) == "thawed":
            return
    raise HypervisorError(
        domain.name(),
        f"its file systems could not be thawed: {last}",
        "see to the agent inside the guest, or reset it",
    )


def frozen(domain: Any) -> bool:
    """Whether the agent says that file systems are frozen."""
    return _status(domain) == "frozen"


def _status(domain: Any) -> str | None:
    return _ask(domain, "guest-fsfreeze-status", _STATUS_SECONDS)


def _ask(domain: Any, command: str, seconds: int) -> str | None:
    question = json.dumps({"execute": command})
    try:
        answer = libvirt_qemu.qemuAgentCommand(domain, question, seconds, 0)
        return str(json.loads(answer)["return"])
    except (libvirt.libvirtError, ValueError, KeyError, TypeError):
        return None
