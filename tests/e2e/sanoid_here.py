"""Running the real sanoid against guests, with snaporch's hooks."""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from faults.machine import locks_held
from guests.guest import Guest
from support import BUNDLES, JOURNAL, Outcome, must, run, snaporch, wait_for

CONFIGURATIONS = Path("/run/sanoid-tests")
CACHE = Path("/var/cache/sanoid")
HOOKS = Path("/usr/local/share/snaporch/hooks")
TEMPLATE = {
    "frequently": "0",
    "hourly": "10",
    "daily": "0",
    "weekly": "0",
    "monthly": "0",
    "yearly": "0",
    "autosnap": "yes",
    "autoprune": "yes",
    "script_timeout": "0",
    "no_inconsistent_snapshot": "yes",
    "pre_snapshot_script": "/usr/local/bin/snaporch hook sanoid pre",
    "post_snapshot_script": str(HOOKS / "sanoid-post"),
}
PATIENT = '[defaults]\nhook_deadline = "10m"\nfreeze_deadline = "10m"\n'
"""Deadlines long enough for a slow machine: guests are not released early."""


@dataclass
class Sanoid:
    """A configuration directory of sanoid."""

    directory: Path

    @classmethod
    def configured(cls, name: str, sections: dict[str, str], **template: str) -> "Sanoid":
        """Sections with the value of their ``recursive``; every other setting is in a template."""
        directory = CONFIGURATIONS / name
        directory.mkdir(parents=True, exist_ok=True)
        lines = []
        for dataset, recursive in sections.items():
            lines += [f"[{dataset}]", "\tuse_template = vm", f"\trecursive = {recursive}", ""]
        lines += ["[template_vm]"]
        lines += [f"\t{key} = {value}" for key, value in (TEMPLATE | template).items()]
        (directory / "sanoid.conf").write_text("\n".join(lines) + "\n")
        return cls(directory)

    def words(self, *options: str) -> list[str]:
        """The command."""
        return ["sanoid", "--configdir", str(self.directory), *(options or ("--cron",))]

    def run(self, *options: str, env: dict[str, str] | None = None) -> Outcome:
        """Take what is due by ZFS's listing, not by sanoid's cache."""
        forget_cache()
        outcome = run(*self.words(*options, "--verbose"), env=env)
        come_to_rest()
        return outcome

    @contextmanager
    def started(self, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
        """A sanoid beside the test, in a process group of its own, which is killed at the end."""
        forget_cache()
        process = subprocess.Popen(
            self.words("--take-snapshots", "--verbose"),
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdout.close()
            come_to_rest()


def forget_cache() -> None:
    """sanoid believes its own list of snapshots for twenty minutes."""
    for path in CACHE.glob("snapshots.txt*"):
        path.unlink()


def come_to_rest() -> None:
    """Wait until no run is under way: sanoid does not wait for the work after the release."""
    wait_for(lambda: not locks_held() and not list(JOURNAL.glob("*")), "the ends of all runs", 200)


def autosnaps(*datasets: str) -> list[str]:
    """Full names of sanoid's snapshots of these datasets."""
    listing = run("zfs", "list", "-H", "-d1", "-t", "snapshot", "-o", "name", *datasets).out
    return [name for name in listing.splitlines() if "@autosnap_" in name]


def records(guest: Guest) -> list[dict]:
    """What ``snaporch list`` has of the guest."""
    return snaporch("list", guest.name, "--json").json


def forget() -> None:
    """Remove all that sanoid has taken, and all bundles, so that everything is due again."""
    listing = run("zfs", "list", "-H", "-t", "snapshot", "-o", "name").out.splitlines()
    for name in listing:
        if "@autosnap_" in name:
            run("zfs", "release", "snaporch-undo", name)  # a safety copy's, which goes with it
            must("zfs", "destroy", name)
    for directory in BUNDLES.glob("*"):  # its marker is a file, and stays
        shutil.rmtree(directory, ignore_errors=True)
