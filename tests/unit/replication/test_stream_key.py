"""The key in the first record of a raw stream, and whether it is that of the copy."""

import struct

import pytest
from fakes.pulled import packed_key, pair

from snaporch.errors import RefusedError
from snaporch.replication.stream_key import (
    MAX_PAYLOAD_BYTES,
    key_digest,
    key_in,
    payload_bytes,
    payload_of,
)

OWN = {"DSL_CRYPTO_GUID": 7, "DSL_CRYPTO_MASTER_KEY_1": bytes(32), "DSL_CRYPTO_IV": bytes(12)}
OF_SNAPSHOT = {"portable_mac": bytes(32), "to_ivset_guid": 5, "mdn_maxblkid": 9}


def digest(**changes):
    return key_digest(key_in(packed_key(**{**OWN, **changes})), key_in(packed_key(**OWN)))


def test_the_same_key_of_another_snapshot_is_the_same():
    assert key_in(packed_key(**OWN, **OF_SNAPSHOT)) == key_in(packed_key(**OWN))
    assert digest(to_ivset_guid=8) == ""


def test_another_key_has_a_digest_of_its_own():
    other, third = digest(DSL_CRYPTO_IV=b"x" * 12), digest(DSL_CRYPTO_IV=b"y" * 12)
    assert len({"", other, third}) == 3
    assert other == digest(DSL_CRYPTO_IV=b"x" * 12, to_ivset_guid=8)


def test_only_what_zfs_here_knows_of_a_key_counts():
    assert digest(future=3) == ""
    own = key_in(packed_key(**OWN))
    assert key_digest({k: v for k, v in own.items() if k != "DSL_CRYPTO_IV"}, own) != ""


def test_other_values_beside_the_key_are_no_part_of_it():
    resumed = packed_key(**OWN, outer=pair("resume_object", 5) + pair("resume_offset", 6))
    assert key_in(resumed) == key_in(packed_key(**OWN))
    assert payload_of(bytes(312) + resumed) == resumed


GOOD = packed_key(**OWN)
AGAIN = pair("DSL_CRYPTO_GUID", 8)
KEY_AGAIN = GOOD[12:-4]


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        packed_key(),
        GOOD[:-4],
        GOOD + b"\0",
        b"\1" + GOOD[1:],
        GOOD[:1] + b"\7" + GOOD[2:],
        packed_key(**OWN, nested=AGAIN),
        packed_key(**OWN, nested=pair("DSL_CRYPTO_GUID", bytes(8))),
        packed_key(**OWN, outer=KEY_AGAIN),
        packed_key(**OWN, outer=pair("crypt_keydata", 3)),
        packed_key(**OWN, nested=KEY_AGAIN),
        packed_key(**OWN, nested=pair("text", b"x\0", 9, 1)),
        packed_key(**OWN, nested=pair("number", bytes(8), 8, 0)),
        packed_key(**OWN, nested=pair("number", bytes(8), 8, 2)),
        packed_key(**OWN, nested=pair("many", b"12345678", 26, 9)),
        packed_key(**OWN, nested=pair("many", b"12345678", 26, -1)),
        packed_key(**OWN, nested=pair("a\0b", 1)),
        packed_key(**OWN, nested=pair("", 1)),
        packed_key(**OWN, nested=pair("schlüssel", 1)),
        packed_key(**OWN, nested=struct.pack("=ihhii", -8, 2, 0, 1, 8)),
        packed_key(**OWN, nested=struct.pack("=ihhii", 8, 2, 0, 1, 8)),
        packed_key(**OWN, nested=struct.pack("=ihhii", 1 << 30, 2, 0, 1, 8)),
        packed_key(**OWN, nested=struct.pack("=ihhii", 24, -5, 0, 1, 8) + bytes(8)),
    ],
)
def test_what_the_kernel_could_read_otherwise_is_refused(payload):
    with pytest.raises(RefusedError, match="the raw stream is refused: "):
        key_in(payload)


@pytest.mark.parametrize("at", range(len(GOOD)))
def test_a_payload_that_was_cut_is_refused(at):
    with pytest.raises(RefusedError):
        key_in(GOOD[:at])


@pytest.mark.parametrize("order", "<>")
def test_the_size_of_the_payload(order):
    def header(size):
        return struct.pack(order + "IIQ", 0, size, 0x2F5BACBAC).ljust(312, b"\0")

    assert payload_bytes(header(1200)) == 1200
    with pytest.raises(RefusedError, match="its first record has 65537 bytes"):
        payload_bytes(header(MAX_PAYLOAD_BYTES + 1))
