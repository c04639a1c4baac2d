import subprocess
from datetime import UTC, datetime

import pytest

from snaporch.errors import UnavailableError
from snaporch.model import Dataset, DatasetKind
from snaporch.pool import command
from snaporch.pool.command import ZfsCommand, _chunks, _parse_snapshot
from snaporch.pool.protocol import PoolError

UNSET = ["-"] * len(command.PROPERTIES)


@pytest.fixture
def zfs(monkeypatch):
    """A ``zfs`` that answers by its first words; unasked ones fail the test."""
    answers, asked = {}, []

    def run(words, **_options):
        asked.append(words[1:])
        for start, answer in answers.items():
            if " ".join(words[1:]).startswith(start):
                code, text = answer if isinstance(answer, tuple) else (0, answer)
                out, err = (text, "") if code == 0 else ("", text)
                return subprocess.CompletedProcess(words, code, out.encode(), err.encode())
        raise AssertionError(words)

    monkeypatch.setattr(command.subprocess, "run", run)
    pool = ZfsCommand("zfs")
    return pool, answers, asked


def line(*values):
    return "\t".join(map(str, values))


def test_a_snapshots_line_with_all_properties():
    found = _parse_snapshot(
        line(
            "tank/vm one@s 1",
            2**64 - 1,
            77,
            1748779200,
            "run-1",
            "ram",
            "u/r",
            "u",
            "when",
            "-",
            "pair/r",
            "u/r",
            "tank",
            "nas,usb",
            "yes",
            "Bär\tx",
        )
    )
    assert (found.dataset, found.name, found.full_name) == ("tank/vm one", "s 1", "tank/vm one@s 1")
    assert (found.guid, found.createtxg) == (2**64 - 1, 77)
    assert found.created == datetime(2025, 6, 1, 12, tzinfo=UTC)
    assert found.properties == {
        "run": "run-1",
        "level": "ram",
        "bundle": "u/r",
        "uuid": "u",
        "verified": "when",
        "group": "pair/r",
        "replicated": "nas,usb",
        "torn": "yes",
        "ram": "u/r",
        "ram-pools": "tank",
        "domain": "Bär\tx",
    }


def test_properties_that_are_not_set_are_absent():
    assert _parse_snapshot(line("tank@s", 1, 2, 3, *UNSET)).properties == {}


def test_datasets_with_their_kinds(zfs):
    pool, answers, _ = zfs
    answers["list"] = "tank\tfilesystem\ntank/vm one\tfilesystem\ntank/vol\tvolume\n"
    assert pool.datasets() == [
        Dataset("tank", DatasetKind.FILESYSTEM),
        Dataset("tank/vm one", DatasetKind.FILESYSTEM),
        Dataset("tank/vol", DatasetKind.VOLUME),
    ]


SURVEY = "list -Hp -t filesystem,volume,snapshot"


def test_a_survey_is_one_command(zfs):
    pool, answers, asked = zfs
    rows = [
        line("-", "-", "hourly", "tank/a", 1, 2, 3, *UNSET),
        line("-", "-", "-", "tank/b", 1, 2, 3, *UNSET),
        line("0", "", "hourly", "tank/a@free", 1, 2, 3, "r", *"----", "hourly", *"-----", "web"),
        line("2", "", "hourly", "tank/a@held", 2, 2, 3, *UNSET),
        line("0", "tank/x,tank/y", "-", "tank/b@cloned", 3, 2, 3, *UNSET),
    ]
    answers[SURVEY] = "\n".join(rows) + "\n"
    found = pool.survey()
    assert [s.full_name for s in found.snapshots] == ["tank/a@free", "tank/a@held", "tank/b@cloned"]
    assert found.snapshots[0].properties == {"run": "r", "retention": "hourly", "domain": "web"}
    assert found.pinned == {"tank/a@held": "held", "tank/b@cloned": "cloned as tank/x,tank/y"}
    assert found.policies == {"tank/a": "hourly"}
    assert len(asked) == 1


def test_a_property_with_line_breaks_makes_no_row_of_a_survey(zfs):
    pool, answers, _ = zfs
    row = line("0", "", "two\nlines", "tank/a@s", 1, 2, 3, *UNSET)
    answers[SURVEY] = row + "\n"
    assert pool.survey().snapshots == ()


