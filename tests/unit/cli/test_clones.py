"""``clone``, ``verify``, ``show`` and ``extract`` as a user sees them."""

from pathlib import Path

import pytest

from snaporch.errors import ExitCode
from snaporch.interrupt import Interrupt
from snaporch.locks import domain_lock


@pytest.fixture
def taken(host, snaporch, monkeypatch):
    """A guest with a snapshot ``s1``."""
    host.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    assert snaporch("snapshot", "web", "--name", "s1", "--quiet").code == 0
    return host


def flip(host):
    (image,) = host.paths.bundles.glob("*/*/ram.save")
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)


# -- clone --------------------------------------------------------------------------------------


def test_clone_prints_how_to_start_the_clone(taken, snaporch):
    answer = snaporch("clone", "web@s1", "test")
    assert answer.code == 0
    assert answer.out == "test  clone of web@s1, defined; virsh start test\n"
    assert "keeps flash/web@s1, tank/web@s1 from being destroyed" in answer.err


CARD = "<interface type='network'><mac address='52:54:00:00:00:01'/></interface>"


@pytest.mark.parametrize("card", ["", CARD])
def test_clone_warns_that_a_running_clone_has_the_same_addresses(host, snaporch, card):
    host.add_guest()
    guest = host.guest()
    guest.live = guest.live.replace("</devices>", f"{card}</devices>")
    assert snaporch("snapshot", "web", "--name", "s1", "--quiet").code == 0
    answer = snaporch("clone", "web@s1", "test", "--running")
    assert answer.out == "test  clone of web@s1, resumed from RAM\n"
    assert ("has the addresses of web in its RAM; network: none" in answer.err) == bool(card)


def test_clones_are_made_and_deleted_with_json_output(taken, snaporch):
    made = snaporch("clone", "web@s1", "test", "--json")
    assert (made.json["name"], made.err) == ("test", "")
    deleted = snaporch("clone", "--delete", "test", "--json")
    assert deleted.json["uuid"] == made.json["uuid"]
    assert snaporch("clone", "--delete", "test").code == ExitCode.NOT_FOUND


@pytest.mark.parametrize(
    "words",
    [
        ["web@s1"],
        ["--delete", "web", "test"],
        ["--delete", "web", "--running"],
        [],
    ],
)
def test_wrong_arguments_of_clone(taken, snaporch, words):
    answer = snaporch("clone", *words)
    assert answer.code == ExitCode.USAGE
    assert len(answer.err.splitlines()) == 1
    assert len(taken.pool.datasets()) == 2


def test_an_original_is_never_deleted(taken, snaporch):
    answer = snaporch("clone", "--delete", "web")
    assert answer.code == ExitCode.REFUSED
    assert taken.is_as_it_was()


# -- verify -------------------------------------------------------------------------------------


def test_a_verification_prints_one_line(taken, snaporch):
    answer = snaporch("verify", "web@s1", "--quiet")
    assert answer.code == 0
    assert answer.out == "web@s1  passed, a clone resumed from RAM\n"
    assert answer.err == ""


def test_a_failed_verification_is_exit_code_8(taken, snaporch):
    flip(taken)
    answer = snaporch("verify", "web@s1", "--quiet")
    assert answer.code == ExitCode.FAILED
    assert answer.out == "web@s1  FAILED in: checksums\n"
    assert "ram.save" in answer.err
    back = "put what is damaged or missing back from a replica: see docs/how-to/verify.md"
    assert f"{back}; or restore only its disks: snaporch restore --cold web@s1" in answer.err
    (problem,) = [line for line in snaporch("status").out.splitlines() if "verification" in line]
    assert f"failed; the stored data is damaged; {back}; " in problem
    assert "failed" in snaporch("list").out
    assert "web     s1" in snaporch("list").out
    assert " crash " in snaporch("list").out
    assert " damaged " in snaporch("list").out
    (entry,) = snaporch("list", "--json").json
    assert (entry["level"], entry["state"]) == ("crash", "damaged")
    shown = snaporch("show", "web@s1").out
    assert "virsh restore" not in shown
    assert "state     damaged" in shown
    refused = snaporch("restore", "web@s1", "--yes", "--quiet")
    assert refused.code == ExitCode.REFUSED
    assert f"the bundle is damaged; {back}, then run `snaporch verify --checksums web@s1`" in (
        refused.err
    )


