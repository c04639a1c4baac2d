"""Domain XML that no libvirt writes: every reader returns a value or a readable error."""

from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.definition_blockers import find_domain_blockers
from snaporch.hypervisor.interface import OverlayDisk
from snaporch.model import Disk, Domain, DomainState, Owner, TpmState

TAGS = ["disk", "driver", "source", "target", "mirror", "backingStore", "readonly", "transient"]
TAGS += ["devices", "os", "nvram", "type", "tpm", "backend", "seclabel", "label", "uuid", "name"]
TAGS += [
    "varstore",
    "loader",
    "channel",
    "hostdev",
    "interface",
    "filesystem",
    "cpu",
    "feature",
    "clock",
    "timer",
]
TAGS += ["{http://example.org}disk", "{http://example.org}source"]
KEYS = ["type", "device", "dev", "file", "dir", "name", "pool", "volume", "path", "state", "job"]
KEYS += ["ready", "cache", "model", "policy", "frequency", "version", "mode"]
KEYS += ["{http://example.org}dev"]
VALUES = ["file", "block", "dir", "volume", "network", "vda", "/tank/web.img", "emulator", "dac"]
VALUES += ["passthrough", "1.2", "1:2", "+0:+0", "\u00b2:\u00b2", "5", ":", "yes", "connected"]
VALUES += ["org.qemu.guest_agent.0", "invtsc", "tsc", "require", "cdrom", "lun", "unsafe", "copy"]
WORDS = st.one_of(
    st.sampled_from(VALUES),
    st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff")),
)
ATTRIBUTES = st.dictionaries(st.sampled_from(KEYS), WORDS, max_size=3)


def element(tag, attributes, text, children):
    made = ElementTree.Element(tag, attributes)
    made.text = text
    made.extend(children)
    return made


LEAVES = st.builds(element, st.sampled_from(TAGS), ATTRIBUTES, WORDS, st.just([]))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.builds(
        element, st.sampled_from(TAGS), ATTRIBUTES, WORDS, st.lists(inner, max_size=4)
    ),
    max_leaves=12,
)
DEVICES = st.lists(TREES, max_size=5).map(lambda found: element("devices", {}, None, found))
SYSTEM = st.lists(TREES, max_size=2).map(lambda found: element("os", {}, None, found))
DOMAINS = st.builds(
    lambda devices, system, rest: element("domain", {}, None, [devices, system, *rest]),
    DEVICES,
    SYSTEM,
    st.lists(TREES, max_size=3),
)
VDA = OverlayDisk("vda", "/tank/web.img", "file", "raw", "/overlays/vda.qcow2")
HANDLE = SimpleNamespace(listAllCheckpoints=lambda flags: [])
DEEP = 20_000


def read_everything(text):
    """Each reader's answer, of the type it promises."""
    root = domain_xml.parse(text)
    found = domain_xml.disks(root)
    assert all(isinstance(disk, Disk) and isinstance(disk.target, str) for disk in found)
    assert isinstance(domain_xml.nvram(root), str | None)
    assert isinstance(domain_xml.tpm_state(root), TpmState | None)
    assert isinstance(domain_xml.uncapturable_reason(root), tuple | None)
    assert isinstance(domain_xml.emulator_owner(root), Owner | None)
    assert isinstance(domain_xml.agent_connected(root), bool)
    for pool, volume in domain_xml.volume_references(root).values():
        assert isinstance(pool, str)
        assert isinstance(volume, str)
    for job, ready in domain_xml.mirrors(root).values():
        assert isinstance(job, str)
        assert isinstance(ready, bool)
    for disk in found:
        assert isinstance(domain_xml.backing_source(root, disk.target), str | None)
        assert all(isinstance(path, str) for path in domain_xml.backing_chain(root, disk.target))
    for blocker in find_domain_blockers(HANDLE, domain(text, tuple(found))):
        assert blocker.reason
        assert blocker.strategies


def domain(text, disks):
    return Domain(
        name="web",
        uuid="u",
        state=DomainState.RUNNING,
        disks=disks,
        live_xml=text,
        inactive_xml=None,
        nvram=None,
        tpm_state=None,
        machine="",
        managed_save=False,
        emulator_owner=None,
        boot="",
    )


def value_or_refusal(text):
    try:
        read_everything(text)
        domain_xml.with_bases(text, [VDA])
    except RefusedError as error:
        message = str(error)
    else:
        message = ""
    assert message == "" or message.isprintable()


@settings(max_examples=80)
@given(DOMAINS)
def test_elements_in_any_order_are_read_or_refused(tree):
    value_or_refusal(ElementTree.tostring(tree, encoding="unicode"))