def test_a_pool_without_datasets_lists_none(zfs):
    pool, answers, _ = zfs
    answers["list"] = ""
    assert pool.datasets() == []
    assert pool.snapshots() == []


def test_a_failed_listing_is_an_error_and_no_empty_list(zfs):
    pool, answers, _ = zfs
    answers["list"] = (1, "cannot open 'tank': I/O error\n")
    with pytest.raises(PoolError, match="zfs list: cannot open 'tank': I/O error"):
        pool.snapshots()


def test_a_failure_without_words_tells_its_status(zfs):
    pool, answers, _ = zfs
    answers["rollback"] = (2, "")
    with pytest.raises(PoolError, match="zfs rollback: exit status 2"):
        pool.rollback("tank@a")


def test_snapshots_of_datasets_that_exist_take_one_command(zfs):
    pool, answers, asked = zfs
    answers["list -Hp -t snapshot"] = line("tank/a@s", 1, 2, 3, *UNSET) + "\n"
    assert [s.full_name for s in pool.snapshots(["tank/a"])] == ["tank/a@s"]
    assert [words[-3:] for words in asked] == [["-d", "1", "tank/a"]]


def test_snapshots_of_no_datasets_take_none(zfs):
    pool, _, asked = zfs
    assert pool.snapshots([]) == []
    assert asked == []


@pytest.fixture
def absent(tmp_path):
    """A ``zfs`` that knows tank/a only, and fails when asked for anything else."""
    script = tmp_path / "zfs"
    row = line("tank/a@s", 1, 2, 3, *UNSET)
    script.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        "*gone*) echo no such dataset >&2; exit 1;;\n"
        "*filesystem*) printf 'tank/a\\tfilesystem\\n';;\n"
        f"*) printf '%s\\n' '{row}';;\n"
        "esac\n"
    )
    script.chmod(0o755)
    return ZfsCommand(str(script))


def test_snapshots_of_absent_datasets_are_none(absent):
    assert absent.snapshots(["gone"]) == []


def test_absent_datasets_do_not_hide_the_others(absent):
    assert [s.full_name for s in absent.snapshots(["gone", "tank/a"])] == ["tank/a@s"]


def test_a_failure_that_is_not_about_absence_is_no_empty_list(zfs):
    pool, answers, _ = zfs
    answers["list -Hp -t filesystem"] = "tank/a\tfilesystem\n"
    answers["list -Hp -t snapshot"] = (1, "I/O error")
    with pytest.raises(PoolError, match="I/O error"):
        pool.snapshots(["tank/a"])


def test_newer_are_snapshots_and_bookmarks_born_later(zfs):
    pool, answers, _ = zfs
    answers["list"] = "t/a@old\t5\nt/a@s\t6\nt/a@new one\t7\nt/a#mark\t8\nt/a#before\t5\n"
    assert pool.newer("t/a@s") == ["t/a@new one", "t/a#mark"]


def test_newer_than_an_absent_snapshot_is_an_error(zfs):
    pool, answers, _ = zfs
    answers["list"] = "t/a@old\t5\n"
    with pytest.raises(PoolError, match="t/a@s: no such snapshot"):
        pool.newer("t/a@s")


def test_holds_are_their_tags(zfs):
    pool, answers, _ = zfs
    answers["holds"] = "t@s\tkeep\tSun Jun  1 12:00 2025\nt@s\ttwo words\tSun Jun  1 12:00 2025\n"
    assert pool.holds("t@s") == ["keep", "two words"]


def test_clones_are_listed_for_snapshots_that_have_any(zfs):
    pool, answers, _ = zfs
    answers["get"] = "t@a\tt/x,t/y z\nt@b\t\nt@c\t-\n"
    assert pool.clones(["t@a", "t@b", "t@c"]) == {"t@a": ["t/x", "t/y z"]}


def test_no_snapshots_no_question(zfs):
    pool, _, asked = zfs
    assert pool.clones([]) == {}
    assert asked == []


def test_the_size_of_an_increment_is_the_total(zfs):
    pool, answers, _ = zfs
    answers["get"] = "off\n"
    answers["send -nP"] = "incremental\ta\tt@b\t1000\nincremental\tb\tt@c\t24\nsize\t1024\n"
    assert pool.increment_size("t@a", "t@c") == 1024


