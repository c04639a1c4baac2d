import re

import pytest
import typer

from snaporch.cli.main import app
from snaporch.cli.manual import pages
from snaporch.config.reference import reference

PAGES = pages()
COMMANDS = typer.main.get_command(app).commands


def plain(page):
    """The text of a page without the marks of Markdown."""
    return re.sub(r"\\(.)", r"\1", page)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_has_a_page_with_all_of_its_options(name):
    page = plain(PAGES[f"snaporch-{name}.8.md"])
    assert f"# NAME\n\nsnaporch-{name} - " in page
    assert f"# SYNOPSIS\n\n**snaporch {name}** " in page
    for parameter in COMMANDS[name].params:
        for option in parameter.opts if parameter.param_type_name == "option" else ():
            assert re.search(rf"(?m)^\*\*(.*, )?{option}\b.*\*\*\n: \S", page), option


def test_the_first_page_names_all_others():
    page = plain(PAGES["snaporch.8.md"])
    for name in COMMANDS:
        assert f"**snaporch-{name}(8)**\n: " in page
    assert "9 needs attention" in page


def test_commands_below_a_command_have_pages():
    assert "**snaporch-render-sanoid(8)**" in plain(PAGES["snaporch-render.8.md"])
    assert "[DOMAIN]..." in plain(PAGES["snaporch-render-sanoid.8.md"])


def test_the_configuration_is_the_reference_page():
    page = PAGES["snaporch.toml.5.md"]
    options = re.findall(r"(?m)^### `(.+)`$", reference())
    assert len(options) > 50
    assert re.findall(r"(?m)^## (.+)$", page) == options
    assert "](" not in page
    assert "docs/how-to/schedule.md" in page
    assert "make docs" not in page


def test_no_page_depends_on_where_it_was_made():
    assert not [name for name, page in PAGES.items() if "Messages name pages such as" in page]
