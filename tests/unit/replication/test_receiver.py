"""What an append-only replica does for each request, and what it never does."""

import io
import os
import struct
from datetime import UTC, datetime

import pytest

from snaporch.errors import RefusedError, SnaporchError, UnavailableError
from snaporch.model import PoolSnapshot
from snaporch.replication.interface import ReplicaError
from snaporch.replication.receive_limits import LimitedStream
from snaporch.replication.receive_request import Verb, parse_request, request_command
from snaporch.replication.received_bundles import ReceivedBundles
from snaporch.replication.receiver import Receiver
from snaporch.zfs import PoolError
from snaporch.zfs.received import ReceivedZfs

ROOT = "backup/vm1"
GOOD = {"readonly": "on", "mountpoint": "none", "volmode": "none", "encryption": "off"}


class Zfs:
    """The copies, in memory; records what was done to them."""

    def __init__(self):
        self.done, self.found = [], []
        self.properties = {ROOT: GOOD | {"available": str(5 << 30)}}
        self.policy = {}
        self.denied = ""

    def kernel_release(self):
        return "2.3.9-1"

    def permissions(self, dataset):
        assert dataset == ROOT
        return frozenset({"create", "userprop"})

    def values(self, dataset, properties):
        if dataset not in self.properties:
            raise PoolError("zfs get", f"cannot open '{dataset}': dataset does not exist")
        return {key: self.properties[dataset].get(key, "-") for key in properties}

    def copies(self, root, datasets):
        assert root == ROOT
        return [each for each in self.found if each.dataset in (root, *datasets)]

    def append(self, snapshot, header, rest):
        self.done.append(("append", snapshot, header + rest.read(1 << 20)))

    def discard_partial(self, dataset):
        if self.denied:
            raise PoolError("zfs receive", self.denied)
        self.done.append(("discard", dataset))

    def policies(self, datasets):
        return {name: self.policy[name] for name in datasets if name in self.policy}

    def set_properties(self, names, properties):
        self.done.append(("set", *names, dict(properties)))

    def clear_properties(self, names, keys):
        self.done.append(("clear", *names, *keys))


@pytest.fixture
def zfs():
    return Zfs()


@pytest.fixture
def ask(zfs, tmp_path):
    def ask(verb, stream=b"", **values):
        bundles = ReceivedBundles(tmp_path, ROOT)
        request = parse_request(request_command(Verb(verb), values))
        path = tmp_path.parent / f"{tmp_path.name}.stream"
        path.write_bytes(stream)
        with path.open("rb", buffering=0) as sent:
            return Receiver(ROOT, bundles, zfs, LimitedStream(sent), lambda: NOW).answer(request)

    return ask


def snapshot(name, txg, properties=(), dataset=f"{ROOT}/tank:a"):
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return PoolSnapshot(dataset, name, txg + 70, txg, moment, dict(properties))


NOW = 1_800_000_000.0


def header(name="tank/a@s1", version=1, *, guid=7, created=int(NOW)):
    given = 0, 0, 0x2F5BACBAC, version, created, 2, 0, guid, 0, name.encode()
    return struct.pack("<IIQQQIIQQ256s", *given)


def test_the_replica_describes_itself(ask):
    found = ask("check")
    copies, bundles = found.pop("free")
    assert copies == 5 << 30
    assert 0 < bundles < 1 << 60
    assert found == {
        "dataset": ROOT,
        "release": "2.3.9-1",
        "permissions": ["create", "userprop"],
        "root": os.geteuid() == 0,
        "encrypted": False,
    }


@pytest.mark.parametrize("key", ["readonly", "mountpoint", "volmode"])
def test_copies_that_would_be_changed_or_mounted_are_refused(ask, zfs, key):
    zfs.properties[ROOT][key] = "other"
    with pytest.raises(UnavailableError, match=f"zfs set {key}={GOOD[key]} {ROOT}"):
        ask("check")


