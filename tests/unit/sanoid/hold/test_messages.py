"""Messages between hooks and the processes that hold guests."""

import socket

import pytest

from snaporch.sanoid.hold.messages import JsonConnection


@pytest.fixture
def pair():
    """Two connected peers."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peers = [JsonConnection(end) for end in ends]
    yield peers
    for peer in peers:
        peer.close()


def test_the_last_message_of_a_peer_that_left_one_unread_is_received(pair):
    """Its reason must not be lost because a message to it crossed its own."""
    hook, process = pair
    hook.send({"do": "freeze"})
    process.send({"failed": "no room"})
    process.close()
    assert hook.receive() == {"failed": "no room"}
    assert hook.receive() is None


@pytest.mark.parametrize("sent", [b"[1]", b"{", b'"text"', b"\xff", b"[" * 100_000])
def test_anything_but_an_object_is_no_message(pair, sent):
    hook, process = pair
    process.socket.send(sent)
    assert hook.receive() is None
