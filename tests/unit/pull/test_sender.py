"""What a source sends, and what it never sends."""

import json
import os

import pytest
from fakes.pull_case import UUID
from fakes.pulled import Collected

from snaporch.errors import SnaporchError
from snaporch.pull.send_request import Verb, parse_request, request_command
from snaporch.pull.sender import ZfsSend
from snaporch.zfs import PoolError

WEB, DB = UUID.format(1), UUID.format(2)


@pytest.fixture
def ask(case):
    case.take("r1")
    case.take("r2", 2)
    case.allowed = {"web"}

    def ask(verb, **values):
        output = Collected()
        case._sender(output).answer(parse_request(request_command(Verb(verb), values)))
        line, _, rest = output.data.partition(b"\n")
        return json.loads(line), rest

    return ask


def guid(case, name):
    (found,) = [each for each in case.pool.snapshots() if each.full_name == name]
    return found.guid


def test_only_allowed_guests_are_listed(ask):
    assert ask("guests")[0]["guests"] == [{"uuid": WEB, "domain": "web"}]


@pytest.mark.parametrize(
    ("verb", "values"),
    [
        ("snapshots", {"uuid": DB}),
        ("manifest", {"uuid": DB, "run": "r2"}),
        ("manifest", {"uuid": WEB, "run": "r2"}),
        ("bundle", {"uuid": DB, "run": "r2", "files": [{"name": "ram.save", "offset": 0}]}),
        ("bundle", {"uuid": WEB, "run": "r1", "files": [{"name": "other", "offset": 0}]}),
        ("bundle", {"uuid": WEB, "run": "r1", "files": [{"name": "ram.save", "offset": 99}]}),
    ],
    ids=str,
)
def test_what_is_not_allowed_is_not_sent(ask, verb, values):
    with pytest.raises(SnaporchError):
        ask(verb, **values)


@pytest.mark.parametrize("dataset", ["tank/db", "tank", "tank/web"])
def test_a_snapshot_of_another_guest_is_not_sent(ask, case, dataset):
    values = {"uuid": WEB, "dataset": dataset, "base": 0, "token": "-"}
    with pytest.raises(SnaporchError, match="no snapshot of this GUID"):
        ask("stream", guid=guid(case, "tank/db@r2"), **values)
    assert case.send.sent == []


def test_a_token_for_another_dataset_is_refused_and_nothing_is_sent(ask, case):
    case.send.contents = (
        "resume token contents:\nnvlist version: 0\n\tobject = 0x1\n\toffset = 0x0\n\tbytes = 0x1\n"
        f"\ttoguid = {guid(case, 'tank/db@r2'):#x}\n\ttoname = tank/db@r2\n"
        "full\ttank/db@r2\t400\nsize\t400\n"
    )
    values = {"uuid": WEB, "dataset": "tank/web", "guid": guid(case, "tank/web@r1"), "base": 0}
    found, rest = ask("stream", token="1-a-b-789c", **values)
    assert found["refused"] == "its token names another dataset"
    assert rest == b""
    assert case.send.sent == []


def test_a_file_of_a_bundle_is_sent_from_its_offset(ask):
    files = [{"name": "ram.save", "offset": 1}]
    assert ask("bundle", uuid=WEB, run="r1", files=files) == ({"bytes": 2}, b"am")


def test_a_file_that_the_manifest_does_not_name_is_not_sent(ask, case):
    (case.store.root / WEB / "r1" / "other").write_bytes(b"x")
    with pytest.raises(SnaporchError, match="is no file of the bundle"):
        ask("bundle", uuid=WEB, run="r1", files=[{"name": "other", "offset": 0}])


def test_a_link_in_a_bundle_is_not_followed(ask, case, tmp_path):
    path = case.store.root / WEB / "r1" / "ram.save"
    secret = tmp_path / "secret"
    secret.write_bytes(b"key")
    path.unlink()
    os.symlink(secret, path)
    with pytest.raises(SnaporchError):
        ask("bundle", uuid=WEB, run="r1", files=[{"name": "ram.save", "offset": 0}])


def test_a_base_that_is_gone_is_refused(ask, case):
    values = {"uuid": WEB, "dataset": "tank/web", "guid": guid(case, "tank/web@r1"), "token": "-"}
    with pytest.raises(SnaporchError, match="neither this snapshot nor a bookmark"):
        ask("stream", base=5, **values)


def test_a_report_that_takes_too_long_is_an_error(tmp_path):
    command = tmp_path / "zfs"
    command.write_text("#!/bin/sh\nexec sleep 600\n")
    command.chmod(0o755)
    with pytest.raises(PoolError, match="takes over 0 s"):
        ZfsSend(str(command), limit=0.1).report(["-nP", "tank/web@r1"])
