"""A clone's images are never the original's."""

import os
from pathlib import Path, PurePosixPath

import pytest
from fakes import manifests
from fakes.domain_xml import DiskSpec
from fakes.images import qcow2
from hypothesis import given
from hypothesis import strategies as st

from snaporch.clone.clone import CloneRequest, check_clone, clone
from snaporch.errors import RefusedError, SnaporchError, UnavailableError
from snaporch.hypervisor.clone_xml import SharedError
from snaporch.hypervisor.domain_xml import backing_chain, disk_element, disks, parse
from snaporch.hypervisor.qcow2 import HeaderError, read_qcow2
from snaporch.model import DomainState, VerifyDepth
from snaporch.restore.safe_path import LeadsOutError, open_beneath
from snaporch.restore.source import IncompleteError, complete_source, find_records
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.verify.verify import VerifyOptions, verify


def write_to(path):
    """Write to it as a blockcommit does."""
    before = path.stat().st_mtime_ns
    path.write_bytes(b"rAw")
    os.utime(path, ns=(before + 1, before + 1))


def replace(path):
    """Replace it by another file of the same size and age."""
    status, fresh = path.stat(), path.with_suffix(".new")
    fresh.write_bytes(b"rAw")
    os.utime(fresh, ns=(status.st_atime_ns, status.st_mtime_ns))
    fresh.rename(path)


def delete(path):
    """Remove it."""
    path.unlink()


def lead_elsewhere(path):
    """Replace it by a link to another file."""
    other = path.with_suffix(".other")
    other.write_bytes(b"raw")
    path.unlink()
    path.symlink_to(other)


class Layout:
    """A guest whose disk is ``top.img`` on ``tank/web``, cloned as ``test``."""

    def __init__(self, world, form="qcow2"):
        self.world = world
        self.live = world.image("tank/web", "top.img").parent
        self.form = form

    def put(self, name, content):
        (self.live / name).parent.mkdir(parents=True, exist_ok=True)
        (self.live / name).write_bytes(content)
        return self

    def snapshot(self):
        specs = (DiskSpec("vda", str(self.live / "top.img"), format=self.form),)
        domain = self.world.add_guest("web", {}, more=specs)
        take_snapshot(self.world.context, domain, SnapshotRequest("s1"))
        return self

    def source(self):
        return complete_source(self.world.context, find_records(self.world.context, "web@s1")[-1])

    def clone(self, name="test"):
        request = CloneRequest(name, resumed=True)
        check_clone(self.world.context, self.source(), request)
        made = clone(self.world.context, self.source(), request)
        return self.world.paths.clones / made.uuid / "disk0"

    def images(self):
        """The images that the clone's definition names, top first."""
        live = self.world.guest("test").live
        (disk,) = disks(parse(live))
        return [disk.source, *backing_chain(parse(live), "vda")]

    def files(self):
        """Every file and link of the original."""
        return {
            path: path.readlink() if path.is_symlink() else path.read_bytes()
            for path in self.live.rglob("*")
            if path.is_symlink() or path.is_file()
        }

    def nothing_was_made(self):
        made = list(self.world.paths.clones.glob("*")) if self.world.paths.clones.exists() else []
        names = [guest.name for guest in self.world.hypervisor.guests.values()]
        return (made, names) == ([], ["web"])


@pytest.fixture
def layout(world):
    return Layout(world)


def test_an_image_without_others(layout):
    where = layout.put("top.img", qcow2()).snapshot().clone()
    assert layout.images() == [str(where / "top.img")]


@pytest.mark.parametrize("absolute", [True, False])
def test_an_image_that_is_a_link_within_its_dataset(world, absolute):
    layout = Layout(world, "raw").put("real/disk.img", b"then")
    (layout.live / "top.img").unlink()
    target = layout.live / "real/disk.img" if absolute else "real/disk.img"
    (layout.live / "top.img").symlink_to(target)
    where = layout.snapshot().clone()
    assert layout.images() == [str(where / "real/disk.img")]


def test_after_a_link_was_changed_the_file_of_the_snapshot_is_cloned(layout, tmp_path):
    """The link is outside of the dataset, and in no snapshot."""
    layout.put("then.img", b"then").put("other.img", b"other")
    link = tmp_path / "link.img"
    link.symlink_to(layout.live / "then.img")
    specs = (DiskSpec("vda", str(link), format="raw"),)
    domain = layout.world.add_guest("web", {}, more=specs)
    take_snapshot(layout.world.context, domain, SnapshotRequest("s1"))
    link.unlink()
    link.symlink_to(layout.live / "other.img")
    where = layout.clone()
    assert layout.images() == [str(where / "then.img")]


