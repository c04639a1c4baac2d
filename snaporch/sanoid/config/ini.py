"""Reads files as perl's Config::IniFiles does (3.000003, ``ReadConfig``), which sanoid uses.

Differences from :mod:`configparser`: a comment or blanks after a value belong to the value; a line
that is no comment, section or parameter is an error; a value may be a "here document"; a parameter
given twice has two values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Values = list[str]
Ini = dict[str, dict[str, Values]]
"""Section → parameter → its values, all in the order of the file."""

_FIRST_END = re.compile(r"\r\n|[\r\n\x15]")
_END = re.compile(r"(\r\n?|\n|\x15)\Z")
_SECTION = re.compile(r"\s*\[\s*(\S|\S.*\S)\s*\]\s*\Z", re.ASCII)
_PARAMETER = re.compile(r"\s*([^=]*?[^=\s])\s*=\s*(.*)\n?\Z", re.ASCII)
_BLANK = re.compile(r"\s*\Z", re.ASCII)
_COMMENT = re.compile(r"\s*[;#]", re.ASCII)
_HERE = re.compile(r"<<(.*)\Z")


class IniError(ValueError):
    """Config::IniFiles refuses the text; the message has the reason and the line."""


def read_ini(text: str) -> Ini:
    """Parse the content of a file.

    Raises:
        IniError: it has no section, or an invalid line.
    """
    found: Ini = {}
    section: dict[str, Values] | None = None
    lines = _numbered_lines(text)
    for number, line in lines:
        if _BLANK.match(line) or _COMMENT.match(line):
            continue
        if match := _SECTION.match(line):
            section = found.setdefault(match[1], {})
        elif match := _PARAMETER.match(line):
            if section is None:
                raise IniError(f"line {number} is a setting outside a section")
            value = match[2]
            here = _HERE.match(value)
            values = _here_document(lines, number, here[1]) if here else [value]
            _add(section, match[1], values)
        else:
            raise IniError(f"line {number} is neither a section nor a setting")
    if not found:
        raise IniError("it has no section")
    return found


def _add(section: dict[str, Values], name: str, values: Values) -> None:
    """Add values; as in Config::IniFiles, a parameter without any value stays without."""
    if name not in section:
        section[name] = values
    elif section[name]:
        section[name] = section[name] + values


def _numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines are split at the kind of line end that the first line has. Without one, no line."""
    first = _FIRST_END.search(text)
    if first is None:
        return
    parts = text.split(first[0])
    if parts[-1] == "":
        parts.pop()
    for number, line in enumerate(parts, 1):
        yield number, _END.sub("", line)


def _here_document(lines: Iterator[tuple[int, str]], began: int, mark: str) -> Values:
    found: Values = []
    for _, line in lines:
        if line == mark:
            return found
        found.append(line)
    raise IniError(f"line {began} begins a text without its end mark {mark!r}")
