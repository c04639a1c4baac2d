"""A hostile source: each lie ends in one refused copy, and nothing that was here changes."""

import json
import re

import pytest
from fakes.pull_case import ROOT, UUID
from fakes.pulled import header
from fakes.world import Heard

from snaporch.bundle.manifest import MANIFEST_NAME, Part, Role, manifest_bytes, read_manifest
from snaporch.config import Source
from snaporch.errors import SnaporchError, WindowClosedError
from snaporch.interrupt import WindowInterrupt
from snaporch.pull.source import PullSource
from snaporch.remote_host import Host
from snaporch.replication.interface import ReplicaError

WEB = f"{ROOT}/tank:web"
LINE = b'{"bytes": 400, "refused": ""}\n'


def errors(result):
    return [each.line() for each in result.failures]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"guid": 99}, "another snapshot was sent"),
        ({"name": "tank/db@r9"}, "another snapshot was sent"),
        ({"name": "tank/db@../x"}, "no name of a snapshot"),
        ({"raw": True}, "whether it is encrypted"),
        ({"created": 1 << 62}, "was taken in the future"),
    ],
    ids=str,
)
def test_a_stream_of_another_snapshot_is_refused(case, changes, reason):
    case.take("r1", 2)
    (real,) = case.pool.snapshots(["tank/db"])
    case.host.answers["stream"] = LINE + header(real, **changes) + b"data"
    result = case.pull(2)
    assert case.here() == []
    assert any(reason in each for each in errors(result)), errors(result)


def test_a_stream_with_the_guid_of_the_oldest_snapshot_is_refused(case):
    case.take("r1", 2)
    case.take("r2", 2)
    case.pull(2)
    oldest, newest = case.pool.snapshots(["tank/db"])
    before = case.here()
    document = {
        "datasets": [
            {
                "name": "tank/db",
                "kind": "filesystem",
                "raw": False,
                "policy": "",
                "bookmarks": [[newest.guid, 5]],
                "snapshots": [
                    {
                        "name": "r9",
                        "guid": oldest.guid,
                        "createtxg": 9,
                        "created": 1.0,
                        "properties": {},
                    }
                ],
            }
        ],
        "waiting": [],
        "shared": [],
        "unmarked": [],
    }
    case.host.answers["snapshots"] = json.dumps(document).encode()
    stream = header(oldest, name="tank/db@r9", created=1)
    case.host.answers["stream"] = LINE + stream + b"data"
    result = case.pull(2)
    assert "has the GUID of @r1, which is there already" in errors(result)[0]
    assert case.here() == before


def test_a_package_of_streams_is_refused(case):
    case.take("r1", 2)
    (real,) = case.pool.snapshots(["tank/db"])
    sent = bytearray(header(real))
    sent[16] = 2
    case.host.answers["stream"] = LINE + bytes(sent)
    assert "it is a package" in errors(case.pull(2))[0]
    assert case.here() == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"x\n",
        b"[]\n",
        b"{}\n",
        b'{"bytes": "x"}\n',
        b"[" * 70000,
        *(f'{{"bytes": {n}, "refused": ""}}\n'.encode() for n in ("1e300", 10**400, -1, "true")),
    ],
    ids=lambda each: str(each[:20]),
)
def test_a_first_line_that_cannot_be_read_is_one_error(case, answer):
    case.take("r1", 2)
    case.host.answers["stream"] = answer
    result = case.pull(2)
    assert len(result.failures) == 1
    assert case.here() == []


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"5", b"{}", b'{"guests": 5}', b'{"guests": [5]}', b"[" * 100_000, b"\xff\xfe"],
    ids=lambda each: str(each[:20]),
)
def test_an_answer_that_cannot_be_read_is_an_error_of_the_source(case, answer):
    case.host.answers["guests"] = answer
    source, _, _ = case.open()
    with pytest.raises(ReplicaError):
        source.guests()


def test_an_answer_that_would_take_all_memory_is_refused(case):
    """A list of empty lists takes 25 times its length."""
    case.take("r1", 2)
    case.host.answers["guests"] = b'{"guests":[' + b"[]," * (6 << 20) + b"[]]}"
    source, _, _ = case.open()
    with pytest.raises(ReplicaError, match="prints over 16 MiB"):
        source.guests()


