"""A definition that libvirt would read in another way than it was checked is refused."""

import pytest

from snaporch.errors import RefusedError
from snaporch.hypervisor.clone_xml import SharedError, make_clone_xml
from snaporch.hypervisor.domain_xml import parse
from snaporch.hypervisor.one_reading import two_readings

QEMU = "xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'"


def domain(content, attributes=""):
    return f"<domain {attributes}><name>web</name><uuid>u</uuid>{content}</domain>"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            "<devices><disk><driver xmlns:x='urn:x' x:type='qcow2' type='raw'/></disk></devices>",
            "an attribute type with a namespace in <driver>",
        ),
        (
            "<seclabel xmlns:x='urn:x' x:type='static' model='dac'><label>+0:+0</label></seclabel>",
            "an attribute type with a namespace in <seclabel>",
        ),
        (
            f"<q:commandline {QEMU}><q:arg q:value='-x'/></q:commandline>",
            "an attribute value with a namespace in <arg>",
        ),
        (
            "<devices><x:disk xmlns:x='urn:x'/></devices>",
            "a <disk> with a namespace in <devices>",
        ),
        (
            "<devices><disk><x:source xmlns:x='urn:x' file='/etc/shadow'/></disk></devices>",
            "a <source> with a namespace in <disk>",
        ),
        (
            "<os><nvram format='qcow2'>/tank/web/evil<source file='/tank/web/a'/></nvram></os>",
            "an <nvram> with a <source> and without a type",
        ),
        ("<os><nvram><source file='/tank/web/a'/></nvram></os>", "an <nvram> with a <source>"),
        (
            "<os><nvram type='file'><source file='/tank/web/a'/>/tank/web/evil</nvram></os>",
            "an <nvram> with a <source>",
        ),
        ("<devices/><devices/>", "more than one <devices>"),
        (
            "<devices><x><mirror><format/><format type='qcow2'/></mirror></x></devices>",
            "more than one <format>",
        ),
    ],
)
def test_what_can_be_read_in_two_ways(content, words):
    assert words in two_readings(parse(domain(content)))
    with pytest.raises(SharedError, match=words):
        make_clone_xml(domain(content), Spec())


class Spec:
    of = "web@s1"
    emulators = None


def test_an_attribute_of_the_domain_itself():
    found = two_readings(parse(domain("", "xmlns:x='urn:x' x:type='kvm'")))
    assert found.startswith("an attribute type with a namespace in <domain>")


@pytest.mark.parametrize(
    "content",
    [
        "<metadata><a:x xmlns:a='urn:a' a:y='1'><target/><target/><a:c/></a:x></metadata>",
        f"<q:commandline {QEMU}><q:arg value='-x'/><q:arg value='-y'/></q:commandline>",
        "<os><nvram>/tank/web/a</nvram></os>",
        "<os><nvram type='file'><source file='/tank/web/a'/></nvram></os>",
        "<seclabel model='dac'/><seclabel model='apparmor'/>",
    ],
)
def test_what_libvirt_writes_has_one_reading(content):
    assert two_readings(parse(domain(content))) is None


@pytest.mark.parametrize("encoding", ["UTF-7", "ISO-8859-1", "utf-16", ""])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_another_encoding_than_utf_8_is_refused(encoding, start):
    xml = f"{start}<?xml version='1.0' encoding = \"{encoding}\" ?>{domain('')}"
    with pytest.raises(RefusedError, match=r"not in UTF-8|cannot be read"):
        parse(xml)


@pytest.mark.parametrize(
    "start", ["<?xml version='1.0'?>", "<?xml version='1.0' encoding='utf-8'?>"]
)
def test_a_definition_may_say_that_it_is_in_utf_8(start):
    assert parse(f"{start}{domain('')}").tag == "domain"


def test_an_encoding_in_a_comment_is_none():
    assert parse(f"<!-- <?xml encoding='UTF-7'?> -->{domain('')}").tag == "domain"
