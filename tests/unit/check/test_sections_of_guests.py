import pytest

from snaporch.check.findings import listed
from snaporch.sanoid.config.render import fitting_parent

TREE = ("flash", "flash/a", "tank", "tank/vm", "tank/vm/a", "tank/vm/a/1", "tank/vm/a/2", "tank/x")


@pytest.mark.parametrize(
    ("wanted", "parent"),
    [
        ({"tank/vm/a/1", "tank/vm/a/2"}, "tank/vm/a"),
        ({"tank/vm/a", "tank/vm/a/1", "tank/vm/a/2"}, "tank/vm/a"),
        ({"tank/vm/a/1", "tank/vm/a/2", "tank/vm"}, "tank/vm"),  # tank/vm/a is on the way
        ({"tank/vm/a", "tank/vm/a/1"}, None),  # tank/vm/a/2 is not wanted
        ({"tank/vm/a/1"}, None),
        ({"tank/vm", "tank/x"}, None),  # a whole pool
        ({"tank/x", "flash/a"}, None),
        (set(), None),
    ],
)
def test_a_parent_with_these_datasets_and_no_others(wanted, parent):
    assert fitting_parent(wanted, TREE) == parent


def test_sanoid_finds_no_children_below_a_name_with_a_blank():
    tree = ["tank", "tank/a b", "tank/a b/1", "tank/a b/2"]
    assert fitting_parent(tree[2:], tree) is None


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "a", "b"], "a and b"),
        (["a", "b", "c", "d"], "a, b, c and d"),
        (["a", "b", "c", "d", "e", "f"], "a, b, c and 3 more"),
    ],
)
def test_names_as_text(names, text):
    assert listed(names) == text
