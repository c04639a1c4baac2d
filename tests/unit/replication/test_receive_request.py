"""What a hostile host may send to the forced command of its key."""

import base64
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.errors import RefusedError
from snaporch.replication.receive_request import SentFile, Verb, parse_request, request_command
from snaporch.replication.request_command import MAX_ARGUMENT_BYTES

UUID = "4b1d2f0e-0000-4000-8000-000000000001"
SHA = "0" * 64
FILE = {"name": "ram.save", "bytes": 9, "sha256": SHA, "offset": 3}


def encoded(text):
    return base64.urlsafe_b64encode(text.encode()).decode()


def asked(verb, **values):
    return parse_request(request_command(Verb(verb), values))


def test_the_largest_values_are_accepted():
    files = [FILE | {"name": f"f{number}", "bytes": 0, "offset": 0} for number in range(64)]
    assert len(asked("store", uuid=UUID, run="r", files=files).files) == 64
    whole = FILE | {"bytes": 1 << 50, "offset": 1 << 50}
    assert asked("store", uuid=UUID, run="r", files=[whole]).files[0].offset == 1 << 50
    marks = {"a@s": {"note": "x" * 1024, "torn": "yes"}}
    assert asked("mark", marks=marks).marks == marks


def test_an_argument_is_in_the_alphabet_of_urls():
    marks = {"a@s": {"note": "<<???>>~~~"}}
    command = request_command(Verb.MARK, {"marks": marks})
    assert set("-_") & set(command.rpartition(" ")[2])
    assert parse_request(command).marks == marks


def refused(command, reason="."):
    with pytest.raises(RefusedError, match=reason):
        parse_request(command)


def test_each_verb_with_its_values():
    assert asked("check").verb is Verb.CHECK
    assert asked("snapshots", copies=["tank:a", "b"]).copies == ("tank:a", "b")
    for verb in ("state", "receive", "discard"):
        assert asked(verb, copy="tank:vm web").copy == "tank:vm web"
    marks = {"tank:a@s": {"run": "r-1", "level": "ram", "note": 'ünd "q"', "copy": "nas"}}
    assert asked("mark", marks=marks).marks == marks
    assert asked("policies", policies={"tank:a": "x", "b": ""}).policies == {"tank:a": "x", "b": ""}
    assert asked("bundles", uuid=UUID).uuid == UUID
    for verb in ("manifest", "begun"):
        found = asked(verb, uuid=UUID, run="2026-a")
        assert (found.uuid, found.run) == (UUID, "2026-a")
    assert asked("damaged", uuid=UUID, run="r", sums={"ram.save": SHA}).sums == {"ram.save": SHA}
    assert asked("store", uuid=UUID, run="r", files=[FILE]).files == (
        SentFile("ram.save", 9, SHA, 3),
    )


@pytest.mark.parametrize(
    "command",
    [
        None,
        "",
        "sh",
        "zfs destroy -r backup/vm1",
        "/usr/lib/openssh/sftp-server",
        "internal-sftp",
        "scp -t /etc",
        "rsync --server -e.LsfxC . /",
        "snaporch-replica 1 check; sh",
        "snaporch-replica 1 check\n",
        "snaporch-replica 1 check\nsh",
        " snaporch-replica 1 check",
        "snaporch-replica 1 check ",
        "snaporch-replica  1 check",
        "snaporch-replica 2 check",
        "snaporch-replica 1 destroy",
        "snaporch-replica 1 CHECK",
        "snaporch-replica 1 check $(sh)",
        "snaporch-replica 1 check e30= e30=",
        "snaporch-replica 1 " + "check" * 40_000,
        "PATH=/tmp snaporch-replica 1 check",
    ],
)
def test_anything_else_is_refused(command):
    refused(command, "no request")


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "1",
        "null",
        '{"copy": NaN}',
        '{"copy": "a", "copy": "b"}',
        "[" * 40_000,
        "{",
        "\xff",
        '{"copy": "' + "a" * MAX_ARGUMENT_BYTES + '"}',
    ],
)
def test_an_argument_that_is_no_object_is_refused(text):
    refused(f"snaporch-replica 1 state {encoded(text)}", "its argument is not a JSON object")


def test_an_argument_in_another_alphabet_is_refused():
    for text in ("e3+/", "e30", "=", "e30=="):
        refused(f"snaporch-replica 1 state {text}", "no request|not a JSON object")


@pytest.mark.parametrize("values", [{}, {"copy": "a", "run": "r"}, {"copies": ["a"]}])
def test_other_values_than_those_of_the_verb_are_refused(values):
    refused(request_command(Verb.STATE, values), "needs exactly these values: copy")


def test_a_verb_without_values_gets_none():
    refused(request_command(Verb.CHECK, {"copy": "a"}), "exactly these values: none")


BAD_NAMES = ["", ".", "..", "a/b", "/", "../x", "a@b", "a#b", "a\0b", "a\nb", " a", "ä", "a" * 256]


@pytest.mark.parametrize("name", [*BAD_NAMES, 1, None, ["a"], {"a": 1}])
def test_a_name_that_leads_elsewhere_is_no_copy(name):
    for verb in ("state", "receive", "discard"):
        refused(request_command(Verb(verb), {"copy": name}), "is no name of a copy")
    refused(request_command(Verb.SNAPSHOTS, {"copies": ["ok", name]}), "is no name of a copy")
    if isinstance(name, str):
        refused(request_command(Verb.POLICIES, {"policies": {name: ""}}), "is no name of a copy")
        for full in (f"{name}@s", f"a@{name}", name.replace("@", "")):
            refused(request_command(Verb.MARK, {"marks": {full: {"note": "x"}}}), "is no name")


