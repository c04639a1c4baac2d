import re
import tomllib

from snaporch.config import Config
from snaporch.config.example import example_text


def test_as_it_is_it_says_nothing_but_the_defaults():
    assert Config.model_validate(tomllib.loads(example_text())) == Config()


def test_every_option_in_it_can_be_set():
    """All of them at once: what is behind a # without a space is TOML, and what it says is true."""
    text = re.sub(r"(?m)^#(?=\S)", "", example_text())
    said = tomllib.loads(text)
    examples = {"domain", "policy", "group", "replica", "source", "copies"}
    assert said.keys() == {*Config.model_fields}
    config = Config.model_validate(said)
    defaults = Config.model_validate({k: v for k, v in said.items() if k not in examples})
    assert defaults == Config()
    assert set(config.policy) == {"hourly"}
    assert config.settings("web", "").level == "quiesced"


def test_every_line_fits_a_terminal():
    assert max(map(len, example_text().splitlines())) <= 100
