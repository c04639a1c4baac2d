"""The machine that loses its power, over and over; needs nothing but the standard library.

A lab is killed with SIGKILL at a point of a run, and the next one boots from the same disks. What
happens inside is a session's: ``session list`` prints ``CASE {...}`` lines, ``session CASE BEFORE
STRIKE`` examines what the last boot left, prints ``VERDICT {...}``, takes the next run to its
point, prints ``STRIKE {...}`` and waits for the end.
"""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
BOOT_SECONDS = 300
NOTHING = ("-", "-")


class Power:
    """The machine, which can be switched on again and again."""

    def __init__(self, disks: str, session: Path) -> None:
        self._disks = disks
        self._session = session
        built = subprocess.run(
            [TESTS / "lab" / "guests" / "build"], check=True, stdout=subprocess.PIPE, text=True
        )
        self._guests = built.stdout.strip()

    def boot(self, *arguments: str) -> Iterator[tuple[str, dict[str, object]]]:
        """The lines that the session inside prints; closing the iterator cuts the power."""
        lab = subprocess.Popen(
            [
                TESTS / "lab" / "run",
                f"--timeout={BOOT_SECONDS}",
                f"--keep-disks={self._disks}",
                f"--env=SNAPORCH_GUESTS_HOST={self._guests}",
                f"--env=FAULTS_SAMPLE={os.environ.get('FAULTS_SAMPLE', '')}",
                "--env=PYTHONDONTWRITEBYTECODE=1",
                self._session,
                *arguments,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert lab.stdout is not None
        assert lab.stdin is not None
        try:
            for line in lab.stdout:
                word, _, rest = line.partition(" ")
                if word in ("CASE", "VERDICT", "STRIKE"):
                    yield word, json.loads(rest)
                else:
                    print(line, end="", flush=True)
        finally:
            lab.send_signal(signal.SIGKILL)
            lab.wait()
            lab.stdout.close()
            lab.stdin.close()


def cases(session: Path) -> list[str]:
    with tempfile.TemporaryDirectory(prefix="snaporch-power-") as disks:
        said = list(Power(disks, session).boot("list"))
    return [str(fields["case"]) for word, fields in said if word == "CASE"]


def chain(wanted: list[str], session: Path) -> Iterator[dict[str, object]]:
    """Each boot examines the case before and strikes the next; a broken machine is replaced."""
    left = list(wanted)
    while left:
        with tempfile.TemporaryDirectory(prefix="snaporch-power-") as disks:
            yield from _until_broken(Power(disks, session), left)


def _until_broken(power: Power, left: list[str]) -> Iterator[dict[str, object]]:
    """Take cases off ``left`` until one leaves the machine unfit for the next."""
    struck = NOTHING
    while left or struck != NOTHING:
        following = left.pop(0) if left else "-"
        began = time.monotonic()
        last, struck = struck, NOTHING
        judged = False
        session = power.boot(*last, following)
        for word, fields in session:
            if word == "VERDICT":
                judged = True
                yield fields
            if word == "STRIKE":
                struck = (following, json.dumps(fields["before"]))
                session.close()
        if last != NOTHING and not judged:
            yield {"case": last[0], "failed": f"no boot, {time.monotonic() - began:.0f} s"}
        if following != "-" and struck == NOTHING:
            yield {"case": following, "failed": "the run never came to its point"}
            return


def main(session: Path) -> int:
    """Every case that the session knows; the exit status."""
    chosen = cases(session)
    began = time.monotonic()
    failed = 0
    for verdict in chain(chosen, session):
        failed += "failed" in verdict
        print("FAULT", json.dumps(verdict), flush=True)
    print(f"power losses took {time.monotonic() - began:.0f} s")
    print(f"=== {len(chosen) - failed} passed, {failed} failed", flush=True)
    return 1 if failed or not chosen else 0
