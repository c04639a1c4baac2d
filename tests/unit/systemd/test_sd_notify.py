import os
import socket

import pytest

from snaporch.systemd.sd_notify import notify, watchdog_seconds


@pytest.fixture(params=["path", "abstract"])
def listener(request, tmp_path, monkeypatch):
    place = str(tmp_path / "notify") if request.param == "path" else f"@snaporch-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bound:
        bound.settimeout(30)
        bound.bind(place.replace("@", "\0"))
        monkeypatch.setenv("NOTIFY_SOCKET", place)
        yield bound


def test_lines_arrive_in_one_message(listener):
    notify("READY=1", "STATUS=läuft")
    assert listener.recv(4096).decode() == "READY=1\nSTATUS=läuft"


def test_a_receiver_that_does_not_read_blocks_no_work(listener):
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    for _ in range(2000):
        notify("STATUS=" + "x" * 500, seconds=0.001)
    assert listener.recv(4096).startswith(b"STATUS=")


@pytest.mark.parametrize("place", ["", "relative", "/nonexistent/socket", "vsock:1:2"])
def test_no_notify_socket_is_no_error(monkeypatch, place):
    monkeypatch.setenv("NOTIFY_SOCKET", place)
    notify("READY=1")


def test_the_watchdogs_time(monkeypatch):
    monkeypatch.delenv("WATCHDOG_USEC", raising=False)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    assert watchdog_seconds() is None
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    assert watchdog_seconds() == 30
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert watchdog_seconds() == 30
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert watchdog_seconds() is None
