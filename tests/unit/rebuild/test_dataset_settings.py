import pytest

from snaporch.model import DatasetKind
from snaporch.rebuild.dataset_settings import RESERVED, Settings, allowed_settings
from snaporch.snapshot.surroundings import SETTINGS

FILESYSTEM, VOLUME = DatasetKind.FILESYSTEM, DatasetKind.VOLUME
GOOD = {
    "recordsize": "16384",
    "compression": "zstd-3",
    "reservation": "1073741824",
    "refreservation": "none",
    "quota": "0",
    "refquota": "1099511627776",
    "primarycache": "metadata",
    "secondarycache": "none",
    "sync": "always",
    "logbias": "throughput",
    "atime": "off",
    "relatime": "on",
    "xattr": "sa",
    "acltype": "posix",
    "snapdir": "visible",
    "copies": "2",
}


def test_each_property_that_is_saved_is_set_again():
    assert GOOD.keys() == set(SETTINGS)
    found = allowed_settings(FILESYSTEM, GOOD)
    assert (found.allowed, found.refused) == (GOOD, ())
    assert [found.reserved(key) for key in RESERVED] == [1 << 30, 0]
    assert Settings({"reservation": "none"}, ()).reserved("reservation") == 0


def test_a_volume_gets_what_a_volume_has():
    found = allowed_settings(VOLUME, {"compression": "lz4", "recordsize": "16384", "copies": "1"})
    assert found.allowed == {"compression": "lz4", "copies": "1"}
    assert found.refused == ("'recordsize' = '16384'",)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("recordsize", each) for each in ("1000", "256", "33554432", "16K", "", "-512", "٣")],
        *[("compression", each) for each in ("zstd-20", "gzip-0", "lz4\n", "zstd -o x", "inherit")],
        *[("refreservation", each) for each in ("auto", "1G", str(1 << 61), "9" * 5000)],
        ("copies", "4"),
        ("sync", "off"),
        ("snapdir", "/"),
        ("mountpoint", "/etc"),
        ("setuid", "on"),
        ("sharenfs", "on"),
        ("snaporch:policy", "x"),
        ("-r", "x"),
    ],
)
def test_what_is_not_on_the_list_is_refused_and_named(key, value):
    found = allowed_settings(FILESYSTEM, {key: value, "atime": "off"})
    assert found.allowed == {"atime": "off"}
    (refused,) = found.refused
    assert refused.startswith(repr(key))
    assert refused.isprintable()
    assert len(refused) < 200
