import os
import subprocess
from contextlib import nullcontext, suppress
from datetime import UTC, datetime

import pytest
from fakes import zfs_get
from fakes.log import recorded_commands

from snaporch.errors import UnavailableError
from snaporch.model import Dataset, DatasetKind
from snaporch.zfs import cli
from snaporch.zfs.cli import ZfsCommand, _chunks
from snaporch.zfs.interface import PoolError
from snaporch.zfs.parity import ParityGroup
from snaporch.zfs.property_listing import Listing


@pytest.fixture
def zfs():
    """A ``zfs`` that answers by its first words, else from a table; unasked ones fail the test."""
    answers, asked, table = {}, [], {}

    def run(words, **_options):
        asked.append(words[1:])
        for start, answer in answers.items():
            if " ".join(words[1:]).startswith(start):
                code, text = answer if isinstance(answer, tuple) else (0, answer)
                out, err = (text, "") if code == 0 else ("", text)
                return subprocess.CompletedProcess(words, code, out.encode(), err.encode())
        text = zfs_get.answer(words[1:], table)
        return subprocess.CompletedProcess(words, 0, text.encode("utf-8", "surrogateescape"), b"")

    pool = ZfsCommand("zfs", run)
    return pool, answers, asked, table


def line(*values):
    return "\t".join(map(str, values))


def born(guid=1, txg=2, creation=3, **marks):
    """A snapshot's properties, as ``zfs`` has them."""
    own = {f"snaporch:{key.replace('_', '-')}": value for key, value in marks.items()}
    return {"guid": str(guid), "createtxg": str(txg), "creation": str(creation)} | own


@pytest.mark.parametrize(("answer", "result"), [("", "ok"), ((1, "no such pool"), "failed")])
def test_each_command_is_logged(zfs, answer, result):
    pool, answers, _, _ = zfs
    answers["destroy"] = answer
    with recorded_commands() as log, suppress(PoolError):
        pool.destroy_bookmark("tank#a")
    (line,) = log.lines
    assert line.startswith(f"zfs destroy 'tank#a': {result}")


def test_a_snapshot_with_all_properties(zfs):
    pool, _, _, table = zfs
    marks = {
        "run": "run-1",
        "level": "ram",
        "bundle": "u/r",
        "uuid": "u",
        "verified": "when",
        "retention": "hourly",
        "group": "pair/r",
        "ram": "u/r",
        "ram-pools": "tank",
        "replicated": "nas,usb",
        "dropped": "tape",
        "torn": "yes",
        "domain": "Bär x",
        "unchanged": "2026-01-02T03:04:05Z",
        "copy": "nas",
        "kept": "2026-01-02T03:04:05Z",
        "note": "before the\tupgrade",
        "verified-here": "when",
        "ended": "yes",
    }
    assert sorted(marks) == sorted(cli.PROPERTIES)
    table["tank/vm one@s 1"] = born(2**64 - 1, 77, 1748779200, **marks)
    (found,) = pool.snapshots()
    assert (found.dataset, found.name, found.full_name) == ("tank/vm one", "s 1", "tank/vm one@s 1")
    assert (found.guid, found.createtxg) == (2**64 - 1, 77)
    assert found.created == datetime(2025, 6, 1, 12, tzinfo=UTC)
    assert found.properties == marks


def test_properties_that_are_not_set_are_absent(zfs):
    pool, _, _, table = zfs
    table["tank@s"] = born()
    assert pool.snapshots()[0].properties == {}


HOSTILE = (
    "two\nlines",
    "tab\there",
    "\n",
    "\t\t\t\n\n",
    "carriage\rreturn \x0b\x0c\x1c\x85\u2028 \udcff",
    "-\nt/a@victim\t7\t8\t9\tforged",
    "x\nt/a@victim\tsnaporch:verified\tlocal\tpassed\nt/a@phantom\tguid\t-\t1",
    "x\nt/a@mine\tsnaporch:0123456789abcdef0123456789abcdef\t-\t-",
    "x\t-\t-\n" * 40,
)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize("key", ["run", "verified", "domain", "policy"])
def test_a_received_value_neither_hides_nor_forges_another(zfs, key, value):
    pool, _, _, table = zfs
    table["t/a"] = {"snaporch:policy": value}
    table["t/a@mine"] = born(7, 8) | {f"snaporch:{key}": (value, "received")}
    table["t/a@victim"] = born(8, 9, run="r", verified="never")
    expected = {"t/a@mine": {key: value}, "t/a@victim": {"run": "r", "verified": "never"}}
    if key == "policy":
        expected["t/a@mine"] = {}
    survey = pool.policy_view()
    for snapshots in (pool.snapshots(), pool.snapshots(["t/a"]), survey.snapshots):
        assert {each.full_name: each.properties for each in snapshots} == expected
        assert [each.guid for each in snapshots] == [7, 8]
    assert survey.policies == {"t/a": value}
    assert pool.local_properties(["snaporch:policy", "x:y"]) == {"t/a": {"snaporch:policy": value}}
    own = {name: {f"snaporch:{k}": v for k, v in each.items()} for name, each in expected.items()}
    if key == "policy":
        own["t/a@mine"] = {"snaporch:policy": value}
    assert pool.user_properties(["t/a@mine", "t/a@victim"]) == own


