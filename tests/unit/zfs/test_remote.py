"""Listing the copies on a replica: what is not listed must not exist."""

import shlex
from types import SimpleNamespace

import pytest
from fakes import zfs_get

from snaporch.remote_host import CommandError
from snaporch.zfs import PoolError
from snaporch.zfs.remote import RemoteZfs

BORN = {"guid": "7", "createtxg": "9", "creation": "100"}
TABLE = {
    "backup/kvm": {},
    "backup/kvm@own": BORN,
    "backup/kvm/tank:web": {},
    "backup/kvm/tank:web@s1": BORN,
    "backup/kvm/tank:db": {},
}


class Replica:
    """A host with these datasets and snapshots: those of each call, the last ones for all later."""

    def __init__(self, *tables):
        self._tables = list(tables)
        self.asked = []

    def script(self, script, *, what, limit):
        _zfs, *words = shlex.split(script)
        self.asked.append(words[0])
        table = self._tables.pop(0) if len(self._tables) > 1 else self._tables[0]
        if table is None:
            return ""
        names = words[words.index("-o") + 2 :]
        missing = {name for name in names if "/" in name} - {*table}
        if missing:
            raise CommandError(what, f"cannot open '{missing.pop()}': dataset does not exist")
        if words[0] == "list":
            return "".join(f"{name}\n" for name in table if "@" not in name)
        return zfs_get.answer(words, table)


def copies(replica, *datasets):
    names = [f"backup/kvm/{each}" for each in datasets]
    return [each.full_name for each in RemoteZfs(replica).copies("backup/kvm", names)]


@pytest.fixture
def replica():
    return Replica(TABLE)


def test_copies_are_listed_by_one_call(replica):
    assert "backup/kvm/tank:web@s1" in copies(replica, "tank:web", "tank:db")
    assert replica.asked == ["get"]


def test_a_copy_that_does_not_exist_has_no_snapshots(replica):
    assert "backup/kvm/tank:web@s1" in copies(replica, "tank:web", "tank:new")
    assert replica.asked == ["get", "list", "get"]


GONE = {}


@pytest.mark.parametrize(
    "tables",
    [[GONE], [None], [GONE, TABLE, GONE], [GONE, TABLE, None], [GONE, None]],
    ids=["exported", "silent", "exported meanwhile", "silent meanwhile", "silent list"],
)
def test_a_listing_without_the_dataset_of_the_replica_is_an_error(tables):
    with pytest.raises(PoolError):
        copies(Replica(*tables), "tank:web", "tank:new")


def test_an_error_of_another_cause_is_passed_on(replica):
    def script(script, *, what, limit):
        if "get" in script:
            raise CommandError(what, "out of memory")
        return "backup/kvm\nbackup/kvm/tank:web\n"

    with pytest.raises(PoolError, match="out of memory"):
        copies(SimpleNamespace(script=script), "tank:web")
