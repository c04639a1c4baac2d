"""The form of a request, whichever protocol it is of."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.errors import RefusedError
from snaporch.replication.request_command import checked_text, command_of, split_command

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