@pytest.mark.parametrize("value", ["tank:a", {"tank:a": 1}, 3, None])
def test_a_list_is_a_list(value):
    refused(request_command(Verb.SNAPSHOTS, {"copies": value}), "a list is expected")
    refused(request_command(Verb.STORE, {"uuid": UUID, "run": "r", "files": value}), "a list is")


@pytest.mark.parametrize("value", ["a", ["a"], 3, None])
def test_an_object_is_an_object(value):
    refused(request_command(Verb.MARK, {"marks": value}), "an object is expected")
    refused(request_command(Verb.MARK, {"marks": {"a@b": value}}), "an object is expected")
    refused(request_command(Verb.POLICIES, {"policies": value}), "an object is expected")
    refused(
        request_command(Verb.DAMAGED, {"uuid": UUID, "run": "r", "sums": value}), "an object is"
    )
    refused(request_command(Verb.STORE, {"uuid": UUID, "run": "r", "files": [value]}), "an object")


@pytest.mark.parametrize("uuid", ["", "..", "/" * 36, UUID[:-1], UUID + "0", UUID.upper(), 1])
def test_a_uuid_is_one(uuid):
    refused(request_command(Verb.BUNDLES, {"uuid": uuid}), "is no UUID$")


@pytest.mark.parametrize("run", ["", "..", ".run.copying", "a/b", "-a", "a.b", "a\n", 1])
def test_a_run_is_one(run):
    refused(request_command(Verb.MANIFEST, {"uuid": UUID, "run": run}), "is no name of a run")


BAD_FILES = ["", ".x", "..", "a/b", "A", "copy.json", "a\0", "a\n", "x" * 101, "-a"]


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_of_a_bundle_is_one(name):
    given = {"uuid": UUID, "run": "r"}
    refused(request_command(Verb.STORE, {**given, "files": [FILE | {"name": name}]}), "name|record")
    refused(request_command(Verb.DAMAGED, {**given, "sums": {name: SHA}}), "name|record")


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"bytes": -1}, "number of bytes"),
        ({"bytes": True}, "number of bytes"),
        ({"bytes": 1.0}, "number of bytes"),
        ({"bytes": (1 << 50) + 1}, "number of bytes"),
        ({"offset": 10}, "behind the end"),
        ({"offset": -1}, "number of bytes"),
        ({"sha256": "0" * 63}, "SHA-256$"),
        ({"sha256": "G" * 64}, "SHA-256"),
        ({"mode": 0o4755}, "a file has a name"),
    ],
)
def test_a_file_is_described_exactly(more, reason):
    refused(request_command(Verb.STORE, {"uuid": UUID, "run": "r", "files": [FILE | more]}), reason)


@pytest.mark.parametrize("count", [0, 65])
def test_a_bundle_has_a_bounded_number_of_files(count):
    files = [FILE | {"name": f"f{number}"} for number in range(count)]
    refused(request_command(Verb.STORE, {"uuid": UUID, "run": "r", "files": files}), "1 to 64")


def test_a_file_comes_once():
    refused(request_command(Verb.STORE, {"uuid": UUID, "run": "r", "files": [FILE] * 2}), "1 to 64")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mountpoint", "/etc"),
        ("kept", "x"),
        ("replicated", "nas"),
        ("snaporch:run", "r"),
        ("run", "a/b"),
        ("run", ""),
        ("uuid", "x"),
        ("bundle", "../../etc"),
        ("bundle", UUID),
        ("ram", f"{UUID}/../x"),
        ("level", "perfect"),
        ("torn", "no"),
        ("note", "two\nlines"),
        ("note", "\x1b[2J"),
        ("note", "x" * 4097),
        ("note", ""),
        ("note", 1),
        ("copy", "a\tb"),
    ],
)
def test_a_mark_is_one_of_a_copy(key, value):
    refused(request_command(Verb.MARK, {"marks": {"a@s": {key: value}}}), f"{key}")


@pytest.mark.parametrize("value", ["a\nb", 1, None, "x" * 4097])
def test_a_policy_is_a_line(value):
    refused(request_command(Verb.POLICIES, {"policies": {"a": value}}), "is no policy$")


@given(st.text(max_size=200))
def test_no_text_does_anything_but_be_refused(text):
    for command in (text, f"snaporch-replica 1 {text}", f"snaporch-replica 1 state {text}"):
        if command != "snaporch-replica 1 check":
            refused(command)


@given(
    st.sampled_from(list(Verb)),
    st.dictionaries(
        st.sampled_from(["copy", "copies", "uuid", "run", "sums", "files", "marks", "policies"]),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just(UUID),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
            max_leaves=5,
        ),
        max_size=3,
    ),
)
def test_whatever_the_values_are_they_are_checked_or_refused(verb, values):
    command = f"snaporch-replica 1 {verb} {encoded(json.dumps(values))}"
    with suppress(RefusedError):
        found = parse_request(command)
        assert "/" not in found.copy + found.uuid + found.run + "".join(found.copies)