def test_an_encrypted_replica_is_recognized(ask, zfs):
    zfs.properties[ROOT]["encryption"] = "aes-256-gcm"
    assert ask("check")["encrypted"] is True


def test_the_snapshots_of_copies_are_listed_with_their_marks(ask, zfs):
    zfs.found = [
        snapshot("s1", 1, {"run": "r"}),
        snapshot("own", 2, dataset=ROOT),
        snapshot("s2", 3, dataset=f"{ROOT}/b"),
    ]
    found = ask("snapshots", copies=["tank:a", "b"])["snapshots"]
    assert [(s["copy"], s["name"], s["guid"], s["createtxg"]) for s in found] == [
        ("tank:a", "s1", 71, 1),
        ("b", "s2", 73, 3),
    ]
    assert found[0]["properties"] == {"run": "r"}
    assert found[0]["created"] == datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def test_the_state_of_a_copy(ask, zfs):
    zfs.properties[f"{ROOT}/a"] = {"written": "7", "receive_resume_token": "1-ab"}
    assert ask("state", copy="a") == {"written": "7", "token": "1-ab"}
    assert ask("state", copy="b") == {"written": "", "token": "-"}


def test_a_copy_whose_state_is_unknown_is_not_called_missing(ask, zfs, monkeypatch):
    def failing(_dataset, _properties):
        raise PoolError("zfs get", "pool I/O is currently suspended")

    monkeypatch.setattr(zfs, "values", failing)
    with pytest.raises(PoolError, match="suspended"):
        ask("state", copy="a")


def test_a_stream_is_appended_under_the_name_in_it(ask, zfs):
    assert ask("receive", header() + b"rest", copy="tank:a") == {}
    assert zfs.done == [("append", f"{ROOT}/tank:a@s1", header() + b"rest")]


@pytest.mark.parametrize("stream", [b"", b"x" * 500, header(version=2), header("tank/a@a/b")])
def test_another_stream_reaches_zfs_never(ask, zfs, stream):
    with pytest.raises(RefusedError, match="the stream is refused"):
        ask("receive", stream, copy="tank:a")
    assert zfs.done == []


RAW = 1 | 1 << 24 + 2


@pytest.mark.parametrize(
    ("stream", "reason"),
    [
        (header(version=RAW), "could replace the key of the whole copy"),
        (header(guid=0), "has no GUID"),
        (header(guid=71), "has the GUID of @old"),
        (header(created=int(NOW) + 86_401), "was taken in the future"),
        (header(created=1 << 62), "was taken in the future"),
    ],
)
def test_a_stream_that_would_harm_older_snapshots_reaches_zfs_never(ask, zfs, stream, reason):
    zfs.found = [snapshot("old", 1), snapshot("other", 2, dataset=f"{ROOT}/tank:b")]
    with pytest.raises(RefusedError, match=reason):
        ask("receive", stream, copy="tank:a")
    assert zfs.done == []


@pytest.mark.parametrize("stream", [header(guid=72), header(created=int(NOW) + 86_400)])
def test_a_guid_of_another_copy_and_a_clock_that_is_ahead_are_accepted(ask, zfs, stream):
    zfs.found = [snapshot("old", 1), snapshot("other", 2, dataset=f"{ROOT}/tank:b")]
    assert ask("receive", stream, copy="tank:a") == {}
    assert [act for act, *_ in zfs.done] == ["append"]


@pytest.mark.parametrize("verb", ["state", "receive", "discard"])
def test_a_name_that_is_too_long_is_refused(ask, zfs, verb):
    with pytest.raises(RefusedError, match="cannot be the name of a copy"):
        ask(verb, header(), copy="a" * 255)
    assert zfs.done == []


def test_a_part_is_discarded_or_the_admin_gets_the_command(ask, zfs):
    ask("discard", copy="a")
    assert zfs.done == [("discard", f"{ROOT}/a")]
    zfs.denied = "permission denied"
    with pytest.raises(PoolError, match=f"denied; as root on the replica: zfs receive -A {ROOT}/a"):
        ask("discard", copy="a")


