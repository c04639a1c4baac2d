"""PostgreSQL and MariaDB in a Debian guest, written to all the time: what is in it after a restore.

The guest prints a count when a server has acknowledged the commit of its row, so a snapshot that
is taken later must have the row. See ``tests/lab/guests/probes/database_init.sh``.
"""

import base64
import json
import re
import shlex

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import (
    assert_clean,
    config,
    first_after_drop,
    must,
    restore,
    snaporch,
    snapshot,
    system_config,
    wait_for,
)

pytestmark = pytest.mark.timeout(3600)
CHECK = "/usr/local/sbin/postgresql-check"
# The guest is emulated, inside a machine that is emulated itself.
PATIENT = """[defaults]
agent_timeout = "5m"
quiesce_budget = "5m"
freeze_deadline = "10m"
verify_command_timeout = "30m"
"""
SECONDS = 1800


@pytest.fixture(scope="module", autouse=True)
def patient():
    with system_config(PATIENT):
        yield


@pytest.fixture(scope="module")
def guest(patient):
    made = Guest.create("db", [Disk("file", "tank/db")], kind="database", timeout=SECONDS)
    made.wait_agent(SECONDS)
    yield made
    made.remove()


@pytest.fixture(scope="module")
def both(guest):
    """The guest, with MariaDB beside PostgreSQL from now on."""
    in_guest(guest, "touch", "/etc/mysql/wanted")
    wait_for(lambda: counts_of_maria(guest), "a count of MariaDB", SECONDS)
    return guest


def in_guest(guest, *words):
    """What a command in the guest prints; it must succeed."""
    started = _ask(guest, "guest-exec", path=words[0], arg=words[1:], **{"capture-output": True})

    def ended():
        found = _ask(guest, "guest-exec-status", pid=started["pid"])
        return found if found["exited"] else None

    found = wait_for(ended, shlex.join(words), SECONDS)
    out, err = (base64.b64decode(found.get(key, "")).decode() for key in ("out-data", "err-data"))
    assert found["exitcode"] == 0, out + err
    return out


def _ask(guest, command, **arguments):
    question = json.dumps({"execute": command, "arguments": arguments})
    return json.loads(
        must("virsh", "qemu-agent-command", guest.name, question, "--timeout", "300")
    )["return"]


def sql(guest, text):
    words = ("-XqAtw", "-d", "postgres", "-c", text)
    return in_guest(guest, "runuser", "-u", "postgres", "--", "psql", *words).strip()


def maria(guest, text):
    return in_guest(guest, "mariadb", "--batch", "--skip-column-names", "-e", text).strip()


def counts_of_maria(guest):
    """What MariaDB has acknowledged; the guest prints what is in its table as of "disk" 1."""
    lines = re.findall(r"^M ([0-9a-f]{8})\r?$", guest.serial(), re.MULTILINE)
    return [int(each, 16) for each in lines]


def acknowledged(guest):
    """The newest count of each server, after one that PostgreSQL prints from now on."""
    return guest.wait_count(timeout=SECONDS), counts_of_maria(guest)[-1]


def wait_counts(guest, beyond):
    """Wait until both servers have acknowledged three more commits; their counts then."""
    wait_for(lambda: counts_of_maria(guest)[-1] > beyond[1] + 3, "a count of MariaDB", SECONDS)
    return guest.wait_count(beyond=beyond[0] + 3, timeout=SECONDS), counts_of_maria(guest)[-1]


def assert_postgresql_works(guest):
    """It accepts transactions, has a row for each count, and finds no fault in its own tables."""
    guest.wait_count(timeout=SECONDS)
    in_guest(guest, CHECK, "--heapallindexed")
    assert sql(guest, "SELECT count(*) = max(n) FROM commits") == "t"


def assert_maria_works(guest):
    """The same of MariaDB."""
    wait_counts(guest, acknowledged(guest))
    assert maria(guest, "SELECT count(*) = max(n) FROM lab.commits") == "1"
    assert_no_fault_in_maria(guest, "lab", "commits")
    assert_no_fault_in_maria(guest, "mysql")


def assert_no_fault_in_maria(guest, *names):
    lines = in_guest(guest, "mariadb-check", "--extended", *names).splitlines()
    assert lines
    assert [line for line in lines if not line.endswith(" OK")] == []


