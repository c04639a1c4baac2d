"""Tables and plot of what ``storage.py`` measured: ``storage_report.py RESULTS DIRECTORY``.

It prints the tables for ``storage.md`` in the directory, and writes ``storage.jsonl`` and
``storage.svg`` there.
"""

import json
import shutil
import statistics
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
_DATA = {"noise": "cannot be compressed", "half": "half of it zeros"}


def main() -> None:
    results, directory = Path(sys.argv[1]), Path(sys.argv[2])
    rows = [json.loads(line) for line in results.read_text().splitlines() if line.startswith("{")]
    shutil.copyfile(results, directory / "storage.jsonl")
    for data in _DATA:
        print("\n".join(table(rows, data)), end="\n\n")
    print("\n".join(settings(rows)))
    plot(rows, directory / "storage.svg")


def median(rows: list[Row], column: str, **labels: object) -> float | None:
    """The median of the rounds with these labels; None if there is none."""
    found = [row[column] for row in rows if all(row.get(k) == v for k, v in labels.items())]
    return statistics.median(found) if found else None


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def table(rows: list[Row], data: str) -> list[str]:
    """A line for each size of records; speeds are relative to a file with the largest records."""
    lines = [
        f"| {_DATA[data]} | 4K random: read | written | speed | 128K sequential: written | speed |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    cases = dict.fromkeys((r["kind"], r["kib"]) for r in rows if r.get("data") == data)
    for kind, kib in cases:
        here = {"kind": kind, "kib": kib, "data": data}
        largest = {"kind": "file", "kib": 128, "data": data}
        cells = [number(median(rows, c, **here, work="random")) for c in ("read", "written")]
        for work in ("random", "sequential"):
            speed, base = (
                median(rows, "mib_per_second", **each, work=work) for each in (here, largest)
            )
            if work == "sequential":
                written = median(rows, "written", **here, work=work)
                cells.append("-" if written is None else f"{written:.2f}")
            cells.append(f"{speed / base:.1f}" if speed and base else "-")
        lines.append(f"| {kind}, {kib}K | " + " | ".join(cells) + " |")
    return lines


def settings(rows: list[Row]) -> list[str]:
    lines = [
        "| volume, setting | writes | read | written | MiB/s | in the page cache |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    cases = dict.fromkeys((r["kib"], r["setting"], r["work"]) for r in rows if "setting" in r)
    for kib, setting, work in cases:
        labels = {"kib": kib, "setting": setting, "work": work}
        columns = ("read", "written", "mib_per_second", "page_cache")
        cells = [number(median(rows, column, **labels)) for column in columns]
        lines.append(f"| {kib}K, `{setting}` | {work} | " + " | ".join(cells) + " |")
    return lines


def plot(rows: list[Row], target: Path) -> None:
    """Bytes written to the pool for each byte of 4K random writes, by the size of records."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "snaporch"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    sizes: set[int] = set()
    for data, said in _DATA.items():
        for kind, style in (("file", "-"), ("volume", "--")):
            labels = {"kind": kind, "data": data, "work": "random"}
            here = sorted({row["kib"] for row in rows if row.get("kind") == kind})
            sizes |= {*here}
            points = [median(rows, "written", **labels, kib=kib) for kib in here]
            axes.plot(here, points, style, marker="o", label=f"{kind}, data {said}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sorted(sizes))
    for axis in (axes.get_xaxis(), axes.get_yaxis()):
        axis.set_major_formatter(mpl.ticker.ScalarFormatter())
    axes.set_xlabel("recordsize or volblocksize, KiB")
    axes.set_ylabel("bytes written to the pool per byte")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
