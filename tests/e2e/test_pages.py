"""The commands of the README and of docs/how-to do, and print, what the pages say."""

import os
import pty
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from guests.disks import Disk, destroy
from guests.guest import Guest
from lab_ssh import sshd_here
from pages import RUN, Block, blocks, differences, shape
from support import (
    BUNDLES,
    accepting,
    assert_clean,
    assert_restored,
    config,
    must,
    run,
    snaporch,
    snapshot,
    system_config,
)


def block(page: str, first: str) -> Block:
    """The block of a page that begins with this line."""
    return next(each for each in blocks(page) if each.first == first)


def follow(
    page: str, first: str, *, directory: Path | None = None, absent: Sequence[str] = ()
) -> None:
    """Run the commands of a block as they stand, and compare what they print.

    ``absent``: lines that this guest cannot cause.
    """
    for command, shown in block(page, first).commands():
        done = subprocess.run(
            ["bash", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            check=False,
            cwd=directory,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}"
        if shown is None:
            continue
        wanted = [line for line in shown if line not in absent]
        wrong = differences(wanted, done.stdout.splitlines())
        assert not wrong, "\n".join([f"{page}: {command}", *wrong, "printed:", done.stdout])


def answer(command: str, reply: str) -> str:
    """Run a command on a terminal, and type this when it asks; what the terminal shows."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("bash", ["bash", "-c", command])
    os.write(terminal, reply.encode())
    shown = b""
    while True:
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # the last process has closed it
            break
    assert os.waitpid(pid, 0)[1] == 0, shown.decode()
    return shown.decode()


@contextmanager
def guests(**disks):
    """Running guests by name, with disks on these datasets; a volume is on the pool flash."""
    with ExitStack() as stack:
        made = []
        for name, datasets in disks.items():
            each = [Disk("zvol" if "flash/" in on else "file", on) for on in datasets]
            guest = Guest.create(name.replace("_", "-"), disks=each)
            stack.callback(guest.remove)
            made.append(guest)
        yield made


pytestmark = pytest.mark.daily(4, "page")

WEB = ("tank/vm/web", "flash/web-data")


@pytest.fixture(scope="module", autouse=True)
def _program():
    """Where the package installs it."""
    program = Path("/usr/bin/snaporch")
    program.symlink_to(shutil.which("snaporch"))
    yield
    program.unlink()


def test_pruning():
    """First of all: the page shows a store with nothing else in the trash."""
    page = "docs/how-to/pruning.md"
    with guests(web=("tank/web",)) as (web,):
        for name in ("hourly-08", "hourly-09", "hourly-10"):
            snapshot(web, "--name", name)
        must("zfs", "destroy", "tank/web@hourly-09")
        for first in RUN[page]:
            follow(page, first)


def test_readme_and_deleting():
    readme, page = "README.md", "docs/how-to/delete.md"
    with guests(demo=("tank/demo", "flash/demo-data")) as (demo,):
        for first in RUN[readme]:
            follow(readme, first)
        assert_clean(demo)
    *deleting, note = RUN[page]
    with guests(demo=("tank/demo", "flash/demo-data")) as (demo,):
        snapshot(demo, "--name", "before-upgrade")
        snapshot(demo)  # the last good one would not be deleted
        for first in deleting:
            follow(page, first)
    with guests(demo=("tank/demo",)):
        follow(page, note)


def test_cloning():
    (first,) = RUN["docs/how-to/clone.md"]
    with guests(web=WEB) as (web,):
        snapshot(web, "--name", "before-upgrade")
        follow("docs/how-to/clone.md", first)
        must("virsh", "start", "test")
        must("snaporch", "clone", "--delete", "test")


def test_restoring():
    page = "docs/how-to/restore.md"
    restoring, changed, undoing = RUN[page]
    with guests(web=WEB) as (web,):
        snapshot(web, "--name", "before-upgrade")
        assert web.sources()["vda"] in bash(block(page, changed).text)
        assert "restored, running" in answer(block(page, restoring).text, "y\n")
        assert "undid the restore" in answer(block(page, undoing).text, "y\n")
        assert web.state() == "shut off"


def test_showing_verifying_and_restoring_by_hand(tmp_path):
    page = "docs/how-to/show.md"
    saved, by_hand = RUN[page]
    (verifying,) = RUN["docs/how-to/verify.md"]
    with guests(web=WEB) as (web,):
        snapshot(web, "--name", "nightly")
        follow(
            "docs/how-to/verify.md", verifying, absent=["web@nightly  the guest's agent answers"]
        )
        follow(page, saved, directory=tmp_path)
        printed = (tmp_path / "web-nightly.txt").read_text().splitlines()
        printed = [line.strip() for line in printed]
        shown = [line.strip() for line in block(page, by_hand).text.splitlines()]
        begin = printed.index(shown[0])
        assert printed[begin : begin + 3] == shown[:3]
        for words in ("zfs rollback", "virsh define", "virsh managedsave-remove", "virsh restore"):
            assert sum(words in line for line in shown) == sum(words in line for line in printed)


def test_checking():
    page = "docs/how-to/check.md"
    check, render, *_ = RUN[page]
    with guests(web=WEB, mail=("tank/mail",)):
        for command, _ in block(page, check).commands():
            done = run("bash", "-c", command)
            assert done.status in (0, 1, 9), f"{command}: {done.err}"
            assert done.out, command
        follow(page, render)
        assert "[tank/vm/web]" in Path("/etc/sanoid/sanoid.conf").read_text()


def test_records_of_another_size():
    """An image is rewritten, but not that of a guest that runs."""
    page = "docs/how-to/check.md"
    text = block(page, RUN[page][2]).text
    web = Guest.create("web", disks=[Disk("file", "tank/vm/web", file_name="disk.raw")])
    directory = Path("/tank/vm/web")
    path = directory / "disk.raw"
    try:
        before = path.stat()
        assert run("bash", "-uc", text).status != 0
        assert [each.name for each in directory.iterdir()] == ["disk.raw"]
        assert path.stat().st_ino == before.st_ino
        web.destroy()
        os.chown(path, pwd.getpwnam("libvirt-qemu").pw_uid, 0)
        before = path.stat()
        bash(text)
        after = path.stat()
        assert (after.st_uid, after.st_mode) == (before.st_uid, before.st_mode)
        assert (before.st_blksize, after.st_blksize) == (128 << 10, 16 << 10)
        assert path.read_bytes() == path.with_name("disk.old").read_bytes()
        web.start()
        assert web.state() == "running"
    finally:
        web.remove()


def test_what_findings_about_directories_advise(tmp_path):
    page = "docs/how-to/check.md"
    _, _, _, *looks, store, writable, pages = RUN[page]
    settings = '[defaults]\nram_strategy = "overlay"\n'
    with guests(web=WEB) as (web,), config(tmp_path, settings) as environment:
        taken = snaporch("snapshot", web.name, "--json", env=environment).json
        for first in looks:
            bash(block(page, first).text)
        for first in (store, pages):
            typed(block(page, first).text, "a passphrase\n")
        try:
            bash(block(page, writable).text)
            moved = Path("/srv/snaporch/bundles", Path(taken["bundle"]).relative_to(BUNDLES))
            assert (moved / "manifest.json").exists()
        finally:
            for dataset in ("tank/bundles", "tank/secret"):
                must("zfs", "destroy", dataset)


def test_groups():
    page = "docs/how-to/groups.md"
    group, take, back = RUN[page]
    members = guests(app_1=("tank/vm/app-1",), db=("tank/vm/db", "flash/db"))
    with members as made, system_config(block(page, group).text):
        follow(page, take)
        shown = answer(block(page, back).text, "y\n")
        assert shown.count("restored, running, resumed from RAM") == 2
        assert [guest.state() for guest in made] == ["running", "running"]


def test_logging():
    (first,) = RUN["docs/how-to/logging.md"]
    with guests(web1=("tank/web1", "flash/web1")):
        follow("docs/how-to/logging.md", first)


def test_policies():
    """Of a host whose policies have carried out one run; the pages show later ones."""
    page = "docs/how-to/schedule.md"
    config, plan = RUN[page]
    (status,) = RUN["docs/how-to/status.md"]
    with guests(web=WEB), system_config(block(page, config).text):
        must("snaporch", "run-due")
        ((command, (shown, *_)),) = block(page, plan).commands()
        assert shape(shown).fullmatch(must(*command.split()).splitlines()[0])
        ((command, shown),) = block("docs/how-to/status.md", status).commands()
        printed = run(*command.split()).out.splitlines()
        columns = [line.split() for line in (*shown, *printed) if line.startswith("DOMAIN")]
        assert set(columns[1]) <= set(columns[0])  # one for each level that there is
        assert columns[1][:5] == columns[0][:5]


RECOVERY = "docs/how-to/recovery.md"


def test_recovering():
    first = RUN[RECOVERY][0]
    with guests(web=WEB) as (web,):
        follow(RECOVERY, first)
        assert_clean(web)


OFFSET, WRITTEN = 32 << 10, b"\xa5" * 512
"""The last write of a guest: it is in the overlay, and not in the base."""


@contextmanager
def quarantined():
    """A guest that is off, with an overlay in quarantine; both paths are those of the page."""
    names, opened = RUN[RECOVERY][1:3]
    text = f"{block(RECOVERY, names).text}printf '%s\\n' $dataset $base $overlay"
    dataset, base, overlay = must("bash", "-c", text).split()
    disk = Disk("file", dataset, file_name=Path(base).name)
    web = Guest.create("web", disks=[disk])
    try:
        web.destroy()
        Path(overlay).parent.mkdir(mode=0o700, parents=True)
        write_image(overlay, base)
        yield web, Path(base), Path(overlay), joined(names, opened)
    finally:
        for state in ("base", "overlay"):
            run("virsh", "destroy", f"web-{state}")
        shutil.rmtree(Path(overlay).parents[1], ignore_errors=True)
        web.remove()


def write_image(path, backing, *form):
    """Make a qcow2 image over another one, with a write in it."""
    must(
        "qemu-img",
        "create",
        "-q",
        "-f",
        "qcow2",
        "-b",
        str(backing),
        *(form or ("-F", "raw")),
        path,
    )
    must("qemu-io", "-c", f"write -q -P {WRITTEN[0]} {OFFSET} {len(WRITTEN)}", path)


def joined(*firsts, page=RECOVERY):
    """These blocks of a page, as one script."""
    return "\n".join(block(page, first).text for first in firsts)


def bash(text):
    """Run a script of which each command must succeed."""
    return must("bash", "-euc", text)


def test_comparing_an_overlay_with_its_base_and_booting_both():
    _, _, _, compare, boot, end, *_ = RUN[RECOVERY]
    with quarantined() as (web, base, overlay, begin):
        before = overlay.read_bytes()
        done = run("bash", "-euc", begin + joined(compare))
        assert (done.status, f"mismatch at offset {OFFSET}" in done.out) == (1, True), done.err
        assert base.stat().st_uid == pwd.getpwnam("libvirt-qemu").pw_uid
        again = begin.replace("zfs snapshot", "true")
        for state in ("base", "overlay"):
            mark, chosen = web.mark(), f"state={state}\n"
            bash(again + joined(boot).replace("state=base\n", chosen))
            copy = Guest.existing(f"web-{state}")
            assert copy.state() == "running"
            web.first_count_since(mark)  # the copy has its serial port
            written = copy.images[0].read(OFFSET, len(WRITTEN)) == WRITTEN
            assert written == (state == "overlay")
            bash(again + chosen + joined(end))
            assert copy.state() == "undefined"
        assert overlay.read_bytes() == before
        assert web.images[0].read(OFFSET, len(WRITTEN)) != WRITTEN


def test_committing_an_overlay_by_hand():
    _, _, _, compare, _, _, commit, end, over = RUN[RECOVERY]
    with quarantined() as (web, base, overlay, begin):
        os.chown(base, 0, 6)
        bash(begin + joined(commit) + 'printf "%s" "$owner"')
        assert (base.stat().st_uid, base.stat().st_gid) == (0, 6)
        assert web.images[0].read(OFFSET, len(WRITTEN)) == WRITTEN
        again = begin.replace("zfs snapshot", "true")
        assert "Images are identical." in bash(again + joined(compare))
        must("zfs", "rollback", "-r", "tank/vm/web@compare")
        top = base.with_name("disk.backup")
        write_image(str(top), overlay, "-F", "qcow2")
        overlaid = overlay.stat().st_size
        bash(again + joined(over))
        assert overlay.stat().st_size >= overlaid
        bash(again + joined(commit) + joined(end))
        assert web.images[0].read(OFFSET, len(WRITTEN)) == WRITTEN
        assert not overlay.exists()
        web.start()


def typed(text, reply):
    """Run a script that reads this."""
    words = ["bash", "-euc", text]
    subprocess.run(words, input=reply, capture_output=True, text=True, check=True, timeout=60)


@contextmanager
def machine_nas(tmp_path):
    """The replica of the page: the lab itself, as ssh knows it by this name."""
    with (tmp_path / "vdev").open("wb") as stream:
        stream.truncate(1 << 30)
    with sshd_here():
        known = Path("/root/.ssh/config")
        known.write_text(
            f"{known.read_text()}Host nas\n    HostName localhost\n    Port 2222\n"
            "    HostKeyAlias [localhost]:2222\n"
        )
        must("zpool", "create", "-m", "/backup", "backup", str(tmp_path / "vdev"))
        try:
            must("mkdir", "-m", "700", "/backup/snaporch")
            yield
        finally:
            must("zpool", "destroy", "backup")


def test_a_lost_guest_comes_back(tmp_path, monkeypatch):
    page, checking = "docs/how-to/replication.md", "docs/how-to/check.md"
    config, found, newest, bring, put_back, prune = RUN[page]
    monkeypatch.chdir(tmp_path)
    with (
        machine_nas(tmp_path),
        guests(web=WEB, webmail=("tank/webmail",)) as (web, other),
        system_config(block(page, config).text),
    ):
        for guest, name in ((other, "not-this"), (web, "older"), (web, "newer")):
            taken = snapshot(guest, "--name", name)
            must("snaporch", "replicate", guest.name, "--to", "offsite")
        (connection,) = [each for each in blocks(checking) if "root@nas" in each.text]
        assert "backup" in bash(connection.text)
        count, mark = web.snapshot_count("newer"), web.mark()
        web.destroy()
        web.undefine()
        shutil.rmtree(Path(taken["bundle"]).parent)
        for dataset in WEB:
            destroy(dataset)
        destroy("tank/vm")
        shown = bash(joined(found, page=page)).splitlines()
        assert [line.split("@")[1].split()[0] for line in shown] == ["older"] * 2 + ["newer"] * 2
        chosen = joined(found, newest, page=page)
        bash(chosen + joined(bring, page=page))
        put_back_here = joined(put_back, page=page).rstrip("\n")
        assert put_back_here.endswith('snaporch restore "$guest@$name"')
        put_back_here += f" {shlex.join(accepting(web.name))}\n"
        assert "restored, running" in answer(chosen + put_back_here, "y\n")
        assert_restored(web, mark, count)
        Path("sanoid.conf").write_text(block(page, prune).text)
        done = run("sanoid", "--configdir", str(tmp_path), "--prune-snapshots", "--verbose")
        assert (done.status, "WARN" in done.err + done.out) == (0, False), done.err
