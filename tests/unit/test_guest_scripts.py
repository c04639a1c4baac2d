"""The scripts for guests, with stubs of the databases' programs on their PATH."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "guest"
# A client of MariaDB: it holds the lock until its input ends.
HOLDS = (
    'while read -r line; do case $line in *locked*) echo locked ;; esac; done; echo end >"$ENDED"'
)


@pytest.fixture
def guest(tmp_path):
    """Run a script; the programs in it are stubs, by name, in shell."""
    programs = tmp_path / "bin"
    programs.mkdir()

    def run(script, *words, programs_of=(), **environment):
        stubs = {"runuser": 'shift 3; exec "$@"', **dict(programs_of)}
        for name, text in stubs.items():
            path = programs / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(0o755)
        paths = {"RUN": tmp_path / "run", "ENDED": tmp_path / "ended", "LOG": tmp_path / "log"}
        mine = {name: str(path) for name, path in paths.items()} | environment
        return subprocess.run(
            [SCRIPTS / script, *words],
            env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **mine},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def ended(tmp_path):
    """A pipe in which the client of MariaDB reports its end; reading it waits for that."""
    os.mkfifo(tmp_path / "ended")
    return tmp_path / "ended"


def mariadb(client):
    return {"pgrep": "exit 0", "mariadb": client}


def test_mariadb_holds_its_lock_until_the_thaw(guest, ended, tmp_path):
    assert guest("mariadb-fsfreeze-hook", "freeze", programs_of=mariadb(HOLDS)).returncode == 0
    assert (tmp_path / "run/output").read_text() == "locked\n"
    pid = (tmp_path / "run/input.pid").read_text().strip()
    assert Path("/proc", pid, "comm").read_text() == "sleep\n"
    assert guest("mariadb-fsfreeze-hook", "thaw").returncode == 0
    assert ended.read_text() == "end\n"
    assert not (tmp_path / "run").exists()


def test_mariadb_releases_its_lock_if_no_thaw_comes(guest, ended):
    frozen = guest("mariadb-fsfreeze-hook", "freeze", programs_of=mariadb(HOLDS), HOLD="1")
    assert frozen.returncode == 0
    assert ended.read_text() == "end\n"
    assert guest("mariadb-fsfreeze-hook", "thaw").returncode == 0


@pytest.mark.parametrize("client", ["echo refused; exit 1", "cat >/dev/null"])
def test_without_the_lock_of_mariadb_nothing_is_frozen(guest, tmp_path, client):
    frozen = guest("mariadb-fsfreeze-hook", "freeze", programs_of=mariadb(client), WAIT="1")
    assert frozen.returncode == 1
    assert frozen.stderr == ("refused\n" if "refused" in client else "")
    assert not (tmp_path / "run").exists()


def test_a_mariadb_that_does_not_run_is_not_waited_for(guest):
    programs = {"pgrep": "exit 1", "mariadb": "exit 1"}
    assert guest("mariadb-fsfreeze-hook", "freeze", programs_of=programs).returncode == 0


@pytest.mark.parametrize("status", [0, 2, 127])  # it runs, or that is unknown
def test_a_mariadb_that_cannot_be_asked_is_not_frozen_without_its_lock(guest, tmp_path, status):
    programs = {"pgrep": f"exit {status}", "mariadb": "echo not found; exit 127"}
    programs["mariadb-admin"] = "exit 127"
    found = guest("mariadb-fsfreeze-hook", "freeze", programs_of=programs)
    assert (found.returncode, found.stderr) == (1, "not found\n")
    assert not (tmp_path / "run").exists()


def test_the_thaw_of_mariadb_kills_no_other_process(guest, tmp_path):
    """After the time for the lock another process may have the number of the one that held it."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/input.pid").write_text(f"{os.getpid()}\n")
    assert guest("mariadb-fsfreeze-hook", "thaw").returncode == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("word", "psql", "status", "asked"),
    [
        ("freeze", "exit 0", 0, True),
        ("freeze", "exit 2", 0, True),  # a snapshot needs no checkpoint
        ("freeze", "exec sleep 100", 0, True),  # the checkpoint continues after the thaw
        ("thaw", "exit 2", 0, False),
    ],
)
def test_postgresql_writes_a_checkpoint_before_the_freeze(
    guest, tmp_path, word, psql, status, asked
):
    programs = {"pg_isready": "exit 0", "psql": f'echo "$@" >"$LOG"; {psql}'}
    found = guest("postgresql-fsfreeze-hook", word, programs_of=programs)
    assert found.returncode == status
    assert (tmp_path / "log").exists() is asked
    if asked:
        assert (tmp_path / "log").read_text().endswith("-c CHECKPOINT\n")


