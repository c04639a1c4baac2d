import os
import threading
from datetime import UTC, datetime, timedelta

import pytest
from fakes import images

from snaporch.bundle.compress import Compression, CompressionSettings
from snaporch.bundle.firmware_files import HostFileError
from snaporch.bundle.manifest import Role
from snaporch.bundle.save_image import SaveImageError
from snaporch.bundle.store import BundleStore
from snaporch.hypervisor import Pause
from snaporch.model import DomainState
from snaporch.snapshot.bundle_parts import RamCapture, side_parts
from snaporch.waiting_times import RamTimes

PLAIN = CompressionSettings(Compression.NONE)
PATIENCE = 60
UUID = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"


@pytest.fixture
def capture(tmp_path):
    return capture_in(tmp_path)


def capture_in(directory, times=None):
    times = times or RamTimes(tick=0.01)
    return RamCapture(directory, directory / "ram.pipe", directory / "ram.raw", PLAIN, times)


def nothing(_stored):
    pass


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def test_ram_in_a_file_is_compressed_afterwards_and_the_raw_file_removed(capture, tmp_path):
    assert not capture.streams
    capture.target.write_bytes(images.image())
    part = capture.seal(nothing)
    assert (part.name, part.compression, part.payload_bytes) == ("ram.save", "none", 5000)
    assert capture.compressed_bytes == 5000
    assert names(tmp_path) == ["ram.save"]


def test_a_raw_file_that_is_no_image_leaves_no_compressed_one(capture, tmp_path):
    capture.target.write_bytes(b"\0" * 200)
    with pytest.raises(SaveImageError):
        capture.seal(nothing)
    assert names(tmp_path) == []


def test_the_raw_file_has_no_name_while_it_is_compressed(tmp_path, ram_store):
    """A later run of the domain uses the same name."""
    capture = capture_in(tmp_path)
    capture.target.write_bytes(images.image())
    sealing = threading.Thread(target=capture.seal, args=(nothing,), daemon=True)
    sealing.start()
    assert ram_store.reached.wait(PATIENCE)
    assert names(tmp_path) == ["ram.save"]
    ram_store.gate.set()
    sealing.join(PATIENCE)
    assert not sealing.is_alive()


def test_ram_by_pipe(capture, tmp_path):
    capture.open_stream()
    assert capture.streams
    assert capture.target == tmp_path / "ram.pipe"
    with capture.target.open("wb") as pipe:
        pipe.write(images.piped())
    assert capture.seal(nothing).bytes == len(images.image())
    assert names(tmp_path) == ["ram.save"]


def test_after_an_abandoned_pipe_ram_can_be_saved_to_a_file(capture, tmp_path):
    capture.open_stream()
    capture.abandon()
    assert not capture.streams
    assert capture.failure is None
    assert names(tmp_path) == []
    capture.target.write_bytes(images.image())
    assert capture.seal(nothing).payload_bytes == 5000


def test_a_pipe_that_cannot_be_made_leaves_nothing(capture, tmp_path):
    capture.target.touch()
    (tmp_path / "ram.pipe").touch()
    with pytest.raises(FileExistsError):
        capture.open_stream()
    assert "ram.save" not in names(tmp_path)


@pytest.mark.parametrize(("label", "name"), [(1, "gzip"), (2, "bzip2"), (3, "xz"), (9, "9")])
def test_the_compression_that_libvirt_used_is_recorded(capture, label, name):
    capture.target.write_bytes(images.image(payload=b"packed" * 9, compression=label))
    assert capture.seal(nothing).compression == name


def poured(capture, way):
    if way == "stream":
        capture.open_stream()
        capture.target.write_bytes(images.piped())
    else:
        capture.target.write_bytes(images.image())


@pytest.mark.parametrize("way", ["stream", "file"])
def test_sealing_can_be_aborted_while_the_store_hangs(tmp_path, ram_store, way):
    times = RamTimes(tick=0.01, abort=0.1)
    capture = capture_in(tmp_path, times)
    poured(capture, way)
    seen = []

    def tick(stored):
        assert ram_store.reached.wait(PATIENCE)
        seen.append(stored)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture.seal(tick)
    assert seen[0] == seen[1] > 92
    capture.abandon()  # and does not wait


def test_syncing_is_not_aborted(capture, monkeypatch):
    """However long it takes: writing much data cannot be distinguished from a hanging store."""
    poured(capture, "stream")
    synced, looks = threading.Event(), []
    monkeypatch.setattr(os, "fsync", lambda _: synced.wait(PATIENCE))
    threading.Timer(0.3, synced.set).start()

    def tick(moved):
        looks.append(moved)
        assert not capture._writer.syncing

    assert capture.seal(tick).payload_bytes == 5000
    assert len(looks) < 10


