"""Every kind of domain that libvirt's schema allows: read, barred and cloned."""

import re
from xml.etree import ElementTree

import pytest
from fakes.domain_corpus import MARKS, Grammar, Validator, examples
from fakes.domain_xml import DiskSpec, domain_xml

from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml as domain_xml_of
from snaporch.hypervisor.clone_xml import CloneDisk, CloneSpec, make_clone_xml
from snaporch.hypervisor.qemu_arguments import unknown_argument

OLD = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
NEW = "11111111-2222-3333-4444-555555555555"
OWN = "/clones/1"
TAKEN_OVER = [
    # data, size and speed that the guest sees
    r"/domain/(title|description|memory|currentMemory|maxMemory|memtune|vcpus?|cpu|features)\b.*",
    r"/domain/(clock|capabilities|iothreads|iothreadids|defaultiothread|os/cmdline)\b.*",
    r"/domain/(throttlegroups/.*|genid)",  # genid is replaced by a random one
    r"/domain/os/(type@machine|bootmenu@timeout|bios@rebootTimeout)",
    r"/domain/sysinfo/((bios|system|baseBoard|chassis|oemStrings)/)?entry(@name)?",
    # CPUs and memory nodes are shared
    r"/domain/(cputune/(?!cachetune|memorytune)|numatune/|memoryBacking/).*",
    # files of the host that are only read
    r"/domain/os/(loader|kernel|initrd|dtb|shim|acpi/table|nvram@template)",
    r"/domain/sysinfo/entry@file|/domain/devices/(emulator|interface/rom@file)",
    # disks: read-only, without a medium, or the clone's own
    r"/domain/devices/disk/(source|backingStore/source)@(file|dev)",
    r"/domain/devices/disk/(iotune|geometry|blockio|driver|throttlefilters)\b.*",
    r"/domain/devices/disk/(serial|wwn|vendor|product|target@\w+)",
    # addresses of devices on the guest's buses
    r"/domain/devices/\w+/(address|alias|acpi|boot)\b.*",
    r"/domain/override/device@alias",
    # devices that have nothing of the host behind them
    r"/domain/devices/(controller|redirfilter|memballoon|hub|iommu|nvram|panic|watchdog)\b.*",
    r"/domain/devices/video/model\b.*",
    r"/domain/devices/(sound\b.*|crypto/backend@queues)",
    (r"/domain/devices/audio(/(input|output)(/settings)?)?@(\w*[lL]ength|voices|channels|frequency"
    r"|timerPeriod)"),
    r"/domain/devices/memory/(uuid|target/.*|source/(nodemask|pagesize))",
    r"/domain/devices/rng/(rate@.*|driver@.*)",
    r"/domain/devices/vsock/driver@.*",
    r"/domain/devices/interface/(mac@address|model@type|mtu@size|driver\b.*)",
    r"/domain/devices/(serial|parallel|console|channel)/target@(name|port)",
    r"/domain/devices/(serial|parallel|console|channel|redirdev)/source@channel",
    r"/domain/devices/graphics@(keymap|passwd)",
    r"/domain/devices/tpm/backend/encryption@secret",
]  # fmt: skip


def identity(*, resumed, throw_away=False):
    return CloneSpec(
        name="two",
        uuid=NEW,
        of="web@s1",
        disks={"vda": CloneDisk(f"{OWN}/disk0/a.img", "file")},
        files=OWN,
        network="none",
        resumed=resumed,
        throw_away=throw_away,
    )


def texts(root):
    return ElementTree.tostring(root, encoding="unicode")


@pytest.fixture(scope="module")
def corpus():
    plain = ElementTree.fromstring(domain_xml("web", OLD, [DiskSpec("vda", "/tank/q7q/a.img")]))
    return list(examples(plain, Grammar()))


@pytest.fixture(scope="module")
def clones(corpus):
    """The clones made of each, resumed and booted, without the refused ones."""
    made = []
    for example in corpus:
        for resumed in (True, False):
            try:
                made.append(
                    (example, make_clone_xml(texts(example.root), identity(resumed=resumed)).xml)
                )
            except RefusedError:
                continue
    return made


