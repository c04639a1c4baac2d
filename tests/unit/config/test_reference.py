import re
from pathlib import Path

import pytest

from snaporch.config.copies import Copies
from snaporch.config.monitoring import EmailOptions, MetricsOptions, NotifyOptions, StatusOptions
from snaporch.config.policy import Group, Keep, Policy
from snaporch.config.reference import reference
from snaporch.config.replica import Replica, ResticReplica
from snaporch.config.schema import (
    Config,
    DomainSettings,
    Paths,
    PruneOptions,
    RamPagesOptions,
    Schedule,
)
from snaporch.config.source import Source

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "configuration.md"


def test_the_page_is_what_the_generator_prints():
    assert PAGE.read_text("utf-8") == reference()


SECTIONS = (
    Paths,
    PruneOptions,
    RamPagesOptions,
    DomainSettings,
    Schedule,
    Policy,
    Keep,
    Group,
    Replica,
    ResticReplica,
    Source,
    Copies,
)
SECTIONS += (StatusOptions, MetricsOptions, NotifyOptions, EmailOptions)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_option_is_described(section):
    page = reference()
    for name, field in section.model_fields.items():
        if name in ("keep", "email"):
            continue  # have sections of their own
        assert f"### `{name}`\n\n{field.description}" in page


def test_every_default_and_type_is_on_the_page():
    entries = reference().count("\n### ")
    options = sum(len(section.model_fields) for section in (Config, *SECTIONS))
    assert entries == options - 19  # these have sections of their own
    assert (
        len(re.findall(r"(?m)^Type: .+\. (Default: `.+`|No default|Required)\.$", reference()))
        == entries
    )


@pytest.mark.parametrize(
    "text",
    [
        'Type: one of `"auto"`, `"zstd"`, `"gzip"`, `"none"`. Default: `"auto"`.',
        "Type: integer, 0 to 256. Default: `0`.",
        "Type: integer, 1 to 1048576. No default.",
        'Type: string, or list of strings. Default: `""`.',
        'Type: integer or string. Default: `"auto"`.',
        "Type: list of strings. Default: `[]`.",
        'Type: absolute path. Default: `"/run/snaporch"`.',
        'Type: string. Default: `"qemu:///system"`.',
        'Type: duration, 1s to 36500d. Default: `"5m"`.',
        'Type: duration, 100ms to 10m. Default: `"10s"`.',
        "Type: duration, 1m to 36500d. No default.",
    ],
)
def test_types_are_in_words(text):
    assert text in reference()
