"""A request as the command of ssh: ``PROTOCOL VERB [ARGUMENT]``.

The argument is a JSON object in base64url, so no shell and no line of ``authorized_keys`` reads it.
The host that asks may be hostile. What the values mean is checked by the module of each protocol.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from snaporch.errors import RefusedError
from snaporch.zfs_names import quoted

MAX_ARGUMENT_BYTES = 60_000
"""Of the JSON text: sshd passes the command in one environment variable (MAX_ARG_STRLEN)."""
_MAX_COMMAND = 100_000
_REST = re.compile(r"([a-z]{1,16})(?: ([A-Za-z0-9_-]+={0,2}))?")


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
