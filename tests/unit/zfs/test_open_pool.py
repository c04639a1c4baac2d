import sys
from types import ModuleType
from unittest.mock import Mock

import pytest

from snaporch.zfs.cli import ZfsCommand
from snaporch.zfs.open_pool import open_pool


class ZFSError(Exception):
    """The error class of pyzfs."""


@pytest.fixture
def host(monkeypatch, tmp_path):
    """The directory of devices of a host with a ``zfs``."""
    (tmp_path / "zfs").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def lzc(monkeypatch):
    """A libzfs_core that can be imported."""
    monkeypatch.delitem(sys.modules, "snaporch.zfs.lzc", raising=False)
    library = ModuleType("libzfs_core")
    library.exceptions = ModuleType("libzfs_core.exceptions")
    library.exceptions.ZFSError = ZFSError
    library.lzc_hold = loaded = Mock()
    monkeypatch.setitem(sys.modules, "libzfs_core", library)
    monkeypatch.setitem(sys.modules, "libzfs_core.exceptions", library.exceptions)
    return loaded


def test_libzfs_core_is_used_for_changes(lzc, host):
    assert type(open_pool(dev=host)).__name__ == "LibZfsCore"
    lzc.assert_called_once_with({})  # this loads the libraries, and creates no hold


def test_libzfs_core_is_not_imported_for_listings(lzc, host):
    assert type(open_pool(read_only=True, dev=host)) is ZfsCommand
    assert "snaporch.zfs.lzc" not in sys.modules


def test_without_libzfs_core_the_command_is_used(lzc, host, monkeypatch):
    monkeypatch.setitem(sys.modules, "libzfs_core", None)
    assert type(open_pool(dev=host)) is ZfsCommand


@pytest.mark.parametrize(
    "error",
    [
        OSError("cannot load library 'libzfs_core.so.6': cannot open shared object file"),
        AttributeError("function/symbol 'lzc_hold' not found in library"),
        ZFSError("libzfs_core initialization failed"),
    ],
)
def test_if_its_libraries_cannot_be_loaded_the_command_is_used(lzc, host, error):
    """pyzfs detects this at the first call, which comes before any guest is frozen."""
    lzc.side_effect = error
    assert type(open_pool(dev=host)) is ZfsCommand
