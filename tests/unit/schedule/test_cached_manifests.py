"""Manifests are kept by their SHA-256, and what is kept is what was stored."""

import hashlib
import os

import pytest

from snaporch.schedule.cached_manifests import CachedManifests

TEXT = b'{"run": "r-1"}'
DIGEST = hashlib.sha256(TEXT).hexdigest()


@pytest.fixture
def cached(tmp_path):
    return CachedManifests(tmp_path / "manifests")


def test_what_was_put_is_found_and_only_root_reads_it(cached, tmp_path):
    assert cached.get(DIGEST) is None
    cached.put(DIGEST, TEXT)
    assert cached.get(DIGEST) == TEXT
    path = tmp_path / "manifests" / DIGEST
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_another_text_is_not_kept_and_one_that_was_changed_is_not_found(cached, tmp_path):
    cached.put(DIGEST, b"other")
    assert not (tmp_path / "manifests").exists()
    cached.put(DIGEST, TEXT)
    (tmp_path / "manifests" / DIGEST).write_bytes(b"other")
    assert cached.get(DIGEST) is None
    cached.put(DIGEST, TEXT)
    assert cached.get(DIGEST) == TEXT


def test_nothing_is_read_by_a_link_or_from_a_pipe(cached, tmp_path):
    (tmp_path / "manifests").mkdir()
    (tmp_path / "text").write_bytes(TEXT)
    path = tmp_path / "manifests" / DIGEST
    path.symlink_to(tmp_path / "text")
    assert cached.get(DIGEST) is None
    path.unlink()
    os.mkfifo(path)
    assert cached.get(DIGEST) is None


def test_only_those_that_are_needed_stay(cached, tmp_path):
    cached.only({DIGEST})
    other = hashlib.sha256(b"other").hexdigest()
    cached.put(DIGEST, TEXT)
    cached.put(other, b"other")
    cached.only({DIGEST})
    assert [path.name for path in (tmp_path / "manifests").iterdir()] == [DIGEST]


def test_without_a_place_nothing_is_kept_and_nothing_fails(cached, tmp_path):
    (tmp_path / "manifests").write_bytes(b"")
    cached.put(DIGEST, TEXT)
    cached.only(set())
    assert cached.get(DIGEST) is None