def test_a_failed_verification_names_the_steps_and_not_what_was_reached(taken, snaporch, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    answer = snaporch("verify", "web@s1", "--quiet", "--script", str(script))
    assert answer.out == "web@s1  FAILED in: script\n"
    answer = snaporch("verify", "web@s1", "--quiet", "--checksums")
    assert answer.out == "web@s1  FAILED in: script\n"
    assert "what was checked now is right, but it failed before in: script" in answer.err


@pytest.mark.parametrize("option", ["--script-timeout", "--sample"])
@pytest.mark.parametrize("value", ["x", "0", "9" * 5000])
def test_a_number_that_is_none_is_refused_in_plain_words(snaporch, option, value):
    answer = snaporch("verify", "--all", option, value)
    assert answer.code == ExitCode.USAGE
    assert f"'{option}': expected a whole number from 1 to " in answer.err


def test_the_list_has_a_column_for_verifications_if_there_are_any(taken, snaporch):
    assert "VERIFIED" not in snaporch("list").out
    snaporch("verify", "web@s1", "--quiet", "--checksums")
    assert "VERIFIED" in snaporch("list").out
    (entry,) = snaporch("list", "--json").json
    assert entry["verified"]["reached"] == "checked"


def test_one_verification_as_json_is_an_object_and_several_are_an_array(taken, snaporch):
    assert snaporch("snapshot", "web", "--name", "s2", "--quiet").code == 0
    assert snaporch("verify", "web@s1", "--json").json["snapshot"] == "s1"
    answer = snaporch("verify", "web@s1", "web@s2", "--json")
    assert [document["snapshot"] for document in answer.json] == ["s1", "s2"]
    answer = snaporch("verify", "--all", "--sample", "1", "--json")
    assert [document["snapshot"] for document in answer.json] == ["s1"]


def test_one_verification_at_a_time(taken, snaporch):
    runtime, interrupt = taken.paths.runtime, Interrupt()
    with domain_lock(
        runtime, "verification", "verification", "verify", wait=0, interrupt=interrupt
    ):
        answer = snaporch("verify", "web@s1")
        assert answer.code == ExitCode.BUSY
        assert "held by verify" in answer.err
        due = snaporch("verify", "--due")
        assert (due.code, due.out) == (0, "")
        assert "due verifications run later" in due.err
    assert snaporch("verify", "web@s1", "--quiet").code == 0


def test_verify_lowers_its_priority(taken, snaporch):
    snaporch("verify", "web@s1", "--quiet")
    assert taken.lowered == ["verify"]


def test_clone_lowers_its_priority_and_its_deletion_does_not(taken, snaporch):
    assert snaporch("clone", "web@s1", "copy").code == 0
    assert snaporch("clone", "--delete", "copy").code == 0
    assert taken.lowered == ["clone"]


def test_verify_all_without_snapshots(host, snaporch):
    answer = snaporch("verify", "--all")
    assert (answer.code, answer.out) == (0, "")
    assert "there are no snapshots" in answer.err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["web@s1", "--all"],
        ["web@s1", "--sample", "1"],
        ["web@s1", "--checksums", "--script", "/bin/true"],
        ["--all", "--sample", "0"],
        ["--due", "web@s1"],
        ["--due", "--all"],
        ["--due", "--checksums"],
        ["--due", "--wait", "1s"],
    ],
)
def test_wrong_arguments_of_verify(taken, snaporch, words):
    assert snaporch("verify", *words).code == ExitCode.USAGE


