import sys
from types import ModuleType

import pytest

from snaporch.pool import open_pool
from snaporch.pool.command import ZfsCommand


@pytest.fixture
def lzc(monkeypatch):
    """A libzfs_core that can be imported, on a host with a ``zfs``."""
    monkeypatch.setattr(ZfsCommand, "open", lambda: ZfsCommand("zfs"))
    monkeypatch.delitem(sys.modules, "snaporch.pool.lzc", raising=False)
    library = ModuleType("libzfs_core")
    library.exceptions = ModuleType("libzfs_core.exceptions")
    library.exceptions.ZFSError = OSError
    monkeypatch.setitem(sys.modules, "libzfs_core", library)
    monkeypatch.setitem(sys.modules, "libzfs_core.exceptions", library.exceptions)


def test_libzfs_core_is_used_by_who_changes_something(lzc):
    assert type(open_pool()).__name__ == "LibZfsCore"


def test_and_not_imported_by_who_looks(lzc):
    assert type(open_pool(to_look=True)) is ZfsCommand
    assert "snaporch.pool.lzc" not in sys.modules


def test_without_it_the_command_does(lzc, monkeypatch):
    monkeypatch.setitem(sys.modules, "libzfs_core", None)
    assert type(open_pool()) is ZfsCommand
