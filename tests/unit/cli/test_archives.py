"""``export`` and ``import`` as a user sees them."""

from pathlib import Path

import pytest
from fakes.archives import VDA, in_snapshot

from snaporch.errors import ExitCode, UnavailableError


@pytest.fixture
def taken(host, snaporch):
    """A guest with a snapshot ``s1``."""
    host.add_guest()
    assert snaporch("snapshot", "web", "--name", "s1", "--quiet").code == 0
    in_snapshot(host, "tank/web", "web-vda.img", VDA)
    return host


@pytest.fixture
def lost(taken, snaporch, tmp_path):
    """The archive of a guest that is here no more."""
    assert snaporch("export", "web@s1", str(tmp_path / "a.tar.zst"), "--quiet").code == 0
    taken.hypervisor.guests.clear()
    (tmp_path / "images").mkdir()
    return tmp_path / "a.tar.zst"


def test_export_prints_the_file(taken, snaporch, tmp_path):
    answer = snaporch("export", "web@s1", str(tmp_path))
    assert answer.code == 0
    assert answer.out.startswith(f"{tmp_path}/web@s1.tar.zst  web@s1, with RAM, ")
    answer = snaporch("export", "web@s1", str(tmp_path / "b"), "--no-ram", "--json")
    assert (answer.json["with_ram"], answer.json["path"]) == (False, str(tmp_path / "b"))
    assert snaporch("export", "web@s1", str(tmp_path)).code == ExitCode.REFUSED


def test_an_archive_without_a_disk_is_incomplete(host, snaporch, tmp_path):
    host.add_guest(disks={"vda": "tank/web", "vdb": "tank/more"})
    with (tmp_path / "snaporch.toml").open("a") as config:
        config.write('exclude_disks = ["vdb"]\n')
    assert snaporch("snapshot", "web", "--name", "s1", "--quiet").code == 0
    in_snapshot(host, "tank/web", "web-vda.img", VDA)
    answer = snaporch("export", "web@s1", str(tmp_path / "a"), "--json")
    assert answer.code == ExitCode.WARNINGS
    assert list(answer.json["left_out"]) == ["vdb"]


def test_json_and_an_archive_do_not_share_standard_output(taken, snaporch):
    assert snaporch("export", "web@s1", "-", "--json").code == ExitCode.USAGE


def test_import_prints_the_guest(lost, snaporch, tmp_path):
    answer = snaporch("import", str(lost), "--directory", str(tmp_path / "images"))
    assert answer.code == 0
    place = tmp_path / "images" / "web"
    assert answer.out == f"web  imported from web@s1 into {place}, resumed from RAM\n"
    assert (place / "vda.raw").read_bytes() == VDA


def test_import_needs_no_zfs(lost, command_host, snaporch, tmp_path):
    def unavailable(**_options):
        raise UnavailableError("zfs", "is not installed")

    command_host.open_pool = unavailable
    answer = snaporch("import", str(lost), "--directory", str(tmp_path / "images"), "--json")
    assert answer.json["state"] == "resumed"
    assert answer.json["cold_reason"] is None


def test_import_of_a_file_that_does_not_exist(host, snaporch, tmp_path):
    answer = snaporch("import", str(tmp_path / "absent"))
    assert answer.code == ExitCode.NOT_FOUND
    assert answer.err == f"snaporch: {tmp_path}/absent: No such file or directory\n"


def test_two_places_for_one_guest(lost, snaporch):
    options = ("--directory", "/x", "--dataset", "tank")
    assert snaporch("import", str(lost), *options).code == ExitCode.USAGE


def test_a_damaged_archive_is_one_line(lost, snaporch, tmp_path):
    lost.write_bytes(lost.read_bytes()[:-1])
    answer = snaporch("import", str(lost), "--directory", str(tmp_path / "images"), "--quiet")
    assert answer.code == ExitCode.REFUSED
    assert answer.err.count("\n") == 1
    assert list(Path(tmp_path / "images").iterdir()) == []
