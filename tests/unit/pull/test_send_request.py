"""What a hostile machine may ask a source for."""

import pytest
from fakes.pull_case import UUID

from snaporch.errors import RefusedError
from snaporch.pull.send_request import Verb, WantedFile, parse_request, request_command

STREAM = {"uuid": UUID.format(1), "dataset": "tank/web", "guid": 7, "base": 0, "token": "-"}


def test_a_request_is_read_as_it_was_written():
    found = parse_request(request_command(Verb.STREAM, STREAM))
    assert (found.verb, found.dataset, found.guid, found.token) == (Verb.STREAM, "tank/web", 7, "-")
    values = {"uuid": UUID.format(1), "run": "r", "files": [{"name": "ram.save", "offset": 3}]}
    assert parse_request(request_command(Verb.BUNDLE, values)).files == (WantedFile("ram.save", 3),)


@pytest.mark.parametrize(
    "command",
    [
        None,
        "",
        "sh",
        "zfs destroy -r tank",
        "snaporch-source 1",
        "snaporch-source 1 ",
        "snaporch-source 1 destroy",
        "snaporch-source 1 guests; zfs destroy tank",
        "snaporch-source 1 guests\n",
        "snaporch-source 2 guests",
        "snaporch-replica 1 check",
        " snaporch-source 1 guests",
        "scp -f /etc/shadow",
        "internal-sftp",
        "snaporch-source 1 guests " + "A" * 200_000,
    ],
)
def test_anything_else_is_refused(command):
    with pytest.raises(RefusedError, match="no request"):
        parse_request(command)


@pytest.mark.parametrize(
    "changes",
    [
        {"uuid": "../../etc"},
        {"uuid": 5},
        {"dataset": "tank/../x"},
        {"dataset": "-tank"},
        {"dataset": "tank@s"},
        {"guid": -1},
        {"guid": 1 << 64},
        {"guid": True},
        {"base": "0"},
        {"token": "x; rm"},
        {"token": ""},
        {"more": 1},
    ],
    ids=str,
)
def test_a_value_that_cannot_be_is_refused(changes):
    with pytest.raises(RefusedError):
        parse_request(request_command(Verb.STREAM, STREAM | changes))


@pytest.mark.parametrize(
    "files",
    [
        [],
        {},
        [{"name": "../x", "offset": 0}],
        [{"name": "/etc/shadow", "offset": 0}],
        [{"name": ".x", "offset": 0}],
        [{"name": "a", "offset": -1}],
        [{"name": "a"}],
        [{"name": "a", "offset": 0}] * 2,
        [{"name": f"f{n}", "offset": 0} for n in range(65)],
    ],
    ids=lambda each: str(each)[:40],
)
def test_files_that_cannot_be_are_refused(files):
    values = {"uuid": UUID.format(1), "run": "r", "files": files}
    with pytest.raises(RefusedError):
        parse_request(request_command(Verb.BUNDLE, values))
