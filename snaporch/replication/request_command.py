"""A request as the command of ssh: ``PROTOCOL VERB [ARGUMENT]``.

The argument is a JSON object in base64url, so no shell and no line of ``authorized_keys`` reads it.
The host that asks may be hostile. So :class:`RequestProtocol` accepts nothing but the verbs of a
table, each with exactly its values. Functions of the protocol's own module check each value.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from snaporch.errors import RefusedError
from snaporch.zfs_names import quoted

MAX_ARGUMENT_BYTES = 60_000
"""Of the JSON text: sshd passes the command in one environment variable (MAX_ARG_STRLEN)."""
_MAX_COMMAND = 100_000
_REST = re.compile(r"([a-z]{1,16})(?: ([A-Za-z0-9_-]+={0,2}))?")


Verb = TypeVar("Verb", bound=StrEnum)
Request = TypeVar("Request")


@dataclass(frozen=True, slots=True)
class RequestProtocol(Generic[Verb, Request]):
    """The requests that a command of snaporch accepts."""

    thing: str
    """The command of snaporch that is asked, for errors."""
    words: str
    """The first words of each request, with a number that changes when an older host would err."""
    verbs: Mapping[Verb, tuple[str, ...]]
    """The names of the values that each verb needs."""
    checks: Mapping[str, Callable[[object], Any]]
    """By the name of a value: returns it checked, or raises :class:`RefusedError`."""
    request: Callable[..., Request]
    """Makes a request of a verb, and of its checked values by name."""

    def command(self, verb: Verb, values: Mapping[str, object]) -> str:
        """The command of ssh that asks for something.

        Args:
            verb: what is asked for.
            values: its values, by name.
        """
        return command_of(self.words, verb, values)

    def parse(self, command: str | None) -> Request:
        """Check a request.

        Args:
            command: ``SSH_ORIGINAL_COMMAND``; None if ssh was given no command.

        Raises:
            RefusedError: it is anything but a valid request.
        """
        name, values = split_command(self.thing, self.words, command)
        verb = next((each for each in self.verbs if name == each), None)
        if verb is None:
            raise RefusedError(self.thing, f"{quoted(name)} is no request")
        wanted = self.verbs[verb]
        if values.keys() != set(wanted):
            names = ", ".join(wanted) or "none"
            raise RefusedError(self.thing, f"{verb} needs exactly these values: {names}")
        checked = {key: self.checks[key](value) for key, value in values.items()}
        return self.request(verb, **checked)


def command_of(protocol: str, verb: str, values: Mapping[str, object]) -> str:
    """The command of ssh that asks for something.

    Args:
        protocol: the first words, with a number that changes when an older host would err.
        verb: what is asked for.
        values: its values, by name.
    """
    if not values:
        return f"{protocol} {verb}"
    text = json.dumps(values, separators=(",", ":")).encode()
    return f"{protocol} {verb} {base64.urlsafe_b64encode(text).decode()}"


def split_command(thing: str, protocol: str, command: str | None) -> tuple[str, dict[str, Any]]:
    """The verb of a request, and its values.

    Args:
        thing: the command of snaporch that is asked, for errors.
        protocol: the first words of each of its requests.
        command: ``SSH_ORIGINAL_COMMAND``; None if ssh was given no command.

    Raises:
        RefusedError: it does not have the form of a request.
    """
    if not command:
        raise RefusedError(thing, "no request: this key gives no shell")
    begin, rest = command[: len(protocol) + 1], command[len(protocol) + 1 :]
    match = _REST.fullmatch(rest) if len(command) <= _MAX_COMMAND else None
    if match is None or begin != f"{protocol} ":
        raise RefusedError(thing, f"{quoted(command)} is no request")
    return match[1], _values(thing, match[2])


def checked_text(thing: str, value: object, is_valid: Callable[[str], object], what: str) -> str:
    """A text that is valid.

    Args:
        thing: the command of snaporch that is asked, for errors.
        value: a value of a request.
        is_valid: whether a text is.
        what: names what it should be.

    Raises:
        RefusedError: it is not.
    """
    if not isinstance(value, str) or not is_valid(value):
        raise RefusedError(thing, f"{quoted(str(value))} is no {what}")
    return value


def _values(thing: str, argument: str | None) -> dict[str, Any]:
    if argument is None:
        return {}
    try:
        text = base64.b64decode(argument, altchars=b"-_", validate=True)
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(thing, "its argument is not a JSON object in base64url") from error
    if not isinstance(found, dict) or len(text) > MAX_ARGUMENT_BYTES:
        raise RefusedError(thing, "its argument is not a JSON object of the permitted size")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name comes twice")
    return found


def _no_constant(name: str) -> None:
    raise ValueError(name)
