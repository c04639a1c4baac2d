#!/usr/bin/env python3
"""Run snaporch and stop it at one point: ``stopping.py [--unguarded] POINT -- ARGUMENT...``.

POINT is ``MOMENT:STEP`` or ``MOMENT:NOTE``, such as ``after:freeze``, or ``MOMENT:DATASET`` for a
step that is taken for each dataset. The process stops itself with
SIGSTOP there; its parent sees that, and kills or continues it. The journal's methods are wrapped:
the code under test has no hook.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import snaporch.snapshot.run
from snaporch.bundle.ram_pipe import RamPipe
from snaporch.bundle.save_image import SaveImageWriter
from snaporch.cli import main
from snaporch.journal import Journal, Note
from snaporch.snapshot.strategies.ram import RamStrategy

WHILE_RAM_IS_SAVED = "during:ram"
AT_THE_END_OF_RAM = "during:end-of-ram"
"""QEMU has stopped the guest for the rest of its RAM."""
STALL = "stall"
"""``stall:GATE``: nothing stops, but :func:`stall_the_store`."""


def stop_at(points: str) -> None:
    """Have this process stop itself at each of ``points``, which have commas between them."""
    for point in points.split(","):
        _stop_at(point)


def _stop_at(point: str) -> None:
    if point == WHILE_RAM_IS_SAVED:
        stop_while_ram_is_saved()
        return
    if point == AT_THE_END_OF_RAM:
        stop_at_the_end_of_ram()
        return
    moment, name = point.split(":", 1)
    if moment == STALL:
        stall_the_store(name)
        return
    original, original_note = Journal.step, Journal.note

    def pass_by(here: str, what: str) -> None:
        if (here, what) == (moment, name):
            os.kill(os.getpid(), signal.SIGSTOP)

    @contextmanager
    def step(journal: Journal, step: StrEnum, of: str = "") -> Iterator[None]:
        place = of or step.value
        pass_by("ahead", place)
        with original(journal, step, of):
            pass_by("before", place)
            yield
            pass_by("after", place)
        pass_by("past", place)

    def note(journal: Journal, note: Note) -> None:
        pass_by("ahead", note.value)
        original_note(journal, note)
        pass_by("past", note.value)

    Journal.step, Journal.note = step, note


def stop_while_ram_is_saved() -> None:
    """Have this process, the reader of the RAM, stop itself when some of it has come."""
    original, stopped = RamStrategy._tick, []

    def tick(strategy: RamStrategy) -> None:
        if not stopped and strategy._capture.arrived_bytes:
            stopped.append(strategy)
            os.kill(os.getpid(), signal.SIGSTOP)
        original(strategy)

    RamStrategy._tick = tick


def stop_at_the_end_of_ram() -> None:
    """Have this process, the reader of the RAM, stop itself when QEMU has paused the guest."""
    enlarge_buffers, stopped = RamPipe.enlarge_buffers, []

    def when_paused(stream: RamPipe) -> None:
        if not stopped:
            stopped.append(stream)
            os.kill(os.getpid(), signal.SIGSTOP)
        enlarge_buffers(stream)

    RamPipe.enlarge_buffers = when_paused


def stall_the_store(gate: str) -> None:
    """Store nothing from when QEMU has paused the guest until ``gate``, a FIFO, has a writer.

    ``GATE.stalled`` is there from then on.
    """
    enlarge_buffers, write = RamPipe.enlarge_buffers, SaveImageWriter._raw_write
    stalled = Path(f"{gate}.stalled")

    def when_paused(stream: RamPipe) -> None:
        stalled.touch()
        enlarge_buffers(stream)

    def store(writer: SaveImageWriter, data: Any) -> None:
        if stalled.exists():
            Path(gate).open("rb").close()
        write(writer, data)

    RamPipe.enlarge_buffers, SaveImageWriter._raw_write = when_paused, store


def dismiss_guardian() -> None:
    """Make this process start no guardian."""

    def do_nothing(*_arguments: Any) -> None:
        pass

    snaporch.snapshot.run.start_guardian = do_nothing
    snaporch.snapshot.run.await_guardian = do_nothing


if __name__ == "__main__":
    options, arguments = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    if "--unguarded" in options:
        dismiss_guardian()
    stop_at(options[-1])
    main.run(arguments)
