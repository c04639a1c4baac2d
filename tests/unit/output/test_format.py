from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.output.format import age, compact, pause, size

NOW = datetime(2025, 6, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "-"),
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1 << 20, "1.0 MiB"),
        (5 << 30, "5.0 GiB"),
        (3 << 40, "3.0 TiB"),
        (9000 << 50, "9000.0 PiB"),
    ],
)
def test_sizes_are_in_the_largest_unit_that_leaves_one(count, text):
    assert size(count) == text


@given(st.integers(min_value=0, max_value=1 << 59))
def test_a_size_never_shows_1024_of_a_unit(count):
    assert float(size(count).split()[0]) < 1024


@pytest.mark.parametrize(
    ("ago", "text"),
    [
        (timedelta(0), "0s"),
        (timedelta(seconds=59), "59s"),
        (timedelta(seconds=60), "1m"),
        (timedelta(minutes=2, seconds=3), "2m 3s"),
        (timedelta(hours=1, seconds=30), "1h"),
        (timedelta(days=3, hours=4, minutes=5), "3d 4h"),
        (timedelta(days=400), "400d"),
        (timedelta(seconds=-5), "0s"),
    ],
)
def test_ages_have_two_units_at_most(ago, text):
    assert age(NOW - ago, NOW) == text


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (84.4, "84 ms"),
        (9999.4, "9999 ms"),
        (9999.9, "10.0 s"),
        (12_345.0, "12.3 s"),
    ],
)
def test_pauses_are_seconds_from_ten_seconds_on(milliseconds, text):
    assert pause(milliseconds) == text


@pytest.mark.parametrize(
    ("text", "short"),
    [("1.5 GiB", "1.5G"), ("512 B", "512B"), ("84 ms", "84ms"), ("12.3 s", "12.3s"), ("-", "-")],
)
def test_compact_is_what_a_narrow_column_has_room_for(text, short):
    assert compact(text) == short
