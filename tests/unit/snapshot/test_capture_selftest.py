import os
import shutil
from unittest import mock

import pytest
from fakes.world import World

from snaporch.snapshot.capture_selftest import CaptureMode, capture_mode


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


@pytest.mark.parametrize("compression", ["zstd", "gzip", "none"])
def test_a_working_compressor_is_reported_and_no_file_is_left(world, tmp_path, compression):
    before = set(tmp_path.rglob("*"))
    mode = capture_mode(world.with_defaults(compression=compression))
    assert mode == CaptureMode(True, compression, "auto")
    assert mode.describe() == f"RAM is streamed (compression: {compression})"
    assert set(tmp_path.rglob("*")) == before


def test_a_file_system_without_pipes(world):
    refusal = OSError(1, "Operation not permitted", "/run/x")
    with mock.patch.object(os, "mkfifo", side_effect=refusal):
        mode = capture_mode(world.with_defaults(compression="none"))
    assert (mode.streams, mode.reason) == (False, "/run/x: Operation not permitted")
    assert "cannot be streamed" in mode.describe()


def test_a_compressor_that_is_not_installed(world, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    mode = capture_mode(world.with_defaults(compression="gzip"))
    assert (mode.streams, mode.reason) == (False, "pigz is not installed")


def test_a_compressor_that_does_not_work(world, tmp_path, monkeypatch):
    broken = tmp_path / "bin" / "pigz"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\ncat >/dev/null\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{broken.parent}:{os.environ['PATH']}")
    mode = capture_mode(world.with_defaults(compression="gzip"))
    assert not mode.streams
    assert "pigz failed with status 3" in mode.reason


@pytest.mark.parametrize("takes", ["cat >/dev/null; ", ""])
def test_a_compressor_that_hangs(world, tmp_path, monkeypatch, takes):
    stuck = tmp_path / "bin" / "pigz"
    stuck.parent.mkdir()
    os.mkfifo(tmp_path / "never")
    stuck.write_text(f"#!/bin/sh\n{takes}read -r _ <{tmp_path}/never\n")
    stuck.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stuck.parent}:{os.environ['PATH']}")
    mode = capture_mode(world.with_defaults(compression="gzip"), seconds=0.5)
    assert not mode.streams
    assert mode.reason


def test_the_decompressed_data_is_compared(world, tmp_path, monkeypatch):
    cutting = tmp_path / "bin" / "zstd"
    cutting.parent.mkdir()
    cutting.write_text(f'#!/bin/sh\n{shutil.which("zstd")} "$@" | head -c -1\n')
    cutting.chmod(0o755)
    monkeypatch.setenv("PATH", f"{cutting.parent}:{os.environ['PATH']}")
    mode = capture_mode(world.with_defaults(compression="zstd"))
    assert mode.reason == "the streamed data was changed"


def test_a_configured_file_capture_is_reported(world):
    mode = capture_mode(world.with_defaults(ram_capture="file", compression="none"))
    assert mode.describe() == "RAM goes through a file, as configured"
