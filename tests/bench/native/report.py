"""Table and plot of what ``bench.py`` measured: ``report.py RESULTS DIRECTORY``."""

import json
import shutil
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Case = tuple[int, int]
_MIB = 1 << 20
_INTRODUCTION = (
    "Made by `make bench`; what they mean is said in [the benchmark](README.md). "
    "Median (least-most) of the rounds. Raw: [native.jsonl](native.jsonl)."
)
_COLUMNS: list[tuple[str, Callable[[Row], float | None]]] = [
    ("pause, ms (libvirt)", lambda row: _pause(row, "pause_events_ms")),
    ("pause, ms (seen)", lambda row: _pause(row, "pause_serial_ms")),
    ("pause, ms (snaporch)", lambda row: row.get("pause_ms")),
    ("safe after, s", lambda row: row["seconds"]),
    ("on disk, MiB", lambda row: row["stored"] / _MIB),
    ("written, MiB", lambda row: row["written"] / _MIB),
    ("CPU, s", lambda row: row["cpu"]),
    ("peak, MiB", lambda row: row["peak_mib"]),
]
_PLOTTED = (
    "script, zstd",
    "script --live, zstd",
    "script --live, pipe, zstd",
    "snaporch overlay, file",
    "snaporch overlay, stream",
    "snaporch manual, stream",
)


def _pause(row: Row, column: str) -> float | None:
    """The pause; None for the reference, which reads bytes from memory and pauses no guest."""
    return None if row["contestant"].endswith("from memory") else row[column]


def main() -> None:
    results, directory = Path(sys.argv[1]), Path(sys.argv[2])
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    heads = [line for line in lines if "versions" in line]
    rows = [line for line in lines if "contestant" in line]
    directory.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(results, directory / "native.jsonl")
    (directory / "native.md").write_text(page(heads, rows))
    plot(rows, directory / "pause.svg")


def grouped(rows: list[Row]) -> dict[Case, dict[str, list[Row]]]:
    """Rows by guest and contestant, in the order in which they were first measured."""
    cases: dict[Case, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cases[row["size"], row["rate"]][row["contestant"]].append(row)
    return cases


def page(heads: list[Row], rows: list[Row]) -> str:
    """The page: one table for each guest."""
    versions = ", ".join(f"{name}: {text}" for name, text in heads[0]["versions"].items())
    loads = sorted(row["load"] for row in rows)
    load = (
        f"{versions}. Load of the machine while it was measured: {loads[0]}-{loads[-1]}, "
        f"median {statistics.median(loads)}."
    )
    text = [
        "# Native benchmark: figures",
        "",
        _INTRODUCTION,
        "",
        load,
        "",
        "![Pause by RAM in use](pause.svg)",
    ]
    for (size, rate), contestants in sorted(grouped(rows).items()):
        text += ["", f"## {size} MiB in use, {rate} pages a second dirtied", ""]
        text.append("| | rounds | " + " | ".join(name for name, _ in _COLUMNS) + " |")
        text.append("| --- | ---: |" + " ---: |" * len(_COLUMNS))
        for name, measured in contestants.items():
            cells = [cell([value(row) for row in measured]) for _, value in _COLUMNS]
            text.append(f"| {name} | {len(measured)} | " + " | ".join(cells) + " |")
    return "\n".join(text) + "\n"


def cell(values: list[float | None]) -> str:
    """``median (least-most)``."""
    there = [value for value in values if value is not None]
    if not there:
        return "-"
    middle = number(statistics.median(there))
    return middle if len(there) == 1 else f"{middle} ({number(min(there))}-{number(max(there))})"


def number(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:.0f}" if value >= 100 or value == 0 else f"{value:.1f}"


def plot(rows: list[Row], target: Path) -> None:
    """Pause over RAM in use, for the rate that every size was measured at."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "snaporch"
    from matplotlib import pyplot

    cases = grouped(rows)
    rates = [rate for _, rate in cases]
    rate = statistics.mode(rates)
    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    for name in _PLOTTED:
        points = []
        for (size, its_rate), contestants in sorted(cases.items()):
            if its_rate == rate and name in contestants:
                pauses = [row["pause_events_ms"] for row in contestants[name]]
                points.append((size, statistics.median(pauses)))
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sorted({size for size, its_rate in cases if its_rate == rate}))
    axes.get_xaxis().set_major_formatter(mpl.ticker.ScalarFormatter())
    axes.set_xlabel(f"RAM in use, MiB ({rate} pages a second dirtied)")
    axes.set_ylabel("pause reported by libvirt, ms (median)")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize="small")
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