def test_marks_are_decided_by_the_marks_that_are_there(ask, zfs):
    zfs.found = [
        snapshot("s0", 1),
        snapshot("s1", 2, {"copy": "nas", "run": "r"}),
        snapshot("s2", 3),
        snapshot("s2", 9, {"copy": "nas"}, dataset=f"{ROOT}/b"),
    ]
    wanted = {f"tank:a@s{n}": {"run": f"r{n}", "copy": "nas"} for n in range(4)}
    assert ask("mark", marks=wanted) == {"late": ["tank:a@s0"]}
    new = {"snaporch:run": "r2", "snaporch:copy": "nas"}
    assert zfs.done == [("set", f"{ROOT}/tank:a@s2", new)]


def test_only_policies_that_differ_are_set(ask, zfs):
    zfs.policy = {f"{ROOT}/a": "hourly", f"{ROOT}/b": "old", f"{ROOT}/c": "gone"}
    ask("policies", policies={"a": "hourly", "b": "new", "c": "", "d": ""})
    assert zfs.done == [
        ("set", f"{ROOT}/b", {"snaporch:policy": "new"}),
        ("clear", f"{ROOT}/c", "snaporch:policy"),
    ]


def test_bundles(ask):
    uuid, sha = "4b1d2f0e-0000-4000-8000-000000000001", "0" * 64
    files = [{"name": "manifest.json", "bytes": 2, "sha256": sha, "offset": 0}]
    names = {"uuid": uuid, "run": "r"}
    assert ask("store", b"{}", files=files, **names) == {"damaged": ["manifest.json"]}
    files[0]["sha256"] = sha = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    with pytest.raises(SnaporchError, match="ended early"):
        ask("store", b"{", files=files, **names)
    assert ask("begun", **names) == {"sizes": {"manifest.json": 1}}
    assert ask("store", b"{}", files=files, **names) == {"damaged": []}
    assert ask("damaged", sums={"manifest.json": sha}, **names) == {"damaged": []}
    assert ask("manifest", **names) == {"text": "{}"}
    assert list(ask("bundles", uuid=uuid)["bundles"]) == ["r"]


def test_a_bundle_that_was_never_read_has_no_age(ask, tmp_path):
    uuid = "4b1d2f0e-0000-4000-8000-000000000001"
    (tmp_path / uuid / "r").mkdir(parents=True)
    assert ask("bundles", uuid=uuid) == {"bundles": {"r": {"sizes": {}, "unread": None}}}


# -- the real zfs ---------------------------------------------------------------------------------


@pytest.fixture
def real(tmp_path):
    """:class:`ReceivedZfs` with a command that records its words, its input, and prints a file."""
    command = tmp_path / "zfs"
    command.write_text(
        f'#!/bin/sh\nprintf "%s|" "$@" >>{tmp_path}/words\n'
        f'case "$1" in receive) cat >{tmp_path}/input ;; esac\n'
        f"cat {tmp_path}/answer\nexit $(cat {tmp_path}/status)\n"
    )
    command.chmod(0o755)
    (tmp_path / "answer").write_text("")
    (tmp_path / "status").write_text("0")
    return ReceivedZfs(str(command))


def test_zfs_receives_without_force(real, tmp_path):
    real.append("b/a@s", b"head", io.BytesIO(b"er" * 2_000_000))
    assert (tmp_path / "words").read_text() == "receive|-s|-u|b/a@s|"
    assert (tmp_path / "input").read_bytes() == b"head" + b"er" * 2_000_000


def test_why_zfs_refused(real, tmp_path):
    (tmp_path / "answer").write_text("cannot receive: destination has been modified\n")
    (tmp_path / "status").write_text("1")
    with pytest.raises(PoolError, match="has been modified"):
        real.append("b/a@s", b"head", io.BytesIO(b"er"))


