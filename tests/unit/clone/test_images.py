"""Where a clone's images are: never where the original's are."""

import json
import os
from pathlib import Path, PurePosixPath

import pytest
from fakes.domain_xml import DiskSpec
from fakes.images import qcow2
from hypothesis import given
from hypothesis import strategies as st

from snaporch.clone.clone import CloneRequest, check_clone, clone
from snaporch.errors import RefusedError, SnaporchError, UnavailableError
from snaporch.hypervisor.clone_xml import SharedError
from snaporch.hypervisor.domain_xml import backing_chain, disk_element, disks, parse
from snaporch.hypervisor.qcow2 import HeaderError, read_qcow2
from snaporch.model import VerifyDepth
from snaporch.restore.safe_path import LeadsOutError, open_beneath
from snaporch.restore.source import IncompleteError, complete_source, find_records
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.verify.verify import VerifyOptions, verify


def write_to(path):
    """As a blockcommit does."""
    before = path.stat().st_mtime_ns
    path.write_bytes(b"rAw")
    os.utime(path, ns=(before + 1, before + 1))


def replace(path):
    """By another of the same size and age."""
    status, fresh = path.stat(), path.with_suffix(".new")
    fresh.write_bytes(b"rAw")
    os.utime(fresh, ns=(status.st_atime_ns, status.st_mtime_ns))
    fresh.rename(path)


def delete(path):
    """Gone."""
    path.unlink()


def lead_elsewhere(path):
    """A link to another."""
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

    def clone(self):
        request = CloneRequest("test", resumed=True)
        check_clone(self.world.context, self.source(), request)
        made = clone(self.world.context, self.source(), request)
        return self.world.paths.clones / made.uuid / "disk0"

    def images(self):
        """What the clone's definition names, top first."""
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


def test_a_link_that_was_set_to_another_since_is_not_believed(layout, tmp_path):
    """It is outside of the dataset, and no snapshot has it."""
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
def test_a_link_that_was_put_there_since_does_not_lead_out(layout, target):
    """The dataset is what was snapshotted; the fake's clones have what is there now."""
    layout.put("top.img", qcow2()).put("real/x", b"").snapshot()
    (layout.live / "top.img").unlink()
    (layout.live / "top.img").symlink_to(target)
    with pytest.raises(LeadsOutError, match="leads out"):
        layout.clone()
    assert layout.nothing_was_made()


def test_links_in_a_circle_end(layout):
    layout.put("top.img", qcow2()).snapshot()
    (layout.live / "top.img").unlink()
    (layout.live / "top.img").symlink_to("top.img")
    with pytest.raises(Exception, match="Too many levels"):
        layout.clone()
    assert layout.nothing_was_made()


def test_what_is_mounted_in_it_is_not_in_it():
    """Of any host: what lies on another file system is in no snapshot of this one."""
    here = PurePosixPath("/")
    with (
        pytest.raises(LeadsOutError, match="proc is on another file system"),
        open_beneath(Path("/"), PurePosixPath("proc/version"), here),
    ):
        pass


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_opened(tmp_path, make):
    """A pipe would be waited for."""
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


def test_a_base_that_is_not_there_may_only_be_away(layout, tmp_path):
    """Its file system may not be mounted: that is no verdict on the snapshot."""
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
def test_a_base_that_is_not_what_it_was_is_not(layout, tmp_path, change):
    golden = tmp_path / "golden.img"
    golden.write_bytes(b"raw")
    layout.put("top.img", qcow2(str(golden), "raw")).snapshot()
    change(golden)
    with pytest.raises(RefusedError, match=r"golden.img, which lies beneath vda and is not in"):
        layout.clone()
    outcome = verify(layout.world.context, layout.source().record, VerifyOptions())
    assert (outcome.passed, outcome.reached) == (False, VerifyDepth.CHECKED)
    assert layout.nothing_was_made()


def test_a_base_that_was_not_below_it_then_is_not(layout, tmp_path):
    layout.put("top.img", qcow2()).snapshot()
    secret = tmp_path / "secret"
    secret.write_bytes(b"of somebody else")
    layout.put("top.img", qcow2(str(secret), "raw"))
    with pytest.raises(IncompleteError, match="has changed since the snapshot"):
        layout.clone()


def test_a_bundle_that_does_not_say_what_lies_beneath_is_taken_as_it_is(layout, tmp_path):
    golden = tmp_path / "golden.img"
    golden.write_bytes(b"raw")
    layout.put("top.img", qcow2(str(golden), "raw")).snapshot()
    source = layout.source()
    path = source.directory / "manifest.json"
    said = json.loads(path.read_text())
    for disk in said["disks"]:
        del disk["beneath"]
    path.write_text(json.dumps(said))
    write_to(golden)
    layout.clone()
    assert layout.images()[1] == str(golden)


def test_a_base_that_another_writes_to_is_not(layout, world):
    other = world.image("flash/other", "disk.img")
    layout.put("top.img", qcow2(str(other), "raw")).snapshot()
    world.add_guest("other", {}, more=(DiskSpec("vda", str(other)),))
    with pytest.raises(SharedError, match="other writes to it"):
        layout.clone()


@pytest.mark.parametrize("name", ["nbd://host/x", 'json:{"driver":"nbd"}', "file:/etc/passwd"])
def test_what_is_no_path_is_not_followed(layout, name):
    """Whatever its header says, of a snapshot that an earlier snaporch took."""
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
    """And a verification does not run it."""
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


def test_a_backing_file_of_no_known_format(layout):
    layout.put("base.img", qcow2()).put("top.img", qcow2()).snapshot()
    layout.put("top.img", qcow2("base.img"))
    with pytest.raises(SharedError, match="format"):
        layout.clone()


def test_a_chain_without_an_end(layout):
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
