"""A snapshot of another host leads to no file of this one, and starts no program here."""

import contextlib
import os
import shlex
import socket
from pathlib import Path

import pytest
from fakes import manifests
from fakes.archives import in_snapshot
from fakes.images import qcow2

from snaporch.errors import RefusedError
from snaporch.hypervisor import HostObject
from snaporch.hypervisor.domain_xml import parse
from snaporch.hypervisor.foreign_xml import ForeignImage, confining, images
from snaporch.restore.bundle_checks import check_bundle
from snaporch.zfs.resolver import Mount

from .plans import plan

IMAGE = "web-vda.img"
QEMU = "xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'"


@pytest.fixture
def copy(story, world):
    """``web@s1``, whose first disk is a qcow2 image, came from a replica."""
    names = [f"{each}@s1" for each in story.datasets]
    world.pool.set_properties(names, {"snaporch:copy": "nas"})
    change(story, 'type="raw"', 'type="qcow2"')
    put(world, qcow2())
    world.hooks.log.clear()
    return story


def change(story, old, new):
    """Change the definitions in the bundle, not that in the RAM."""
    directory = Path(story.record.bundle)
    for path in directory.glob("domain*.xml"):
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1))
    manifests.with_sums(directory)


def put(world, data, name=IMAGE):
    in_snapshot(world, "tank/web", name, data)


def planned(world, **options):
    return plan(world, cold=True, discard_newer=True, **options)


def refused(world, words, *accepted):
    """Each refusal names the option that accepts it; with all of them it is accepted."""
    with pytest.raises(RefusedError, match=words):
        planned(world)
    for number, word in enumerate(accepted):
        with pytest.raises(RefusedError) as caught:
            planned(world, accepted=accepted[:number])
        assert shlex.split(caught.value.step.rpartition(": ")[2]) == ["--accept", word]
    assert planned(world, accepted=accepted)


def test_an_image_of_its_own_is_accepted(copy, world):
    planned(world)


@pytest.mark.parametrize(
    "image",
    [
        qcow2("/etc/shadow", "raw"),
        qcow2("/etc/shadow"),
        qcow2("/dev/sda", "raw"),
        qcow2("json:{}", "raw"),
        qcow2("nbd://example.org", "raw"),
        qcow2(data_file="/etc/shadow"),
    ],
)
def test_an_image_that_names_a_file_of_this_host_is_refused(copy, world, image):
    put(world, image)
    with pytest.raises(RefusedError, match="the header of") as caught:
        planned(world)
    assert "which is not in the snapshot" in caught.value.reason
    accepted = shlex.split(caught.value.step.rpartition("--accept")[2])
    assert planned(world, accepted=accepted)
    assert world.hooks.log == []


def test_an_image_that_names_a_file_above_its_dataset_is_refused(copy, world):
    put(world, qcow2("../../../etc/shadow", "raw"))
    path = Path(copy.domain.disks[0].source).parent / "../../../etc/shadow"
    refused(world, "leads out of it", str(path))


@pytest.mark.parametrize(
    "more",
    [
        "<title>/etc/shadow</title>",
        "<description>/etc/shadow</description>",
        "<metadata><x:a xmlns:x='urn:x' p='/etc/shadow'/></metadata>",
    ],
)
def test_a_description_that_has_the_path_accepts_no_file(copy, world, more):
    change(copy, "<devices>", f"{more}<devices>")
    put(world, qcow2("/etc/shadow", "raw"))
    refused(world, "names .?/etc/shadow.?, which is not in the snapshot", "/etc/shadow")


def below(world, form):
    """A backing file of its own that the definition shows; its header names a file of the host."""
    own = world.image("tank/web", "b.img")
    put(world, qcow2("/etc/shadow", "raw"), "b.img")
    return f"<backingStore type='file'>{form}<source file='{own}'/></backingStore>"


