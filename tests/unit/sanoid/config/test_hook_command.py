import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.sanoid.config.hook_command import SETTINGS, HookCommand, parse_hook


@pytest.mark.parametrize(
    ("text", "program", "phase"),
    [
        ("/usr/bin/snaporch hook sanoid pre", "/usr/bin/snaporch", "pre"),
        ("  '/opt/my tools/snaporch' hook sanoid post", "/opt/my tools/snaporch", "post"),
        ('"/usr/bin/snaporch" "hook" sanoid "prune"', "/usr/bin/snaporch", "prune"),
        ("snaporch --config /etc/pre.toml hook sanoid pre-prune", "snaporch", "pre-prune"),
        ("snaporch hook sanoid --config=x post --verbose", "snaporch", "post"),
        ("SNAPORCH_CONFIG=/etc/a /usr/bin/snaporch hook sanoid pre", "/usr/bin/snaporch", "pre"),
        ("exec env A=b snaporch hook sanoid pre", "snaporch", "pre"),
        ("/usr/share/snaporch/hooks/sanoid-pre", "/usr/share/snaporch/hooks/sanoid-pre", "pre"),
        ("hooks/sanoid-pre-prune -x", "hooks/sanoid-pre-prune", "pre-prune"),
        ("python3 -m snaporch hook sanoid post", "python3", "post"),
        ("/usr/local/bin/freeze tank/web", "/usr/local/bin/freeze", ""),
        ("snaporch snapshot web", "snaporch", ""),
        ("snaporch hook sanoid", "snaporch", ""),
        ("sanoid-prepare", "sanoid-prepare", ""),
        ("echo 'unfinished", "", ""),
        ("   ", "", ""),
        ("A=b", "", ""),
    ],
)
def test_spellings_of_the_hook_command(text, program, phase):
    assert parse_hook(text) == HookCommand(program, phase)


@given(st.text())
def test_any_text_is_parsed(text):
    assert parse_hook(text).phase in ("", *SETTINGS.values())
