import shutil

import pytest
from fakes.world import Heard

from snaporch.config import Config
from snaporch.errors import NotFoundError
from snaporch.interrupt import Interrupt
from snaporch.rebuild.replica_source import ReplicaSource
from snaporch.verify.copy_source import AppendOnlyCopies, known_datasets, open_copies


def test_an_append_only_replica_is_asked_for_the_known_datasets(copied):
    datasets = known_datasets(copied.world.context.store, copied.world.pool)
    assert datasets == ["flash/web", "tank/web"]
    source = AppendOnlyCopies(copied.replica, datasets)
    listed = {each.full_name for each in source.snapshots()}
    assert listed == {each.full_name for each in copied.source.snapshots()}
    copied.source = source
    copied.flip("s2")
    assert copied.faults() == {"s1": "", "s2": "ram.save is damaged"}


def test_datasets_that_were_lost_are_known_by_their_manifests(copied):
    copied.source.lose("tank/web", "flash/web")
    store = copied.world.context.store
    assert known_datasets(store, copied.world.pool) == ["flash/web", "tank/web"]
    shutil.rmtree(copied.world.paths.bundles)
    assert known_datasets(store, copied.world.pool) == []


@pytest.mark.parametrize(
    ("more", "kind"), [({}, ReplicaSource), ({"append_only": True}, AppendOnlyCopies)]
)
def test_a_replica_is_read_by_its_kind(copied, more, kind):
    section = copied.config.replica["nas"].model_dump() | {"host": "u@nas"} | more
    config = Config.model_validate(copied.config.model_dump() | {"replica": {"nas": section}})
    assert isinstance(open_copies(config, "nas", copied.world.pool, Interrupt(), Heard()), kind)


def test_an_unknown_replica_is_refused(copied):
    with pytest.raises(NotFoundError, match="no such replica"):
        open_copies(copied.config, "tape", copied.world.pool, Interrupt(), Heard())
