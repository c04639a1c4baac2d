import os

import pytest

from snaporch.prune.trash import remove


@pytest.fixture
def condemned(tmp_path):
    path = tmp_path / "x.deleting"
    path.mkdir()
    (path / "ram.save").write_bytes(b"1")
    return path


def test_files_go_with_their_directory(condemned):
    remove(condemned)
    assert not condemned.exists()


def test_what_is_gone_already_is_no_error(condemned):
    remove(condemned)
    remove(condemned)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/etc", path)])
def test_what_is_no_plain_file_stays(condemned, make):
    stranger = condemned / "stranger"
    make(stranger)
    with pytest.raises(OSError, match="not empty"):
        remove(condemned)
    assert os.listdir(condemned) == ["stranger"]


def test_a_link_is_not_followed(condemned):
    link = condemned.with_name("y.deleting")
    link.symlink_to(condemned)
    with pytest.raises(OSError, match="directory"):
        remove(link)
    assert (condemned / "ram.save").exists()
