"""Fixtures of the unit tests; the fakes lie beside this directory."""

import errno
import io
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes import age_command, sanoid
from fakes.story import Story
from fakes.world import World

from snaporch import default_paths

# An example takes as long as the machine needs: no test asserts times. The same examples each time,
# so that a change is not blamed for what was there before; `make test-all` looks for new ones.
hypothesis.settings.register_profile(
    "snaporch", deadline=None, derandomize=not os.environ.get("RANDOM_EXAMPLES")
)
# Mutants and other repeated tries need few examples. They report the first failing one, unshrunk.
hypothesis.settings.register_profile(
    "few",
    parent=hypothesis.settings.get_profile("snaporch"),
    max_examples=30,
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("few" if os.environ.get("FEW_EXAMPLES") else "snaporch")


@pytest.fixture(autouse=True)
def own_locks(tmp_path, monkeypatch):
    """Tests have locks in a directory of their own, and not the host's."""
    monkeypatch.setattr(default_paths, "LOCKS", tmp_path / "runtime")


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A host of fakes, with nothing on it yet."""
    made = World(tmp_path)
    made.install(monkeypatch)
    yield made
    made.kill_guardians()


@pytest.fixture
def age(tmp_path, monkeypatch):
    """A command ``age`` that hides nothing; the directory of two identities, and their keys."""
    place = tmp_path / "age"
    place.mkdir()
    monkeypatch.setenv("PATH", f"{age_command.install(place)}:{os.environ['PATH']}")
    names = ("right", "wrong")
    keys = [age_command.write_identity(place / name, n) for n, name in enumerate(names)]
    return SimpleNamespace(place=place, right=place / names[0], wrong=place / names[1], keys=keys)


@pytest.fixture
def to_disk(monkeypatch):
    """The files that were synced, written in place or renamed, by name, in order."""
    order = []

    def logged(act, line):
        def wrapped(*arguments, **named):
            order.append(line(*arguments))
            return act(*arguments, **named)

        return wrapped

    def file_of(descriptor, *_what):
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    def moved(source, target):
        return f"{Path(source).name} -> {Path(target).name}"

    for act in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, act, logged(getattr(os, act), file_of))
    monkeypatch.setattr(os, "pwrite", logged(os.pwrite, lambda *what: f"{file_of(*what)} written"))
    for act in ("rename", "replace"):
        monkeypatch.setattr(os, act, logged(getattr(os, act), moved))
    return order


@pytest.fixture
def fill_disk(monkeypatch):
    """Fills the disk of the journals: from then on nothing can be written to them."""
    real = os.write

    def write(descriptor, data):
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".jsonl"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    def fill():
        monkeypatch.setattr(os, "write", write)

    return fill


@pytest.fixture
def refuse_line(monkeypatch):
    """Refuses to write the lines that have a text, as if the disk were full then."""

    def refuse(text):
        real = os.write

        def write(descriptor, data):
            if text.encode() in bytes(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(descriptor, data)

        monkeypatch.setattr(os, "write", write)

    return refuse


class RamStore:
    """A store that takes the beginning of a RAM image; then it fails, or hangs until its end."""

    def __init__(self):
        self.taken = 92
        """After so many bytes: the header of the image."""
        self.error = None
        self.gate, self.reached = threading.Event(), threading.Event()
        self.files = []

    def open(self, descriptor):
        store = self

        class RamFile(io.FileIO):
            def write(self, data):
                if os.lseek(self.fileno(), 0, os.SEEK_CUR) > store.taken:
                    store.reached.set()
                    if store.error is not None:
                        raise store.error
                    store.gate.wait(60)
                return super().write(data)

        self.files.append(RamFile(descriptor, "w"))
        return self.files[-1]

    def end(self):
        self.gate.set()
        for thread in threading.enumerate():
            if thread.name in ("store", "seal"):
                thread.join(60)
        for file in self.files:
            file.close()


@pytest.fixture
def ram_store(monkeypatch):
    """RAM images lie on a store that hangs, or fails."""
    store, real = RamStore(), os.fdopen

    def fdopen(descriptor, *how, **more):
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")).name == "ram.save":
            return store.open(descriptor)
        return real(descriptor, *how, **more)

    monkeypatch.setattr(os, "fdopen", fdopen)
    yield store
    store.end()


@pytest.fixture
def sanoid_conf(tmp_path):
    """Resolves the text of a sanoid.conf, with the datasets that exist."""
    return partial(sanoid.resolved, tmp_path)


@pytest.fixture(autouse=True, scope="session")
def signals_as_in_a_terminal():
    """A shell's background jobs inherit ignored signals, which snaporch would leave ignored."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def make_story(world):
    """Makes a guest with snapshots."""

    def make(**guest):
        return Story(world, **guest)

    return make


@pytest.fixture
def story(make_story):
    return make_story()