def test_the_end_of_the_window_is_no_failure_of_the_source():
    window = WindowInterrupt(closed=lambda: "its window has ended")
    section = Source(host="nas", dataset="backup/a", bundles="/backup/a")
    host = Host("", lambda: window.check("a"))
    with pytest.raises(WindowClosedError):
        PullSource("a", section, window, Heard(), host).guests()


def test_an_error_of_the_source_is_repeated_as_it_is(case):
    case.allowed = {"db"}
    case.take("r1")
    source, _, _ = case.open()
    with pytest.raises(SnaporchError, match="no guest of this UUID may be copied"):
        source.guest(UUID.format(1), "web")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('"\\ud800"', "cannot be read"),
        ('"{}"', "SHA-256"),
        ("5", "cannot be read"),
        ('""', "is not whole on the source"),
    ],
)
def test_a_manifest_that_may_be_anything_is_one_error(case, text, reason):
    case.take("r1", 2)
    case.host.answers["manifest"] = f'{{"text": {text}}}'.encode()
    result = case.pull(2)
    assert result.skipped == ["r1"]
    assert reason in errors(result)[0]
    assert case.bundles_here() == []


def parts(number):
    return tuple(Part(name=f"p{n}", role=Role.RAM, bytes=1, sha256="0" * 64) for n in range(number))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parts": parts(20_000)}, "has 20000 parts"),
        ({"parts": (parts(1)[0].model_copy(update={"bytes": 1 << 62}),)}, "no number of bytes"),
        ({"parts": (parts(1)[0].model_copy(update={"bytes": 1 << 49}),)}, "has .* free"),
        ({"parts": (parts(1)[0].model_copy(update={"name": "copy.json"}),)}, "own record"),
        (
            {"parts": (parts(1)[0].model_copy(update={"name": MANIFEST_NAME}),)},
            "names a file twice",
        ),
        ({"parts": parts(1) * 2}, "two parts have the same name"),
        ({"uuid": UUID.format(1)}, "of another bundle"),
        ({"run": "r2"}, "of another bundle"),
    ],
    ids=lambda each: str(each)[:30],
)
def test_a_bundle_that_cannot_be_is_refused(case, changes, reason):
    case.take("r1", 2)
    directory = case.store.root / UUID.format(2) / "r1"
    text = manifest_bytes(read_manifest(directory).model_copy(update=changes)).decode()
    case.host.answers["manifest"] = json.dumps({"text": text}).encode()
    result = case.pull(2)
    assert result.skipped == ["r1"]
    assert re.search(reason, errors(result)[0])
    assert case.bundles_here() == []


def test_a_first_line_that_trickles_in_ends_in_time(case, monkeypatch):
    monkeypatch.setattr("snaporch.pull.source._CHECK_SECONDS", 1)
    monkeypatch.setattr("snaporch.pull.source.LIMIT_SECONDS", 0)
    case.take("r1", 2)
    case.host.words = lambda _script: ["sh", "-c", "while printf ' '; do sleep 0.2; done"]
    assert "came too slowly" in errors(case.pull(2))[0]


@pytest.mark.parametrize("key", ["waiting", "shared"])
@pytest.mark.parametrize("name", ["\ud800", "tank/../x@r1", "a\nb", 5])
def test_names_that_cannot_be_are_refused(case, key, name):
    document = {"datasets": [], "waiting": [], "shared": [], "unmarked": [], key: [name]}
    case.host.answers["snapshots"] = json.dumps(document).encode()
    source, _, _ = case.open()
    with pytest.raises(ReplicaError, match="is no name of"):
        source.guest(UUID.format(2), "db")


def test_all_waiting_for_a_source_together_has_an_end(case, monkeypatch):
    monkeypatch.setattr("snaporch.pull.source._ALL_SECONDS", 0.3)
    case.take("r1", 2)
    words = case.host.words

    def late(script):
        shell, option, command, *more = words(script)
        return [shell, option, f"sleep 0.5; {command}", *more]

    case.host.words = late
    result = case.pull(2)
    assert "has let this pull wait for" in errors(result)[0]
    assert case.here() == [f"{ROOT}/tank:db@r1"]  # the request that had begun