def test_an_answer_to_another_question_is_an_error():
    listing = Listing(("guid",), ("a:b",))
    mark = listing.properties.split(",")[1]
    right = f"t@s\tguid\t-\t1\nt@s\t{mark}\t-\t-\nt@s\ta:b\tlocal\tx\ny\nt@s\t{mark}\t-\t-\n"
    assert list(listing.read(right)) == [("t@s", {"guid": "1", "a:b": "x\ny"})]
    for wrong in (
        right[:-4],
        right + "t@s\tguid\t-\t1\n",
        right.replace("guid", "createtxg"),
        right.replace("a:b", "a:c"),
        right.replace(f"t@s\t{mark}", f"t@r\t{mark}", 1),
        "t@s\tguid\t-\t1\n" + right,
    ):
        with pytest.raises(PoolError, match="zfs get: unexpected output"):
            list(listing.read(wrong))


def test_the_separating_property_is_unpredictable():
    assert Listing((), ("a:b",)).properties != Listing((), ("a:b",)).properties


def test_datasets_with_their_kinds(zfs):
    pool, answers, _, _ = zfs
    answers["list"] = "tank\tfilesystem\ntank/vm one\tfilesystem\ntank/vol\tvolume\n"
    assert pool.datasets() == [
        Dataset("tank", DatasetKind.FILESYSTEM),
        Dataset("tank/vm one", DatasetKind.FILESYSTEM),
        Dataset("tank/vol", DatasetKind.VOLUME),
    ]


def test_a_survey_is_one_command(zfs):
    pool, _, asked, table = zfs
    table |= {
        "tank/a": born() | {"snaporch:policy": "hourly"},
        "tank/a@free": born(1, 5, run="r", retention="hourly", domain="web") | {"userrefs": "0"},
        "tank/a@held": born(2, 6) | {"userrefs": "2", "clones": ""},
        "tank/b": born(),
        "tank/b@cloned": born(3, 4) | {"userrefs": "0", "clones": "tank/x,tank/y"},
    }
    table["tank/a@free"]["snaporch:policy"] = ("hourly", "inherited from tank/a")
    found = pool.policy_view()
    assert [s.full_name for s in found.snapshots] == ["tank/b@cloned", "tank/a@free", "tank/a@held"]
    assert found.snapshots[1].properties == {"run": "r", "retention": "hourly", "domain": "web"}
    assert found.pinned == {"tank/a@held": "held", "tank/b@cloned": "cloned as tank/x,tank/y"}
    assert found.policies == {"tank/a": "hourly"}
    assert len(asked) == 1


def test_a_pool_without_datasets_lists_none(zfs):
    pool, answers, _, _ = zfs
    answers["list"] = ""
    assert pool.datasets() == []
    assert pool.snapshots() == []


def test_a_failed_listing_is_an_error_and_no_empty_list(zfs):
    pool, answers, _, _ = zfs
    answers["get"] = (1, "cannot open 'tank': I/O error\n")
    with pytest.raises(PoolError, match="zfs get: cannot open 'tank': I/O error"):
        pool.snapshots()


def test_a_failure_without_output_reports_its_status(zfs):
    pool, answers, _, _ = zfs
    answers["rollback"] = (2, "")
    with pytest.raises(PoolError, match="zfs rollback: exit status 2"):
        pool.rollback("tank@a")


def test_snapshots_of_datasets_that_exist_take_one_command(zfs):
    pool, _, asked, table = zfs
    table["tank/a@s"] = born()
    assert [s.full_name for s in pool.snapshots(["tank/a"])] == ["tank/a@s"]
    assert [words[2:6] for words in asked] == [["-t", "snapshot", "-d", "1"]]


def test_snapshots_of_no_datasets_take_none(zfs):
    pool, _, asked, _ = zfs
    assert pool.snapshots([]) == []
    assert asked == []