def test_a_slice_whose_header_is_not_read_is_refused(copy, world):
    chain = below(world, "<format type='raw'/>").replace(
        "/></backingStore>",
        "><slices><slice type='storage' offset='512' size='512'/></slices></source></backingStore>",
    )
    change(copy, "</disk>", f"{chain}</disk>")
    with pytest.raises(RefusedError, match="slices"):
        planned(world)


def test_what_its_backing_file_names_is_read_too(copy, world):
    put(world, qcow2("base.img", "qcow2"))
    put(world, qcow2("below.img"), "base.img")
    put(world, qcow2("/etc/shadow", "raw"), "below.img")
    refused(world, "below.img names '/etc/shadow'", "/etc/shadow")
    put(world, qcow2("base.img", "qcow2"), "below.img")
    with pytest.raises(RefusedError, match="over more than 64 images"):
        planned(world)


def test_a_backing_file_that_is_the_data_file_too_is_read(copy, world):
    put(world, qcow2("base.img", "qcow2", "base.img"))
    put(world, qcow2("/etc/shadow", "raw"), "base.img")
    refused(world, "base.img names '/etc/shadow'", "/etc/shadow")


def test_a_backing_file_that_the_definition_shows_is_accepted(copy, world):
    put(world, qcow2("/srv/base.img", "raw"))
    refused(world, "names '/srv/base.img'", "/srv/base.img")
    source = "<format type='raw'/><source file='/srv/base.img'/>"
    store = f"<backingStore type='file'>{source}</backingStore>"
    change(copy, '<target dev="vda"', f'{store}<target dev="vda"')
    with pytest.raises(RefusedError, match="and has <source file='/srv/base"):
        planned(world)
    planned(world, accepted=["/srv/base.img"])


def test_uefi_variables_in_its_dataset_are_read_too(copy, world):
    put(world, qcow2("/etc/shadow", "raw"), "vars.fd")
    path = Path(copy.domain.disks[0].source).with_name("vars.fd")
    change(copy, "</os>", f"<nvram format='qcow2'>{path}</nvram></os>")
    refused(world, "vars.fd names '/etc/shadow'", "/etc/shadow")


@pytest.mark.parametrize("kind", ["file", "block"])
def test_uefi_variables_that_a_source_names_are_read_too(copy, world, kind):
    put(world, qcow2("/etc/shadow", "raw"), "vars.fd")
    path = Path(copy.domain.disks[0].source).with_name("vars.fd")
    source = f"<source {'dev' if kind == 'block' else 'file'}='{path}'/>"
    change(copy, "</os>", f"<nvram type='{kind}' format='qcow2'>{source}</nvram></os>")
    definitions = [each.read_text() for each in Path(copy.record.bundle).glob("domain*.xml")]
    assert all(
        ForeignImage("nvram", str(path), "qcow2") in images(parse(each)) for each in definitions
    )
    with pytest.raises(RefusedError, match=r"vars.fd names '/etc/shadow'"):
        planned(world)


def test_a_loader_that_this_hosts_definition_has_there_is_read_too(copy, world):
    put(world, qcow2("/etc/shadow", "raw"), "fw.img")
    path = Path(copy.domain.disks[0].source).with_name("fw.img")
    guest = world.guest()
    loader = f"<loader format='qcow2'>{path}</loader></os>"
    guest.inactive = guest.inactive.replace("</os>", loader)
    with pytest.raises(RefusedError, match=r"fw.img names '/etc/shadow'"):
        planned(world, keep_definition=True)


def test_a_volume_of_a_storage_pool_is_read_too(copy, world):
    put(world, qcow2("/etc/shadow", "raw"), "more.img")
    home = Path(copy.domain.disks[0].source).parent
    pool = f"<pool type='dir'><name>vms</name><target><path>{home}</path></target></pool>"
    world.hypervisor.pool_objects["vms"] = HostObject("vms", pool, False)
    disk = (
        "<disk type='volume'><driver type='qcow2'/><source pool='vms' volume='more.img'/>"
        "<target dev='vdm'/></disk>"
    )
    change(copy, "</devices>", f"{disk}</devices>")
    refused(world, "more.img names '/etc/shadow'", "/etc/shadow")


