import pytest

from snaporch import errors
from snaporch.errors import ExitCode, SnaporchError, one_line


def test_an_error_is_thing_reason_and_step_on_one_line():
    error = SnaporchError("web", "is gone", "define it")
    assert str(error) == error.line() == "web: is gone; define it"


def test_an_error_without_a_step_ends_with_the_reason():
    assert str(SnaporchError("web", "is gone")) == "web: is gone"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("one\ntwo\r\nthree", "one two three"),
        ("  padded  \n\n  lines  ", "padded lines"),
        ("bell\x07 and escape\x1b[31m", "bell\\x07 and escape\\x1b[31m"),
        ("next line\x85and\u2028separator", "next line and separator"),
        ("right to left \u202e", "right to left \\x202e"),
        ("undecodable \udcff", "undecodable \\xdcff"),
        ("Bärs <vm> & Co", "Bärs <vm> & Co"),
        ("", ""),
    ],
)
def test_one_line_shows_control_characters_and_keeps_the_rest(text, line):
    assert one_line(text) == line


def test_a_hostile_name_cannot_break_out_of_an_error():
    line = SnaporchError("web\x1b]0;title\x07\nroot", "is gone").line()
    assert line.isprintable()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("UsageError", 2),
        ("ConfigError", 3),
        ("NotFoundError", 4),
        ("RefusedError", 5),
        ("BusyError", 6),
        ("UnavailableError", 7),
        ("RunFailedError", 8),
        ("AttentionError", 9),
    ],
)
def test_every_branch_has_its_documented_exit_code(name, code):
    assert getattr(errors, name)("x", "y").exit_code == code


def test_exit_codes_are_all_different_and_no_alias_hides_one():
    assert len(ExitCode) == len(ExitCode.__members__) == 11
