"""The form of a request, whichever protocol it is of."""

from contextlib import suppress
from enum import StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.errors import RefusedError
from snaporch.replication.request_command import (
    RequestProtocol,
    checked_text,
    command_of,
    split_command,
)

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=9,
)


@given(st.dictionaries(st.text(), VALUES))
def test_what_is_written_is_read(values):
    command = command_of("snaporch-x 1", "verb", values)
    assert split_command("x", "snaporch-x 1", command) == ("verb", values)
    assert command.isascii()
    assert command.isprintable()


@given(st.text() | st.text().map("snaporch-x 1 verb {}".format))
def test_any_other_text_is_refused_or_has_the_form(text):
    with suppress(RefusedError):
        verb, values = split_command("x", "snaporch-x 1", text)
        assert verb.islower()
        assert isinstance(values, dict)


@pytest.mark.parametrize("command", ["snaporch-x 10 verb", "snaporch-x 1verb", "snaporch-x 1"])
def test_another_protocol_is_refused(command):
    with pytest.raises(RefusedError, match="is no request"):
        split_command("x", "snaporch-x 1", command)


def test_a_text_that_is_not_valid_is_named():
    assert checked_text("x", "ab", str.isalpha, "name") == "ab"
    for value in ("1", 5, None, ["a"]):
        with pytest.raises(RefusedError, match="is no name"):
            checked_text("x", value, str.isalpha, "name")


class Verb(StrEnum):
    LOOK = "look"
    TAKE = "take"
    HIDDEN = "hidden"


def checked(value):
    return checked_text("x", value, str.isalpha, "name")


PROTOCOL = RequestProtocol(
    "x",
    "snaporch-x 1",
    {Verb.LOOK: (), Verb.TAKE: ("name", "place")},
    {"name": checked, "place": checked},
    lambda verb, **values: (verb, values),
)


def test_a_request_has_a_verb_of_the_table_and_its_values():
    assert PROTOCOL.parse("snaporch-x 1 look") == (Verb.LOOK, {})
    values = {"name": "a", "place": "b"}
    assert PROTOCOL.parse(PROTOCOL.command(Verb.TAKE, values)) == (Verb.TAKE, values)


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        (None, "gives no shell"),
        ("snaporch-x 1 steal", "steal.* is no request"),
        (PROTOCOL.command(Verb.HIDDEN, {}), "hidden.* is no request"),
        (PROTOCOL.command(Verb.LOOK, {"name": "a"}), "exactly these values: none"),
        (PROTOCOL.command(Verb.TAKE, {"name": "a"}), "exactly these values: name, place"),
        (PROTOCOL.command(Verb.TAKE, {"name": "a", "place": "b", "more": "c"}), "exactly these"),
        (PROTOCOL.command(Verb.TAKE, {"name": "a", "place": "b1"}), "is no name"),
    ],
)
def test_any_other_request_is_refused(command, reason):
    with pytest.raises(RefusedError, match=reason):
        PROTOCOL.parse(command)
