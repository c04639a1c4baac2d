"""Both ends of a pull in memory: what a source sends, and the copies that a machine has of it."""

from __future__ import annotations

import struct
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace

from snaporch.errors import SnaporchError
from snaporch.model import PoolSnapshot, moment_at
from snaporch.pull.send_request import parse_request
from snaporch.pull.sender import Sender
from snaporch.remote_host import CommandError, Host
from snaporch.zfs import PoolError
from snaporch.zfs.pulled import Counts

_RAW = 1 << 26
_HEADER_BYTES = 312
_HEADER = "<IIQQQIIQQ256s"


class FakeSend:
    """``zfs send`` of a :class:`~fakes.pool.FakePool`: a header, and the text of the command."""

    def __init__(self, pool):
        self.pool = pool
        self.sent = []
        self.cut = 0
        """How many of the next streams end early."""
        self.contents = ""
        """Of a resume token, as ``zfs send -nvPt`` prints them; such a stream has ``resumes``."""
        self.resumes = ""
        self.key = b"first"
        """Of encrypted datasets."""

    def report(self, words):
        if "-t" in words and "-nvP" in words:
            return self.contents
        return "size\t400\n"

    def send(self, words, output):
        self.sent.append(" ".join(words))
        name = self.resumes if "-t" in words else words[-1]
        dataset = name.partition("@")[0]
        (found,) = [e for e in self.pool.snapshots([dataset]) if e.full_name == name]
        payload = packed_key(wrapped=self.key) if "-w" in words else b""
        output.write(header(found, raw="-w" in words, payload=len(payload)) + payload)
        if self.cut:
            self.cut -= 1
            raise PoolError("zfs send", "the line was cut")
        output.write(b" ".join(each.encode() for each in words))


def packed_key(nested=b"", outer=b"", **values):
    """The payload of the first record of a raw stream, with these values of its key.

    Args:
        nested: packed pairs beside those of the key.
        outer: packed pairs beside the key.
        values: each is bytes, or a number.
    """
    inner = b"".join(pair(name, value) for name, value in values.items())
    key = pair("crypt_keydata", struct.pack("=iIQIi", 0, 1, 0, 0, 0), 19, 1)
    start = bytes([0, sys.byteorder == "little", 0, 0]) + struct.pack("=iI", 0, 1)
    return start + outer + key + inner + nested + bytes(4) + bytes(4)


def pair(name, value, kind=26, count=None):
    """A packed ``nvpair``: a number, or an array of bytes."""
    if isinstance(value, int):
        value, kind, count = struct.pack("=Q", value), 8, 1
    text = name.encode() + b"\0"
    text += bytes(-(16 + len(text)) % 8)
    size = 16 + len(text) + len(value) + -len(value) % 8
    count = len(value) if count is None else count
    start = struct.pack("=ihhii", size, len(name) + 1, 0, count, kind)
    return start + text + value + bytes(-len(value) % 8)


def header(snapshot, *, raw=False, name=None, guid=None, created=None, payload=0):
    """The first record of a stream of a snapshot, or of another one."""
    return struct.pack(
        _HEADER,
        0,
        payload,
        0x2F5BACBAC,
        1 | (_RAW if raw else 0),
        int(snapshot.created.timestamp()) if created is None else created,
        2,
        0,
        snapshot.guid if guid is None else guid,
        0,
        (name or snapshot.full_name).encode(),
    )


class FakeSource(Host):
    """A host by ssh whose ``snaporch send`` is a :class:`~snaporch.pull.sender.Sender` here.

    Args:
        make: makes the sender of a request; gets its output.
    """

    def __init__(self, make):
        super().__init__("root@vm1", prelude="")
        self.make = make
        self.requests = []
        self.is_away = False
        self.answers = {}
        """What is answered instead, by verb: bytes."""

    def _answer(self, command):
        """What the command prints, and its error."""
        request = parse_request(command)
        self.requests.append(request)
        output = Collected()
        if request.verb in self.answers:
            output.write(self.answers[request.verb])
            return output.data, ""
        try:
            self.make(output).answer(request)
        except SnaporchError as error:
            return output.data, f"snaporch: {error}"
        return output.data, ""

    def script(self, script, *, what, limit=0.0, most=1 << 27):
        if self.is_away:
            raise CommandError(self.name, "cannot be reached: no route", "see: ssh")
        data, error = self._answer(script)
        if len(data) > most:
            raise CommandError(what, f"prints over {most >> 20} MiB, and was ended")
        if error:
            raise CommandError(what, error)
        return data.decode("utf-8", "surrogateescape")

    def words(self, script):
        data, error = self._answer(script)
        descriptor, path = tempfile.mkstemp()
        with open(descriptor, "wb") as file:
            file.write(data)
        end = 'rm "$1"; test -z "$2" || { echo "$2" >&2; exit 8; }'
        return ["sh", "-c", f'cat "$1"; {end}', "sh", path, error]