def test_with_ram_the_server_goes_on_from_the_last_transaction(guest):
    server = sql(guest, "SELECT pg_postmaster_start_time()")
    acknowledged = guest.wait_count()
    assert snapshot(guest, "--level", "ram", "--name", "ram")["level"] == "ram"
    guest.wait_count(beyond=guest.wait_count() + 3)
    mark = guest.mark()
    restore(guest, "ram")
    first = wait_for(lambda: first_after_drop(guest.serial()[mark - 100 :]), "a count", SECONDS)
    assert acknowledged < first
    guest.wait_count(beyond=first + 3, timeout=SECONDS)
    assert not guest.cold_boots_since(mark)
    assert not guest.bad_since(mark)
    # Each row that was acknowledged is there once, and no other: else the key would be violated.
    assert sql(guest, "SELECT pg_postmaster_start_time()") == server
    assert_postgresql_works(guest)
    assert_clean(guest)


@pytest.mark.parametrize("level", ["crash", "quiesced"])
def test_without_ram_it_recovers_and_has_what_was_acknowledged(both, level):
    guest = both
    hooks = asked_by_hooks(guest)
    before = acknowledged(guest)
    assert snapshot(guest, "--level", level, "--name", level)["level"] == level
    asked = [now - then for now, then in zip(asked_by_hooks(guest), hooks, strict=True)]
    assert asked == ([1, 1] if level == "quiesced" else [0, 0])
    later = wait_counts(guest, acknowledged(guest))
    mark = guest.mark()
    restore(guest, level)

    def booted():
        found = guest.cold_boots_since(mark)
        return found[0] if found and len(found[0]) == 2 else None

    found = wait_for(booted, "a boot", SECONDS)
    assert before[0] <= found[0] < later[0]
    assert before[1] <= found[1] < later[1]
    assert not guest.bad_since(mark)
    assert "automatic recovery in progress" in guest.serial()[mark:]
    assert "InnoDB: Starting crash recovery" in guest.serial()[mark:]
    guest.wait_agent(SECONDS)
    assert_postgresql_works(guest)
    assert_maria_works(guest)


def asked_by_hooks(guest):
    """How many checkpoints and locks were asked for."""
    checkpoints = in_guest(guest, "cat", "/run/postgresql/log").count("immediate force wait")
    status = maria(guest, "SHOW GLOBAL STATUS LIKE 'Com_flush'")
    return checkpoints, int(status.split()[-1])


def test_a_hook_that_fails_refuses_the_freeze(guest):
    hook = "/etc/qemu/fsfreeze-hook"
    in_guest(guest, "cp", hook, "/run/hook")
    in_guest(guest, "ln", "-sf", "/bin/false", hook)
    try:
        outcome = snaporch("snapshot", guest.name, "--level", "quiesced", "--name", "no")
        assert outcome.status != 0
        assert "hook" in outcome.err
    finally:
        in_guest(guest, "cp", "--remove-destination", "/run/hook", hook)
    guest.wait_count(timeout=SECONDS)
    assert_clean(guest)


def verify(name, tmp_path, *words):
    with config(tmp_path, f"{PATIENT}verify_command = {json.dumps(words)}\n") as environment:
        return snaporch("verify", name, "--json", "--quiet", env=environment)


@pytest.mark.parametrize(("name", "reached"), [("ram", "resumed"), ("quiesced", "booted")])
def test_verify_runs_the_check_of_postgresql_in_the_clone(guest, tmp_path, name, reached):
    outcome = verify(f"db@{name}", tmp_path, CHECK, "--heapallindexed")
    assert outcome.status == 0, outcome.err
    assert (outcome.json["reached"], outcome.json["command_passed"]) == (reached, True)
    assert "verify_command passed" in snaporch("show", f"db@{name}").out


def test_verify_finds_an_index_that_is_damaged(guest, tmp_path):
    sql(guest, "CREATE TABLE victim AS SELECT generate_series(1, 5000) AS n")
    sql(guest, "CREATE INDEX victim_n ON victim (n)")
    sql(guest, "CHECKPOINT")
    path = sql(guest, "SELECT pg_relation_filepath('victim_n')")
    where = f"of=/var/lib/postgresql/17/main/{path}"
    in_guest(
        guest, "dd", "if=/dev/urandom", where, "bs=8k", "seek=1", "count=1", "conv=notrunc,fsync"
    )
    snapshot(guest, "--level", "crash", "--name", "damaged")
    outcome = verify("db@damaged", tmp_path, CHECK)
    assert outcome.status == 8, outcome.err
    assert (outcome.json["reached"], outcome.json["failed_steps"]) == ("booted", ["command"])
    assert "victim_n" in outcome.err
