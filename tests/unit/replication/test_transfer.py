import os
import time
from pathlib import Path

import pytest
from fakes.log import recorded_commands
from fakes.world import Heard

from snaporch.errors import InterruptedRunError, UnavailableError
from snaporch.interrupt import Interrupt
from snaporch.replication.interface import ReplicaError
from snaporch.replication.stall_detector import StallDetector
from snaporch.replication.transfer import RateChangedError, Transfers

SLOW_TO_END = """#!/bin/sh
(trap 'sleep 1; touch {place}/ended; exit' TERM
 touch {place}/begun
 while :; do sleep 0.1; done) &
wait
"""


def transfers(interrupt=None, **more):
    return Transfers("nas", "nas", interrupt or Interrupt(), Heard(), **more)


def test_an_interrupted_transfer_has_ended_with_all_it_started(tmp_path):
    """A command may exit at once; ``zfs receive`` still records its position."""
    script = tmp_path / "transfer"
    script.write_text(SLOW_TO_END.format(place=tmp_path))
    script.chmod(0o755)
    interrupt = Interrupted(tmp_path / "begun")
    there = transfers(interrupt, end_seconds=1000)  # it is not waited for longer
    with pytest.raises(InterruptedRunError):
        there.output(str(script), limit=1000)
    assert (tmp_path / "ended").exists()


class Stalled(StallDetector):
    def is_stalled(self):
        return True


def test_a_stalled_transfer_is_ended_and_reported():
    there = transfers(watch=Stalled)
    with pytest.raises(
        ReplicaError, match=r"no data moved for 60 minutes.*see: zpool status, on nas"
    ):
        there.run(["sleep", "1000"], through=0, size=0)


def test_a_transfer_that_moves_data_may_take_long():
    assert transfers().run(["sleep", "0.5"], through=0, size=0) == (0, [])


def test_another_rate_ends_a_transfer_that_has_one(tmp_path):
    """Its caller begins it again, where the replica has recorded its position."""
    rates = [5, 5, 2]
    heard = Heard()
    there = Transfers("nas", "nas", Interrupt(), heard, lambda: rates.pop(0) if rates[1:] else 2)
    began = time.monotonic()
    with pytest.raises(RateChangedError):
        there.run(["sleep", "1000"], through=0, size=0, rate=5)
    assert time.monotonic() - began < 60
    assert rates == [2]
    assert there.run(["sleep", "0.5"], through=0, size=0) == (0, [])  # it has no limit


def test_bytes_are_reported_while_they_go_through_a_command(tmp_path):
    """Of several commands, one reads and writes everything."""
    heard, data, more = Heard(), tmp_path / "data", tmp_path / "more"
    data.write_bytes(bytes(3 << 20))
    os.mkfifo(more)

    class Watching(Interrupt):
        def check(self, _thing):
            """Let the first command end when the data is counted."""
            if heard.amounts and heard.amounts[-1][0] >= 3 << 20 and more.exists():
                more.open("wb").close()
                more.unlink()

    there = Transfers("nas", "nas", Watching(), heard)
    commands = ["cat", str(data), str(more)], ["cat"], ["wc", "-c"]
    assert there.run(*commands, through=1, size=4 << 20) == (0, [str(3 << 20)])
    counts = [done for done, total in heard.amounts if total == 4 << 20]
    assert counts == sorted(counts)
    assert 3 << 20 <= counts[-1] < 4 << 20


def test_bytes_of_an_unknown_size_are_not_reported():
    heard = Heard()
    Transfers("nas", "nas", Interrupt(), heard).run(["sleep", "0.5"], through=0, size=0)
    assert heard.amounts == []


def test_a_command_with_a_limit_need_not_move_data():
    assert transfers(watch=Stalled).output("sleep", "1", limit=1000) == (0, "")


def test_a_command_over_its_limit_is_ended_and_reported():
    """As if a pool of this machine were suspended."""
    with pytest.raises(
        ReplicaError, match=r"^nas: zfs takes over 0 s, .*; see: zpool status, on this machine$"
    ):
        transfers().output("sleep", "1000", limit=0.3)


def test_a_transfer_that_prints_without_end_is_ended():
    with pytest.raises(ReplicaError, match="nas: a transfer prints over 16 MiB, and was ended"):
        transfers().output("yes", limit=1000)


def test_a_transfer_that_ignores_sigterm_is_killed(tmp_path):
    script = tmp_path / "transfer"
    script.write_text(f"#!/bin/sh\ntrap '' TERM\necho $$ >{tmp_path}/begun\nexec sleep 1000\n")
    script.chmod(0o755)
    there = transfers(Interrupted(tmp_path / "begun"), end_seconds=0.3)
    with pytest.raises(InterruptedRunError):
        there.output(str(script), limit=1000)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "begun").read_text()), 0)


class Interrupted(Interrupt):
    """A signal comes as soon as the file is there."""

    def __init__(self, begun: Path) -> None:
        super().__init__()
        self._begun = begun

    def check(self, thing: str) -> None:
        end = time.monotonic() + 60
        while not self._begun.exists() and time.monotonic() < end:
            time.sleep(0.01)
        self.signum = 15
        super().check(thing)


def test_a_missing_program_is_reported_with_its_package():
    with pytest.raises(UnavailableError, match=r"no-such-program: is not installed; apt install"):
        transfers().run(["true"], ["no-such-program"], through=0, size=0)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device"), "nas: No space left on device"),
        (OSError(2, "No such file or directory", "/a"), "nas: No such file or directory (/a)"),
    ],
)
def test_an_error_of_this_host_names_the_file_if_there_is_one(error, line):
    with pytest.raises(ReplicaError) as caught, transfers().local_errors():
        raise error
    assert caught.value.line() == line


def test_a_transfer_is_logged_with_all_commands_and_its_status():
    with recorded_commands() as log:
        transfers().run(["echo", "a"], ["false"], through=0, size=0)
    (line,) = log.lines
    assert line.startswith("echo a '|' false: exit 1, ")
