"""Sections of sanoid.conf that take snapshots without snaporch's hooks."""

import shutil

import pytest
from fakes.sanoid import DEFAULTS

from snaporch.sanoid.config.frozen_datasets import (
    frozen_by_hooks,
    unfrozen_by_sanoid,
    unfrozen_section,
)

HOOKS = """\
pre_snapshot_script = /usr/bin/snaporch hook sanoid pre
post_snapshot_script = /usr/bin/snaporch hook sanoid post
"""
HELD = f"[tank/web]\n{HOOKS}no_inconsistent_snapshot = yes\n"
FOREIGN = "[tank/web]\npre_snapshot_script = /bin/true\nno_inconsistent_snapshot = yes\n"
WEB = "sanoid snapshots tank/web by [{}] without freezing the guest"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HELD, ""),
        ("[tank/other]\n", ""),
        ("[tank/web]\nautosnap = no\n", ""),
        ("[tank/web]\n", WEB.format("tank/web")),
        ("[tank]\nrecursive = yes\n", WEB.format("tank")),
        ("[tank]\nrecursive = zfs\n", WEB.format("tank")),
        (f"[tank/web]\n{HOOKS}", WEB.format("tank/web")),  # taken nevertheless when pre fails
        (FOREIGN, WEB.format("tank/web")),
        (HELD.replace("[tank/web]", "[x]\npath = tank/web"), WEB.format("x")),
    ],
)
def test_sections_without_hooks_are_found(sanoid_conf, text, expected):
    config = sanoid_conf(text, "tank", "tank/web", "tank/other")
    assert unfrozen_section(config, ["flash/web", "tank/web"]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (HELD, {"tank/web"}),
        (HELD.replace("[tank/web]", "[tank]\nrecursive = zfs"), {"tank/web", "tank/other"}),
        ("[tank/web]\n", set()),
        (f"[tank/web]\n{HOOKS}", set()),
        (FOREIGN, set()),
        ("[tank/web]\nautosnap = no\n", set()),
    ],
)
def test_sections_that_freeze_the_guest(host, sanoid_conf, text, expected):
    sanoid_conf(text, "tank", "tank/web", "tank/other")
    assert frozen_by_hooks(["tank/web", "tank/other"], host, str(host)) == expected
    (host / "sanoid").unlink()
    assert frozen_by_hooks(["tank/web", "tank/other"], host, str(host)) == frozenset()


@pytest.fixture
def host(tmp_path):
    (tmp_path / "sanoid").write_text("#!/bin/sh\n")
    (tmp_path / "sanoid").chmod(0o755)
    shutil.copy(DEFAULTS, tmp_path / "sanoid.defaults.conf")
    return tmp_path


def test_the_sanoid_configuration_of_this_host(host, sanoid_conf):
    sanoid_conf("[tank/web]\n", "tank/web")
    assert unfrozen_by_sanoid(["tank/web"], host, str(host)) == WEB.format("tank/web")
    assert unfrozen_by_sanoid(["tank/db"], host, str(host)) == ""


def test_without_sanoid_or_with_a_refused_configuration(host, sanoid_conf):
    assert unfrozen_by_sanoid(["tank/web"], host / "none", str(host)) == ""
    sanoid_conf("[tank/web]\n", "tank/web")
    (host / "sanoid.conf").write_text("[tank/web]\nno_such_setting = 1\n")
    assert unfrozen_by_sanoid(["tank/web"], host, str(host)) == ""
    (host / "sanoid.conf").write_text("[tank/web]\n")
    (host / "sanoid").unlink()
    assert unfrozen_by_sanoid(["tank/web"], host, str(host)) == ""
