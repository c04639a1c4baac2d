"""The command line in this process, on a host of fakes."""

import json
from dataclasses import dataclass
from functools import partial

import pytest

from snaporch.cli import main
from snaporch.cli.command_host import CommandHost
from snaporch.config import load_config
from snaporch.context import Context


@dataclass
class Answer:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def command_host():
    """The host on which commands run."""
    return CommandHost()


@pytest.fixture
def snaporch(capsys, monkeypatch, command_host):
    """Runs a command."""
    monkeypatch.delenv("SNAPORCH_CONFIG", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments):
        code = main._run(list(arguments), command_host)
        captured = capsys.readouterr()
        return Answer(int(code), captured.out, captured.err)

    return run


@pytest.fixture
def notified(host, tmp_path):
    """Returns a function for the lines of the failures that the admin was notified of."""
    script, sent = tmp_path / "notify", tmp_path / "sent"
    script.write_text(f'#!/bin/sh\nprintf "%s\\n" "$SNAPORCH_TEXT" >>{sent}\n')
    script.chmod(0o755)
    sent.touch()
    text = host.config_file.read_text()
    host.config_file.write_text(f'[notify]\ncommand = "{script}"\n{text}')
    return lambda: sent.read_text().splitlines()


@pytest.fixture
def host(world, command_host, tmp_path):
    """The world behind the command line; its configuration is the default one."""
    paths = world.paths
    lines = [
        f"{key} = {json.dumps(str(getattr(paths, key)))}"
        for key in ("overlays", "bundles", "clones")
    ]
    lines += [f"{key} = {json.dumps(str(getattr(paths, key)))}" for key in ("journal", "runtime")]
    world.config_file = tmp_path / "snaporch.toml"
    lines = ["[paths]", "overlay_reserve_mib = 1", *lines]
    lines += ["[defaults]", 'ram_strategy = "overlay"']
    world.config_file.write_text("\n".join(lines) + "\n")
    command_host.load_config = partial(load_config, default=world.config_file)
    command_host.open_pool = lambda **_: world.pool
    command_host.open_hypervisor = lambda _uri: world.hypervisor
    command_host.fences = lambda: world.fences
    command_host.has_libvirt = lambda _uri: True
    command_host.lower_priority = world.lowered.append
    fakes = (
        *("resolver", "fences", "clock", "libvirt_times", "ram_times", "overlay_images"),
        *("liveness_times", "program", "start_detached", "lower_priority", "unit_states"),
    )

    def make_context(*arguments, **settings):
        given = {name: getattr(world.context, name) for name in fakes}
        return Context(*arguments, **given, **settings)

    command_host.make_context = make_context
    return world
