"""snaporch reads sanoid.conf as sanoid does: compared with its ``init``, on the same files.

It is the host's sanoid; ``SANOID=PATH`` names another release's, with its defaults beside it.
"""

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from snaporch.sanoid.config.resolve import DEFAULTS, SanoidConfigError, load_sanoid, release_of

pytestmark = pytest.mark.lab

TESTS = Path(__file__).parents[1]
SAMPLES = TESTS / "config-samples" / "sanoid"
DRIVER = TESTS / "contract" / "sanoid_init.pl"
SANOID = Path(os.environ.get("SANOID", "/usr/sbin/sanoid"))
BESIDE = SANOID.with_name(DEFAULTS.name)
DATASETS = (
    *("flash", "flash/v", "flash/v/w", "tank", "tank/a", "tank/a/b", "tank/odd name"),
    *("tank/odd name/v", "tank/p", "tank/p/child", "tank/p/child/deep", "tank/q"),
)
MADE_UP = 400


def sanoid_says(directories, tmp_path):
    """The result of ``init`` for each directory: settings by section, or its fatal error."""
    datasets = tmp_path / "datasets"
    datasets.write_text("".join(f"{name}\n" for name in DATASETS))
    words = ["perl", DRIVER, SANOID, defaults(), datasets, *directories]
    done = subprocess.run(words, check=True, stdout=subprocess.PIPE, timeout=600)
    return json.loads(done.stdout.decode("latin-1"))


def defaults():
    return BESIDE if BESIDE.exists() else DEFAULTS


def we_say(directory):
    try:
        config = load_sanoid(directory, DATASETS, defaults(), SANOID, directory)
    except SanoidConfigError as error:
        return f"fatal: {error}"
    return {name: shown(section) for name, section in config.sections.items()}


def shown(section):
    zfs = {"zfs_recursion": "1"} if section.recursive == "zfs" else {}
    return dict(section.settings) | zfs


def as_text(value):
    """perl answers in bytes, which came through Latin-1."""
    if isinstance(value, dict):
        return {as_text(key): as_text(each) for key, each in value.items()}
    return value.encode("latin-1").decode("utf-8")


def assert_agreed(directories, tmp_path):
    ours_before = [we_say(directory) for directory in directories]
    answers = sanoid_says(directories, tmp_path)
    assert len(answers) == len(directories)
    fatal = 0
    for directory, ours in zip(directories, ours_before, strict=True):
        theirs = as_text(answers[str(directory)])
        if isinstance(theirs, str):
            fatal += 1
            assert isinstance(ours, str), f"sanoid refuses it: {theirs}\n{text_in(directory)}"
        else:
            assert ours == theirs, text_in(directory)
    return fatal


def text_in(directory):
    return (directory / "sanoid.conf").read_text()


def directory_with(parent, name, content):
    directory = parent / name
    directory.mkdir()
    (directory / "sanoid.conf").write_bytes(content)
    return directory


def test_valid_samples_are_resolved_alike_and_invalid_ones_are_fatal_to_both(tmp_path):
    made = {
        kind: [
            directory_with(tmp_path, f"{kind}-{path.stem}", path.read_bytes())
            for path in sorted((SAMPLES / kind).glob("*.conf"))
        ]
        for kind in ("good", "bad")
    }
    assert assert_agreed(made["good"], tmp_path) == 0
    assert assert_agreed(made["bad"], tmp_path) == len(made["bad"])


SECTIONS = (
    *("tank", "tank/a", "tank/a/b", "tank/p", "tank/p/child", "flash", "flash/v", "other"),
    *("tank/odd name", "template_t1", "template_t2", "template_default"),
)
KEYS = (
    *("hourly", "daily", "autosnap", "recursive", "use_template", "script_timeout", "path"),
    *("pre_snapshot_script", "process_children_only", "skip_children", "no_inconsistent_snapshot"),
)
VALUES = (
    *("yes", "no", "1", "0", "zfs", "on", "zfs ", "Yes", "36", "36 # x", "t1", "t1, t2", "t2 ,t1"),
    *("missing", "", "/usr/bin/x y", "tank/a", "<<E\nfoo\nE", "<<E\nfoo\nbar\nE", "TRUE", "-1"),
    *("<<E\nE", "<<E\n zfs \nE", "yes\t ", " \u00a0"),
)
OTHER = ("# c", "; c", "", "  ", "hourly", "x = 1", "[a] # c", "[a] [b]", "hourly == 1", "= 1", "ä")


def made_up_line(dice):
    kind = dice.random()
    if kind < 0.3:
        return dice.choice(("[%s]", "[ %s ]", "  [%s]\t")) % dice.choice(SECTIONS)
    if kind < 0.96:
        form = dice.choice(("%s = %s", "\t%s=%s", "%s  =   %s", "%s = %s\t"))
        return form % (dice.choice(KEYS), dice.choice(VALUES))
    return dice.choice(OTHER)


def made_up(dice):
    lines = [f"[{dice.choice(SECTIONS)}]"]
    lines += [made_up_line(dice) for _ in range(dice.randint(0, 14))]
    end = dice.choice(("\n", "\n", "\n", "\r\n"))
    return (end.join(lines) + dice.choice(("", end))).encode()


def test_random_files_are_resolved_alike(tmp_path):
    dice = random.Random(20)
    made = [directory_with(tmp_path, f"{n}", made_up(dice)) for n in range(MADE_UP)]
    fatal = assert_agreed(made, tmp_path)
    assert 0 < fatal < MADE_UP / 2
    # The lists of datasets that a sanoid of 2.3 has left there, with and without all their lines.
    for directory in made:
        cache = directory / "datasets.txt"
        assert cache.exists() <= (release_of(SANOID) >= (2, 3))
        if cache.exists() and dice.random() < 0.7:
            kept = [line for line in cache.read_text().splitlines(True) if dice.random() < 0.7]
            cache.write_text("".join(kept))
    assert assert_agreed(made, tmp_path) == fatal
