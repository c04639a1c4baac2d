from pathlib import Path

import pytest

from snaporch.check.apply_rules import apply_rules
from snaporch.check.facts import (
    GuestFacts,
    HookProgram,
    HostFacts,
    OverlayFacts,
    SanoidFacts,
    StoreFacts,
)
from snaporch.sanoid.config.render import Stanza, render_sanoid, stanzas

TREE = (
    *("flash", "flash/v", "tank", "tank/db", "tank/db/data", "tank/db/log", "tank/vm"),
    *("tank/vm/a-1", "tank/vm/a-2", "tank/vm/b", "tank/odd name", "tank/odd name/1"),
)
DB = GuestFacts("db", "auto", ("tank/db/data", "tank/db/log"))


def test_a_guest_with_one_dataset():
    assert stanzas([GuestFacts("b", "auto", ("tank/vm/b",))], TREE) == [
        Stanza("tank/vm/b", False, ("b",))
    ]


def test_a_guest_with_a_parent_of_its_own_is_one_call():
    assert stanzas([DB], TREE) == [Stanza("tank/db", True, ("db",))]


def test_no_guest_gets_anothers_datasets():
    guests = [
        GuestFacts("a", "auto", ("tank/vm/a-1", "tank/vm/a-2")),
        GuestFacts("b", "auto", ("tank/vm/b",)),
    ]
    assert [stanza.dataset for stanza in stanzas(guests, TREE)] == [
        "tank/vm/a-1",
        "tank/vm/a-2",
        "tank/vm/b",
    ]


def test_a_dataset_of_two_guests_has_one_section():
    guests = [GuestFacts(name, "auto", ("flash/v",)) for name in ("x", "y")]
    assert stanzas(guests, TREE) == [Stanza("flash/v", False, ("x", "y"))]


def test_a_dataset_below_a_recursive_parent_has_no_section():
    guests = [DB, GuestFacts("reader", "auto", ("tank/db/log",))]
    assert stanzas(guests, TREE) == [Stanza("tank/db", True, ("db", "reader"))]


GUESTS = {
    "one": [GuestFacts("b", "auto", ("tank/vm/b",))],
    "parent": [DB],
    "two pools": [GuestFacts("p", "auto", ("flash/v", "tank/vm/b"))],
    "blank": [GuestFacts("o", "auto", ("tank/odd name", "tank/odd name/1"))],
    "all": [
        DB,
        GuestFacts("a", "auto", ("tank/vm/a-1", "tank/vm/a-2")),
        GuestFacts("reader", "auto", ("tank/db/log", "flash/v")),
        GuestFacts("nas", "auto", (), refusal=("no disk on ZFS", "")),
    ],
}


@pytest.mark.parametrize("guests", GUESTS.values(), ids=GUESTS.keys())
def test_rendered_sections_have_no_errors_and_no_warnings(guests, sanoid_conf):
    text = render_sanoid(guests, TREE, "/usr/bin/snaporch")
    program = {"/usr/bin/snaporch": HookProgram(True, True, "1.0")}
    found = SanoidFacts(True, True, Path("/etc/sanoid"), sanoid_conf(text, *TREE), programs=program)
    facts = HostFacts(
        version="1.0",
        command="/usr/bin/snaporch",
        sanoid=found,
        guests=tuple(guests),
        store=StoreFacts(Path("/s")),
        overlays=OverlayFacts(Path("/o"), 2, 1),
        datasets=frozenset(TREE),
    )
    assert {finding.severity.value for finding in apply_rules(facts)} <= {"hint"}
    assert found.config.complaints == ()
    assert all(found.config.covering(d) for guest in guests for d in guest.datasets)


def test_a_guest_off_zfs_is_named_in_a_comment(sanoid_conf):
    text = render_sanoid(GUESTS["all"], TREE, "snaporch")
    assert "# nas has no disk on ZFS.\n" in text
    assert set(sanoid_conf(text).written) == {
        *("flash/v", "tank/db", "tank/vm/a-1", "tank/vm/a-2", "template_snaporch")
    }


def test_a_hostile_name_stays_in_its_comment(sanoid_conf):
    guest = GuestFacts("x\n[tank]\nhourly = 1", "auto", ("flash/v",))
    assert sanoid_conf(render_sanoid([guest], TREE, "snaporch")).written == (
        "flash/v",
        "template_snaporch",
    )
