"""Files beneath a guest's disks are snapshotted with them, or identified again later."""

import os
from xml.etree import ElementTree

import pytest
from fakes.domain_xml import DiskSpec
from fakes.images import qcow2

from snaporch.clone.clone import CloneRequest, check_clone
from snaporch.disks.backing_chain import written_by
from snaporch.errors import RefusedError
from snaporch.hypervisor.domain_xml import disk_element, parse
from snaporch.model import DomainState, Strategy, VerifyDepth
from snaporch.restore.plan import make_restore_plan
from snaporch.restore.source import complete_source, find_records
from snaporch.snapshot.plan import make_plan
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot
from snaporch.verify.verify import VerifyOptions, verify
from snaporch.zfs.resolver import Mount


class Chain:
    """A guest whose disk is ``top.img`` on ``tank/web``."""

    def __init__(self, world):
        self.world = world
        self.top = world.image("tank/web", "top.img")

    def write(self, content, form="qcow2", **options):
        self.top.write_bytes(content)
        specs = (DiskSpec("vda", str(self.top), format=form),)
        self.world.add_guest("web", {}, more=specs, **options)
        return self

    def spell(self, below, *, live=True, inside=""):
        """Put an element into the disk: the chain as libvirt reports it."""
        guest = self.world.guest("web")
        for name in ("live", "inactive") if live else ("inactive",):
            root = parse(getattr(guest, name))
            element = disk_element(root, "vda")
            place = element.find(inside) if inside else element
            place.append(ElementTree.fromstring(below))
            setattr(guest, name, ElementTree.tostring(root, encoding="unicode"))
        return self

    def plan(self):
        guest = self.world.guest("web")
        return make_plan(self.world.context, self.world.hypervisor.domain(guest.uuid))

    def beneath(self):
        self.world.with_defaults(ram_strategy="manual")
        return [
            (file.path, file.dataset.name if file.dataset else None, file.state is not None)
            for file in self.plan().backing_files
        ]


def store(path, form="raw", more="", kind="file"):
    attribute = "file" if kind == "file" else "dev"
    return (
        f"<backingStore type='{kind}'><format type='{form}'/>"
        f"<source {attribute}='{path}'/>{more}</backingStore>"
    )


@pytest.fixture
def chain(world):
    return Chain(world)


@pytest.fixture
def elsewhere(world):
    return world.image("flash/golden", "base.img")


def test_an_image_with_nothing_beneath_it(chain):
    assert chain.write(qcow2()).beneath() == []


@pytest.mark.parametrize("state", [DomainState.RUNNING, DomainState.OFF])
def test_a_backing_file_in_a_dataset_of_the_guest(chain, world, state):
    base = world.image("tank/web", "base.img")
    chain.write(qcow2("base.img", "raw"), state=state)
    assert chain.beneath() == [(str(base), "tank/web", False)]


@pytest.mark.parametrize("state", [DomainState.RUNNING, DomainState.OFF])
def test_a_backing_file_in_another_dataset_is_identified(chain, elsewhere, state):
    chain.write(qcow2(str(elsewhere), "raw"), state=state)
    assert chain.beneath() == [(str(elsewhere), None, True)]
    (file,) = chain.plan().backing_files
    assert (file.state.bytes, file.state.inode) == (0, elsewhere.stat().st_ino)


def test_the_whole_chain(chain, world, elsewhere):
    middle = world.image("tank/web", "middle.img")
    middle.write_bytes(qcow2(str(elsewhere), "raw"))
    chain.write(qcow2("middle.img", "qcow2"))
    assert chain.beneath() == [(str(middle), "tank/web", False), (str(elsewhere), None, True)]


def test_libvirts_chain_takes_precedence_over_the_header(chain, world, elsewhere):
    base = world.image("tank/web", "base.img")
    chain.write(qcow2("/nowhere", "raw")).spell(store(base, more="<backingStore/>"))
    assert chain.beneath() == [(str(base), "tank/web", False)]


def test_a_chain_that_libvirt_ends(chain):
    assert chain.write(qcow2("/nowhere", "raw")).spell("<backingStore/>").beneath() == []


def test_where_libvirts_chain_stops_the_headers_are_read(chain, world, elsewhere):
    middle = world.image("tank/web", "middle.img")
    middle.write_bytes(qcow2(str(elsewhere), "raw"))
    chain.write(qcow2()).spell(store(middle, "qcow2"))
    assert chain.beneath() == [(str(middle), "tank/web", False), (str(elsewhere), None, True)]


@pytest.mark.parametrize("state", [DomainState.RUNNING, DomainState.OFF])
def test_a_data_file_beside_its_image(chain, world, state):
    data = world.image("tank/web", "data.raw")
    chain.write(qcow2(data_file="data.raw"), state=state)
    assert chain.beneath() == [(str(data), "tank/web", False)]


