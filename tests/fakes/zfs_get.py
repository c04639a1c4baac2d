"""The output of ``zfs get`` for a given table."""

from collections.abc import Mapping, Sequence

Values = Mapping[str, str | tuple[str, str]]
"""Property → its value; with its source, if that is not ``local``."""

_UNSET = ("-", "-")


def answer(words: Sequence[str], table: Mapping[str, Values]) -> str:
    """What it prints for ``get -Hp [OPTION VALUE]... -o COLUMNS PROPERTIES [NAME...]``.

    ``-t`` selects either snapshots or other datasets. With names, those and their snapshots.
    """
    assert list(words[:2]) == ["get", "-Hp"], words
    rest, options = list(words[2:]), dict[str, str]()
    while rest[0].startswith("-"):
        options[rest[0]] = rest[1]
        del rest[:2]
    asked, *names = rest
    kinds = options.get("-t", "filesystem,snapshot").split(",")
    sources = options["-s"].split(",") if "-s" in options else ()
    lines = []
    for name, values in table.items():
        kind = "snapshot" if "@" in name else "filesystem"
        if kind not in kinds or (names and not {name, name.split("@")[0]} & {*names}):
            continue
        for key in values if asked == "all" else asked.split(","):
            found = values.get(key, _UNSET)
            value, source = found if isinstance(found, tuple) else (found, "local")
            if not sources or source in sources:
                row = {"name": name, "property": key, "source": source, "value": value}
                lines.append("\t".join(row[column] for column in options["-o"].split(",")) + "\n")
    return "".join(lines)
