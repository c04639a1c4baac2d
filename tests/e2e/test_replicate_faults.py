"""Interrupted transfers, renamed, hostile and damaged replicas: a real replica, over ssh."""

import os
from pathlib import Path

import pytest
from support import must, one_line_error, run, snaporch, started, wait_for
from vault import flip, guids, same_bytes, vault

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    with vault("faults", tmp_path_factory.mktemp("vault")) as both:
        yield both


@pytest.fixture
def guest(made):
    return made[0]


@pytest.fixture
def there(made):
    made[1].configure()
    return made[1]


def names(dataset):
    return list(guids(dataset))


def bookmarks(there):
    listing = ("zfs", "list", "-H", "-d", "1", "-t", "bookmark", "-o", "name", there.dataset)
    return must(*listing).splitlines()


@pytest.mark.daily(2, "long")
def test_a_damaged_bundle_on_the_replica_is_reported_and_replaced(there):
    first, second = there.take(), there.take()
    there.replicate()
    here, copy = there.copied(first)
    flip(copy / "ram.save")
    document = there.replicate("--recheck")
    assert (document["arrived"], document["damaged"]) == ([first], [first])
    assert same_bytes(here, copy)
    (copy / "ram.save").write_bytes(b"")
    outcome = snaporch("replicate", there.domain)
    assert f"vault: faults@{first}" in outcome.err
    assert "its bundle there is missing or damaged: ram.save" in outcome.err
    assert "1 snapshot replicated" in outcome.out
    assert same_bytes(here, copy)
    assert there.replicate("--recheck")["read"] == 2
    assert there.replicated() == {first: ["vault"], second: ["vault"]}


def test_a_bundle_that_is_damaged_on_both_sides_is_not_called_replicated(there):
    newest = there.take()
    there.replicate()
    here, copy = there.copied(newest)
    flip(here / "ram.save")
    flip(copy / "ram.save")
    one_line_error(
        snaporch("replicate", there.domain, "--recheck", "--quiet"), 8,
        "its bundle is damaged on this host", f"snaporch verify faults@{newest}",
    )  # fmt: skip
    assert there.replicated()[newest] == []
    flip(here / "ram.save")
    assert there.replicate()["arrived"] == [newest]
    assert same_bytes(here, copy)


@pytest.mark.daily(2, "long")
def test_what_the_replica_destroyed_is_not_called_replicated(there):
    base, first, second = there.take(), there.take(), there.take()
    there.replicate()
    must("zfs", "destroy", f"{there.copy}@{first}")
    assert there.replicate()["arrived"] == []
    assert (there.replicated()[first], there.replicated()[second]) == ([], ["vault"])
    assert "replicate" not in snaporch("plan", there.domain).out
    must("zfs", "rollback", "-r", f"{there.copy}@{base}")
    assert there.replicate()["arrived"] == [first, second]
    assert there.replicated()[first] == ["vault"], "it was newer than the replica's newest"


def test_a_replica_whose_pool_is_exported_has_lost_nothing(there):
    taken = there.take()
    there.replicate()
    before, marks = there.replicated(), bookmarks(there)
    must("zpool", "export", "vault")
    try:
        for option in ("--quiet", "--recheck"):
            outcome = snaporch("replicate", there.domain, option)
            one_line_error(outcome, 8, "vault/kvm", "is its pool imported?")
    finally:
        must("zpool", "import", "-d", str(there.vdev), "vault")
    assert (there.replicated(), bookmarks(there)) == (before, marks)
    assert before[taken] == ["vault"]
    assert there.replicate()["arrived"] == []


@pytest.mark.daily(2, "long")
def test_an_interrupted_transfer_continues_although_its_snapshots_are_destroyed_here(guest, there):
    """Retention, or sanoid, destroys here what the replica got before the line was cut."""
    first = there.take()
    assert there.replicate()["arrived"] == [first]
    must("zfs", "snapshot", f"{there.dataset}@between")
    (Path(guest.sources()["vda"]).parent / "noise").write_bytes(os.urandom(48 << 20))
    last = there.take()
    there.configure(rate=4)
    with started("replicate", there.domain, env={}) as process:
        wait_for(lambda: "between" in names(there.copy), "the first of them arrives")
        token = ("zfs", "get", "-H", "-o", "value", "receive_resume_token", there.copy)
        wait_for(lambda: run("pgrep", "-f", "zfs receive").status == 0, "the next one is sent")
        process.terminate()
        process.wait()
    assert last not in names(there.copy)
    assert must(*token).strip() != "-"
    there.configure()
    must("zfs", "destroy", f"{there.dataset}@{first}%{last}")
    new = there.take()
    assert there.replicate()["arrived"] == [new]
    assert names(there.copy)[-3:] == [first, "between", new]
    (mark,) = bookmarks(there)
    assert mark.startswith(f"{there.dataset}#snaporch-vault-")


