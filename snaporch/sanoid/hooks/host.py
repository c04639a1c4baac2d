"""The host as a hook sees it. Each part is opened when it is first used: start-up time counts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from snaporch.default_paths import HOLD_SOCKET_SUFFIX
from snaporch.errors import NotFoundError
from snaporch.hypervisor import Hypervisor, open_hypervisor
from snaporch.sanoid.hooks.caller import Caller, find_sanoid
from snaporch.sanoid.hooks.settings import HookSettings, read_settings
from snaporch.zfs.resolver import HOST, Resolver, read_mounts

if TYPE_CHECKING:
    from snaporch.config import Config, DomainSettings
    from snaporch.zfs import Pool

_ZVOLS = Path("/dev/zvol")


class HookHost:
    """Everything that the pre and the post hook use of a host; tests hand in another one."""

    resolver: Resolver = HOST
    start_seconds = 60.0
    """To wait until a hold process that was started listens."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    @cached_property
    def settings(self) -> HookSettings:
        """The settings for which no schema is needed.

        Raises:
            ConfigError: the configuration cannot be read.
        """
        return read_settings(self._environment)

    @cached_property
    def config(self) -> Config:
        """The whole configuration.

        Raises:
            ConfigError: the schema does not allow it.
        """
        return self.settings.validated()

    @cached_property
    def caller(self) -> Caller:
        """The sanoid that calls the hook."""
        return find_sanoid()

    @cached_property
    def hypervisor(self) -> Hypervisor:
        """libvirt.

        Raises:
            UnavailableError: libvirt does not answer.
        """
        return open_hypervisor(self.settings.libvirt_uri)

    @cached_property
    def pool(self) -> Pool:
        """ZFS.

        Raises:
            UnavailableError: ZFS is not installed.
        """
        from snaporch.zfs.open_pool import open_pool

        return open_pool(read_only=True)

    def hold_socket(self, uuid: str) -> Path:
        """The socket of the process that holds a domain."""
        return self.settings.runtime / f"{uuid}{HOLD_SOCKET_SUFFIX}"

    def plan_seconds(self, settings: DomainSettings) -> float:
        """See :func:`~snaporch.sanoid.hooks.handshake_times.plan_seconds`."""
        from snaporch.sanoid.hooks.handshake_times import plan_seconds

        return plan_seconds(settings)

    def start_hold_process(self, uuid: str) -> None:
        """Start the process that holds a domain; it outlives this one."""
        import secrets
        import sys

        from snaporch.systemd.start_detached import start_detached

        words = [sys.executable, "-P", "-m", "snaporch.sanoid.hold.process", uuid]
        words.append(str(self.hold_socket(uuid)))
        if self.settings.path is not None:
            words.append(str(self.settings.path.absolute()))
        start_detached(f"snaporch-window-{uuid}-{secrets.token_hex(4)}", words)

    def check_exist(self, datasets: Sequence[str]) -> None:
        """Check that the datasets exist; ``zfs`` is started only for those that are not mounted.

        Raises:
            NotFoundError: one does not exist.
        """
        mounted = {mount.source for mount in read_mounts() if mount.filesystem == "zfs"}
        for dataset in datasets:
            if dataset in mounted or (_ZVOLS / dataset).exists():
                continue
            import subprocess

            from snaporch.command_log import LoggedCommand

            command = ["zfs", "list", "-H", "-o", "name", dataset]
            path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
            with suppress(FileNotFoundError), LoggedCommand(*command) as log:
                done = subprocess.run(
                    command, capture_output=True, check=False, env={**os.environ, "PATH": path}
                )
                log.exited(done.returncode)
                if done.returncode != 0:
                    raise NotFoundError(dataset, "no such dataset", "nothing was touched")
