"""A machine that only keeps copies, without libvirt."""

import json

import pytest

from snaporch.default_paths import LIBVIRT_URI
from snaporch.errors import ExitCode, UnavailableError
from snaporch.hypervisor.absent import NoGuests, is_expected

POLICY = '[policy.hourly]\nevery = "1h"\n'


def away(_uri):
    raise UnavailableError("libvirt", "does not answer")


@pytest.fixture
def backup(host, command_host):
    """It has a source that was never pulled."""
    host.pool.create("backup")
    host.pool.create("backup/vm1")
    (host.root / "pulled").mkdir()
    bundles, schedule = (json.dumps(str(host.root / each)) for each in ("pulled", "schedule"))
    text = host.config_file.read_text().replace("[paths]\n", f"[paths]\nschedule = {schedule}\n")
    source = f'[source.vm1]\nhost = "vm1"\ndataset = "backup/vm1"\nbundles = {bundles}\n'
    host.config_file.write_text(text + source + "keep = { daily = 7 }\n")
    command_host.open_hypervisor = away
    command_host.has_libvirt = lambda _uri: False
    return host


@pytest.mark.parametrize("words", [("status",), ("list",), ("plan",), ("prune",), ("run-due",)])
def test_a_backup_machine_needs_no_libvirt(backup, snaporch, words):
    answer = snaporch(*words)
    assert "libvirt" not in answer.err + answer.out
    assert answer.code == (ExitCode.WARNINGS if words == ("status",) else ExitCode.OK)
    assert "[pull-late]" in snaporch("status").out


@pytest.mark.parametrize("words", [("status",), ("run-due",)])
def test_a_host_whose_libvirt_does_not_answer_is_not_called_well(
    backup, snaporch, command_host, words
):
    command_host.has_libvirt = lambda _uri: True
    assert snaporch(*words).code == ExitCode.UNAVAILABLE
    command_host.has_libvirt = lambda _uri: False
    backup.config_file.write_text(backup.config_file.read_text() + POLICY)
    assert snaporch(*words).code == ExitCode.UNAVAILABLE


def test_check_has_the_source_and_nothing_of_libvirt(backup, snaporch):
    answer = snaporch("check", "--json")
    assert answer.out, answer.err
    assert "source-unreachable" in {each["code"] for each in answer.json}
    assert not {"libvirt", "QEMU", "RAM"} & {each["subject"] for each in answer.json}


def test_a_pull_opens_no_libvirt_where_there_is_one(backup, snaporch, command_host):
    command_host.has_libvirt = lambda _uri: True
    opened = []
    command_host.open_pull = lambda _context, name: opened.append(name) or away("")
    snaporch("pull", "vm1")
    assert opened == ["vm1"]


def test_what_needs_guests_names_what_is_missing(backup, snaporch):
    answer = snaporch("snapshot", "web")
    assert answer.code == ExitCode.NOT_FOUND
    assert "web: no such domain: libvirt is not installed on this machine" in answer.err
    answer = snaporch("prune", "web")
    assert answer.code == ExitCode.NOT_FOUND
    with pytest.raises(UnavailableError, match="apt install libvirt-daemon-system"):
        NoGuests().emulators()


def test_a_daemon_or_a_socket_is_an_installation(tmp_path):
    socket = tmp_path / "socket"
    assert not is_expected(LIBVIRT_URI, [str(socket)], tmp_path)
    socket.touch()
    assert is_expected(LIBVIRT_URI, [str(tmp_path / "libvirtd"), str(socket)], tmp_path)


def test_another_libvirt_and_definitions_of_guests_are_not_overlooked(tmp_path):
    """As of a libvirt that was built by hand, or is removed while its guests are not."""
    assert is_expected("qemu+unix:///system?socket=/opt/sock", [], tmp_path)
    assert not is_expected(LIBVIRT_URI, [], tmp_path / "none")
    (tmp_path / "networks").mkdir()
    assert not is_expected(LIBVIRT_URI, [], tmp_path)
    (tmp_path / "web.xml").touch()
    assert is_expected(LIBVIRT_URI, [], tmp_path)


def test_the_uri_of_the_configuration_counts(backup, snaporch, command_host):
    asked = []
    command_host.has_libvirt = lambda uri: asked.append(uri) or False
    text = backup.config_file.read_text()
    backup.config_file.write_text(f'libvirt_uri = "qemu:///embed"\n{text}')
    assert snaporch("prune", "web").code == ExitCode.NOT_FOUND
    assert snaporch("status").code == ExitCode.WARNINGS
    assert asked == ["qemu:///embed"] * 2