class Absent(ZfsCommand):
    """A ``zfs`` with tank/a only, which fails when asked for anything else."""

    def _run(self, *arguments):
        if "gone" in arguments:
            raise PoolError("zfs get", "no such dataset")
        if arguments[0] == "list":
            return "tank/a\tfilesystem\n"
        return zfs_get.answer(arguments, {"tank/a@s": born()})


@pytest.fixture
def absent():
    return Absent("zfs")


def test_snapshots_of_absent_datasets_are_none(absent):
    assert absent.snapshots(["gone"]) == []


def test_absent_datasets_do_not_hide_the_others(absent):
    assert [s.full_name for s in absent.snapshots(["gone", "tank/a"])] == ["tank/a@s"]


def test_a_failure_that_is_not_about_absence_is_no_empty_list(zfs):
    pool, answers, _, _ = zfs
    answers["list -Hp -t filesystem"] = "tank/a\tfilesystem\n"
    answers["get -Hp -t snapshot"] = (1, "I/O error")
    with pytest.raises(PoolError, match="I/O error"):
        pool.snapshots(["tank/a"])


def test_holds_are_their_tags(zfs):
    pool, answers, _, _ = zfs
    answers["holds"] = "t@s\tkeep\tSun Jun  1 12:00 2025\nt@s\ttwo words\tSun Jun  1 12:00 2025\n"
    assert pool.holds_of(["t@s"])["t@s"] == ["keep", "two words"]


def test_holds_of_many_snapshots_are_asked_for_at_once(zfs):
    pool, answers, asked, _ = zfs
    answers["holds"] = "t@b\tkeep\tnow\nt@other\tkeep\tnow\n"
    assert pool.holds_of(["t@a", "t@b"]) == {"t@a": [], "t@b": ["keep"]}
    assert asked == [["holds", "-H", "t@a", "t@b"]]
    asked.clear()
    assert pool.holds_of([]) == {}
    assert asked == []


def test_clones_are_listed_for_snapshots_that_have_any(zfs):
    pool, answers, _, _ = zfs
    answers["get"] = "t@a\tt/x,t/y z\nt@b\t\nt@c\t-\n"
    assert pool.clones(["t@a", "t@b", "t@c"]) == {"t@a": ["t/x", "t/y z"]}


def test_without_snapshots_zfs_is_not_called(zfs):
    pool, _, asked, _ = zfs
    assert pool.clones([]) == {}
    assert asked == []


def test_the_size_of_an_increment_is_the_total(zfs):
    pool, answers, _, _ = zfs
    answers["send -nP"] = "incremental\ta\tt@b\t1000\nincremental\tb\tt@c\t24\nsize\t1024\n"
    assert pool.increment_size("t@a", "t@c", raw=False) == 1024


@pytest.mark.parametrize(("raw", "flags"), [(False, "-L -c -e"), (True, "-w")])
def test_encrypted_datasets_are_sent_raw(zfs, raw, flags):
    pool, answers, asked, _ = zfs
    answers["send -nP"] = "size\t1\n"
    pool.increment_size("t@a", "t@b", raw=raw)
    assert " ".join(asked[-1]) == f"send -nP {flags} -I t@a t@b"


def test_bytes_written_since_a_missing_snapshot_are_an_error(zfs):
    """``zfs get`` prints ``-`` for it and exits with 0."""
    pool, answers, _, _ = zfs
    answers["get -Hp -o value written@a tank/web"] = "512\n"
    answers["get -Hp -o value written@gone tank/web"] = "-\n"
    assert pool.written_since("tank/web@a") == 512
    with pytest.raises(PoolError, match="written@gone: ZFS gives no number"):
        pool.written_since("tank/web@gone")


@pytest.mark.parametrize(("tags", "clone"), [("t@b\tkeep\tnow\n", ""), ("", "t/clone")])
def test_held_or_cloned_snapshots_stop_the_destruction_of_all(zfs, tags, clone):
    pool, answers, asked, table = zfs
    answers["list -Hp -t filesystem"] = "t\tfilesystem\n"
    table |= {f"t@{name}": born() for name in "ab"}
    answers["holds -H t@a t@b"] = tags
    answers["get -Hp -o name,value clones"] = f"t@a\t\nt@b\t{clone}\n"
    with pytest.raises(PoolError, match="t@b: held or cloned"):
        pool.destroy_snapshots(["t@a", "t@b"])
    assert not [words for words in asked if words[0] == "destroy"]


def test_long_lists_are_cut_below_the_kernels_limit():
    names = [f"tank/{'x' * 200}@{number}" for number in range(5000)]
    chunks = _chunks(names)
    assert [name for chunk in chunks for name in chunk] == names
    assert len(chunks) > 1
    assert all(sum(len(name) + 1 for name in chunk) <= 101_000 for chunk in chunks)