def test_a_misspelt_snapshot_stops_all_verifications(taken, snaporch):
    answer = snaporch("verify", "web@s1", "web@s9")
    assert answer.code == ExitCode.NOT_FOUND
    assert "verified" not in str(snaporch("list").out).lower()


def test_clones_of_a_killed_verification_are_recovered(taken, snaporch):
    mark = "11111111-2222-3333-4444-555555555555"
    taken.pool.clone("tank/web@s1", "tank/web-x", {"snaporch:verify": mark})
    answer = snaporch("recover", "--dry-run")
    assert "tank/web-x" in answer.out
    assert len(taken.pool.datasets()) == 3
    answer = snaporch("recover")
    assert answer.code == 0
    assert "destroyed tank/web-x" in answer.out
    assert "nothing to recover" in snaporch("recover").err


# -- show ---------------------------------------------------------------------------------------


def test_show_ends_with_the_commands_by_hand(taken, snaporch):
    answer = snaporch("show", "web@s1")
    assert answer.code == 0
    assert answer.out.startswith("web@s1\n")
    lines = answer.out.split("by hand, with zfs and virsh alone:\n")[1].splitlines()
    assert lines == snaporch("show", "web@s1", "--json").json["by_hand"]
    assert lines[-2].startswith("virsh restore ")


def test_show_without_a_bundle(taken, snaporch):
    (bundle,) = taken.paths.bundles.glob("*/*")
    bundle.rename(bundle.with_name("elsewhere"))
    answer = snaporch("show", "web@s1")
    assert answer.code == 0
    assert "missing" in answer.out
    assert snaporch("show", "web@s1", "--json").json["manifest"] is None


def test_show_of_a_snapshot_that_does_not_exist(taken, snaporch):
    assert snaporch("show", "web@s9").code == ExitCode.NOT_FOUND


# -- extract ------------------------------------------------------------------------------------


def test_an_extracted_disk(taken, snaporch, tmp_path):
    folder = taken.root / "zfs" / "tank/web" / ".zfs" / "snapshot" / "s1"
    folder.mkdir(parents=True)
    (folder / "web-vda.img").write_bytes(b"content")
    answer = snaporch("extract", "web@s1", str(tmp_path / "x"), "--disk", "vda", "--quiet")
    assert answer.code == 0
    assert answer.out.startswith(f"{tmp_path}/x  vda of web@s1, raw, 7 B, ")
    answer = snaporch("extract", "web@s1", str(tmp_path / "y"), "--disk", "vda", "--json")
    assert answer.json[0]["path"] == str(tmp_path / "y")
    assert Path(tmp_path / "y").read_bytes() == b"content"


def test_a_disk_that_is_not_extracted_is_named(host, snaporch, tmp_path):
    with host.config_file.open("a") as stream:
        stream.write('[domain.web]\nexclude_disks = ["vdb"]\n')
    host.add_guest(disks={"vda": "tank/web", "vdb": "flash/web"})
    assert snaporch("snapshot", "web", "--name", "s1").code in (ExitCode.OK, ExitCode.WARNINGS)
    folder = host.root / "zfs" / "tank/web" / ".zfs" / "snapshot" / "s1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "web-vda.img").write_bytes(b"content")
    answer = snaporch("extract", "web@s1", str(tmp_path), "--json")
    assert answer.code == ExitCode.WARNINGS
    assert "the disk vdb is not in the snapshot: " in answer.err
    assert [each["disk"] for each in answer.json] == ["vda"]
    answer = snaporch("extract", "web@s1", str(tmp_path / "y"), "--disk", "vdb")
    assert answer.code == ExitCode.NOT_FOUND
    assert "vdb: is not in the snapshot: " in answer.err
    answer = snaporch("extract", "web@s1", str(tmp_path / "y"), "--disk", "vda")
    assert (answer.code, "note" in answer.err) == (ExitCode.OK, False)
