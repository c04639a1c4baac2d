import os
import re
import shutil
from pathlib import Path

import pytest

from snaporch.config import Config, load_config
from snaporch.errors import ExitCode, RefusedError
from snaporch.hypervisor.start_hook_check import find_hook_problem
from snaporch.install_files import UNITS, Change, package_of
from snaporch.install_files import uninstall as remove_files
from snaporch.journal import Journal
from snaporch.recovery.package_removal import check_no_run
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest

COMMAND = ("--command", "/usr/bin/snaporch")
FILES = len(UNITS) + 2
"""The configuration and libvirt's hook, too."""


@pytest.fixture
def place(tmp_path):
    return tmp_path / "root/etc/systemd/system"


@pytest.fixture
def install(host, snaporch, tmp_path):
    """Installs below a directory."""
    return lambda *more: snaporch("install", "--root", str(tmp_path / "root"), *COMMAND, *more)


@pytest.fixture
def uninstall(snaporch, tmp_path):
    return lambda: snaporch("uninstall", "--root", str(tmp_path / "root"))


def words(answer):
    """The last word of the line on each file."""
    return [line.split("  ")[1] for line in answer.out.splitlines()]


def test_all_units_are_written(install, place):
    answer = install()
    assert answer.code == 0
    assert words(answer) == ["written"] * FILES
    assert sorted(path.name for path in place.iterdir()) == sorted(UNITS)
    for path in place.iterdir():
        assert path.stat().st_mode & 0o777 == 0o644
        assert "{" not in path.read_text()
    daemon = (place / "snaporch.service").read_text()
    assert "ExecStart=/usr/bin/snaporch daemon\n" in daemon
    assert "\nNoNewPrivileges=yes\n" in daemon
    assert "\n[Install]\nWantedBy=multi-user.target\n" in daemon
    assert "\nTimeoutStartSec=infinity\n" in daemon  # it recovers before it is ready


def test_the_daemon_is_reloaded_only_with_a_configuration_that_can_be_read(install, place):
    """systemd runs the second command only if the first one succeeds."""
    install()
    lines = (place / "snaporch.service").read_text().splitlines()
    assert [line.partition("=")[2] for line in lines if line.startswith("ExecReload=")] == [
        "/usr/bin/snaporch daemon --check-config",
        "/bin/kill -HUP $MAINPID",
    ]


def test_a_second_install_changes_nothing(install, place):
    install()
    before = {path: path.stat().st_mtime_ns for path in place.iterdir()}
    assert words(install()) == ["unchanged"] * FILES
    assert {path: path.stat().st_mtime_ns for path in place.iterdir()} == before


def test_an_unedited_file_is_replaced(install, place):
    install()
    answer = install("--command", "/opt/snaporch")
    assert words(answer).count("replaced") == 6
    assert words(answer).count("unchanged") == 5
    assert "/opt/snaporch" in (place / "snaporch.service").read_text()
    assert len(list(place.iterdir())) == len(UNITS)


def test_an_edited_file_is_kept_beside_the_new_one(install, place):
    install()
    unit = place / "snaporch-run-due.timer"
    edits = []
    for hour in (1, 2):
        edits.append(unit.read_text() + f"# {hour}\n")
        unit.write_text(edits[-1])
        assert "replaced; the edited file is now" in install().out
    assert unit.read_text() != edits[1]
    assert (place / "snaporch-run-due.timer.edited").read_text() == edits[0]
    assert (place / "snaporch-run-due.timer.edited.2").read_text() == edits[1]


def test_libvirts_hook_is_executable_and_an_edited_one_is_not_any_more(
    install, uninstall, tmp_path
):
    """libvirt calls every executable file in that directory."""
    path = tmp_path / "root/etc/libvirt/hooks/qemu.d/snaporch"
    install()
    assert path.stat().st_mode & 0o777 == 0o755
    assert path.read_text().startswith("#!/bin/sh\n# Made by `snaporch install`")
    assert find_hook_problem(may_have_called=False, place=path) is None
    with path.open("a") as stream:
        stream.write("# mine\n")
    assert f"{path}  replaced; the edited file is now {path}.edited" in install().out
    assert [each.name for each in path.parent.iterdir() if os.access(each, os.X_OK)] == ["snaporch"]
    assert f"{path}  removed" in uninstall().out


def test_the_mark_of_another_hook_is_removed(install, uninstall, tmp_path):
    """libvirt may have called the other hook, and not have loaded the one that is written now."""
    mark = tmp_path / "root/run/snaporch-hook"
    mark.parent.mkdir(parents=True)
    mark.touch()
    install()
    assert not mark.exists()
    mark.touch()
    install()
    assert mark.exists()
    uninstall()
    assert not mark.exists()