def values(element, path=""):
    """Each value in a document, and where it is."""
    path = f"{path}/{re.sub('{.*}', '', element.tag)}"
    yield from ((f"{path}@{name}", value) for name, value in element.attrib.items())
    if element.text and element.text.strip():
        yield path, element.text.strip()
    for child in element:
        yield from values(child, path)


def is_small(root):
    """libxml2 takes very long to validate large disks."""
    return all(len(list(disk.iter())) <= 12 for disk in root.findall("devices/disk"))


def test_it_has_every_device_and_clones_of_all_that_can_be_cloned(corpus, clones):
    assert len(corpus) > 1000
    tags = {example.tag for example in corpus}
    cannot = {"hostdev", "filesystem", "shmem", "lease", "launchSecurity", "idmap"}
    resumed = {example.tag for example, text in clones if f"<{example.tag}" in text}
    assert tags >= cannot
    assert not resumed & cannot
    assert resumed >= {
        "disk", "controller", "interface", "input", "graphics", "video", "sound", "audio", "rng",
        "serial", "parallel", "console", "channel", "smartcard", "redirdev", "redirfilter", "hub",
        "tpm", "memory", "watchdog", "memballoon", "nvram", "panic", "iommu", "vsock", "emulator",
        "os", "cpu", "clock", "features", "sysinfo", "cputune", "numatune", "memoryBacking",
        "metadata", "vcpu", "pm", "perf", "keywrap", "blkiotune", "memtune", "title",
    }  # fmt: skip


def test_all_are_read_and_barred(corpus):
    validator = Validator()
    for example in corpus:
        text = texts(example.root)
        root = domain_xml_of.parse(text)
        assert domain_xml_of.disks(root)[0].target == "vda"
        for read in (
            domain_xml_of.volume_references, domain_xml_of.nvram, domain_xml_of.tpm_state,
            domain_xml_of.emulator_owner, domain_xml_of.mirrors, domain_xml_of.agent_connected,
            unknown_argument,
        ):  # fmt: skip
            read(root)
        for disk in domain_xml_of.disks(root):
            domain_xml_of.backing_images(root, disk.target)
        devices = example.root.find("devices")
        if devices[-1].tag == "disk" and is_small(example.root):
            devices[:] = reversed(devices)  # the first is the one that is barred
            text = domain_xml_of.barred(texts(example.root), "/absent")
            devices[:] = reversed(devices)
            assert domain_xml_of.has_disk_at(text, "/absent")
            assert validator.accepts(text) or not validator.accepts(texts(example.root)), text


def test_nothing_of_the_host_is_left_in_a_clone(clones):
    taken_over = re.compile("|".join(f"({each})" for each in TAKEN_OVER))
    left = {
        path
        for _, text in clones
        for path, value in values(ElementTree.fromstring(text))
        if MARKS.search(value) and not value.startswith(OWN) and not taken_over.fullmatch(path)
    }
    assert not left


def test_no_clone_refers_to_the_host(clones):
    for _, text in clones:
        root = ElementTree.fromstring(text)
        absent = (
            "seclabel", "resource", "devices/hostdev", "devices/filesystem", "devices/shmem",
            "devices/lease", "devices/input[@type='evdev']", "devices/input[@type='passthrough']",
            "devices/graphics/listen[@address]", "devices/graphics[@port]",
            "devices/graphics[@socket]", "devices/interface/script",
            "devices/video/driver[@name='vhostuser']",
        )  # fmt: skip
        assert [path for path in absent if root.find(path) is not None] == []
        assert {each.get("type") for each in root.findall("devices/interface")} <= {"ethernet"}
        for source in root.findall("devices/disk[@type='network']"):
            raise AssertionError(texts(source))


def test_clones_are_of_the_schema(clones):
    validator = Validator()
    seen = set()
    for example, text in clones:
        if id(example) in seen or not is_small(example.root):
            continue
        seen.add(id(example))
        assert validator.accepts(text) or not validator.accepts(texts(example.root)), text
