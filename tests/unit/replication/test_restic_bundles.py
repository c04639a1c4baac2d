import hashlib

import pytest
from fakes.cloud import Cloud
from fakes.pool import FakePool

from snaporch.replication.interface import ReplicaError

REFERENCE = "4b1d2f0e-0000-4000-8000-000000000001/r-1"


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """A repository with one bundle."""
    made = Cloud(tmp_path / "cloud", FakePool("tank/web"))
    monkeypatch.setenv("PATH", str(made.tools), prepend=":")
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "manifest.json").write_bytes(b"{}\n")
    made.sums = {"manifest.json": hashlib.sha256(b"{}\n").hexdigest()}
    assert made.destination().store(bundle, REFERENCE, made.sums) == []
    return made


def test_a_file_is_read_as_it_was_stored(cloud):
    there = cloud.source()
    assert there.manifest(REFERENCE) == "{}\n"
    assert there.damaged(REFERENCE, cloud.sums) == []


def test_one_read_that_failed_is_repeated(cloud):
    cloud.fail("dump", 1)
    assert cloud.source().manifest(REFERENCE) == "{}\n"
    cloud.fail("dump", 1)
    assert cloud.source().damaged(REFERENCE, cloud.sums) == []


def test_a_repository_that_does_not_answer_is_not_taken_for_damage(cloud):
    for command in ("dump", "cat"):
        cloud.fail(command, 99)
    with pytest.raises(ReplicaError, match="does not answer: no server"):
        cloud.source().manifest(REFERENCE)
    with pytest.raises(ReplicaError, match="does not answer: no server"):
        cloud.source().damaged(REFERENCE, cloud.sums)


def test_what_restic_cannot_read_in_a_repository_that_answers_is_damaged(cloud):
    cloud.damage(b"{}\n")
    assert cloud.source().manifest(REFERENCE) == ""
    assert cloud.source().damaged(REFERENCE, cloud.sums) == ["manifest.json"]
