"""The command line in this process, on a host of fakes."""

import json
from dataclasses import dataclass
from functools import partial

import pytest

from snaporch.cli import main
from snaporch.context import Context
from snaporch.notify.notifier import Notifier


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
def snaporch(capsys, monkeypatch):
    """Runs a command."""
    monkeypatch.delenv("SNAPORCH_CONFIG", raising=False)
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def run(*arguments):
        code = main._run(list(arguments))
        captured = capsys.readouterr()
        return Answer(int(code), captured.out, captured.err)

    return run


@pytest.fixture
def notified(monkeypatch):
    """The lines of the failures that the admin is notified of."""
    lines = []
    monkeypatch.setattr(
        Notifier, "failed", lambda _self, _config, error: lines.append(error.line())
    )
    return lines


@pytest.fixture
def host(world, monkeypatch, tmp_path):
    """The world behind the command line; its configuration is the default one."""
    paths = world.paths
    lines = [
        f"{key} = {json.dumps(str(getattr(paths, key)))}"
        for key in ("overlays", "bundles", "clones")
    ]
    lines += [f"{key} = {json.dumps(str(getattr(paths, key)))}" for key in ("journal", "runtime")]
    config = tmp_path / "snaporch.toml"
    lines = ["[paths]", "overlay_reserve_mib = 1", *lines]
    lines += ["[defaults]", 'ram_strategy = "overlay"']
    config.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr("snaporch.config.load.DEFAULT_PATH", config)
    monkeypatch.setattr("snaporch.cli.session.open_pool", lambda **_: world.pool)
    monkeypatch.setattr("snaporch.cli.session.open_hypervisor", lambda _uri: world.hypervisor)
    fakes = (
        *("resolver", "clock", "libvirt_times", "sealing_times", "overlay_images"),
        *("liveness_times", "start_detached", "lower_priority", "unit_states"),
    )
    given = {name: getattr(world.context, name) for name in fakes}
    monkeypatch.setattr("snaporch.cli.session.Context", partial(Context, **given))
    monkeypatch.setattr("snaporch.zfs.open_pool", lambda **_: world.pool)
    monkeypatch.setattr("snaporch.hypervisor.open_hypervisor", lambda _uri: world.hypervisor)
    return world
