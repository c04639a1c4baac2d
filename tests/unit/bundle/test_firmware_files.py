import os
import stat

import pytest

from snaporch.bundle.firmware_files import (
    LIMIT_BYTES,
    HostFileError,
    read_host_file,
    replace_host_file,
    tpm_files,
    trusted_directory,
)
from snaporch.model import TpmState


@pytest.fixture
def precious(tmp_path):
    path = tmp_path / "precious"
    path.write_text("the host's")
    path.chmod(0o600)
    return path


def as_a_link(place, precious):
    place.symlink_to(precious)


def as_a_dangling_link(place, precious):
    place.symlink_to("nowhere")


def as_a_fifo(place, precious):
    os.mkfifo(place)


def as_a_directory(place, precious):
    place.mkdir()


def as_a_giant(place, precious):
    place.touch()
    os.truncate(place, LIMIT_BYTES + 1)


PLANTS = [as_a_link, as_a_dangling_link, as_a_fifo, as_a_directory, as_a_giant]


@pytest.mark.parametrize("plant", PLANTS)
def test_planted_files_are_not_read(tmp_path, precious, plant):
    place = tmp_path / "vars.fd"
    plant(place, precious)
    with pytest.raises(HostFileError, match=r"regular file|larger than 64 MiB"):
        read_host_file(place)


def test_a_file_that_grows_while_it_is_read_is_not_read_to_its_end(tmp_path):
    place = tmp_path / "vars.fd"
    place.write_bytes(b"1234")
    assert read_host_file(place, limit=4)[0] == b"1234"
    with pytest.raises(HostFileError):
        read_host_file(place, limit=3)


def test_a_file_comes_with_its_status(tmp_path, precious):
    data, status = read_host_file(precious)
    assert data == b"the host's"
    assert stat.S_IMODE(status.st_mode) == 0o600


def test_a_link_in_its_place_is_replaced_and_not_followed(tmp_path, precious):
    place = tmp_path / "vars.fd"
    place.symlink_to(precious)
    replace_host_file(place, b"variables", os.getuid(), os.getgid(), 0o640)
    assert precious.read_text() == "the host's"
    assert stat.S_IMODE(precious.stat().st_mode) == 0o600
    assert (place.is_symlink(), place.read_bytes()) == (False, b"variables")
    assert stat.S_IMODE(place.stat().st_mode) == 0o640


def test_a_link_that_is_planted_meanwhile_is_not_followed(tmp_path, precious, monkeypatch):
    """The emulator owns the directory, so it may replace the file between any two steps."""
    place, real = tmp_path / "vars.fd", os.fsync

    def plant(descriptor):
        real(descriptor)
        for path in tmp_path.glob(".vars.fd.*"):
            path.unlink()
            path.symlink_to(precious)

    before = os.stat(precious)
    for step in ("fchown", "fchmod", "fsync"):
        original = getattr(os, step)
        monkeypatch.setattr(os, step, lambda *words, of=original: (plant(words[0]), of(*words)))
    owner = 64055 if os.getuid() == 0 else os.getuid()
    replace_host_file(place, b"variables", owner, os.getgid(), 0o644)
    after = os.stat(precious)
    assert (after.st_uid, after.st_mode) == (before.st_uid, before.st_mode)
    assert precious.read_text() == "the host's"


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        replace_host_file(tmp_path / "vars.fd", b"variables", None, None, None)
    assert not list(tmp_path.iterdir())


def test_another_name_of_a_file_is_not_read(tmp_path, precious):
    """Its owner is unknown; without fs.protected_hardlinks it may be root's."""
    (tmp_path / "vars.fd").hardlink_to(precious)
    with pytest.raises(HostFileError, match="more than one name"):
        read_host_file(tmp_path / "vars.fd")


@pytest.fixture
def emulators(tmp_path):
    """A directory that other users write to, and a link from it to a directory of root's."""
    roots, own = tmp_path / "roots", tmp_path / "own"
    roots.mkdir()
    (roots / "vars.fd").write_bytes(b"the host's")
    own.mkdir()
    own.chmod(0o777)
    (own / "nvram").symlink_to("../roots")
    return own


def test_a_planted_link_in_the_path_is_not_followed(tmp_path, emulators):
    place = emulators / "nvram/vars.fd"
    with pytest.raises(HostFileError, match="nvram in its path is a link of another user"):
        read_host_file(place)
    with pytest.raises(HostFileError, match="is a link"):
        replace_host_file(place, b"planted", None, None, None)
    with pytest.raises(HostFileError, match="is a link"):
        replace_host_file(emulators / "nvram/new/vars.fd", b"planted", None, None, None)
    with pytest.raises(HostFileError):
        tpm_files(TpmState(str(emulators / "nvram")))
    assert sorted(os.listdir(tmp_path / "roots")) == ["vars.fd"]
    assert (tmp_path / "roots/vars.fd").read_bytes() == b"the host's"


@pytest.mark.parametrize("target", ["roots", "./x/../roots", "{}/roots", "again"])
def test_a_link_of_roots_own_in_the_path_is_followed(tmp_path, emulators, target):
    (tmp_path / "x").mkdir()
    (tmp_path / "again").symlink_to("roots")
    (tmp_path / "moved").symlink_to(target.format(tmp_path))
    assert read_host_file(tmp_path / "moved/vars.fd")[0] == b"the host's"
    with trusted_directory(tmp_path / "moved") as descriptor:
        assert os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path / "roots")


def test_links_in_a_circle_are_an_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(HostFileError):
        read_host_file(tmp_path / "a/vars.fd")


def test_a_directory_in_its_place_stays_and_no_temporary_file_does(tmp_path):
    (tmp_path / "vars.fd").mkdir()
    with pytest.raises(HostFileError, match="is a directory"):
        replace_host_file(tmp_path / "vars.fd", b"variables", None, None, None)
    assert os.listdir(tmp_path) == ["vars.fd"]


def test_a_name_as_long_as_names_can_be(tmp_path):
    place = tmp_path / ("v" * 255)
    replace_host_file(place, b"variables", None, None, None)
    assert place.read_bytes() == b"variables"


def test_only_files_with_swtpms_names_are_tpm_state(tmp_path):
    for name in (b"tpm2-00.permall", b"tpm2-00.volatilestate", b"tpm-00.permall", b".lock"):
        (tmp_path / os.fsdecode(name)).touch()
    for name in (b"a\n.permall", b"-rf.permall", b"x" * 247 + b".permall", b"\xff.permall"):
        (tmp_path / os.fsdecode(name)).touch()
    names = [path.name for path in tpm_files(TpmState(str(tmp_path)))]
    assert names == ["tpm-00.permall", "tpm2-00.permall", "tpm2-00.volatilestate"]
    assert tpm_files(TpmState(str(tmp_path / "none"))) == []


def test_a_file_that_is_put_back_cannot_be_run(tmp_path):
    place = tmp_path / "vars"
    replace_host_file(place, b"#!/bin/sh", os.getuid(), os.getgid(), 0o4755)
    assert stat.S_IMODE(place.stat().st_mode) == 0o644