@pytest.mark.parametrize(("encryption", "flags"), [("off", "-L -c -e"), ("aes-256-gcm", "-w")])
def test_encrypted_datasets_are_sent_raw(zfs, encryption, flags):
    pool, answers, asked = zfs
    answers["get"] = f"{encryption}\n"
    answers["send -nP"] = "size\t1\n"
    pool.increment_size("t@a", "t@b")
    assert " ".join(asked[-1]) == f"send -nP {flags} -I t@a t@b"


def test_held_or_cloned_snapshots_stop_the_destruction_of_all(zfs):
    pool, answers, asked = zfs
    answers["list -Hp -t filesystem"] = "t\tfilesystem\n"
    answers["list -Hp -t snapshot"] = "".join(line(f"t@{n}", 1, 2, 3, *UNSET) + "\n" for n in "ab")
    answers["holds -H t@a"] = ""
    answers["holds -H t@b"] = "t@b\tkeep\tnow\n"
    answers["get"] = "t@a\t\nt@b\t\n"
    with pytest.raises(PoolError, match="t@b: held or cloned"):
        pool.destroy_snapshots(["t@a", "t@b"])
    assert not [words for words in asked if words[0] == "destroy"]


def test_long_lists_are_cut_below_the_kernels_limit():
    names = [f"tank/{'x' * 200}@{number}" for number in range(5000)]
    chunks = _chunks(names)
    assert [name for chunk in chunks for name in chunk] == names
    assert len(chunks) > 1
    assert all(sum(len(name) + 1 for name in chunk) <= 101_000 for chunk in chunks)


def test_no_names_no_chunks():
    assert _chunks([]) == []


@pytest.mark.parametrize(
    ("which", "device", "permitted", "message"),
    [
        (None, True, True, "apt install zfsutils-linux"),
        ("/sbin/zfs", False, True, "modprobe zfs"),
        ("/sbin/zfs", True, False, "run snaporch as root"),
    ],
)
def test_a_host_without_zfs_is_told_what_is_missing(monkeypatch, which, device, permitted, message):
    monkeypatch.setattr(command.shutil, "which", lambda *_args, **_options: which)
    monkeypatch.setattr(command.os.path, "exists", lambda _path: device)
    monkeypatch.setattr(command.os, "access", lambda *_args: permitted)
    with pytest.raises(UnavailableError, match=message):
        ZfsCommand.open()


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
    script.write_text("#!/bin/sh\ncase $1 in get) echo off;; send) printf stream;; esac\n")
    script.chmod(0o755)
    path = tmp_path / "000.zfs"
    assert ZfsCommand(str(script)).send_increment("t@a", "t@b", path) == 6
    assert path.read_bytes() == b"stream"
    assert path.stat().st_mode & 0o777 == 0o600


def test_an_increment_is_on_stable_storage(tmp_path, to_disk):
    """What it holds is destroyed next."""
    script = tmp_path / "zfs"
    script.write_text("#!/bin/sh\ncase $1 in get) echo off;; *) printf stream;; esac\n")
    script.chmod(0o755)
    ZfsCommand(str(script)).send_increment("t@a", "t@b", tmp_path / "000.zfs")
    assert to_disk == ["000.zfs"]


def test_an_increment_that_fails_leaves_no_file(tmp_path):
    script = tmp_path / "zfs"
    script.write_text("#!/bin/sh\ncase $1 in get) echo off;; *) echo broken >&2; exit 1;; esac\n")
    script.chmod(0o755)
    with pytest.raises(PoolError, match="zfs send t@b: broken"):
        ZfsCommand(str(script)).send_increment("t@a", "t@b", tmp_path / "000.zfs")
    assert not (tmp_path / "000.zfs").exists()


def test_local_properties_keep_what_they_say(zfs):
    pool, answers, asked = zfs
    answers["get"] = (
        "t/a\tsnaporch:clone\tu\nt/a\tsnaporch:clone-name\ta\tb\nt/b\tsnaporch:clone\tv\n"
    )
    assert pool.local_properties(["snaporch:clone", "snaporch:clone-name"]) == {
        "t/a": {"snaporch:clone": "u", "snaporch:clone-name": "a\tb"},
        "t/b": {"snaporch:clone": "v"},
    }
    assert asked[-1][-1] == "snaporch:clone,snaporch:clone-name"
    assert "local" in asked[-1]