def test_without_names_there_are_no_chunks():
    assert _chunks([]) == []


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("command", "apt install zfsutils-linux"),
        ("device", "modprobe zfs"),
        ("permission", "run snaporch as root"),
        (None, None),
    ],
)
def test_a_host_without_zfs_is_reported_with_the_missing_part(
    monkeypatch, tmp_path, missing, message
):
    for name in ("bin", "dev"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    if missing != "command":
        (tmp_path / "bin" / "zfs").touch(0o755)
    if missing != "device":
        (tmp_path / "dev" / "zfs").touch()
    if missing == "permission":  # which root always has
        real = os.access
        monkeypatch.setattr(
            os, "access", lambda path, *how: path != tmp_path / "dev/zfs" and real(path, *how)
        )
    said = pytest.raises(UnavailableError, match=message) if missing else nullcontext()
    with said:
        ZfsCommand.open(tmp_path / "dev", str(tmp_path / "bin"))


def test_a_command_that_cannot_be_run_is_an_error(tmp_path):
    with pytest.raises(PoolError, match="cannot be run: Permission denied"):
        ZfsCommand(str(tmp_path)).datasets()


def test_words_of_zfs_are_always_english(tmp_path, monkeypatch):
    script = tmp_path / "zfs"
    script.write_text('#!/bin/sh\nprintf "%s\\tfilesystem\\n" "$LC_ALL"\n')
    script.chmod(0o755)
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    assert ZfsCommand(str(script)).datasets() == [Dataset("C", DatasetKind.FILESYSTEM)]


def test_an_increment_goes_to_a_private_file(tmp_path):
    script = tmp_path / "zfs"
    script.write_text("#!/bin/sh\nprintf stream\n")
    script.chmod(0o755)
    path = tmp_path / "000.zfs"
    assert ZfsCommand(str(script)).send_increment("t@a", "t@b", path, raw=False) == 6
    assert path.read_bytes() == b"stream"
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_increment_is_on_stable_storage(tmp_path, to_disk):
    """The snapshots in it are destroyed next."""
    script = tmp_path / "zfs"
    script.write_text("#!/bin/sh\nprintf stream\n")
    script.chmod(0o755)
    ZfsCommand(str(script)).send_increment("t@a", "t@b", tmp_path / "000.zfs", raw=False)
    assert to_disk == ["000.zfs"]


def test_an_increment_reports_what_is_written_while_it_is_written(tmp_path):
    """``zfs send`` ends only after its first bytes were reported."""
    script, gate = tmp_path / "zfs", tmp_path / "gate"
    os.mkfifo(gate)
    script.write_text(f"#!/bin/sh\nprintf stream; read x <{gate}\n")
    script.chmod(0o755)
    amounts = []

    def on_written(count):
        amounts.append(count)
        if count:
            gate.write_text("\n")

    ZfsCommand(str(script)).send_increment(
        "t@a", "t@b", tmp_path / "000.zfs", on_written, raw=False
    )
    assert amounts[-1] == 6


def test_an_increment_that_fails_leaves_no_file(tmp_path):
    script = tmp_path / "zfs"
    script.write_text("#!/bin/sh\necho broken >&2; exit 1\n")
    script.chmod(0o755)
    with pytest.raises(PoolError, match="zfs send t@b: broken"):
        ZfsCommand(str(script)).send_increment("t@a", "t@b", tmp_path / "000.zfs", raw=False)
    assert not (tmp_path / "000.zfs").exists()


@pytest.mark.parametrize("status", [1, 2, 137])
def test_a_stream_that_is_not_received_is_an_error(tmp_path, status):
    script, stream = tmp_path / "zfs", tmp_path / "000.zfs"
    script.write_text(f"#!/bin/sh\ncat >/dev/null; echo broken >&2; exit {status}\n")
    script.chmod(0o755)
    stream.write_bytes(b"stream")
    with pytest.raises(PoolError, match="zfs receive tank/a: broken"):
        ZfsCommand(str(script)).receive("tank/a", stream)


def test_local_properties_are_neither_inherited_nor_received(zfs):
    pool, _, asked, table = zfs
    table |= {
        "t/a": {"snaporch:clone": "u", "snaporch:clone-name": "a\tb", "other:x": "y"},
        "t/a/b": {"snaporch:clone": ("u", "inherited from t/a")},
        "t/b": {"snaporch:clone": "v", "snaporch:clone-name": ("c", "received")},
    }
    assert pool.local_properties(["snaporch:clone", "snaporch:clone-name"]) == {
        "t/a": {"snaporch:clone": "u", "snaporch:clone-name": "a\tb"},
        "t/b": {"snaporch:clone": "v"},
    }
    assert len(asked) == 1


def test_user_properties_are_local_or_received(zfs):
    pool, _, _, table = zfs
    many = {f"org:{'x' * 200}-{number}": f"{number}\n" for number in range(1000)}
    table |= {
        "t/a@s": born() | {"org:x": "1", "org:y": ("2", "received"), "org:z": ("3", "inherited")},
        "t/a@t": born(),
        "t/a@u": born() | many,
    }
    assert pool.user_properties(["t/a@s", "t/a@t", "t/a@u"]) == {
        "t/a@s": {"org:x": "1", "org:y": "2"},
        "t/a@u": many,
    }


def test_no_argument_of_a_command_is_too_long_for_the_kernel(zfs):
    pool, _, asked, table = zfs
    table["t@s"] = born() | {f"org:{number:0250}": "1" for number in range(1000)}
    assert len(pool.user_properties(["t@s"])["t@s"]) == 1000
    assert max(len(word) for words in asked for word in words) < 131072


def test_a_hold_tag_of_several_lines_is_not_read_as_another(zfs):
    """Tags also arrive with streams; without libzfs_core they cannot be parsed reliably."""
    pool, answers, _, _ = zfs
    answers["holds"] = "t@s\tkeep\tnow\nt@s\ttwo\nlines\tnow\nt@s\ta\tb\tnow\n"
    assert pool.holds_of(["t@s"])["t@s"] == ["keep"]


def test_what_destroying_frees_is_asked_for_each_dataset_at_once(zfs):
    pool, answers, asked, _ = zfs
    answers["destroy -nvp tank/a@x,y"] = "destroy\ttank/a@x\ndestroy\ttank/a@y\nreclaim\t1024\n"
    answers["destroy -nvp tank/b@x"] = "destroy\ttank/b@x\nreclaim\t1\n"
    assert pool.reclaimable(["tank/a@x", "tank/b@x", "tank/a@y"]) == 1025
    assert len(asked) == 2
    answers["destroy -nvp tank/c@x"] = "destroy\ttank/c@x\n"
    with pytest.raises(PoolError, match="gives no number"):
        pool.reclaimable(["tank/c@x"])


@pytest.mark.parametrize(
    ("printed", "size"),
    [
        ("12\n0\n12\n13\n-\n", 8192),
        ("0\n9\n", 512),
        ("0\n-\n", 0),
        ("64\n", 0),
        ("", 0),
        ((2, "bad property list: invalid property 'ashift'"), 0),  # OpenZFS before 2.2
    ],
)
def test_the_largest_sector_of_a_pools_devices(zfs, printed, size):
    pool, answers, _, _ = zfs
    answers["get -Hp -o value ashift tank all-vdevs"] = printed
    assert pool.sector_bytes("tank") == size


@pytest.mark.parametrize(
    ("printed", "groups"),
    [
        ("root-0\t1\nmirror-0\t2\n/dev/a\t0\n", ()),
        ("raidz2-0\t6\n/dev/a\t-\nraidz1-1\t3\n", (ParityGroup(2, 4), ParityGroup(1, 2))),
        ("draid2:8d:24c:1s-0\t24\n", (ParityGroup(2, 8, is_draid=True),)),
        ("raidz2-0\t-\nraidz3-1\t2\ndraid1:0d:3c:0s-2\t3\nraidz2\t6\n", ()),
        ("", ()),
        ((2, "bad property list: invalid property 'numchildren'"), ()),  # OpenZFS before 2.2
    ],
)
def test_the_vdevs_with_parity(zfs, printed, groups):
    pool, answers, _, _ = zfs
    answers["get -Hp -o name,value numchildren tank all-vdevs"] = printed
    assert pool.parity_groups("tank") == groups


@pytest.mark.parametrize(
    ("group", "kib", "sectors"),
    [
        (ParityGroup(1, 2), 8, 4),  # two, one of parity, one of padding
        (ParityGroup(1, 2), 16, 6),
        (ParityGroup(1, 2), 128, 48),
        (ParityGroup(2, 8), 8, 6),
        (ParityGroup(2, 8), 128, 42),
        (ParityGroup(3, 8), 4, 4),
        (ParityGroup(2, 8, is_draid=True), 4, 10),
        (ParityGroup(2, 8, is_draid=True), 36, 20),
    ],
)
def test_what_a_record_takes(group, kib, sectors):
    assert group.allocated(kib << 10, 4096) == sectors * 4096