class Collected:
    """An output in memory."""

    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += data


class FakeCopies:
    """ZFS of the machine that pulls: the copies below one dataset."""

    def __init__(self, root):
        self.root = root
        self.found: list[PoolSnapshot] = []
        self.tokens = {}
        self.policy = {}
        self.streams = {}
        self.options = {}
        self.is_there = False
        self.inherited = {"readonly": "on", "mountpoint": "none", "volmode": "none"}
        self.refusals = []
        """Errors of the next calls of ``zfs receive``."""
        self.done = []
        self.keys = {}
        """The payloads with the keys of encrypted copies."""
        self.accepted = {}
        """The digests of other keys."""
        self.encrypted = set()
        """Datasets and directories that are."""

    def exists(self, dataset):
        names = {each.dataset for each in self.found} | {*self.tokens}
        return (dataset == self.root and self.is_there) or dataset in names

    def make_root(self, dataset):
        assert dataset == self.root
        self.is_there = True

    def counts(self, dataset):
        assert dataset == self.root
        return Counts(len({each.dataset for each in self.found}), len(self.found))

    def values(self, dataset, properties):
        if dataset == self.root:
            return {each: self.inherited[each] for each in properties}
        found = {"receive_resume_token": self.tokens, "snaporch:new-key": self.accepted}
        return {key: found[key].get(dataset, "-") for key in properties}

    def copies(self, root, datasets: Sequence[str]):
        assert root == self.root
        assert self.is_there
        return [each for each in self.found if each.dataset in datasets]

    def append(self, snapshot, header, rest, options=()):
        header, data = header[:_HEADER_BYTES], header[_HEADER_BYTES:]
        while block := rest.read(1 << 20):
            data += block
        if self.refusals:
            raise PoolError(f"zfs receive {snapshot}", self.refusals.pop(0))
        dataset, _, name = snapshot.partition("@")
        _, size, _, _, created, _, _, guid, _, _ = struct.unpack(_HEADER, header)
        key, data = data[:size], data[size:]
        if not data:
            self.tokens[dataset] = "1-a-b-789c"
            raise PoolError(f"zfs receive {snapshot}", "cannot receive: incomplete stream")
        self.tokens.pop(dataset, None)
        if key:
            self.keys[dataset] = key
        self.streams[snapshot] = data.decode()
        self.options[dataset] = [*options]
        self.found.append(
            PoolSnapshot(dataset, name, guid, len(self.found) + 1, moment_at(float(created)), {})
        )

    def beginning(self, snapshot):
        return bytes(_HEADER_BYTES) + self.keys[snapshot.partition("@")[0]]

    def is_encrypted(self, place):
        return place in self.encrypted

    def discard_partial(self, dataset):
        self.done.append(f"discard {dataset}")
        del self.tokens[dataset]

    def policies(self, datasets):
        return {name: self.policy[name] for name in datasets if name in self.policy}

    def set_properties(self, names, properties):
        for name in names:
            if "@" not in name:
                self.policy[name] = properties["snaporch:policy"]
            new = {key.removeprefix("snaporch:"): value for key, value in properties.items()}
            self.found = [
                replace(e, properties={**e.properties, **new}) if e.full_name == name else e
                for e in self.found
            ]

    def clear_properties(self, names, keys):
        assert keys == ["snaporch:policy"]
        for name in names:
            del self.policy[name]


__all__ = [
    "Collected",
    "FakeCopies",
    "FakeSend",
    "FakeSource",
    "Sender",
    "header",
    "packed_key",
    "pair",
]
