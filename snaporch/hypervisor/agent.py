"""The guest's agent: freeze and thaw the guest's file systems, run a command in the guest.

The limit of a freeze, ``agent_timeout``, is handed in: it is an option in
:mod:`snaporch.config.schema`.

Every request has its own time limit, because a dead agent would block for ever. libvirt's general
limit (``virDomainAgentSetResponseTimeout``) applies to all of libvirt's clients, so it is left
unchanged. The agent executes one command after the other (QEMU Guest Agent protocol reference). So
a status that it returns includes all earlier commands, and it answers nothing while it freezes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import libvirt
import libvirt_qemu

from snaporch.command_log import LoggedCommand
from snaporch.hypervisor.interface import GuestExit, HypervisorError, NotFrozenByUsError

_STATUS_SECONDS = 5
_THAW_TRIES = 3
_QUERIES = ("guest-ping", "guest-fsfreeze-status", "guest-exec-status")
_MOST_OUTPUT = 4096
"""Characters in base64, a multiple of 4, that are kept of each output of a command: its end."""
_NO_ANSWER = (libvirt.VIR_ERR_AGENT_UNRESPONSIVE, libvirt.VIR_ERR_AGENT_UNSYNCED)
_REFUSED = (
    libvirt.VIR_ERR_INTERNAL_ERROR,
    getattr(libvirt, "VIR_ERR_AGENT_COMMAND_FAILED", None),  # in later versions of libvirt
)
"""libvirt's error codes for an error that the agent returned."""


def answers(domain: Any, seconds: int) -> bool:
    """See :meth:`Hypervisor.agent_answers`."""
    with suppress(libvirt.libvirtError, ValueError, KeyError, TypeError):
        _ask(domain, "guest-ping", seconds)
        return True
    return False


def freeze(domain: Any, mountpoints: Sequence[Path], seconds: int) -> int:
    """Freeze; see :meth:`Hypervisor.freeze_file_systems`."""
    command, names = "guest-fsfreeze-freeze", [str(path) for path in mountpoints]
    if names:
        command = "guest-fsfreeze-freeze-list"
    try:
        return int(_ask(domain, command, seconds, **({"mountpoints": names} if names else {})))
    except (libvirt.libvirtError, ValueError, KeyError, TypeError) as error:
        answered = _code(error) in _REFUSED
        is_frozen = frozen(domain)
        reason = f"its agent did not freeze: {_reason(error)}"
        if is_frozen is False:  # the agent itself thaws a freeze that failed half way
            raise NotFrozenByUsError(domain.name(), reason) from error
        if is_frozen and answered:  # it does not freeze what is frozen already
            raise NotFrozenByUsError(
                domain.name(), f"{reason} (another program has frozen it)"
            ) from error
        raise HypervisorError(domain.name(), reason) from error


def thaw(domain: Any, seconds: int) -> None:
    """Thaw until the agent says so; see :meth:`Hypervisor.thaw_file_systems`."""
    last = "it reports that file systems are still frozen"
    for _ in range(_THAW_TRIES):
        try:
            _ask(domain, "guest-fsfreeze-thaw", seconds)
        except (libvirt.libvirtError, ValueError, KeyError, TypeError) as error:
            last = _reason(error)
        if frozen(domain) is False:
            return
    raise HypervisorError(
        domain.name(),
        f"its file systems could not be thawed: {last}",
        "check the agent inside the guest, or reset the guest",
    )


def frozen(domain: Any) -> bool | None:
    """Whether the agent reports file systems as frozen; ``None`` if it does not answer."""
    with suppress(libvirt.libvirtError, ValueError, KeyError, TypeError):
        status = _ask(domain, "guest-fsfreeze-status", _STATUS_SECONDS)
        return {"frozen": True, "thawed": False}.get(str(status))
    return None


def start_command(domain: Any, words: Sequence[str], seconds: int) -> int:
    """Start a command; see :meth:`Hypervisor.start_in_guest`. Errors of libvirt pass through."""
    options = {"path": words[0], "arg": list(words[1:]), "capture-output": True}
    try:
        return int(_ask(domain, "guest-exec", seconds, **options)["pid"])
    except (ValueError, KeyError, TypeError) as error:
        raise HypervisorError(domain.name(), _reason(error)) from error


def command_exit(domain: Any, pid: int, seconds: int) -> GuestExit | None:
    """How a command has ended; see :meth:`Hypervisor.exit_in_guest`.

    Errors that the agent answers pass through.
    """
    try:
        found = _ask(domain, "guest-exec-status", seconds, pid=pid)
        if found["exited"] is not True:
            return None
        status = -int(found["signal"]) if "signal" in found else int(found["exitcode"])
        return GuestExit(status, "".join(map(_end, (found.get("out-data"), found.get("err-data")))))
    except libvirt.libvirtError as error:
        if error.get_error_code() in _NO_ANSWER:
            return None
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise HypervisorError(domain.name(), _reason(error)) from error


def _end(encoded: Any) -> str:
    """The end of an output, from base64; ``None`` is an empty one."""
    kept = str(encoded or "")[-_MOST_OUTPUT:]
    return base64.b64decode(kept, validate=True).decode("utf-8", "replace")


@contextmanager
def answering(domain: Any, seconds: int) -> Iterator[None]:
    """Set a time limit for the requests that libvirt itself sends to the agent.

    Only for a domain that was just started: a limit cannot be read, and a new domain has none.
    Afterwards the domain has none again.
    """
    domain.agentSetResponseTimeout(seconds, 0)
    try:
        yield
    finally:
        domain.agentSetResponseTimeout(libvirt.VIR_DOMAIN_AGENT_RESPONSE_TIMEOUT_BLOCK, 0)


def _ask(domain: Any, command: str, seconds: int, **arguments: Any) -> Any:
    """Send one command to the agent and return its result.

    Errors of libvirt and JSON pass through.
    """
    question = json.dumps({"execute": command} | ({"arguments": arguments} if arguments else {}))
    changes = command not in _QUERIES
    with LoggedCommand("agent", command, domain=domain.name()) if changes else nullcontext():
        answer = libvirt_qemu.qemuAgentCommand(domain, question, seconds, 0)
    return json.loads(answer)["return"]


def _code(error: Exception) -> int:
    return error.get_error_code() if isinstance(error, libvirt.libvirtError) else -1


def _reason(error: Exception) -> str:
    if isinstance(error, libvirt.libvirtError):
        return str(error.get_error_message())
    return "its answer is invalid"