@pytest.mark.parametrize("target", ["/elsewhere.img", "../other/disk.img", "real/../../../x"])
def test_a_link_made_since_the_snapshot_does_not_lead_out_of_the_dataset(layout, target):
    """The test changes the live dataset, because the fake's clones have its present files."""
    layout.put("top.img", qcow2()).put("real/x", b"").snapshot()
    (layout.live / "top.img").unlink()
    (layout.live / "top.img").symlink_to(target)
    with pytest.raises(LeadsOutError, match="leads out"):
        layout.clone()
    assert layout.nothing_was_made()


def test_links_in_a_circle_are_refused(layout):
    layout.put("top.img", qcow2()).snapshot()
    (layout.live / "top.img").unlink()
    (layout.live / "top.img").symlink_to("top.img")
    with pytest.raises(Exception, match="Too many levels"):
        layout.clone()
    assert layout.nothing_was_made()


def test_a_file_on_another_file_system_is_not_in_the_snapshot():
    """This holds on any host: files on another file system are in no snapshot of this one."""
    here = PurePosixPath("/")
    with (
        pytest.raises(LeadsOutError, match="proc is on another file system"),
        open_beneath(Path("/"), PurePosixPath("proc/version"), here),
    ):
        pass


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_regular_files_are_opened(tmp_path, make):
    """Opening a pipe would block."""
    make(tmp_path / "top.img")
    home = PurePosixPath("/tank")
    with (
        pytest.raises(LeadsOutError, match="not a regular file"),
        open_beneath(tmp_path, PurePosixPath("top.img"), home),
    ):
        pass


@pytest.mark.parametrize("absolute", [True, False])
def test_a_chain_within_the_dataset_is_the_clones(layout, absolute):
    base = f"{layout.live}/below/base.img" if absolute else "below/base.img"
    middle = f"{layout.live}/middle.img" if absolute else "middle.img"
    layout.put("below/base.img", b"raw").put("middle.img", qcow2(base, "raw"))
    where = layout.put("top.img", qcow2(middle, "qcow2")).snapshot().clone()
    names = ["top.img", "middle.img", "below/base.img"]
    assert layout.images() == [str(where / name) for name in names]


def test_a_base_that_the_original_has_lost_is_found_in_the_clone(layout, world):
    base = layout.live / "base.img"
    layout.put("base.img", b"raw").put("top.img", qcow2(str(base), "raw")).snapshot()
    world.hooks.at["hypervisor.restore"] = lambda: base.unlink(missing_ok=True)
    where = layout.clone()
    assert layout.images()[1] == str(where / "base.img")


def test_a_base_that_no_domain_writes_to_is_shared(layout, tmp_path):
    golden = tmp_path / "golden.img"
    golden.write_bytes(b"raw")
    layout.put("top.img", qcow2(str(golden), "raw")).snapshot().clone()
    assert layout.images()[1] == str(golden)


def test_a_missing_base_does_not_make_the_snapshot_damaged(layout, tmp_path):
    """Its file system may not be mounted, which says nothing about the snapshot."""
    golden = tmp_path / "golden.img"
    golden.write_bytes(b"raw")
    layout.put("top.img", qcow2(str(golden), "raw")).snapshot()
    delete(golden)
    with pytest.raises(SnaporchError, match=r"golden.img, which lies beneath vda and is not in"):
        layout.clone()
    with pytest.raises(UnavailableError, match="cannot be read"):
        verify(layout.world.context, layout.source().record, VerifyOptions())
    assert layout.nothing_was_made()


@pytest.mark.parametrize("change", [write_to, replace, lead_elsewhere])
def test_a_base_that_was_changed_is_not_shared(layout, tmp_path, change):
    golden = tmp_path / "golden.img"
    golden.write_bytes(b"raw")
    layout.put("top.img", qcow2(str(golden), "raw")).snapshot()
    change(golden)
    with pytest.raises(RefusedError, match=r"golden.img, which lies beneath vda and is not in"):
        layout.clone()
    outcome = verify(layout.world.context, layout.source().record, VerifyOptions())
    assert (outcome.passed, outcome.reached) == (False, VerifyDepth.CHECKED)
    assert layout.nothing_was_made()


def test_a_base_that_was_added_since_is_not_shared(layout, tmp_path):
    layout.put("top.img", qcow2()).snapshot()
    secret = tmp_path / "secret"
    secret.write_bytes(b"of another user")
    layout.put("top.img", qcow2(str(secret), "raw"))
    with pytest.raises(IncompleteError, match="has changed since the snapshot"):
        layout.clone()