def test_a_disk_in_its_dataset_that_no_snapshot_knows_is_read_too(copy, world):
    put(world, qcow2("/etc/shadow", "raw"), "more.img")
    path = Path(copy.domain.disks[0].source).with_name("more.img")
    disk = (
        f"<disk type='file'><driver type='qcow2'/><source file='{path}'/><target dev='vdz'/></disk>"
    )
    change(copy, "</devices>", f"{disk}</devices>")
    refused(world, "more.img names '/etc/shadow'", "/etc/shadow")


def test_a_link_that_leads_out_of_it_is_refused(copy, world):
    put(world, b"")
    inside = world.snapshot_files("tank/web", "s1") / IMAGE
    inside.unlink()
    inside.symlink_to("/etc/shadow")
    path = copy.domain.disks[0].source
    refused(world, "the link web-vda.img leads out of it, to /etc/shadow", path)
    inside.unlink()
    os.mkfifo(inside)  # as a device file
    refused(world, "is not a regular file", path)


def test_a_socket_in_its_dataset_is_accepted(copy, world):
    inside = world.snapshot_files("tank/web", "s1")
    inside.mkdir(parents=True, exist_ok=True)
    path = Path(copy.domain.disks[0].source).with_name("console")
    with socket.socket(socket.AF_UNIX) as listener, contextlib.chdir(inside):
        listener.bind("console")
    console = f"<console type='unix'><source mode='bind' path='{path}'/></console>"
    change(copy, "</devices>", f"{console}</devices>")
    planned(world)


def test_a_shared_directory_of_its_dataset_is_accepted_if_no_link_leads_to_it(copy, world):
    inside = world.snapshot_files("tank/web", "s1")
    (inside / "share").mkdir(parents=True)
    path = Path(copy.domain.disks[0].source).with_name("share")
    source = f"<source dir='{path}'/><target dir='x'/>"
    share = f"<filesystem type='mount'><driver type='virtiofs'/>{source}</filesystem>"
    change(copy, "</devices>", f"{share}</devices>")
    planned(world)
    (inside / "share").rename(inside / "other")
    (inside / "share").symlink_to("other")
    refused(world, "is not a regular file", str(path))


def test_a_shared_directory_with_a_file_that_is_opened_for_the_guest_is_refused(copy, world):
    """The guest could replace the file by a link, which libvirt follows at the next start."""
    home = Path(copy.domain.disks[0].source).parent
    source = f"<source dir='{home}'/><target dir='x'/>"
    share = f"<filesystem type='mount'><driver type='virtiofs'/>{source}</filesystem>"
    change(copy, "</devices>", f"{share}</devices>")
    refused(world, f"its guest can replace .*, which is in the shared {home};", str(home))


@pytest.mark.parametrize("named", ["definition", "header"])
def test_a_link_to_a_file_in_a_shared_directory_is_refused(copy, world, named):
    home = Path(copy.domain.disks[0].source).parent
    inside = world.snapshot_files("tank/web", "s1")
    (inside / "share").mkdir(parents=True)
    (inside / "share/base").write_bytes(b"")
    (inside / "way").symlink_to("share/base")
    source = f"<source dir='{home}/share'/><target dir='x'/>"
    more = f"<filesystem type='mount'><driver type='virtiofs'/>{source}</filesystem>"
    if named == "definition":
        more += f"<disk><source file='{home}/way'/><target dev='vdz'/></disk>"
    else:
        put(world, qcow2("way", "raw"))
    change(copy, "</devices>", f"{more}</devices>")
    refused(world, f"can replace {home}/way, which is in the shared {home}/share", f"{home}/share")


