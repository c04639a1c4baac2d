"""Signs of life of a guest that was just resumed or booted."""

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
from snaporch.errors import NotFoundError, SnaporchError
from snaporch.hypervisor import Vitals
from snaporch.hypervisor.domain_xml import agent_connected, parse
from snaporch.model import DomainState
from snaporch.restore.source import Source

_CPU_SECONDS = 60.0
_AGENT_SECONDS = 300.0
_POLL_SECONDS = 0.1
_STANDARD_ERROR = 2
_ADVANCES = 2
"""Restoring costs the vCPUs' threads some time too; so their clock has to move again after that."""


class LifeError(SnaporchError):
    """The snapshot did not come to life."""


def wait_for_cpus(context: Context, thing: str, uuid: str) -> int:
    """Until the virtual CPUs have run: their time has advanced twice; nanoseconds they used.

    A guest that stands still after a resume (its RAM is not what its disks or devices want) stays
    running in libvirt's eyes; the time of its CPUs does not lie.

    Raises:
        LifeError: it does not run, or its CPUs do nothing.
    """
    seen = {_running(context, thing, uuid).vcpu_ns}

    def advanced() -> bool:
        seen.add(_running(context, thing, uuid).vcpu_ns)
        return len(seen) > _ADVANCES

    if not _poll(context, thing, advanced, _CPU_SECONDS):
        raise LifeError(thing, f"its CPUs did nothing for {_CPU_SECONDS:.0f} s")
    return max(seen)


def _running(context: Context, thing: str, uuid: str) -> Vitals:
    try:
        vitals = context.hypervisor.vitals(uuid)
    except NotFoundError as error:  # libvirt forgets a transient domain at its end
        raise LifeError(thing, "its emulator ended") from error
    if vitals.state is not DomainState.RUNNING:
        raise LifeError(thing, f"does not run but is {vitals.state}")
    return vitals


def wait_for_agent(context: Context, source: Source, uuid: str) -> bool:
    """Until the guest's agent answers, if it had one when it was captured; whether it had.

    Raises:
        LifeError: it had one, and it does not answer.
    """
    live = source.text(Role.LIVE_XML)
    if live is None or not agent_connected(parse(live)) or not source.manifest.was_running:
        return False
    settings = context.config.settings(source.record.domain, source.record.uuid)

    def answers() -> bool:
        _running(context, source.thing, uuid)
        return context.hypervisor.agent_answers(uuid, settings.agent_timeout)

    if not _poll(context, source.thing, answers, _AGENT_SECONDS):
        raise LifeError(source.thing, f"its agent does not answer within {_AGENT_SECONDS:.0f} s")
    return True


def run_script(context: Context, source: Source, made: Clone, script: Path, seconds: int) -> None:
    """Run the user's own test against the clone; its output goes to standard error.

    Raises:
        LifeError: it fails or takes too long.
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
            stdout=_STANDARD_ERROR,
            env=environment,
            process_group=0,
        )
    except OSError as error:
        raise LifeError(str(script), f"cannot be run: {error.strerror}") from error
    with LoggedCommand(str(script)) as log:
        try:
            ended = _poll(context, source.thing, lambda: process.poll() is not None, seconds)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            log.exited(process.wait())
    if not ended:
        raise LifeError(source.thing, f"{script} did not end within {seconds} s")
    if process.returncode != 0:
        raise LifeError(source.thing, f"{script} ended with {process.returncode}")


def _poll(context: Context, thing: str, reached: Callable[[], bool], seconds: float) -> bool:
    """Ask again and again; a signal ends it."""
    end = time.monotonic() + seconds
    while not reached():
        context.interrupt.check(thing)
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True
