"""No definition of an archive gets anything of this host."""

import pytest
from fakes.domain_xml import DiskSpec, domain_xml

from snaporch.archive.import_xml import HostRules, imported_xml
from snaporch.errors import RefusedError
from snaporch.hypervisor.clone_xml import CloneDisk, CloneSpec, SharedError
from snaporch.hypervisor.domain_xml import host_paths, parse

UUID = "4678f48e-9e6e-53d3-9c13-dbd66056a5d1"
EMULATOR = "/usr/bin/qemu-system-x86_64"
QEMU = "xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'"


def spec(*, resumed=False):
    disks = {"vda": CloneDisk("/images/web/vda.raw", "file", "raw")}
    return CloneSpec(
        "web", UUID, "web@s1", disks, "/images/web", "none", resumed=resumed, is_clone=False
    )


def made(xml, *, resumed=False, accepted=()):
    rules = HostRules(frozenset({EMULATOR}), accepted)
    return imported_xml(xml, spec(resumed=resumed), {"vda": "raw"}, rules)


def plain(*more):
    return domain_xml("web", UUID, [DiskSpec("vda", "/tank/web.raw"), *more])


def with_device(xml):
    return plain().replace("</devices>", f"{xml}</devices>")


def with_child(xml):
    return plain().replace("<devices>", f"{xml}<devices>")


def with_os(xml):
    return plain().replace("</os>", f"{xml}</os>")


def test_only_the_own_directory_is_named():
    assert host_paths(parse(made(plain()).xml)) == {"/images/web/vda.raw"}


@pytest.mark.parametrize(
    "hostile",
    [
        with_child("<memory/>")
        .replace("<domain ", f"<domain {QEMU} ")
        .replace(
            "</domain>",
            "<qemu:commandline><qemu:arg value='-drive'/></qemu:commandline></domain>",
        ),
        plain()
        .replace("<domain ", f"<domain {QEMU} ")
        .replace("</domain>", "<qemu:override><qemu:device/></qemu:override></domain>"),
        plain().replace(
            "</domain>", "<x:c xmlns:x='http://libvirt.org/schemas/domain/bhyve/1.0'/></domain>"
        ),
        with_os("<kernel>/etc/shadow</kernel>"),
        with_os("<kernel>etc/shadow</kernel>"),
        with_os("<initrd>/usr/share/../../etc/shadow</initrd>"),
        with_os("<dtb>../etc/shadow</dtb>"),
        with_os("<loader readonly='yes' type='pflash'>/etc/shadow</loader>"),
        with_os("<loader readonly='yes' type='rom'>etc/shadow</loader>"),
        with_os("<nvram template='/etc/shadow'>/x</nvram>"),
        with_os("<acpi><table type='slic'>/etc/shadow</table></acpi>"),
        with_child("<sysinfo type='fwcfg'><entry name='opt/x' file='/etc/shadow'/></sysinfo>"),
        with_device("<interface type='network'><rom file='/etc/shadow'/></interface>"),
        plain().replace('type="raw"', 'type="vmdk"'),
        plain().replace('type="raw"', 'type="qcow2"'),
        with_child("<launchSecurity type='sev'/>"),
        plain().replace(
            '<target dev="vda"',
            "<encryption><secret type='passphrase' uuid='u'/></encryption><target dev=\"vda\"",
        ),
        with_os("<loader type='pflash'>/usr/share/OVMF/OVMF.fd</loader>"),
    ],
)
def test_a_definition_that_takes_something_of_the_host_is_refused(hostile):
    assert hostile != plain()
    with pytest.raises(RefusedError) as caught:
        made(hostile)
    assert "\n" not in caught.value.line()