def test_a_link_counts_as_edited(install, place):
    install()
    unit = place / "snaporch.slice"
    unit.unlink()
    unit.symlink_to("/dev/null")
    install()
    assert not unit.is_symlink()
    assert (place / "snaporch.slice.edited").is_symlink()


def test_uninstall_removes_unedited_files(install, uninstall, place):
    install()
    (place / "mine.service").write_text("[Unit]\n")
    with (place / "snaporch.service").open("a") as stream:
        stream.write("# mine\n")
    answer = uninstall()
    assert answer.code == 0
    assert sorted(path.name for path in place.iterdir()) == ["mine.service", "snaporch.service"]
    assert "snaporch.service  kept: it was edited" in answer.out


def test_uninstall_leaves_no_link_to_a_removed_unit(install, uninstall, place):
    """Of ``systemctl enable``; an edited unit stays, and starts as before."""
    install()
    wants = place / "multi-user.target.wants"
    wants.mkdir()
    for name in ("snaporch.service", "snaporch-recover.service", "mine.service"):
        (wants / name).symlink_to(f"/etc/systemd/system/{name}")
    with (place / "snaporch.service").open("a") as stream:
        stream.write("# mine\n")
    uninstall()
    assert sorted(link.name for link in wants.iterdir()) == ["mine.service", "snaporch.service"]


def test_uninstall_leaves_the_files_of_a_package(install, place, tmp_path):
    """Libvirt's hook is a conffile of the package, and has a checksum as if it were installed."""
    install()
    root = tmp_path / "root"
    hook = root / "etc/libvirt/hooks/qemu.d/snaporch"
    done = list(remove_files(root, lambda path: "snaporch" if path == hook else ""))
    (kept,) = (each for each in done if each.change is not Change.REMOVED)
    assert (kept.path, kept.change, kept.detail) == (hook, Change.PACKAGED, "snaporch")
    assert kept.change.endswith("apt purge")  # a removal leaves conffiles
    assert hook.exists()
    assert list(place.iterdir()) == []


@pytest.mark.skipif(shutil.which("dpkg-query") is None, reason="the host has no dpkg")
def test_the_package_of_a_file(tmp_path):
    assert package_of(Path("/etc/debian_version")) == "base-files"
    assert package_of(tmp_path) == ""


def test_a_host_without_dpkg_has_no_packages(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert package_of(Path("/etc/debian_version")) == ""


def test_uninstall_is_refused_while_a_run_has_a_journal(world):
    """The command itself would remove the files of the host that runs this test."""
    domain = world.add_guest()
    check_no_run(world.paths.journal)
    facts = make_plan(world.context, domain, SnapshotRequest("s1")).facts
    Journal(world.paths.journal, facts).close(settled=False)
    with pytest.raises(RefusedError, match=r"its guest may be on overlays.*run: snaporch recover"):
        check_no_run(world.paths.journal)


def test_a_configuration_to_edit(install, uninstall, tmp_path):
    install()
    path = tmp_path / "root/etc/snaporch/snaporch.toml"
    assert load_config(path) == Config()
    assert path.stat().st_mode & 0o777 == 0o644
    mine = path.read_text() + "[prune]\n"
    path.write_text(mine)
    assert f"{path}  kept: it was edited" in install("--command", "/opt/snaporch").out
    assert f"{path}  kept: it was edited" in uninstall().out
    assert path.read_text() == mine
    path.unlink()
    install()
    assert f"{path}  removed" in uninstall().out
    assert not path.exists()


def test_nothing_to_uninstall(uninstall):
    answer = uninstall()
    assert (answer.code, answer.out) == (0, "")
    assert "no units of snaporch" in answer.err


def test_a_given_configuration_is_named_in_the_units(install, place, tmp_path):
    config = tmp_path / "own.toml"
    config.write_text('[paths]\njournal = "/srv/journal"\n')
    install("--config", str(config))
    text = (place / "snaporch-recover.service").read_text()
    assert f"ExecStart=/usr/bin/snaporch --config {config} recover --autostart --notify\n" in text


def test_no_unit_has_a_path_of_the_configuration(install, place, tmp_path):
    """A path may be changed after the installation: recovery at boot must not look at the old."""
    config = tmp_path / "own.toml"
    config.write_text('[paths]\njournal = "/srv/journal"\n')
    install("--config", str(config))
    for path in place.iterdir():
        assert "/srv/journal" not in path.read_text()
        assert "Condition" not in path.read_text()


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("plain-1.toml", "plain-1.toml"),
        ("my own.toml", '"{}my own.toml"'),
        ("100%.toml", "100%%.toml"),
        ("$HOME.toml", "$$HOME.toml"),
        ("it's.toml", '"{}it\'s.toml"'),
        ('so-"called".toml', '"{}so-\\"called\\".toml"'),
        ("back\\slash.toml", '"{}back\\\\slash.toml"'),
        ("a;b.toml", '"{}a;b.toml"'),
    ],
)
def test_a_path_of_a_unit_is_one_word(install, place, tmp_path, name, written):
    """It is quoted as in systemd.service(5), and nothing in it is expanded."""
    config = tmp_path / name
    config.touch()
    assert install("--config", str(config)).code == 0
    word = written.format(f"{tmp_path}/") if "{}" in written else f"{tmp_path}/{written}"
    text = (place / "snaporch-recover.service").read_text()
    assert f"ExecStart=/usr/bin/snaporch --config {word} recover --autostart --notify\n" in text


