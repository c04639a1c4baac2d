"""A hold process in a thread, on a host of fakes, and hooks that connect to it."""

import threading

import pytest
from fakes.sanoid import hold_on

from snaporch.default_paths import HOLD_SOCKET_SUFFIX
from snaporch.interrupt import Interrupt
from snaporch.sanoid.hold.messages import JsonConnection, ask, connect


class HookConnection(JsonConnection):
    """A hook's end of a connection."""

    replies = ()

    def outcome(self):
        """The next reply that is no estimate."""
        if self.replies:
            return self.replies.pop()
        while "estimate" in (reply := self.receive()):
            pass
        return reply


class Held:
    """A guest and its hold process."""

    def __init__(self, world, name="web", join_seconds=5, **more):
        self.world = world
        self.uuid = world.guest(name).uuid
        world.paths.runtime.mkdir(exist_ok=True)
        self.socket = world.paths.runtime / f"{self.uuid}{HOLD_SOCKET_SUFFIX}"
        self.interrupt = Interrupt()
        self.code = None
        self._connections = []
        self._more = {"join_seconds": join_seconds, **more}
        self._thread = threading.Thread(target=self._hold)

    def _hold(self):
        self.code = hold_on(self.world, self.uuid, self.socket, self.interrupt, **self._more)

    def start(self):
        self._thread.start()
        while (line := connect(self.socket)) is None:
            assert self._thread.is_alive()
        line.close()
        return self

    def message(self, what, target="tank/web", sanoid=0, **more):
        return {"do": what, "sanoid": sanoid, "target": target} | more

    def join(self, target="tank/web", sanoid=0, datasets=None, promised=(), names=("hourly",)):
        """Join, and order the freeze; its outcome is still to be received."""
        line = self.request(target, sanoid, datasets, promised, names)
        reply = line.receive()
        if "ok" not in reply:
            line.send(self.message("freeze", target, sanoid, attempt=reply["attempt"]))
        else:
            line.replies = [reply]
        return line

    def request(self, target="tank/web", sanoid=0, datasets=None, promised=(), names=("hourly",)):
        """Join; the first reply is still to be received."""
        line = HookConnection(connect(self.socket).socket)
        self._connections.append(line)
        line.send(
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
        """Join, and wait until the guest is frozen."""
        line = self.join(*arguments, **more)
        reply = line.outcome()
        assert reply["ok"], reply
        line.send(self.message("begin", *arguments[:2]))
        assert line.outcome() == {"begun": True}
        line.close()
        return reply

    def leave(self, target="tank/web", sanoid=0):
        return ask(self.socket, self.message("leave", target, sanoid))

    def snapshot(self, *names):
        """Take snapshots, as sanoid does."""
        for name in names:
            self.world.pool.snapshot([name], {})

    def end(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert not self.socket.exists()
        return self.code

    def rescue(self):
        """End the thread, even after a failed test."""
        self.interrupt.signum = 15
        self._thread.join(60)
        for line in self._connections:
            line.close()


@pytest.fixture
def hold(world):
    """Starts a hold process for a guest."""
    started = []

    def start(name="web", **more):
        started.append(Held(world, name, **more).start())
        return started[-1]

    yield start
    for held in started:
        held.rescue()