@pytest.mark.parametrize(
    "device",
    [
        "<serial type='file'><source path='{0}' append='on'/></serial>",
        "<channel type='pty'><log file='{0}'/></channel>",
        "<memory model='nvdimm'><source><path>{0}</path></source></memory>",
        "<disk><source file='{0}'/><target dev='vdy'/></disk>",
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_an_image_into_which_the_guest_writes_bytes_is_refused(copy, world, device, is_there):
    """It could write a header that names a file of this host, which the next start opens."""
    path = Path(copy.domain.disks[0].source).with_name("more")
    disk = (
        "<disk device='cdrom'><driver type='qcow2'/>"
        f"<source file='{path}' startupPolicy='optional'/><target dev='sdz'/></disk>"
    )
    if is_there:
        put(world, qcow2(), "more")
    change(copy, "</devices>", f"{disk}{device.format(path)}</devices>")
    refused(world, f"its guest can write the header of {path}, which is a file of", str(path))


@pytest.mark.parametrize("loader", ["", "<loader format='raw'>/usr/share/OVMF/OVMF.fd</loader>"])
def test_variables_of_uefi_in_a_qcow2_image_are_no_bytes(copy, world, loader):
    path = Path(copy.domain.disks[0].source).with_name("variables")
    put(world, qcow2(), "variables")
    loader = loader.replace("<loader", "<loader readonly='yes' type='pflash'")
    change(copy, "</os>", f"{loader}<nvram format='qcow2'>{path}</nvram></os>")
    planned(world)


@pytest.mark.parametrize("device", ["disk", "nvram"])
def test_an_image_that_is_flash_or_a_raw_disk_too_is_refused(copy, world, device):
    path = Path(copy.domain.disks[0].source)
    if device == "nvram":
        change(copy, "</os>", f"<nvram format='raw'>{path}</nvram></os>")
    else:
        disk = f"<disk><source file='{path}'/><target dev='vdy'/></disk>"
        change(copy, "</devices>", f"{disk}</devices>")
    refused(world, "its guest can write the header of", str(path))


def test_a_raw_view_that_cannot_be_written_is_accepted(copy, world):
    path = Path(copy.domain.disks[0].source)
    disk = f"<disk><source file='{path}'/><target dev='vdy'/><readonly/></disk>"
    change(copy, "</devices>", f"{disk}</devices>")
    planned(world)


def test_another_directory_of_its_dataset_is_refused(copy, world):
    inside = world.snapshot_files("tank/web", "s1")
    (inside / "tpm").mkdir(parents=True)
    path = Path(copy.domain.disks[0].source).with_name("tpm")
    change(copy, "</devices>", f"<serial type='file'><source path='{path}'/></serial></devices>")
    refused(world, "is not a regular file", str(path))


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("link", ["", "way"])
def test_a_file_of_a_dataset_that_is_mounted_below_its_own_is_not_its(copy, world, link, is_there):
    """Also by a link, and if the snapshot has a file at the same place."""
    home = Path(copy.domain.disks[0].source).parent
    world.resolver.table.append(Mount("0:9", str(home / "db"), "zfs", "tank/web/db"))
    put(world, qcow2(f"{link or 'db'}/disk.raw", "raw"))
    inside = world.snapshot_files("tank/web", "s1")
    if link:
        (inside / link).symlink_to("db")
    if is_there:
        (inside / "db").mkdir()
        put(world, b"", "db/disk.raw")
    if link:
        refused(world, "db is on another file system", str(home / link / "disk.raw"))
    else:
        refused(world, "names 'db/disk.raw', which is not in the snapshot", "db/disk.raw")


def test_a_path_in_a_dataset_below_its_own_is_this_hosts(copy, world):
    home = Path(copy.domain.disks[0].source).parent
    world.resolver.table.append(Mount("0:9", str(home / "db"), "zfs", "tank/web/db"))
    disk = f"<disk><source file='{home}/db/cd.iso'/><target dev='vdz'/></disk>"
    change(copy, "</devices>", f"{disk}</devices>")
    refused(world, "and has <source file=", f"{home}/db/cd.iso")


def test_a_file_in_another_snapshot_of_its_dataset_is_not_read_unchecked(copy, world):
    put(world, qcow2(".zfs/snapshot/s0/base.img", "qcow2"))
    path = Path(copy.domain.disks[0].source).parent / ".zfs/snapshot/s0/base.img"
    refused(world, ".zfs is on another file system", str(path))


@pytest.mark.parametrize("form", ["vmdk", "qed", "fat"])
def test_a_format_that_is_not_read_is_refused(copy, world, form):
    change(copy, 'type="qcow2"', f'type="{form}"')
    refused(
        world, f"has the format '{form}', which may name other files", copy.domain.disks[0].source
    )


def test_a_damaged_image_is_refused(copy, world):
    put(world, b"zeros")
    refused(world, "is not a qcow2 image", copy.domain.disks[0].source)


def test_an_image_that_is_at_no_path_is_refused(copy, world):
    disk = (
        "<disk type='network'><driver type='qcow2'/><source protocol='nbd' name='x'/>"
        "<target dev='vdn'/></disk>"
    )
    change(copy, "</devices>", f"{disk}</devices>")
    refused(world, "and has <disk type='network'>", "disk.type=network", "vdn")


def test_an_image_of_this_host_may_name_what_it_names(story, world):
    put(world, qcow2("/etc/shadow", "raw"))
    change(story, 'type="raw"', 'type="qcow2"')
    planned(world)


def test_ram_whose_definition_has_another_format_is_not_resumed(copy, world):
    change(copy, 'type="qcow2"', 'type="raw"')
    check_bundle(world.context, plan(world, discard_newer=True))
    change(copy, 'type="raw"', 'type="qcow2"')
    with pytest.raises(RefusedError, match="vda as raw") as caught:
        check_bundle(world.context, plan(world, discard_newer=True))
    assert "--cold" in caught.value.step


STATIC = "<seclabel type='static' model='dac'><label>+0:+0</label></seclabel>"
BASE = "<seclabel type='dynamic' model='selinux'><baselabel>x</baselabel></seclabel>"
RUNS = (
    "<seclabel type='dynamic' model='dac' relabel='yes'><label>+64055:+64055</label>"
    "<imagelabel>+64055:+64055</imagelabel></seclabel>"
)
ARGUMENTS = f"<q:commandline {QEMU}><q:arg value='-incoming'/></q:commandline>"
OVERRIDE = f"<q:override {QEMU}/>"
LABEL = "<label>x</label>"
OF_A_FILE = f"<source><seclabel model='dac'>{LABEL}</seclabel></source>"
OF_A_DISK = f"<devices><disk>{OF_A_FILE}</disk></devices>"


@pytest.mark.parametrize(
    ("xml", "expected"),
    [
        (RUNS, set()),
        (STATIC, {"seclabel"}),
        (BASE, {"seclabel"}),
        ("<seclabel type='none'/>", {"seclabel"}),
        (OF_A_DISK, {"seclabel"}),
        (OF_A_DISK.replace(LABEL, ""), set()),
        (ARGUMENTS, {"qemu:commandline"}),
        (f"{OVERRIDE}{RUNS}{STATIC}", {"qemu:override", "seclabel"}),
        ("<x:y xmlns:x='urn:x'/>", {"y"}),
    ],
)
def test_what_gives_a_guest_more_than_others_have(xml, expected):
    assert confining(parse(f"<domain>{xml}</domain>")) == expected


@pytest.mark.parametrize(("more", "name"), [(ARGUMENTS, "qemu:commandline"), (STATIC, "seclabel")])
def test_the_definition_of_another_host_gets_them_only_if_they_are_accepted(
    copy, world, more, name
):
    change(copy, "</domain>", f"{more}</domain>")
    refused(world, f"comes from another host, and has <{name}>", name)


def test_a_definition_that_stays_is_this_hosts(copy, world):
    change(copy, "</domain>", f"{STATIC}</domain>")
    planned(world, keep_definition=True)


def test_a_guest_of_this_host_keeps_them(story, world):
    change(story, "</domain>", f"{STATIC}{ARGUMENTS}</domain>")
    planned(world)
