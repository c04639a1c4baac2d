"""What several modules do with files; that data is on stable storage is tested where it matters."""

import os

from snaporch.private_files import subdirectories, write_at


def test_all_is_written_although_a_call_writes_a_part(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data[:3], offset))
    with (tmp_path / "file").open("wb") as stream:
        write_at(stream.fileno(), b"snapshot", 2)
    assert (tmp_path / "file").read_bytes() == b"\0\0snapshot"


def test_subdirectories_are_sorted_and_links_do_not_count(tmp_path):
    for name in ("b", "a", "c"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a")
    assert subdirectories(tmp_path) == [tmp_path / name for name in "abc"]