@pytest.mark.parametrize("name", ["a\nUser=b", "a ", "a\\"])
def test_a_path_that_a_unit_cannot_hold_is_refused(install, place, tmp_path, name):
    config = tmp_path / name
    config.touch()
    answer = install("--config", str(config))
    assert (answer.code, place.exists()) == (ExitCode.USAGE, False)
    assert "systemd unit" in answer.err


@pytest.mark.parametrize("command", ["snaporch", "/usr/bin/snaporch --x", "/a\nb", "/a'b"])
def test_an_invalid_command(snaporch, host, tmp_path, command):
    answer = snaporch("install", "--root", str(tmp_path), "--command", command)
    assert answer.code == ExitCode.USAGE
    assert list(tmp_path.glob("etc/**/*")) == []


def test_a_directory_that_cannot_be_written(snaporch, host, tmp_path):
    (tmp_path / "file").write_text("")
    answer = snaporch("install", "--root", str(tmp_path / "file"), *COMMAND)
    assert answer.code == ExitCode.UNAVAILABLE
    assert len(answer.err.splitlines()) == 1


def test_every_line_is_one_of_a_unit_file(install, place):
    install()
    for path in place.iterdir():
        for line in path.read_text().splitlines():
            assert re.fullmatch(r"|#.*|\[\w+\]|[A-Z]\w+=\S.*", line), (path.name, line)


def test_a_process_that_is_killed_takes_no_run_with_it(install, place):
    """Neither if the daemon that started it is killed, nor if memory is short."""
    install()
    services = {path.name: path.read_text() for path in place.glob("*.service")}
    assert all("\nOOMPolicy=continue\n" in text for text in services.values())
    for name in ("snaporch.service", "snaporch-run-due.service"):
        assert "\nKillMode=process\n" in services[name]


def settings(text, name):
    """The values of a setting in a unit."""
    return " ".join(re.findall(rf"(?m)^{name}=(.*)$", text)).split()


def minutes(text):
    (span,) = settings(text, "TimeoutStopSec")
    return int(span.removesuffix("min"))


def test_at_shutdown_runs_end_before_libvirt_guests_begins(install, place):
    """It saves or shuts off guests; systemd stops units in the reverse order of their start."""
    install()
    services = {path.stem: path.read_text() for path in place.glob("*.service")}
    recover = services.pop("snaporch-recover")
    for text in services.values():
        assert {"libvirt-guests.service", "snaporch-recover.service"} <= set(
            settings(text, "After")
        )
    # at boot it comes first: libvirt-guests resumes guests that it saved on overlays
    assert "libvirt-guests.service" in settings(recover, "Before")
    for text in (recover, *services.values()):
        assert {"libvirtd.service", "virtqemud.service"} <= set(settings(text, "After"))
        assert minutes(text) <= 10  # systemd forces the shutdown after 30


def test_hardening_leaves_what_safety_needs(install, place):
    """Without CAP_SYS_PTRACE the open files of emulators (proc(5)), of another user, are hidden."""
    install()
    for name in ("snaporch.service", "snaporch-run-due.service", "snaporch-recover.service"):
        text = (place / name).read_text()
        (dropped,) = re.findall(r"(?m)^CapabilityBoundingSet=~(.+)$", text)
        needed = {"CAP_SYS_PTRACE", "CAP_SYS_ADMIN", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_KILL"}
        assert not needed & set(dropped.split())
        for hidden in ("PrivateTmp", "ProtectSystem", "PrivateDevices", "ProtectClock"):
            assert hidden not in text