def test_a_header_that_cannot_be_stored_does_not_block_the_writer(capture, ram_store):
    """QEMU would hang in its write to the pipe."""
    ram_store.taken = -1
    capture.open_stream()
    capture.target.write_bytes(images.piped())
    ending = threading.Thread(target=capture.abandon, daemon=True)
    ending.start()
    ending.join(10)
    assert not ending.is_alive()


@pytest.mark.parametrize("way", ["stream", "file"])
def test_a_store_that_recovers_after_the_abort_leaves_no_file(capture, tmp_path, ram_store, way):
    poured(capture, way)

    def tick(_stored):
        assert ram_store.reached.wait(PATIENCE)
        threading.Timer(0.1, ram_store.gate.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture.seal(tick)
    capture.abandon()
    assert "ram.save" not in names(tmp_path)


# -- files beside RAM ---------------------------------------------------------------------------


@pytest.fixture
def bundle(tmp_path):
    return BundleStore(tmp_path / "bundles").create(UUID, "run")


@pytest.fixture
def variables(tmp_path):
    path = tmp_path / "vars.fd"
    path.write_bytes(b"nvram")
    return path


def exact(bundle, domain, pause):
    return [part.exact for part in side_parts(bundle, domain, pause) if part.role is Role.NVRAM]


@pytest.mark.parametrize(("seconds", "known"), [(-10, True), (10, False)])
def test_a_running_guests_nvram_is_exact_if_it_did_not_change_since(
    world, bundle, variables, seconds, known
):
    freeze = datetime.now(UTC)
    changed = (freeze + timedelta(seconds=seconds)).timestamp()
    os.utime(variables, (changed, changed))
    domain = world.add_guest(nvram=str(variables))
    assert exact(bundle, domain, Pause(freeze, 1.0)) == [known]


def test_a_running_guests_nvram_is_not_exact_without_the_time_of_the_freeze(
    world, bundle, variables
):
    domain = world.add_guest(nvram=str(variables))
    assert exact(bundle, domain, Pause(None, 0.0)) == [None]


def test_the_nvram_of_a_guest_that_is_off_is_exact(world, bundle, variables):
    domain = world.add_guest(nvram=str(variables), state=DomainState.OFF)
    assert exact(bundle, domain, Pause(None, 0.0)) == [True]


def test_files_that_do_not_exist_yet_are_no_parts(world, bundle, tmp_path):
    domain = world.add_guest(nvram=str(tmp_path / "absent"), tpm=str(tmp_path / "no-tpm"))
    roles = [part.role for part in side_parts(bundle, domain, Pause(None, 0.0))]
    assert roles == [Role.LIVE_XML, Role.INACTIVE_XML]


def test_a_transient_guest_has_no_definition(world, bundle):
    domain = world.add_guest(persistent=False)
    roles = [part.role for part in side_parts(bundle, domain, Pause(None, 0.0))]
    assert roles == [Role.LIVE_XML]


def test_the_state_of_a_tpm_in_one_file_is_kept(world, bundle, tmp_path):
    state = tmp_path / "any-name"
    state.write_bytes(b"secret")
    domain = world.add_guest(tpm=str(state))
    (part,) = [
        each for each in side_parts(bundle, domain, Pause(None, 0.0)) if each.role is Role.TPM
    ]
    assert part.source == str(state)
    assert (bundle.directory / part.name).read_bytes() == b"secret"


def test_the_state_of_a_tpm_is_not_read_through_a_link(world, bundle, tmp_path):
    (tmp_path / "state").touch()
    domain = world.add_guest(tpm=str(tmp_path / "state"))
    (tmp_path / "state").unlink()
    (tmp_path / "state").symlink_to("/etc/hostname")
    with pytest.raises(HostFileError, match="regular file"):
        side_parts(bundle, domain, Pause(None, 0.0))


def test_only_the_permanent_state_of_a_tpm_is_kept(world, bundle, tmp_path):
    state = tmp_path / "tpm2"
    state.mkdir()
    for name in ("tpm2-00.permall", "tpm2-00.volatilestate", ".lock"):
        (state / name).write_bytes(b"x")
    domain = world.add_guest(tpm=str(state))
    parts = side_parts(bundle, domain, Pause(None, 0.0))
    assert [part.source for part in parts if part.role is Role.TPM] == [
        str(state / "tpm2-00.permall")
    ]
