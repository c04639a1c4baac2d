import json

import pytest

from snaporch.default_paths import HostPaths
from snaporch.errors import UnavailableError
from snaporch.hypervisor import HostObject
from snaporch.rebuild.reached_addresses import read_host_networks
from snaporch.remote_host import Host

ANSWERS = {
    ("-4", "route"): [
        {"dst": "default", "gateway": "10.1.0.1"},
        {"dst": "default", "nexthops": [{"gateway": "10.1.0.2"}, {"dev": "ppp0"}]},
        {"dst": "default", "via": {"family": "inet6", "host": "fe80::1"}},
        {"dst": "10.1.0.0/24", "dev": "eth0"},
        {"type": "local", "dst": "127.0.0.1", "dev": "lo"},
    ],
    ("-4", "address"): [{"ifname": "eth0", "addr_info": [{"local": "10.1.0.5", "prefixlen": 24}]}],
    ("-6", "address"): [{}, {"ifname": "lo", "addr_info": [{}]}],
}


class Machine(Host):
    """Answers as ``ip -j`` does, which prints nothing at all for no routes."""

    def __init__(self, answers):
        super().__init__("")
        self.answers = answers

    def run(self, *words, **_more):
        assert words[:2] == ("ip", "-j")
        found = self.answers.get((words[2], words[3]), "")
        return found if isinstance(found, str) else json.dumps(found)


def read(tmp_path, answers=ANSWERS, networks=()):
    net = tmp_path / "sys" / "class" / "net"
    for name in ("eth0", "br0/bridge"):
        (net / name).mkdir(parents=True, exist_ok=True)
    resolver, upstream = tmp_path / "resolv.conf", tmp_path / "upstream.conf"
    upstream.write_text("nameserver 10.9.9.9\nnameserver 172.16.0.53\n")
    resolver.write_text(
        "# x\nnameserver 10.9.9.9\nnameserver fe80::1%eth0\nnameserver x\noptions\n"
    )
    host = HostPaths(sys=tmp_path / "sys")
    return read_host_networks(
        Machine(answers), host, networks, [resolver, upstream, tmp_path / "absent"]
    )


def test_all_that_the_host_reaches_is_known(tmp_path):
    xml = "<network><ip address='192.168.9.1' prefix='24'/></network>"
    found = read(tmp_path, networks=[HostObject("old", xml, False)])
    assert [(what, str(each)) for what, each in found.reached] == [
        ("the host's", "10.1.0.1/32"),
        ("the host's", "10.1.0.2/32"),
        ("the host's", "fe80::1/128"),
        ("the host's", "10.1.0.0/24"),
        ("the host's", "127.0.0.1/32"),
        ("the host's", "10.1.0.0/24"),
        ("the name server", "10.9.9.9/32"),
        ("the name server", "fe80::1/128"),
        ("the name server", "172.16.0.53/32"),
        ("network old", "192.168.9.0/24"),
    ]
    assert (found.interfaces, found.bridges) == (["br0", "eth0"], ["br0"])


@pytest.mark.parametrize("answer", ["{", "[1]", [{"dst": "x"}], [{"dst": 7.5}]])
def test_an_answer_that_cannot_be_read_is_an_error(tmp_path, answer):
    with pytest.raises(UnavailableError, match="cannot be read"):
        read(tmp_path, {("-4", "route"): answer})


def test_this_host_answers():
    found = read_host_networks(Host(""), HostPaths(), [])
    assert "127.0.0.0/8" in {str(each) for _, each in found.reached}
    assert "lo" in found.interfaces