@pytest.mark.daily(2, "long")
def test_a_replica_with_another_name_is_continued(there):
    both, newest = there.take(), there.take()
    there.replicate()
    must("zfs", "destroy", f"{there.dataset}@{newest}")
    assert both in names(there.dataset)
    there.configure("attic")
    new = there.take()
    assert there.replicate()["arrived"][-1] == new
    former, mark = sorted(bookmarks(there), key=lambda name: "-attic-" in name)
    assert mark.startswith(f"{there.dataset}#snaporch-attic-")
    assert former.startswith(f"{there.dataset}#snaporch-vault-")
    there.take()
    there.replicate()
    assert former in bookmarks(there)
    listing = f"zfs list -H -o name -t bookmark -r {there.dataset} | grep '#snaporch-vault-'"
    must("sh", "-c", f"{listing} | xargs -r -n 1 zfs destroy")
    assert former not in bookmarks(there)
    assert there.replicate()["arrived"] == []


@pytest.mark.daily(2, "long")
def test_the_advice_for_a_diverged_copy_loses_nothing(guest, there):
    kept, gone = there.take(), there.take()
    there.replicate()
    guest.destroy()
    must("zfs", "rollback", "-r", f"{there.dataset}@{kept}")
    guest.start()
    new = there.take()
    outcome = snaporch("replicate", there.domain)
    one_line_error(outcome, 8, "on root@localhost has diverged", f"(@{gone})", "keep them: ssh")
    before = names(there.copy)
    must("sh", "-c", outcome.err.partition("keep them: ")[2].partition(", and the next")[0])
    assert there.replicate()["arrived"][-1] == new
    assert names(f"{there.copy}-kept-{gone}") == before


NO_TOKEN = "-"
HOSTILE = """#!/bin/sh
token="$(cat {place}/token)"
case "$*" in
    get*receive_resume_token*) printf '{copy}\\treceive_resume_token\\t%s\\t-\\n' "$token" ;;
    list*receive_resume_token*) printf '{copy}\\t%s\\n' "$token" ;;
    "receive -A"*) echo - >{place}/token ;;
    *) PATH="${{PATH#*:}}" exec zfs "$@" ;;
esac
"""


@pytest.fixture
def hostile(there, tmp_path):
    """The replica answers with a token of its own; returns how to set it."""
    program = tmp_path / "zfs"
    program.write_text(HOSTILE.format(copy=there.copy, place=tmp_path))
    program.chmod(0o755)
    keys = Path("/root/.ssh/authorized_keys")
    before = keys.read_text()
    command = f'PATH={tmp_path}:$PATH; export PATH; exec sh -c \\"$SSH_ORIGINAL_COMMAND\\"'
    keys.write_text(f'command="{command}" {before}')
    yield (tmp_path / "token").write_text
    keys.write_text(before)


def token_of(dataset):
    """The token of an interrupted transfer in clear of a dataset's snapshot ``now``."""
    stolen = "vault/stolen"
    must("sh", "-c", f"zfs send {dataset}@now | head -c 9000000 | zfs receive -s -u {stolen} || :")
    token = must("zfs", "get", "-H", "-o", "value", "receive_resume_token", stolen).strip()
    must("zfs", "receive", "-A", stolen)
    return token


@pytest.fixture
def secret(tmp_path):
    """An encrypted dataset whose key is loaded."""
    words = "zfs create -o encryption=on -o keyformat=passphrase -o mountpoint={} tank/secret"
    must("sh", "-c", f"yes 'a long passphrase' | head -n 2 | {words.format(tmp_path / 'secret')}")
    (tmp_path / "secret" / "content").write_bytes(os.urandom(24 << 20))
    must("zfs", "snapshot", "tank/secret@now")
    yield "tank/secret"
    must("zfs", "destroy", "-r", "tank/secret")


@pytest.mark.daily(1)
@pytest.mark.parametrize("kind", ["command", "other"])
def test_a_hostile_token_neither_runs_a_command_nor_chooses_what_is_sent(
    there, secret, hostile, tmp_path, kind
):
    planted = tmp_path / "planted"
    token = f"1-ab-f0-789c;touch {planted};" if kind == "command" else token_of(secret)
    hostile(NO_TOKEN)
    there.take()
    there.replicate()
    hostile(token)
    new = there.take()
    outcome = snaporch("replicate", there.domain)
    assert not planted.exists()
    assert outcome.status == 0, outcome.err
    assert "an interrupted transfer is not continued, but begins again: its token" in outcome.err
    assert there.replicated()[new] == ["vault"]
    assert names(there.copy)[-1] == new
    assert guids(there.copy).items() >= {new: guids(there.dataset)[new]}.items()