def test_a_receiver_that_exits_early_ends_the_transfer(real, tmp_path):
    (tmp_path / "zfs").write_text("#!/bin/sh\necho cannot receive: no >&2; exit 1\n")
    with pytest.raises(PoolError, match="cannot receive: no"):
        real.append("b/a@s", b"head", io.BytesIO(bytes(8 << 20)))


def test_a_stream_that_is_cut_has_one_line_and_the_next_step(real, tmp_path):
    (tmp_path / "answer").write_text(
        "cannot receive new filesystem stream: checksum mismatch or incomplete stream.\n"
        "Partially received snapshot is saved.\nA resuming stream can be generated on the sending"
        " system by running:\n    zfs send -t 1-abc\n"
    )
    (tmp_path / "status").write_text("1")
    with pytest.raises(PoolError) as caught:
        real.append("b/a@s", b"head", io.BytesIO(b"er"))
    reason = "got an incomplete stream, and has kept what arrived; try again; it continues there"
    assert caught.value.line() == f"zfs receive b/a@s: {reason}"


def test_only_the_line_with_the_reason_is_printed(real, tmp_path):
    (tmp_path / "answer").write_text("warning: x\ncannot receive: out of space\nmore\n")
    (tmp_path / "status").write_text("1")
    with pytest.raises(PoolError) as caught:
        real.append("b/a@s", b"head", io.BytesIO(b"er"))
    assert caught.value.line() == "zfs receive b/a@s: cannot receive: out of space"


@pytest.mark.parametrize("size", [8 << 20, 10])
def test_a_pool_that_takes_no_data_does_not_hold_the_transfer_for_ever(real, tmp_path, size):
    """It is suspended: the command neither reads all nor ends."""
    (tmp_path / "zfs").write_text("#!/bin/sh\nexec sleep 600\n")
    with pytest.raises(PoolError, match="its pool may be suspended") as caught:
        real.append("b/a@s", b"head", io.BytesIO(bytes(size)), limit=0.2)
    assert caught.value.step == "see: zpool status b"


def test_a_stream_that_fails_ends_the_receiver(real, tmp_path):
    class Cut(io.BytesIO):
        def read(self, _size):
            raise ReplicaError("the stream", "no data came")

    with pytest.raises(ReplicaError, match="no data came"):
        real.append("b/a@s", b"head", Cut())
    assert (tmp_path / "input").read_bytes() == b"head"


def test_only_a_part_is_discarded(real, tmp_path):
    real.discard_partial("b/a")
    assert (tmp_path / "words").read_text() == "receive|-A|b/a|"


def test_the_permissions_are_those_of_this_user(real, tmp_path):
    import grp
    import pwd

    user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(os.getegid()).gr_name
    (tmp_path / "answer").write_text(
        "---- Permissions on backup/vm1 ----\nPermission sets:\n\t@bad rename\n"
        "Create time permissions:\n\tpromote,clone\nLocal+Descendent permissions:\n"
        f"\tuser {user} create,mount,@bad\n\tuser other destroy\n\tgroup {group} userprop\n"
        "\tgroup others rollback\n\teveryone receive\n"
    )
    own = {"create", "mount", "@bad", "userprop", "receive"}
    assert real.permissions("backup/vm1") == own | {"promote", "clone"}
    assert "allow" in (tmp_path / "words").read_text()


def test_values_of_properties(real, tmp_path):
    (tmp_path / "answer").write_text("readonly\ton\nmountpoint\tnone\n")
    assert real.values("b", ["readonly", "mountpoint"]) == {"readonly": "on", "mountpoint": "none"}
    assert (tmp_path / "words").read_text() == "get|-Hp|-o|property,value|readonly,mountpoint|b|"


def test_the_version_of_the_module(real, tmp_path):
    (tmp_path / "version").write_text("2.3.9-1\n")
    assert real.kernel_release(tmp_path / "version") == "2.3.9-1"
    assert real.kernel_release(tmp_path / "missing") == ""
