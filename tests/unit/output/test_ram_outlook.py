"""The texts on how saving RAM will end."""

import pytest

from snaporch.output.ram_outlook import outlook_lines
from snaporch.snapshot.ram_forecast import RamForecast, RamOutcome
from snaporch.snapshot.ram_outlook import RamOutlook


@pytest.mark.parametrize(
    ("outlook", "said"),
    [
        (RamOutlook(3 << 30, None, 120.0, None), ["could not be measured"]),
        (RamOutlook(3 << 30, 35, None, None), ["35 MiB of it change", "after a RAM snapshot"]),
        (
            RamOutlook(3 << 30, 35, 120.4, RamForecast(RamOutcome.FITS, 36.1)),
            ["RAM: 3.0 GiB in use, 35 MiB", "fits: saved within 36 s"],
        ),
        (
            RamOutlook(3 << 30, 35, 20.0, RamForecast(RamOutcome.SLOWED, 0.2, 25)),
            ["20 MiB are saved", "slowed down to 25 % of its CPU time, for 1 s"],
        ),
        (
            RamOutlook(3 << 30, 99999, 9999.0, RamForecast(RamOutcome.SUSPENDED, 60.0, 10)),
            ["99999 MiB", "suspended for 60 s"],
        ),
        (RamOutlook(1, 9, 1.0, RamForecast(RamOutcome.ABORTED)), ["1 MiB are", "on_ram_budget"]),
        (RamOutlook(1, 9, 1.0, RamForecast(RamOutcome.ENDLESS)), ["1 MiB", "ram_time_budget"]),
    ],
)
def test_what_is_said(outlook, said):
    lines = list(outlook_lines(outlook))
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))
    assert all(len(line) <= 78 for line in lines)
