"""Records in the format of systemd's journal."""

import logging
import socket
from contextlib import closing, suppress

import pytest

from snaporch.systemd_log import JournalHandler


@pytest.fixture
def journal(tmp_path):
    """A socket as journald's."""
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(path))
        yield path, listening


def log(path, **fields):
    handler = JournalHandler("snaporch", ("DOMAIN", "RUN"), path)
    record = logging.LogRecord("x", logging.INFO, "x.py", 1, "%s", ("zfs list: ok",), None)
    vars(record).update(fields)
    with closing(handler):
        handler.handle(record)


def test_a_record_has_its_fields(journal):
    path, listening = journal
    log(path, DOMAIN="wéb", STEP="other")
    lines = listening.recv(10000).decode().splitlines()
    assert lines == [
        "MESSAGE=zfs list: ok",
        "PRIORITY=6",
        "SYSLOG_IDENTIFIER=snaporch",
        "DOMAIN=wéb",
    ]


@pytest.mark.timeout(20)
def test_a_journal_that_hangs_holds_nothing_up(journal):
    path, listening = journal
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                other.sendto(b"MESSAGE=full", str(path))
    log(path, DOMAIN="web")
    listening.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            assert listening.recv(10000) == b"MESSAGE=full"


def test_where_there_is_no_journal_records_are_dropped(tmp_path):
    log(tmp_path / "absent", DOMAIN="web")