@given(st.text())
def test_any_text_is_read_or_refused(text):
    value_or_refusal(text)


@given(st.text(st.characters(codec=None, min_codepoint=0xD000, max_codepoint=0xE100)))
def test_half_surrogates_are_read_or_refused(text):
    value_or_refusal(f"<domain><name>{text}</name></domain>")


PLAIN = (
    "<domain type='kvm'><uuid>u</uuid><os><type>hvm</type><nvram>/x</nvram></os><devices>"
    "<disk type='file'><driver type='raw'/><source file='/tank/web.img'/><target dev='vda'/></disk>"
    "<channel><target name='org.qemu.guest_agent.0' state='connected'/></channel></devices>"
    "<seclabel model='dac'><label>+1:+2</label></seclabel></domain>"
)


@settings(max_examples=100)
@given(st.data())
def test_one_wrong_character_is_read_or_refused(data):
    place = data.draw(st.integers(0, len(PLAIN)))
    length = data.draw(st.integers(0, 3))
    other = data.draw(st.text(max_size=3))
    value_or_refusal(PLAIN[:place] + other + PLAIN[place + length :])


@pytest.mark.parametrize("cut", range(0, len(PLAIN), 7))
def test_a_document_that_was_cut_is_refused(cut):
    with pytest.raises(RefusedError):
        domain_xml.parse(PLAIN[:cut])


@pytest.mark.parametrize(
    "inside",
    [
        "<metadata>" + "<a>" * DEEP + "</a>" * DEEP + "</metadata>",
        "<devices>" * DEEP + "</devices>" * DEEP,
        "<devices><disk><target dev='vda'/>"
        + "<backingStore type='file'><source file='/x'/>" * DEEP
        + "</backingStore>" * DEEP
        + "</disk></devices>",
        "<devices>" + "<disk><target dev='vda'/></disk>" * 2000 + "</devices>",
        f"<name>{'x' * 1_000_000}</name>",
        "<a " + " ".join(f"b{number}='1'" for number in range(DEEP)) + "/>",
    ],
    ids=["metadata", "devices", "chain", "disks", "text", "attributes"],
)
def test_huge_documents_are_read_or_refused(inside):
    try:
        root = domain_xml.parse(f"<domain>{inside}</domain>")
    except RefusedError:
        return
    assert isinstance(domain_xml.disks(root), list)
    assert isinstance(domain_xml.backing_chain(root, "vda"), list)


def test_xml_that_libvirt_accepts_can_be_written_again():
    """Its parser (libxml2) takes 256 levels."""
    deep = "<metadata>" + "<a>" * 250 + "</a>" * 250 + "</metadata>"
    switched = PLAIN.replace(VDA.base, VDA.overlay).replace("<os>", deep + "<os>")
    assert VDA.base in domain_xml.with_bases(switched, [VDA])


@pytest.mark.parametrize(
    "text",
    [
        PLAIN.replace("<domain ", "<domain xmlns='http://example.org' "),
        PLAIN.replace("<domain ", "<x:domain xmlns:x='http://example.org' ").replace(
            "</domain>", "</x:domain>"
        ),
    ],
)
def test_a_domain_in_a_foreign_namespace_is_refused(text):
    with pytest.raises(RefusedError):
        domain_xml.parse(text)


def test_a_disk_in_a_foreign_namespace_is_ignored():
    text = PLAIN.replace("<disk ", "<x:disk xmlns:x='http://example.org' ")
    assert domain_xml.disks(domain_xml.parse(text.replace("</disk>", "</x:disk>"))) == []


@pytest.mark.parametrize(
    "declaration",
    ["<?xml version='1.0'?>", "<?xml version='1.0' encoding='utf-8'?>", "<?xml-model href='x'?>"],
)
def test_text_before_the_domain_changes_nothing(declaration):
    assert domain_xml.disks(domain_xml.parse(declaration + PLAIN)) == domain_xml.disks(
        domain_xml.parse(PLAIN)
    )


def test_a_comment_or_instruction_inside_is_no_device():
    text = PLAIN.replace("<devices>", "<devices><!-- <disk/> --><?disk x?>")
    assert len(domain_xml.disks(domain_xml.parse(text))) == 1


@pytest.mark.parametrize("entity", ["&lt;", "&#0;", "&#xD800;", "&#1114112;", "&amp;", "&x;"])
def test_references_in_attributes_are_read_or_refused(entity):
    value_or_refusal(PLAIN.replace("/tank/web.img", f"/tank/{entity}"))