def test_a_postgresql_that_does_not_run_is_frozen_as_it_is(guest):
    programs = {"pg_isready": "exit 2", "psql": "exit 2"}
    assert guest("postgresql-fsfreeze-hook", "freeze", programs_of=programs).returncode == 0


def clusters(*lines):
    """A pg_lsclusters; with a version and a name it lists one cluster, without its start.conf."""
    cases = "".join(
        f'"{line.split()[0]} {line.split()[1]}") echo "{line.replace(",auto", "")}" ;;\n'
        for line in lines
    )
    listed = "\n".join(f'echo "{line}"' for line in lines)
    return f'case "$2 $3" in\n{cases}*) {listed or ":"} ;;\nesac'


MAIN = "17 main 5432 online,auto postgres /var/lib/postgresql/17/main log"
SECOND = "18 main 5433 online,auto postgres /var/lib/postgresql/18/main log"


@pytest.mark.parametrize("status", [0, 2])
def test_the_check_waits_for_postgresql_and_ends_as_pg_amcheck_does(guest, tmp_path, status):
    programs = {
        "pg_lsclusters": clusters(MAIN),
        "pg_isready": f"[ -e {tmp_path}/ready ] || ! : >{tmp_path}/ready",  # at the second time
        "pg_amcheck": f'echo "$@" >"$LOG"; exit {status}',
    }
    found = guest("postgresql-check", "--heapallindexed", programs_of=programs)
    assert found.returncode == status
    words = "--port 5432 --all --no-password --install-missing --heapallindexed\n"
    assert (tmp_path / "log").read_text() == words


@pytest.mark.parametrize("damaged", [5432, 5433])
def test_every_cluster_of_postgresql_is_checked(guest, tmp_path, damaged):
    programs = {
        "pg_lsclusters": clusters(MAIN, SECOND),
        "pg_isready": "exit 0",
        "pg_amcheck": f'cat >>"$LOG"; echo "$2" >>"$LOG"; [ "$2" != {damaged} ] || exit 2',
    }
    assert guest("postgresql-check", programs_of=programs).returncode == 2
    assert (tmp_path / "log").read_text() == "5432\n5433\n"


@pytest.mark.parametrize(
    ("listed", "status"),
    [
        ((MAIN, SECOND.replace("online", "down")), 1),
        ((MAIN, SECOND.replace("online", "down").replace("5433", "5432")), 1),  # the port is taken
        ((MAIN, SECOND.replace("online,auto", "down,manual")), 0),
        ((MAIN, SECOND.replace("online,auto", "down,disabled")), 0),
        ((SECOND.replace("online,auto", "down,manual"),), 1),  # nothing was checked
        ((), 1),
    ],
)
def test_a_cluster_of_postgresql_that_is_down_fails_the_check_if_it_is_started(
    guest, listed, status
):
    programs = {"pg_lsclusters": clusters(*listed), "pg_isready": "exit 0", "pg_amcheck": "exit 0"}
    found = guest("postgresql-check", programs_of=programs, WAIT="1")
    assert (found.returncode, bool(found.stderr)) == (status, status != 0)


def test_a_guest_without_a_list_of_clusters_fails_the_check(guest):
    programs = {"pg_lsclusters": "exit 127", "pg_isready": "exit 0", "pg_amcheck": "exit 0"}
    assert guest("postgresql-check", programs_of=programs).returncode == 1


def test_a_postgresql_that_never_recovers_fails_the_check(guest):
    programs = {"pg_lsclusters": clusters(MAIN), "pg_isready": "exit 1", "pg_amcheck": "exit 0"}
    found = guest("postgresql-check", programs_of=programs, WAIT="1")
    assert (found.returncode, found.stderr) == (
        1,
        "PostgreSQL 17/main accepted no connection within 1 s\n",
    )
