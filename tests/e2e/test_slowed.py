"""A guest that changes RAM faster than it is saved is slowed down, and gets its CPU time back."""

from pathlib import Path

import pytest
from faults.process import Run
from support import (
    assert_clean,
    assert_restored,
    config,
    restore,
    rewriting_guest,
    snaporch,
    wait_for,
)


def cpu_times():
    """What the kernel lets the vCPUs of all guests use."""
    files = Path("/sys/fs/cgroup").rglob("vcpu*/cpu.max")
    return {path.read_text().strip() for path in files}


SLOW_TO_SAVE = 'compression = "zstd"\ncompression_level = 15\n'


@pytest.fixture(scope="module")
def hasty():
    """A guest that rewrites its RAM more than once a second."""
    made = rewriting_guest("hasty", 48)
    yield made
    made.remove()


@pytest.mark.timeout(900)
def test_a_guest_that_a_killed_run_had_slowed_down_gets_its_cpu_time_back(hasty, tmp_path):
    with config(tmp_path, f"[defaults]\n{SLOW_TO_SAVE}") as environment:
        run = Run("snapshot", hasty.name, env=environment)
        try:
            wait_for(lambda: cpu_times() != {"max 100000"}, "the guest to be slowed down", 600)
        finally:
            run.kill()
            run.close()
        wait_for(lambda: cpu_times() == {"max 100000"}, "the guardian", 100)
    hasty.wait_count()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["overlay", "manual"])
def test_a_guest_that_changes_ram_faster_than_it_is_saved_is_slowed_down(hasty, tmp_path, way):
    text = f'[defaults]\nram_strategy = "{way}"\n{SLOW_TO_SAVE}'
    with config(tmp_path, text) as environment:
        taken = snaporch("snapshot", hasty.name, "--name", way, "--json", env=environment)
    assert "slowing its vCPUs down" in taken.err
    assert "suspending" not in taken.err
    assert taken.json["level"] == "ram"
    assert cpu_times() == {"max 100000"}
    assert_clean(hasty)
    expected = hasty.snapshot_count(way)
    mark = hasty.mark()
    restore(hasty, way)
    assert_restored(hasty, mark, expected)
