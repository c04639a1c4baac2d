import pytest

from snaporch.rebuild.host_object_xml import NotAllowedError, read_definition

ALLOWED = {"": ("a",), "name": (), "x": ("b",), "x/y": ()}


def test_what_is_allowed_is_read():
    root = read_definition("t", "n", "<t a='1'><name>n</name><x b='2'><y/></x></t>", ALLOWED)
    assert root.find("x").get("b") == "2"


@pytest.mark.parametrize(
    ("name", "xml", "reason"),
    [
        ("n", "<t><name>n</name><y/></t>", "has <y>"),
        ("n", "<t><name>n</name><x><x/></x></t>", "has <x/x>"),
        ("n", "<t><name>n</name><x c='1'/></t>", "the attribute 'c'"),
        ("n", "<t b='1'><name>n</name></t>", "the attribute 'b'"),
        ("n", "<t xmlns:q='urn:q'><name>n</name><q:commandline/></t>", "has <{urn:q}commandline>"),
        ("n", "<u><name>n</name></u>", "something else"),
        ("n", "<t><name>m</name></t>", "something else"),
        ("n", "<t>", "no XML"),
        ("n", "\udcff", "no XML"),
        ("n", "<!DOCTYPE t [<!ENTITY e 'n'>]><t><name>&e;</name></t>", "no XML"),
        ("n", f"<t><name>n</name>{' ' * (1 << 16)}</t>", "over 64 KiB"),
        ("-n", "<t><name>-n</name></t>", "unusual form"),
        ("n\n", "<t><name>n\n</name></t>", "unusual form"),
        ("../n", "<t><name>../n</name></t>", "unusual form"),
    ],
)
def test_anything_else_is_refused(name, xml, reason):
    with pytest.raises(NotAllowedError) as raised:
        read_definition("t", name, xml, ALLOWED)
    assert reason in raised.value.reason
