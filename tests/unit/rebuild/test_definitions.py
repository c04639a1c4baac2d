"""Which paths a guest that comes back will have as its own."""

import pytest

from snaporch.rebuild.definitions import will_have


@pytest.mark.parametrize(
    ("path", "is_own"),
    [
        ("/tank/web/a.img", True),
        ("/tank/web2/a.img", False),
        ("/tank/web/../x", False),
        ("/dev/zvol/tank/web", True),
        ("/dev/zvol/tank/web-part1", True),
        ("/dev/zvol/tank/web-part12", True),
        ("/dev/zvol/tank/web-part", False),
        ("/dev/zvol/tank/web-part1-part2", False),
        ("/dev/zvol/tank/web-part1/x", False),
        ("/dev/zvol/tank/web-part1\n", False),
        ("/dev/zvol/tank/web2-part1", False),
        ("/tank/web-part1", False),
    ],
)
def test_paths_in_its_datasets_and_partitions_of_its_volumes(path, is_own):
    assert will_have(path, {"/tank/web"}, {"/dev/zvol/tank/web"}) is is_own
