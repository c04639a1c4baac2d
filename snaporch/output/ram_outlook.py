"""Texts on how saving a guest's RAM will end."""

from __future__ import annotations

from collections.abc import Iterator

from snaporch.output.format import size
from snaporch.snapshot.ram_forecast import RamForecast, RamOutcome
from snaporch.snapshot.ram_outlook import RamOutlook


def outlook_lines(outlook: RamOutlook) -> Iterator[str]:
    """Lines of at most 78 columns, without indentation."""
    used = f"RAM: {size(outlook.ram_bytes)} in use"
    if outlook.changed is None:
        yield f"{used}; how fast it changes could not be measured"
        return
    changes = f"{used}, {outlook.changed} MiB of it change a second"
    if outlook.speed is None:
        yield changes
        yield "  how fast it is saved is known after a RAM snapshot of a second or more"
        return
    yield f"{changes}, {outlook.speed:.0f} MiB are saved"
    if outlook.forecast is not None:
        yield f"  {_forecast(outlook.forecast)}"


def _forecast(forecast: RamForecast) -> str:
    seconds = f"{max(forecast.seconds, 1):.0f} s"
    match forecast.outcome:
        case RamOutcome.FITS:
            return f"fits: saved within {seconds}, while the guest runs"
        case RamOutcome.SLOWED:
            return f"may be slowed down to {forecast.percent} % of its CPU time, for {seconds}"
        case RamOutcome.SUSPENDED:
            return f"may use a budget up, and be suspended for {seconds}"
        case RamOutcome.ABORTED:
            return "may use a budget up, so that the run is aborted (on_ram_budget)"
        case RamOutcome.ENDLESS:
            return "may change RAM faster than it is saved, without end: set ram_time_budget"
