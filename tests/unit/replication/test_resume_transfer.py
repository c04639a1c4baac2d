"""When an interrupted transfer may be continued by its token."""

from datetime import UTC, datetime

import pytest

from snaporch.model import PoolSnapshot
from snaporch.replication.needed_streams import Originals
from snaporch.replication.resume_transfer import NO_TOKEN, is_token, token_refusal
from snaporch.zfs import Bookmark

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
A, B, C = (PoolSnapshot("t/w", "abc"[each], each + 1, each + 1, NOON, {}) for each in range(3))
OURS = Originals("t/w", [A, B, C], {"t/w#old": Bookmark(9, 0), "t/w#a": Bookmark(1, 1)})


# -- the form of a token --------------------------------------------------------------------------

REAL = "1-cecf66539-f0-789c636064000310a500c4ec50360710e72765a526973030"


def test_a_token_of_zfs_has_the_form_of_one():
    assert is_token(REAL)


@pytest.mark.parametrize(
    "text",
    [
        NO_TOKEN,
        "",
        f"{REAL};touch /tmp/x",
        f"{REAL} ",
        f"{REAL}\n",
        f"{REAL}\n{REAL}",
        f"-{REAL}",
        f"2{REAL[1:]}",
        REAL.upper(),
        f"{REAL}0",
        "1-cecf66539-f0-",
        "1-cecf66539-fffff-789c",  # a size that libzfs would allocate
        f"1-{'0' * 17}-f0-789c",
        f"1-cecf66539-f0-{'00' * 4097}",
        "1-cecf66539-f0-\uff17\uff18",
    ],
)
def test_any_other_text_has_not(text):
    assert not is_token(text)


# -- the contents of a token ----------------------------------------------------------------------

FLAGS = "\tembedok = 1\n\tcompressok = 1\n"


def report(name="t/w@b", guid=2, more=FLAGS, stream="full\tt/w@b"):
    return (
        "resume token contents:\nnvlist version: 0\n\tobject = 0x2\n\toffset = 0x860000\n"
        f"\tbytes = 0x885ce0\n\ttoguid = {guid:#x}\n\ttoname = {name}\n{more}"
        f"{stream}\t12116112\nsize\t12116112\n"
    )


def refusal(text, newest=None, options="Lce"):
    return token_refusal(text, OURS, newest, options)


INCREMENT = {"more": f"\tfromguid = 0x1\n{FLAGS}", "stream": "incremental\tt/w@a\tt/w@b"}


def test_a_token_that_continues_a_stream_of_now_is_used():
    assert refusal(report()) == ""
    assert refusal(report(**INCREMENT), newest=1) == ""
    raw = "\tlargeblockok = 1\n\tcompressok = 1\n\trawok = 1\n"
    assert refusal(report(more=raw), options="w") == ""


def test_a_renamed_snapshot_is_found_by_its_guid():
    assert refusal(report(name="t/w@former")) == ""


@pytest.mark.parametrize("name", ["t/secret@b", "t@b", "t/w/below@b", "t/wx@b"])
def test_a_token_of_another_dataset_is_refused(name):
    assert refusal(report(name=name)) == "its token names another dataset"


@pytest.mark.parametrize(
    ("text", "newest"),
    [
        (report(guid=7), None),
        (report(), 2),  # the replica has it
        (report(), 3),
        (report(stream="full\tt/secret@b"), None),  # ZFS would send this one
        (report(stream="full"), None),
        (report(stream=""), None),
    ],
)
def test_a_token_of_a_snapshot_that_is_not_wanted_is_refused(text, newest):
    assert refusal(text, newest) == "its token names a snapshot that is not to be sent"


@pytest.mark.parametrize(
    "changes",
    [
        {**INCREMENT, "more": "\tfromguid = 0x7\n"},
        {**INCREMENT, "more": ""},
        {"more": "\tfromguid = 0x1\n"},
        {"more": "\tfromguid = 0x0\n", "stream": "saved\tt/w@b"},
    ],
)
def test_a_token_with_an_unknown_base_is_refused(changes):
    assert refusal(report(**changes)) == "its token names an unknown base"


@pytest.mark.parametrize(
    ("flags", "options"),
    [("\trawok = 1\n", "Lce"), ("\tembedok = 1\n", "Lc"), ("\tlargeblockok = 1\n", "ce")],
)
def test_a_token_with_other_flags_is_refused(flags, options):
    text = report(more=flags)
    assert refusal(text, options=options) == "its token is for a stream with other options"


def test_a_token_that_is_not_raw_is_refused_for_an_encrypted_dataset():
    assert refusal(report(), options="w") == "its token is not for a raw stream"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "resume token contents:\n",
        report().replace("\ttoguid = 0x2\n", ""),
        report().replace("version: 0", "version: 1"),
        report(more="\tsavedok = 1\n"),
        report(more="\tredact_snaps = 0x1\n"),
        report(more="\tunknown = 1\n"),
        report(more="anything\n"),
        report(more="\trawok = 2\n"),
        report(guid=2).replace("0x2", "two"),
        # line breaks in a name imitate other values
        report(name="t/secret@b\n\ttoname = t/w@b"),
        report(name="t/w@b\n\ttoguid = 0x1"),
        report(name="t/w@b\n"),
    ],
)
def test_a_token_with_unknown_contents_is_refused(text):
    assert refusal(text) == "its token has unknown contents"
