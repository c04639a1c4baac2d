"""The contract of restic, as far as snaporch relies on it: the fake, and the real one."""

import json
import os
import shutil
import subprocess
from datetime import datetime
from pathlib import Path

import pytest
from fakes import restic as fake

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "object-storage.md"


class Restic:
    """A repository in a directory, which exists."""

    def __init__(self, command, place):
        self._command, self.place = command, place
        (place / "password").write_text("open sesame\n")
        self.variables = {
            "RESTIC_REPOSITORY": str(place / "repository"),
            "RESTIC_PASSWORD_FILE": str(place / "password"),
            "RESTIC_CACHE_DIR": str(place / "cache"),
        }
        assert self.run("init").returncode == 0

    def run(self, *words, data=None, **variables):
        given = {**os.environ, **self.variables, **variables}
        return subprocess.run(
            [self._command, *words], input=data, capture_output=True, check=False, env=given
        )

    def backup(self, data, *tags):
        named = [word for tag in tags for word in ("--tag", tag)]
        words = ("backup", "--quiet", "--force", *named, "--stdin", "--stdin-filename", "/x")
        return self.run(*words, data=data)

    def listed(self, *tags):
        named = [word for tag in tags for word in ("--tag", tag)]
        done = self.run("snapshots", "--no-lock", "--json", *named)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def dump(self, *words):
        return self.run("dump", "--no-lock", "--quiet", *words)


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.lab)])
def restic(request, tmp_path):
    if request.param == "fake":
        return Restic(fake.put_in(tmp_path), tmp_path)
    return Restic(shutil.which("restic"), tmp_path)


def test_what_was_stored_is_listed_with_its_tags_and_comes_back(restic):
    assert restic.listed() == []
    assert restic.backup(b"one", "snaporch", "a=x@y/z 1%2C", "b=").returncode == 0
    assert restic.backup(b"two", "snaporch").returncode == 0
    first, second = restic.listed("snaporch")
    assert first["tags"] == ["snaporch", "a=x@y/z 1%2C", "b="]
    assert len(first["id"]) == 64
    assert datetime.fromisoformat(first["time"]) < datetime.fromisoformat(second["time"])
    assert restic.dump(first["id"], "/x").stdout == b"one"
    assert restic.dump("latest", "/x").stdout == b"two"
    assert restic.dump("latest", "/x", "--tag", "b=").stdout == b"one"
    assert [each["id"] for each in restic.listed("b=")] == [first["id"]]


def test_a_directory_comes_back_by_its_whole_path(restic, tmp_path):
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    (bundle / "ram.save").write_bytes(b"RAM")
    assert restic.run("backup", "--quiet", "--force", "--tag", "t", str(bundle)).returncode == 0
    (entry,) = restic.listed("t")
    assert restic.dump(entry["id"], str(bundle / "ram.save")).stdout == b"RAM"
    assert restic.dump(entry["id"], str(bundle / "none")).returncode != 0


def test_a_stream_that_was_cut_is_stored_and_an_empty_one_is_an_error(restic):
    """So a snapshot of restic alone proves nothing. restic 0.18 stores even an empty one."""
    assert restic.backup(b"the beginning of", "cut").returncode == 0
    assert len(restic.listed("cut")) == 1
    assert restic.backup(b"", "empty").returncode != 0


def test_without_a_repository_each_command_fails_and_says_so(restic, tmp_path):
    for words in (("snapshots", "--json"), ("cat", "config", "--no-lock")):
        done = restic.run(*words, RESTIC_REPOSITORY=str(tmp_path / "none"))
        assert done.returncode != 0
        assert b"Fatal: " in done.stderr or b"repository does not exist" in done.stderr


def test_damage_is_found_by_reading_and_storing_again_does_not_repair_it(restic):
    data = os.urandom(100_000)
    assert restic.backup(data, "a").returncode == 0
    for pack in (restic.place / "repository" / "data").rglob("*"):
        if pack.is_file() and pack.stat().st_size > 4096:
            pack.chmod(0o600)
            content = pack.read_bytes()
            pack.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    done = restic.dump("latest", "/x", "--tag", "a")
    assert done.returncode != 0
    assert b"ciphertext verification failed" in done.stderr
    assert any(
        line.startswith((b"Fatal: ", b"cannot dump file")) for line in done.stderr.splitlines()
    )
    assert restic.backup(data, "b").returncode == 0
    assert restic.dump("latest", "/x", "--tag", "b").returncode != 0


@pytest.mark.lab
def test_a_chain_is_deleted_by_the_command_of_the_page(tmp_path):
    restic = Restic(shutil.which("restic"), tmp_path)
    for tag in ("chain=tank/a b@1", "chain=tank/a b@1", "chain=tank/a b@2"):
        assert restic.backup(b"x", tag).returncode == 0
    text = PAGE.read_text()
    (line,) = (each for each in text.splitlines() if each.startswith("restic snapshots --json"))
    script = f"tag='chain=tank/a b@1'\n{line}\n"
    environment = {**os.environ, **restic.variables}
    subprocess.run(["bash", "-ec", script], check=True, capture_output=True, env=environment)
    assert [each["tags"] for each in restic.listed()] == [["chain=tank/a b@2"]]
