import os
import stat

import pytest

from snaporch.errors import UnavailableError
from snaporch.status.metrics_textfile import write_textfile


def test_a_textfile_is_replaced_in_one_step_for_others_to_read(tmp_path):
    path = tmp_path / "snaporch.prom"
    path.write_text("old")
    before = os.umask(0o077)
    try:
        with path.open() as reader:
            write_textfile(path, b"new\n")
            assert reader.read() == "old"
    finally:
        os.umask(before)
    assert path.read_bytes() == b"new\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["snaporch.prom"]


def test_a_textfile_that_cannot_be_written(tmp_path):
    with pytest.raises(UnavailableError):
        write_textfile(tmp_path / "no" / "snaporch.prom", b"")
    (tmp_path / "d.prom").mkdir()
    with pytest.raises(UnavailableError):
        write_textfile(tmp_path / "d.prom", b"")
    assert [each.name for each in tmp_path.iterdir()] == ["d.prom"]
