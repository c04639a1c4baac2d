import pytest
from hypothesis import given
from hypothesis import strategies as st

from snaporch.sanoid.config.ini import IniError, read_ini


def test_sections_settings_and_comments():
    text = "# c\n\n [ tank/a ]\n\t; c\n\thourly = 1\nno_equals_needed=  x = y \n"
    assert read_ini(text) == {"tank/a": {"hourly": ["1"], "no_equals_needed": ["x = y "]}}


def test_a_comment_after_a_value_belongs_to_it():
    assert read_ini("[a]\nhourly = 1 # one\n")["a"]["hourly"] == ["1 # one"]


def test_a_parameter_given_twice_has_two_values():
    assert read_ini("[a]\nx = 1\n[b]\n[a]\nx = 2\n") == {"a": {"x": ["1", "2"]}, "b": {}}


def test_a_here_document_has_a_value_per_line():
    text = "[a]\nx = <<END\n [no section]\n# no comment\nEND\ny = 1\n"
    assert read_ini(text)["a"] == {"x": [" [no section]", "# no comment"], "y": ["1"]}


def test_a_parameter_without_a_value_stays_without():
    assert read_ini("[a]\nx = <<E\nE\nx = 1\n")["a"] == {"x": []}


def test_the_first_line_end_is_the_line_end_of_all():
    assert read_ini("[a]\r\nx = 1\r\n") == {"a": {"x": ["1"]}}
    assert read_ini("[a]\nx = 1\r\n") == {"a": {"x": ["1"]}}
    with pytest.raises(IniError):
        read_ini("[a]\r\nx = 1\ny = 2\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no section"),
        ("# only\n", "no section"),
        ("[a]", "no section"),
        ("x = 1\n[a]\n", "line 1 is a setting outside"),
        ("[a]\n\nx\n", "line 3 is neither"),
        ("[a] # c\n", "line 1 is neither"),
        ("[]\n", "line 1 is neither"),
        ("[a]\nx = <<E\n", "line 2 begins a text without its end mark 'E'"),
    ],
)
def test_invalid_texts_are_refused(text, reason):
    with pytest.raises(IniError, match=reason):
        read_ini(text)


NAMES = st.text("abcxyz/_-.", min_size=1, max_size=8)
VALUES = st.text("ab 1=#;[]<", max_size=8).map(str.lstrip).filter(lambda v: not v.startswith("<<"))
BLANK = st.sampled_from(["", " ", "\t", " \t "])


@given(
    st.dictionaries(NAMES, st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=4),
    BLANK,
    BLANK,
    st.sampled_from(["\n", "\r\n"]),
)
def test_written_texts_are_read_back(sections, before, around, end):
    lines = []
    for name, settings in sections.items():
        lines += [f"{before}[{around}{name}{around}]{before}", "# a comment", before]
        lines += [f"{before}{key}{around}={around}{value}" for key, value in settings.items()]
    expected = {n: {key: [v] for key, v in settings.items()} for n, settings in sections.items()}
    assert read_ini(end.join(lines) + end) == expected


@given(st.text("[]=#; <E\n\r\tab", max_size=60))
def test_any_text_is_read_or_refused(text):
    try:
        found = read_ini(text)
    except IniError as error:
        assert "\n" not in str(error)  # noqa: PT017 - both ends are fine
    else:
        assert found
