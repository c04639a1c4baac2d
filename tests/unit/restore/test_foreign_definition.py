"""What a definition that came from another host may have only if the admin accepts it."""

import pytest

from snaporch.errors import RefusedError
from snaporch.restore.foreign_definition import check_foreign_definitions


def definition(devices="", os=""):
    return f"<domain><name>web</name><os>{os}</os><devices>{devices}</devices></domain>"


def interface(element):
    return f"<interface type='ethernet'>{element}<target dev='tank'/></interface>"


def is_own(path):
    return path.startswith("/tank/web/")


@pytest.mark.parametrize(
    ("xml", "shown", "word"),
    [
        (
            interface("<script path='python3'/>"),
            "script path='python3'",
            "interface.script.path=python3",
        ),
        (
            interface("<script path='/tank/web/x'/>"),
            "script path=",
            "interface.script.path=/tank/web/x",
        ),
        ("<console type='pty'><log file='/etc/cron.d/x'/></console>", "log file=", "/etc/cron.d/x"),
        ("<emulator>qemu</emulator>", "emulator>qemu", "emulator=qemu"),
    ],
)
def test_what_root_runs_or_writes_is_refused(xml, shown, word):
    definitions = [definition(), definition(xml)]
    with pytest.raises(RefusedError, match=f"has <{shown}.*; read it first; .*--accept {word}$"):
        check_foreign_definitions("web@s1", definitions, (), is_own)
    check_foreign_definitions("web@s1", definitions, [word], is_own)


def test_the_error_has_the_first_words_and_says_how_many_more_there_are():
    serial = "".join(f"<serial><log file='/etc/{number}'/></serial>" for number in range(10))
    with pytest.raises(RefusedError, match="and 2 more") as caught:
        check_foreign_definitions("web@s1", [definition(serial)], (), is_own)
    assert caught.value.step.count("--accept /etc/") == 8


def test_a_word_of_a_shell_is_quoted():
    words = "--accept '/etc/a b'$"
    with pytest.raises(RefusedError, match=words):
        check_foreign_definitions(
            "web@s1", [definition("<serial><log file='/etc/a b'/></serial>")], (), is_own
        )
