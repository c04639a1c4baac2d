"""Which of the datasets with a run's snapshots are those of the guest."""

from types import SimpleNamespace

from snaporch.config import Config, Source
from snaporch.replication.members import Originals


def test_a_pulled_copy_is_no_original_whatever_its_name_is():
    config = Config(source={"vm1": Source(host="vm1", dataset="backup/vm1", bundles="/srv/vm1")})
    record = SimpleNamespace(run="r1", datasets=("tank/web", "backup/vm1/other:web"))
    assert Originals(config, [record], {"r1": None}, []).of(record) == {"tank/web"}
