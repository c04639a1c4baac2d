"""The manual pages, from the text of ``--help`` and from the configuration's schema.

``python3 -m snaporch.cli.manual DIRECTORY`` writes them as Markdown for go-md2man.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath
from typing import Any

import typer

from snaporch import __version__
from snaporch.cli.main import EXIT_CODES, app
from snaporch.config.reference import reference

_SECTION = 8
_FILES = """\
# FILES

**/etc/snaporch/snaporch.toml**
: The configuration, see snaporch.toml(5). A file is not necessary.

**/var/lib/snaporch**
: Bundles, and the journals of runs.

**/usr/share/doc/snaporch/docs**
: The pages that messages name, such as docs/how-to/recovery.md.

# ENVIRONMENT

**SNAPORCH_CONFIG**
: The configuration file, if there is no **--config**.

**SNAPORCH_DEBUG**
: If it is set, a bug prints its traceback.
"""


def pages() -> dict[str, str]:
    """The text of each page by its file name, such as ``snaporch-list.8.md``."""
    found = {"snaporch.toml.5.md": _configuration()}
    for words, command in _commands(typer.main.get_command(app), ("snaporch",)):
        found[f"{'-'.join(words)}.{_SECTION}.md"] = _page(words, command)
    return found


def _commands(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The command and those below it, each with the words that name it."""
    if not command.hidden:
        yield words, command
        for name, each in getattr(command, "commands", {}).items():
            yield from _commands(each, (*words, name))


def _page(words: tuple[str, ...], command: Any) -> str:
    context = command.make_context(" ".join(words), [], resilient_parsing=True)
    usage = command.collect_usage_pieces(context)
    first, *more = re.split(r"\n\s*\n", command.help or "")
    parts = [
        _title("-".join(words), _SECTION),
        f"# NAME\n\n{'-'.join(words)} - {_escape(_line(first).rstrip('.'))}\n",
        f"# SYNOPSIS\n\n**{' '.join(words)}** {_escape(' '.join(usage))}\n",
        "# DESCRIPTION\n",
        *(f"{_escape(_line(each))}\n" for each in (first, *more)),
    ]
    if records := [each.get_help_record(context) for each in command.params]:
        parts.append("# OPTIONS\n")
        parts += [_entry(*record) for record in records if record]
    if below := getattr(command, "commands", {}):
        parts.append("# COMMANDS\n")
        parts += [
            _entry(f"{'-'.join((*words, name))}({_SECTION})", each.get_short_help_str(200))
            for name, each in below.items()
            if not each.hidden
        ]
    parts += [f"# EXIT STATUS\n\n{_escape(EXIT_CODES.partition(': ')[2])}\n"]
    parts += [_FILES] if len(words) == 1 else []
    seen = [f"snaporch({_SECTION})"] if len(words) > 1 else ["zfs(8)", "virsh(1)", "sanoid(8)"]
    return "\n".join([*parts, f"# SEE ALSO\n\n{', '.join([*seen, 'snaporch.toml(5)'])}\n"])


def _entry(name: str, text: str) -> str:
    return f"**{_escape(name)}**\n: {_escape(_line(text)) or '.'}\n"


def _configuration() -> str:
    """The reference page of the configuration with the headings of a manual page."""
    _, _, body = reference().partition("\n\n")
    body = re.sub(r"\[[^]`]+\]\(([^)#]+\.md)(?:#[a-z-]+)?\)", _page_path, body)
    body = re.sub(r"(?m)^##(#?) (.+)$", lambda m: f"#{m[1]} {m[2].replace('`', '')}", body)
    head = "# NAME\n\nsnaporch.toml - configuration of snaporch\n\n# DESCRIPTION\n\n"
    see = f"\n# SEE ALSO\n\nsnaporch({_SECTION})\n"
    body = re.sub(r"(?m)^Generated from .*\n\n", "", body)
    return "\n".join([_title("snaporch.toml", 5), head + body + see])


def _page_path(link: re.Match[str]) -> str:
    """A page as messages name it, from a link on the reference page."""
    return normpath(f"docs/reference/{link[1]}")


def _title(name: str, section: int) -> str:
    return f'% "{name.upper()}" "{section}" "" "snaporch {__version__}" "snaporch"\n'


def _line(text: str) -> str:
    return " ".join(text.split()).replace("\\[", "[")  # typer 0.15 escapes for rich


def _escape(text: str) -> str:
    """Text in which only ``code`` is marked up."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(
        piece if piece.startswith("`") else re.sub(r"([\\*_<>\[\]|])", r"\\\1", piece)
        for piece in pieces
    )


if __name__ == "__main__":
    for name, page in pages().items():
        Path(sys.argv[1], name).write_text(page, "utf-8")
