"""What a caller asks for: the name is checked once, and a policy sets the level."""

import pytest

from snaporch.config import Config
from snaporch.errors import NotFoundError, UsageError
from snaporch.snapshot.request import SnapshotRequest, apply_policy

CONFIG = Config.model_validate(
    {"policy": {"daily": {"every": "1d", "level": "crash"}, "auto": {"every": "1d"}}}
)


def test_a_name_that_zfs_refuses_makes_no_request():
    with pytest.raises(UsageError, match="snapshot name"):
        SnapshotRequest("a@b")


@pytest.mark.parametrize(
    ("policy", "level", "expected"),
    [
        ("daily", None, "crash"),
        ("daily", "ram", "ram"),
        ("auto", None, None),
        (None, "paused", "paused"),
        (None, None, None),
    ],
)
def test_a_policy_sets_the_level_unless_one_is_given(policy, level, expected):
    assert apply_policy(CONFIG, SnapshotRequest(level=level, policy=policy)).level == expected


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (SnapshotRequest(if_changed=True), UsageError, "needs --policy"),
        (SnapshotRequest("s1", policy="daily"), UsageError, "leave out --name"),
        (SnapshotRequest(policy="dayly"), NotFoundError, "there are auto, daily"),
    ],
)
def test_options_that_contradict_each_other_are_refused(request_, error, words):
    with pytest.raises(error, match=words):
        apply_policy(CONFIG, request_)
