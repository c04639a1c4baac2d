"""Wait for signs of life of a clone that was just resumed or booted.

How long is set by ``LivenessTimes`` in :mod:`snaporch.waiting_times`, and for a script of the user
by ``--script-timeout`` (:mod:`snaporch.cli.verify`). What a failure means for the result is decided
by :mod:`snaporch.verify.verify`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from snaporch.bundle.manifest import Role
from snaporch.clone.clone import Clone
from snaporch.command_log import LoggedCommand
from snaporch.context import Context
from snaporch.errors import NotFoundError, SnaporchError, one_line
from snaporch.hypervisor import GuestExit, HypervisorError, LostLibvirtError, Vitals
from snaporch.hypervisor.domain_xml import agent_connected, parse
from snaporch.model import DomainState
from snaporch.restore.source import Source
from snaporch.verify.present_settings import present_settings

_STDERR = 2
_MOST_SAID = 300
"""Characters of a failed command's output that an error repeats: its end."""
_ADVANCES = 2
"""The restore itself uses CPU time of the vCPU threads; so their time has to advance twice."""


class LivenessError(SnaporchError):
    """The clone showed no sign of life."""


def wait_for_cpus(context: Context, thing: str, uuid: str) -> int:
    """Wait until the CPU time of the vCPUs has advanced twice.

    libvirt reports a guest as running even if it hangs after a resume, because its RAM does not fit
    its disks or devices. The CPU time of its vCPUs shows that.

    Returns:
        The CPU time of the vCPUs in nanoseconds.

    Raises:
        LivenessError: the guest does not run, or its CPUs do nothing.
    """
    seen = {_running(context, thing, uuid).vcpu_ns}

    def advanced() -> bool:
        seen.add(_running(context, thing, uuid).vcpu_ns)
        return len(seen) > _ADVANCES

    seconds = context.liveness_times.cpu
    if not _poll(context, thing, advanced, seconds):
        raise LivenessError(thing, f"its CPUs did nothing for {seconds:.0f} s")
    return max(seen)


def _running(context: Context, thing: str, uuid: str) -> Vitals:
    try:
        vitals = context.hypervisor.vitals(uuid)
    except NotFoundError as error:  # libvirt forgets a transient domain at its end
        raise LivenessError(thing, "its emulator exited") from error
    if vitals.state is not DomainState.RUNNING:
        raise LivenessError(thing, f"is {vitals.state}, not running")
    return vitals


def wait_for_agent(context: Context, source: Source, uuid: str) -> bool:
    """Wait for the guest agent, if one was connected when the snapshot was taken.

    Returns:
        Whether there is an agent; then it has answered.

    Raises:
        LivenessError: an agent was connected then, and does not answer now.
    """
    live = source.text(Role.LIVE_XML)
    if live is None or not agent_connected(parse(live)) or not source.manifest.was_running:
        return False
    timeout = present_settings(context, source.record).agent_timeout
    _await_agent(context, source.thing, uuid, timeout)
    return True


def _await_agent(context: Context, thing: str, uuid: str, timeout: int) -> None:
    def answers() -> bool:
        _running(context, thing, uuid)
        return context.hypervisor.agent_answers(uuid, timeout)

    seconds = context.liveness_times.agent
    if not _poll(context, thing, answers, seconds):
        raise LivenessError(thing, f"its agent does not answer within {seconds:.0f} s")


def run_command(context: Context, source: Source, uuid: str) -> str:
    """Run the guest's ``verify_command`` in a clone, by the guest's agent.

    The agent has to answer, also where none was connected when the snapshot was taken.

    Args:
        source: the snapshot.
        uuid: the clone's, which runs.

    Returns:
        The name of the program, which exited with status 0.

    Raises:
        LivenessError: the command fails, cannot be run, or exceeds ``verify_command_timeout``.
    """
    settings, thing = present_settings(context, source.record), source.thing
    name, timeout = settings.verify_command[0], settings.agent_timeout
    _await_agent(context, thing, uuid, timeout)
    found: list[GuestExit] = []

    def ended() -> bool:
        _running(context, thing, uuid)
        found.extend(filter(None, [context.hypervisor.exit_in_guest(uuid, pid, timeout)]))
        return bool(found)

    try:
        pid = context.hypervisor.start_in_guest(uuid, settings.verify_command, timeout)
        in_time = _poll(context, thing, ended, settings.verify_command_timeout)
    except LostLibvirtError:
        raise
    except (HypervisorError, NotFoundError) as error:
        reason = f"{name} could not be run in the guest ({error.reason})"
        raise LivenessError(thing, reason) from error
    if not in_time:
        limit = settings.verify_command_timeout
        raise LivenessError(thing, f"{name} did not exit in the guest within {limit} s")
    if found[0].status != 0:
        text = f"{name} exited with status {found[0].status} in the guest"
        said = one_line(found[0].output)[-_MOST_SAID:]
        raise LivenessError(thing, f"{text}: {said}" if said else text)
    return name


def run_script(context: Context, source: Source, made: Clone, script: Path, seconds: int) -> None:
    """Run the admin's test script against the clone; its output goes to standard error.

    Args:
        source: the snapshot.
        made: the clone, a running domain.
        script: the program.
        seconds: its time limit.

    Raises:
        LivenessError: the script fails, cannot be run, or exceeds the limit.
    """
    environment = {
        **os.environ,
        "SNAPORCH_DOMAIN": source.record.domain,
        "SNAPORCH_SNAPSHOT": source.record.snapshot,
        "SNAPORCH_LEVEL": source.manifest.level.value,
        "SNAPORCH_CLONE": made.name,
        "SNAPORCH_CLONE_UUID": made.uuid,
        "SNAPORCH_RESUMED": "1" if made.resumed else "0",
        "LIBVIRT_DEFAULT_URI": context.config.libvirt_uri,
    }
    try:
        process = subprocess.Popen(
            [script],
            stdin=subprocess.DEVNULL,
            stdout=_STDERR,
            env=environment,
            process_group=0,
        )
    except OSError as error:
        raise LivenessError(str(script), f"cannot be run: {error.strerror}") from error
    with LoggedCommand(str(script)) as log:
        try:
            ended = _poll(context, source.thing, lambda: process.poll() is not None, seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            log.exited(process.wait())
    if not ended:
        raise LivenessError(source.thing, f"{script} did not exit within {seconds} s")
    if process.returncode != 0:
        raise LivenessError(source.thing, f"{script} exited with status {process.returncode}")


def _poll(context: Context, thing: str, reached: Callable[[], bool], seconds: float) -> bool:
    """Poll until ``reached`` returns True; False after ``seconds``. A signal raises."""
    end = time.monotonic() + seconds
    while not reached():
        context.interrupt.check(thing)
        if time.monotonic() > end:
            return False
        time.sleep(context.liveness_times.poll)
    return True
