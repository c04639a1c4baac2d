"""A holder in a thread, on a host of fakes, and hooks that come to its door."""

import threading

import pytest

from snaporch.context import Interrupt
from snaporch.default_paths import WINDOW
from snaporch.sanoid.hold import process
from snaporch.sanoid.hold.client import JsonConnection, ask, call


class Talk(JsonConnection):
    """A hook's end of a conversation."""

    replies = ()

    def outcome(self):
        """The next answer that is no news of what freezing takes, and how far it is."""
        if self.replies:
            return self.replies.pop()
        while "prospect" in (reply := self.hear()):
            pass
        return reply


class Held:
    """A guest behind its door."""

    def __init__(self, world, name="web"):
        self.world = world
        self.uuid = world.guest(name).uuid
        world.paths.runtime.mkdir(exist_ok=True)
        self.door = world.paths.runtime / f"{self.uuid}{WINDOW}"
        self.interrupt = Interrupt()
        self.code = None
        self._lines = []
        self._thread = threading.Thread(target=self._hold)

    def _hold(self):
        self.code = process.hold(self.uuid, self.door, None, self.interrupt)

    def start(self):
        self._thread.start()
        while (line := call(self.door)) is None:
            assert self._thread.is_alive()
        line.close()
        return self

    def message(self, what, target="tank/web", sanoid=0, **more):
        return {"do": what, "sanoid": sanoid, "target": target} | more

    def join(self, target="tank/web", sanoid=0, datasets=None, promised=(), names=("hourly",)):
        """Join, and give the word to freeze; what came of it is still to be heard."""
        line = self.knock(target, sanoid, datasets, promised, names)
        reply = line.hear()
        if "ok" not in reply:
            line.say(self.message("freeze", target, sanoid, attempt=reply["attempt"]))
        else:
            line.replies = [reply]
        return line

    def knock(self, target="tank/web", sanoid=0, datasets=None, promised=(), names=("hourly",)):
        """Join; the first answer is still to be heard."""
        line = Talk(call(self.door).connection)
        self._lines.append(line)
        line.say(
            self.message(
                "join",
                target,
                sanoid,
                datasets=datasets or [target],
                promised=list(promised),
                names=list(names),
            )
        )
        return line

    def enter(self, *arguments, **more):
        """Join, and have it that the guest is frozen."""
        line = self.join(*arguments, **more)
        reply = line.outcome()
        assert reply["ok"], reply
        line.say(self.message("go", *arguments[:2]))
        assert line.outcome() == {"begun": True}
        line.close()
        return reply

    def leave(self, target="tank/web", sanoid=0):
        return ask(self.door, self.message("leave", target, sanoid))

    def snapshot(self, *names):
        """What sanoid does."""
        for name in names:
            self.world.pool.snapshot([name], {})

    def end(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert not self.door.exists()
        return self.code

    def rescue(self):
        """However the test went, the thread ends."""
        self.interrupt.signum = 15
        self._thread.join(60)
        for line in self._lines:
            line.close()


@pytest.fixture
def hold(world, monkeypatch):
    """Starts a holder for a guest."""
    monkeypatch.setattr(process, "load_config", lambda _path: world.context.config)
    monkeypatch.setattr(process, "open_hypervisor", lambda _uri: world.hypervisor)
    monkeypatch.setattr(process, "open_pool", lambda: world.pool)
    monkeypatch.setattr("snaporch.sanoid.hold.snapshotter.lower_priority", lambda _work: None)
    monkeypatch.setattr(process, "_JOIN_SECONDS", 5)
    started = []

    def start(name="web"):
        started.append(Held(world, name).start())
        return started[-1]

    yield start
    for held in started:
        held.rescue()
