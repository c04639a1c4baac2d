import os

import pytest

from snaporch.prune.trash import remove


@pytest.fixture
def marked(tmp_path):
    path = tmp_path / "x.deleting"
    path.mkdir()
    (path / "ram.save").write_bytes(b"1")
    return path


def test_a_directory_is_removed_with_its_files(marked):
    remove(marked)
    assert not marked.exists()


def test_a_missing_directory_is_no_error(marked):
    remove(marked)
    remove(marked)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: os.symlink("/etc", path)])
def test_anything_but_plain_files_stays(marked, make):
    foreign = marked / "foreign"
    make(foreign)
    with pytest.raises(OSError, match="not empty"):
        remove(marked)
    assert os.listdir(marked) == ["foreign"]


def test_a_link_is_not_followed(marked):
    link = marked.with_name("y.deleting")
    link.symlink_to(marked)
    with pytest.raises(OSError, match="directory"):
        remove(link)
    assert (marked / "ram.save").exists()
