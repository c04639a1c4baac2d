import re
from pathlib import Path

import pytest

from snaporch.config.policy import Keep, Policy, Schedule
from snaporch.config.reference import reference
from snaporch.config.schema import Config, DomainSettings, Paths, Prune

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_what_the_generator_prints():
    assert PAGE.read_text("utf-8") == reference()


@pytest.mark.parametrize("section", [Paths, Prune, DomainSettings, Schedule, Policy, Keep])
def test_every_option_is_described(section):
    page = reference()
    for name, field in section.model_fields.items():
        if name == "keep":
            continue  # has a section of its own
        assert f"### `{name}`\n\n{field.description}" in page


def test_every_default_and_type_is_told():
    entries = reference().count("\n### ")
    sections = (Paths, Prune, DomainSettings, Config, Schedule, Policy, Keep)
    options = sum(len(section.model_fields) for section in sections)
    assert entries == options - 7  # these have sections of their own
    assert len(re.findall(r"(?m)^Type: .+\. Default: `.+`\.$", reference())) == entries


@pytest.mark.parametrize(
    "text",
    [
        'Type: one of `"auto"`, `"zstd"`, `"gzip"`, `"none"`. Default: `"auto"`.',
        "Type: integer, -7 to 19. Default: `1`.",
        "Type: list of strings. Default: `[]`.",
        'Type: absolute path. Default: `"/run/snaporch"`.',
        'Type: string. Default: `"qemu:///system"`.',
    ],
)
def test_types_are_in_words(text):
    assert text in reference()