@pytest.mark.parametrize("spelled", [True, False])
@pytest.mark.parametrize("state", [DomainState.RUNNING, DomainState.OFF])
def test_a_data_file_in_another_dataset_is_refused(chain, elsewhere, spelled, state):
    chain.write(qcow2(data_file="" if spelled else str(elsewhere)), state=state)
    if spelled:
        element = (
            f"<dataStore type='file'><format type='raw'/><source file='{elsewhere}'/></dataStore>"
        )
        chain.spell(element, live=state is DomainState.RUNNING, inside="source")
    with pytest.raises(RefusedError, match="in flash/golden and would not be snapshotted with it"):
        chain.plan()


def test_a_data_file_that_is_not_on_zfs_is_refused(chain, tmp_path):
    (tmp_path / "data").touch()
    with pytest.raises(RefusedError, match="is not on ZFS and would not be snapshotted with it"):
        chain.write(qcow2(data_file=str(tmp_path / "data"))).plan()


def test_a_data_file_of_a_backing_file_is_only_read(chain, world, elsewhere):
    base = world.image("tank/web", "base.img")
    base.write_bytes(qcow2(data_file=str(elsewhere)))
    chain.write(qcow2("base.img", "qcow2"))
    assert chain.beneath() == [(str(base), "tank/web", False), (str(elsewhere), None, True)]


@pytest.mark.parametrize("state", [DomainState.RUNNING, DomainState.OFF])
def test_a_backing_file_that_a_guest_writes_to(chain, world, elsewhere, state):
    """The disk of a guest that is off may be the image's template."""
    world.add_guest("other", {}, more=(DiskSpec("vda", str(elsewhere)),), state=state)
    chain.write(qcow2(str(elsewhere), "raw"))
    if state is DomainState.OFF:
        assert len(chain.plan().backing_files) == 1
        return
    with pytest.raises(RefusedError, match="in flash/golden, and other writes to it"):
        chain.plan()


@pytest.mark.parametrize("device", ["disk", "lun"])
def test_a_backing_file_that_a_guest_writes_to_by_another_name(chain, world, elsewhere, device):
    link = chain.top.with_name("link")
    link.symlink_to(elsewhere)
    world.add_guest("other", {}, more=(DiskSpec("vda", str(elsewhere), device=device),))
    chain.write(qcow2(str(link), "raw"))
    with pytest.raises(RefusedError, match="in flash/golden, and other writes to it"):
        chain.plan()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"zeros", "is not a qcow2 image"),
        (qcow2("nbd://host/x", "raw"), "which is no path"),
        (qcow2(data_file="nbd://host/x"), "which is no path"),
        (qcow2(data_file=""), "names nothing as its data"),
        (qcow2("/nowhere", "raw"), "/nowhere, which lies beneath it: No such file"),
        (qcow2("pipe", "qcow2"), "neither a file nor a block device"),
        (qcow2("bare.img"), "does not say which format"),
        (qcow2("top.img", "qcow2"), "more than 64 images"),
    ],
)
def test_an_unknown_chain_is_refused(chain, content, reason):
    os.mkfifo(chain.top.with_name("pipe"))
    chain.top.with_name("bare.img").write_bytes(qcow2())
    with pytest.raises(RefusedError, match=reason):
        chain.write(content).plan()


@pytest.fixture
def device(elsewhere):
    """A golden device; a pipe takes its place."""
    os.mkfifo(elsewhere.with_name("device"))
    return elsewhere.with_name("device")


@pytest.mark.parametrize("state", [DomainState.RUNNING, DomainState.OFF])
def test_a_golden_device_is_reported_and_refused_only_with_overlays(chain, world, device, state):
    chain.write(qcow2(str(device), "raw"), state=state)
    if state is DomainState.RUNNING:
        with pytest.raises(RefusedError, match=r"vda lies over .*only libvirt could commit"):
            chain.plan()
    for level in ("ram", "paused", "crash") if state is DomainState.RUNNING else (None,):
        world.with_defaults(ram_strategy="auto")
        domain = world.hypervisor.domain("web")
        (file,) = make_plan(world.context, domain, SnapshotRequest(level=level)).backing_files
        assert file.is_unknown
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    warning = f"a later change of it cannot be detected: {device}, beneath vda"
    assert any(warning in note for note in world.heard.notes)


def test_an_unverifiable_file_is_restored_only_if_permitted(chain, world, device):
    chain.write(qcow2(str(device), "raw"))
    world.with_defaults(ram_strategy="auto")
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    for how in ({}, {"cold": True}, {"disks_only": True}):
        with pytest.raises(
            RefusedError, match=r"former state is unknown; .*use --despite-other-disks"
        ):
            make_restore_plan(world.context, "web", "s1", **how)
        assert make_restore_plan(world.context, "web", "s1", despite_other_disks=True, **how)
    record = find_records(world.context, "web@s1")[-1]
    with pytest.raises(RefusedError, match="former state is unknown"):
        check_clone(
            world.context,
            complete_source(world.context, record),
            CloneRequest("test", resumed=False),
        )
    outcome = verify(world.context, record, VerifyOptions())
    assert (outcome.passed, outcome.reached) == (True, VerifyDepth.CHECKED)
    assert any(str(device) in line and line.startswith("not run: ") for line in outcome.proof)


