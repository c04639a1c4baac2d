"""Properties of retention for any snapshots, any rules and any time."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

from hypothesis import given
from hypothesis import strategies as st

from snaporch.config.policy import RULES, Keep
from snaporch.schedule.retention import RetentionSnapshot, decide_retention

ZONES = [UTC, *map(ZoneInfo, ("Europe/Berlin", "Australia/Lord_Howe", "America/St_Johns"))]
# Around both changes of the clocks, new year, the leap day and the leap second of 2016.
PIVOTS = ("2026-03-29T01:00", "2025-10-26T01:00", "2026-01-01", "2024-02-29", "2016-12-31T23:59:59")

pivots = st.sampled_from([datetime.fromisoformat(text).replace(tzinfo=UTC) for text in PIVOTS])
edges = st.builds(
    lambda h, s: timedelta(hours=h, seconds=s), st.integers(-49, 49), st.integers(-1, 1)
)
"""At the turn of an hour or a day, and a second before and after it."""
spans = st.one_of(
    edges,
    st.timedeltas(timedelta(hours=-6), timedelta(hours=6)),
    st.timedeltas(timedelta(days=-800), timedelta(days=800)),
)
moments = st.builds(lambda pivot, span: (pivot + span).replace(microsecond=0), pivots, spans)
counts = st.integers(0, 5)
keeps = st.builds(lambda *found: dict(zip(RULES, found, strict=True)), *[counts] * len(RULES))
keeps = keeps.filter(lambda keep: any(keep.values())).map(lambda keep: Keep(**keep))
zones = st.sampled_from(ZONES)


@st.composite
def snapshots(draw):
    found = draw(
        st.lists(
            st.builds(
                RetentionSnapshot,
                run=st.just(""),
                snapshot=st.just("s"),
                created=moments,
                policy=st.sampled_from(["p", "p", "p", "q", None]),
                good_ram=st.booleans(),
                incomplete=st.sampled_from([False, False, False, True]),
                pinned=st.sampled_from(["", "", "", "held"]),
                passed=st.sampled_from([None, None, True, False]),
            ),
            max_size=30,
        )
    )
    return [
        replace(taken, run=f"{n:02}", good_ram=taken.good_ram and not taken.incomplete)
        for n, taken in enumerate(found)
    ]


def gone(found, keep, now, zone):
    return {v.taken.run for v in decide_retention(found, {"p": keep}, now, zone) if v.delete}


@given(snapshots(), keeps, moments, zones)
def test_every_snapshot_is_judged_once_with_a_reason(found, keep, now, zone):
    verdicts = decide_retention(found, {"p": keep}, now, zone)
    assert sorted(v.taken.run for v in verdicts) == [taken.run for taken in found]
    assert all(v.reason for v in verdicts)


@given(snapshots(), keeps, moments, zones)
def test_only_unpinned_complete_past_snapshots_of_the_policy_are_deleted(found, keep, now, zone):
    left = gone(found, keep, now, zone)
    for taken in found:
        if taken.run in left:
            assert taken.policy == "p"
            assert taken.created <= now
            assert not taken.incomplete
            assert not taken.pinned


@given(snapshots(), keeps, moments, zones)
def test_the_last_good_ram_snapshot_is_never_deleted(found, keep, now, zone):
    left = gone(found, keep, now, zone)
    past = [taken for taken in found if taken.created <= now and taken.passed is not False]
    good = [taken for taken in past if taken.good_ram]
    passed = [taken for taken in past if taken.passed and not taken.incomplete]
    if passed:
        assert max(passed, key=lambda t: (t.created, t.run)).run not in left
    if good:
        newest = max(taken.created for taken in good)
        remaining = [t for t in good if t.run not in left]
        assert max(taken.created for taken in remaining) == newest


@given(snapshots(), keeps, moments, zones)
def test_the_newest_of_a_policy_is_never_deleted(found, keep, now, zone):
    left = gone(found, keep, now, zone)
    own = [t for t in found if t.policy == "p" and t.created <= now and not t.incomplete]
    if own:
        assert max(own, key=lambda t: (t.created, t.run)).run not in left


@given(snapshots(), keeps, moments, zones)
def test_snapshots_that_failed_their_verification_displace_no_other(found, keep, now, zone):
    others = [taken for taken in found if taken.passed is not False]
    failed = {taken.run for taken in found if taken.passed is False}
    assert gone(found, keep, now, zone) - failed == gone(others, keep, now, zone)


@given(snapshots(), keeps, moments, zones)
def test_retention_deletes_nothing_the_second_time(found, keep, now, zone):
    left = gone(found, keep, now, zone)
    assert gone([taken for taken in found if taken.run not in left], keep, now, zone) == set()


@given(snapshots(), keeps, moments, st.timedeltas(timedelta(0), timedelta(days=900)), zones)
def test_a_snapshot_that_may_be_deleted_now_may_be_deleted_later(found, keep, now, later, zone):
    assert gone(found, keep, now, zone) <= gone(found, keep, now + later, zone)


@given(snapshots(), snapshots(), keeps, moments, zones)
def test_a_snapshot_that_may_be_deleted_still_may_with_newer_ones(found, more, keep, now, zone):
    newest = max((taken.created for taken in found), default=now)
    added = [
        replace(taken, run=f"n{taken.run}", created=newest + abs(taken.created - newest))
        for taken in more
    ]
    later = max([now, *(taken.created for taken in added)])
    assert gone(found, keep, now, zone) <= gone([*found, *added], keep, later, zone)


@given(snapshots(), keeps, keeps, moments, zones)
def test_smaller_limits_never_keep_more(found, keep, other, now, zone):
    pairs = {rule: (getattr(keep, rule), getattr(other, rule)) for rule in RULES}
    more = Keep(**{rule: max(pair) for rule, pair in pairs.items()})
    assert gone(found, more, now, zone) <= gone(found, keep, now, zone)


@given(st.permutations(range(12)), snapshots(), keeps, moments, zones)
def test_the_order_of_snapshots_does_not_matter(order, found, keep, now, zone):
    mixed = [found[place] for place in order if place < len(found)] + found[len(order) :]
    assert gone(mixed, keep, now, zone) == gone(found, keep, now, zone)
