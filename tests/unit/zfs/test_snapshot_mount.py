"""Reading a snapshot by a private mount; the contract tests the real pool."""

import os

import pytest

from snaporch.zfs import PoolError
from snaporch.zfs.snapshot_mount import mounted_snapshot


def test_a_snapshot_that_cannot_be_mounted_is_an_error_in_words_and_leaves_nothing_open():
    before = os.listdir("/proc/self/fd")
    with (
        pytest.raises(PoolError, match="no-such-pool/x@s: cannot be mounted to be read"),
        mounted_snapshot("no-such-pool/x@s"),
    ):
        pass
    assert os.listdir("/proc/self/fd") == before