def test_a_backing_file_that_is_not_on_this_host(chain):
    network = "<backingStore type='network'><source protocol='nbd' name='x'/></backingStore>"
    with pytest.raises(RefusedError, match="is not on this host"):
        chain.write(qcow2()).spell(network).plan()


def test_files_on_nfs_or_fuse_are_not_accessed(chain, elsewhere, monkeypatch):
    touched = []

    def opened(path, *what, **how):
        touched.append(str(path))
        return open_file(path, *what, **how)

    open_file = os.open
    chain.world.resolver.table.append(Mount("0:9", str(elsewhere), "nfs4", "nas:/x", number=9))
    monkeypatch.setattr(os, "open", opened)
    chain.write(qcow2(str(elsewhere), "raw"))
    assert chain.beneath() == [(str(elsewhere), None, False)]
    chain.write(qcow2(str(elsewhere), "qcow2")).spell(store(elsewhere, "qcow2", "<backingStore/>"))
    assert chain.beneath() == [(str(elsewhere), None, False)]
    chain.write(qcow2(data_file=str(elsewhere)))
    with pytest.raises(RefusedError, match="is not on ZFS but on nfs4 and would not be"):
        chain.plan()
    assert str(elsewhere) not in touched


def test_a_written_path_that_cannot_be_resolved_counts_by_its_name(chain):
    chain.write(b"", "raw")
    chain.world.resolver.table.append(Mount("0:9", str(chain.top), "nfs4", "nas:/x", number=9))
    domain = chain.world.hypervisor.domain(chain.world.guest("web").uuid)
    assert written_by(chain.world.resolver, domain) == {str(chain.top)}


@pytest.mark.parametrize("form", ["vmdk", "qed", "qcow"])
def test_formats_whose_headers_are_not_read(chain, form):
    with pytest.raises(RefusedError, match=f"is a {form} image"):
        chain.write(b"KDMV", form).plan()


@pytest.mark.parametrize(("form", "known"), [("vmdk", False), ("qed", True), ("vdi", True)])
@pytest.mark.parametrize("spelled", [True, False])
def test_images_of_other_formats_beneath_a_disk(chain, world, elsewhere, form, known, spelled):
    """libvirt's chain has all files beneath them, except the extents of a vmdk."""
    chain.write(qcow2(str(elsewhere), form))
    if spelled:
        chain.spell(store(elsewhere, form, "<backingStore/>"))
    known = known and (spelled or form == "vdi")
    assert chain.beneath() == [(str(elsewhere), None, known)]
    world.with_defaults(ram_strategy="overlay")
    with pytest.raises(RefusedError, match="only libvirt could commit an overlay into it"):
        chain.plan()


def test_an_extent_of_a_vmdk_may_be_in_no_snapshot(chain, world):
    """Also if the extent is the file itself."""
    base = world.image("tank/web", "base.vmdk")
    chain.write(qcow2("base.vmdk", "vmdk"))
    assert chain.beneath() == [(str(base), None, False)]


@pytest.mark.parametrize("form", ["raw", "vdi", "vhdx"])
def test_formats_that_name_no_file(chain, form):
    assert chain.write(b"anything", form).beneath() == []


def test_a_disk_that_is_left_out_is_not_followed(chain):
    chain.write(qcow2("/nowhere", "raw"))
    chain.world.add_guest(
        "db", {"vda": "tank/db"}, more=(DiskSpec("vdb", str(chain.top), format="qcow2"),)
    )
    context = chain.world.with_defaults(exclude_disks=["vdb"])
    assert make_plan(context, chain.world.hypervisor.domain("db")).backing_files == ()


def test_a_data_file_gets_no_overlay(chain, world):
    """qemu-img would have to trust the header; libvirt before 10.10 has no data files."""
    world.image("tank/web", "data.raw")
    chain.write(qcow2(data_file="data.raw"))
    with pytest.raises(RefusedError, match=r"vda has a data file .*only libvirt could commit"):
        chain.plan()
    world.with_defaults(ram_strategy="auto")
    assert chain.plan().strategy is Strategy.MANUAL


def test_files_that_are_not_snapshotted_are_reported(chain, world, elsewhere):
    chain.write(qcow2(str(elsewhere), "raw"))
    take_snapshot(world.context, world.hypervisor.domain("web"), SnapshotRequest("s1"))
    assert f"not snapshotted, must not be changed: {elsewhere}" in world.heard.steps