@pytest.mark.parametrize(
    "device",
    [
        (
            "<hostdev mode='subsystem' type='pci'><source><address domain='0' bus='1' slot='0' "
            "function='0'/></source></hostdev>"
        ),
        "<filesystem type='mount'><source dir='/'/><target dir='root'/></filesystem>",
        "<shmem name='x'/>",
        "<interface type='hostdev'><source><address type='pci'/></source></interface>",
        "<disk type='block' device='lun'><source dev='/dev/sda'/><target dev='sda'/></disk>",
        "<disk type='file'><readonly/><source file='/etc/shadow'/><target dev='vdz'/></disk>",
        "<disk type='network'><source protocol='rbd' name='x'/><target dev='vdy'/></disk>",
    ],
)
def test_devices_of_the_host_are_left_out_of_a_guest_that_boots(device):
    result = made(with_device(device))
    assert result.missing
    assert host_paths(parse(result.xml)) == {"/images/web/vda.raw"}
    with pytest.raises(RefusedError):
        made(with_device(device), resumed=True)


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize(
    "device",
    [
        (
            "<disk type='file' device='cdrom'><source file='/etc/shadow'/><target dev='sda'/>"
            "<readonly/></disk>"
        ),
        "<disk type='block' device='cdrom'><source dev='/dev/sr0'/><target dev='sda'/></disk>",
        "<serial type='dev'><source path='/dev/ttyS0'/></serial>",
        "<serial type='file'><source path='/etc/cron.d/x'/></serial>",
        "<serial type='tcp'><source mode='connect' host='evil' service='1'/></serial>",
        (
            "<channel type='unix'><source mode='connect' path='/run/libvirt/libvirt-sock'/>"
            "<target type='virtio' name='x'/></channel>"
        ),
        "<interface type='bridge'><source bridge='br0'/><script path='/bin/sh'/></interface>",
        "<interface type='direct'><source dev='eth0'/></interface>",
        "<rng model='virtio'><backend model='egd' type='unix'><source path='/x'/></backend></rng>",
        "<graphics type='vnc' port='5900' listen='0.0.0.0'/>",
        "<emulator>/tmp/evil</emulator>",
    ],
)
def test_a_device_keeps_nothing_of_the_host(device, resumed):
    result = made(with_device(device), resumed=resumed)
    paths = host_paths(parse(result.xml))
    assert all(path.startswith("/images/web/") for path in paths)
    for word in ("evil", "br0", "eth0", "5900", "0.0.0.0", "cron", "ttyS0", "shadow", "sr0"):
        assert word not in result.xml.replace("/images/web/x", "")


def test_a_known_emulator_stays_and_firmware_of_packages_is_read():
    xml = with_os("<loader readonly='yes' type='pflash'>/usr/share/OVMF/CODE.fd</loader>")
    result = made(xml.replace("<devices>", f"<devices><emulator>{EMULATOR}</emulator>"))
    paths = {"/images/web/vda.raw", EMULATOR, "/usr/share/OVMF/CODE.fd"}
    assert host_paths(parse(result.xml)) == paths


def test_another_file_is_read_if_the_admin_accepts_it():
    xml = with_os("<kernel>/boot/vmlinuz guest</kernel>")
    with pytest.raises(RefusedError, match="--accept '/boot/vmlinuz guest'"):
        made(xml)
    assert "/boot/vmlinuz guest" in made(xml, accepted=("/boot/vmlinuz guest",)).xml


def test_hooks_and_labels_of_another_host_are_dropped():
    xml = with_child(
        "<metadata><x:run xmlns:x='urn:x'>/bin/sh</x:run></metadata>"
        "<seclabel type='static' model='dac'><label>0:0</label></seclabel>"
        "<resource><partition>/machine</partition></resource>"
    )
    result = made(xml).xml
    assert not any(word in result for word in ("/bin/sh", "seclabel", "partition"))


@pytest.mark.parametrize(
    "device",
    [
        "<graphics type='egl-headless'/>",
        "<graphics type='spice'><gl enable='yes' rendernode='/dev/dri/renderD128'/></graphics>",
        "<graphics type='sdl'><gl enable='yes'/></graphics>",
        "<video><model type='virtio'><acceleration accel3d='yes'/></model></video>",
    ],
)
def test_a_gpu_of_this_host_is_left_out(device):
    result = made(with_device(device))
    assert [each for each in result.missing if each.endswith("a GPU of this host")]
    assert not any(word in result.xml for word in ("egl", "<gl", 'accel3d="yes"'))
    with pytest.raises(SharedError, match="a GPU of this host"):
        made(with_device(device), resumed=True)


def test_a_definition_that_libvirt_reads_otherwise_is_refused():
    xml = plain().replace("<driver ", "<driver xmlns:x='urn:x' x:type='qcow2' ")
    with pytest.raises(SharedError, match="an attribute type with a namespace in <driver>"):
        made(xml)


def test_no_guest_gets_more_of_this_host_than_the_others():
    xml = "<cputune><shares>262144</shares></cputune><blkiotune><weight>1000</weight></blkiotune>"
    assert not any(word in made(with_child(xml)).xml for word in ("262144", "1000"))


def test_a_lun_is_refused():
    with pytest.raises(RefusedError, match="its disk vda is a lun"):
        made(plain().replace('device="disk"', 'device="lun"'))