def test_a_bundle_without_data_of_backing_files_is_accepted(layout, tmp_path):
    golden = tmp_path / "golden.img"
    golden.write_bytes(b"raw")
    layout.put("top.img", qcow2(str(golden), "raw")).snapshot()
    source = layout.source()
    path = source.directory / "manifest.json"
    said = manifests.load(path)
    for disk in said["disks"]:
        del disk["beneath"]
    manifests.store(path, said)
    write_to(golden)
    layout.clone()
    assert layout.images()[1] == str(golden)
    layout.world.pool.set_properties(["tank/web@s1"], {"snaporch:copy": "nas"})
    with pytest.raises(IncompleteError, match="has changed since the snapshot"):
        layout.clone("foreign")


@pytest.mark.parametrize("state", [DomainState.RUNNING, DomainState.OFF])
def test_a_base_that_another_domain_writes_to_is_not_shared(layout, world, state):
    """A guest that is off writes to it when it is started."""
    other = world.image("flash/other", "disk.img")
    layout.put("top.img", qcow2(str(other), "raw")).snapshot()
    world.add_guest("other", {}, more=(DiskSpec("vda", str(other)),), state=state)
    with pytest.raises(SharedError, match="other writes to it"):
        layout.clone()


@pytest.mark.parametrize("name", ["nbd://host/x", 'json:{"driver":"nbd"}', "file:/etc/passwd"])
def test_a_backing_name_that_is_no_path_is_not_followed(layout, name):
    """The header is of a snapshot that an earlier snaporch took, and may contain anything."""
    layout.put("top.img", qcow2()).snapshot().put("top.img", qcow2(name, "raw"))
    with pytest.raises(SharedError, match="not a path"):
        layout.clone()
    assert layout.nothing_was_made()


def test_a_data_file_beside_its_image_is_the_clones(layout):
    layout.world.with_defaults(ram_strategy="manual")
    where = layout.put("data", b"x").put("top.img", qcow2(data_file="data")).snapshot().clone()
    assert layout.images() == [str(where / "top.img")]
    assert (where / "data").is_file()
    element = disk_element(parse(layout.world.guest("test").live), "vda")
    store = element.find("source/dataStore")
    assert store.find("source").get("file") == str(where / "data")
    assert (store.get("type"), store.find("format").get("type")) == ("file", "raw")


@pytest.mark.parametrize("name", ["{live}/data", "../../flash/x", "nbd:x", "", "link"])
def test_a_data_file_that_a_clone_would_share_is_refused(layout, name):
    """A verification does not run it either."""
    (layout.live / "link").symlink_to(layout.live / "data")
    layout.put("data", b"x").put("top.img", qcow2()).snapshot()
    layout.put("top.img", qcow2(data_file=name.format(live=layout.live)))
    before = layout.files()
    with pytest.raises(SharedError, match=r"its data is in|leads out"):
        layout.clone()
    assert layout.nothing_was_made()
    record = layout.source().record
    outcome = verify(layout.world.context, record, VerifyOptions())
    assert (outcome.passed, outcome.reached) == (True, VerifyDepth.CHECKED)
    assert any(text.startswith("not run: ") for text in outcome.proof)
    assert layout.nothing_was_made()
    assert layout.files() == before


def test_a_format_that_snaporch_cannot_read_is_refused(world):
    layout = Layout(world, "vhdx").put("top.img", b"vhdxfile").snapshot()
    with pytest.raises(SharedError, match="vhdx"):
        layout.clone()


def test_an_image_that_is_not_of_its_format_is_damaged(layout):
    layout.put("top.img", qcow2()).snapshot().put("top.img", b"zeros")
    with pytest.raises(IncompleteError, match="not a qcow2 image"):
        layout.clone()


def test_a_backing_file_of_an_unknown_format_is_refused(layout):
    layout.put("base.img", qcow2()).put("top.img", qcow2()).snapshot()
    layout.put("top.img", qcow2("base.img"))
    with pytest.raises(SharedError, match="format"):
        layout.clone()


def test_a_chain_without_an_end_is_refused(layout):
    layout.put("top.img", qcow2()).snapshot().put("top.img", qcow2("top.img", "qcow2"))
    with pytest.raises(SharedError, match="more than 64"):
        layout.clone()


@given(data=st.binary(max_size=400), head=st.booleans())
def test_any_header_is_read_or_refused(data, head, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes((qcow2("b", "raw", "d")[:104] if head else b"QFI\xfb") + data)
    with path.open("rb") as image:
        try:
            names = read_qcow2(image.fileno())
        except HeaderError:
            return
    assert names.backing is None or len(names.backing) <= 1023


def test_names_in_a_header():
    descriptor = os.memfd_create("image")
    os.write(descriptor, qcow2("the base", "qcow2", "the data"))
    names = read_qcow2(descriptor)
    os.close(descriptor)
    assert (names.backing, names.backing_format, names.data_file) == (
        "the base",
        "qcow2",
        "the data",
    )
