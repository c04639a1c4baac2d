"""One rule for names from all sources."""

import pytest

from snaporch.config.replica import Replica
from snaporch.config.schema import RamPagesOptions
from snaporch.errors import UsageError
from snaporch.restore.select import split_name
from snaporch.sanoid.hooks.request import read_request
from snaporch.snapshot.snapshot_name import check_snapshot_name
from snaporch.zfs_names import is_dataset, is_snapshot

GOOD = ["s", "-x", "--name", "a.b:c_d-e", "two words", "-", "...", "x" * 255]
BAD = ["", " x", "x ", "\n", "x\n", ".", "..", "a@b", "a/b", "a#b", "%x", "ä", "x" * 256]
GOOD_DATASETS = ["tank", "tank/-x", "tank/a b/c", "T/.x", "a/" + "b" * 253]
BAD_DATASETS = ["", "-x", "1a", "tank/", "/tank", "tank//x", "tank/..", "tank/ x", "ä", "t" * 256]


def takes(rule, *arguments):
    try:
        return rule(*arguments) is not False
    except (UsageError, ValueError):
        return False


def by_command(name):
    split_name(f"web@{name}")


def from_sanoid(name):
    read_request("pre", {"SANOID_TARGET": "t", "SANOID_SNAPNAME": name})


@pytest.mark.parametrize("rule", [is_snapshot, check_snapshot_name, by_command, from_sanoid])
@pytest.mark.parametrize(("name", "good"), [(n, True) for n in GOOD] + [(n, False) for n in BAD])
def test_a_snapshot_is_called_the_same_everywhere(rule, name, good):
    if name == "a@b" and rule is by_command:
        return  # a domain's name may hold an @
    if rule is from_sanoid and len(name) == 255:
        name = name[:-2]  # with its dataset no longer than ZFS allows
    assert takes(rule, name) is good


def target(name):
    read_request("pre", {"SANOID_TARGET": name, "SANOID_SNAPNAME": "s"})


@pytest.mark.parametrize(
    "rule",
    [
        is_dataset,
        lambda name: Replica(dataset=name, bundles="/b"),
        lambda name: name and RamPagesOptions(dataset=name),
        target,
    ],
    ids=["rule", "replica", "pages", "sanoid"],
)
@pytest.mark.parametrize(
    ("name", "good"), [(n, True) for n in GOOD_DATASETS] + [(n, False) for n in BAD_DATASETS]
)
def test_a_dataset_is_called_the_same_everywhere(request, rule, name, good):
    which = request.node.callspec.id
    if name == "" and "pages" in which:
        return  # stands for none
    if " " in name and ("replica" in which or "pages" in which):
        good = False
    if rule is target and len(name) == 255:
        name = name[:-2]
    assert takes(rule, name) is good
