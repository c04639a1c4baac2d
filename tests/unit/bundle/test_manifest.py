import json
import subprocess
from datetime import UTC, datetime

import pytest
from fakes import manifests

from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    Manifest,
    ManifestError,
    Role,
    cut_to_milliseconds,
    manifest_bytes,
)
from snaporch.bundle.manifest import read_manifest as read
from snaporch.model import Level

NOW = datetime(2025, 6, 1, 12, 0, 0, 123_000, tzinfo=UTC)
DIGEST = "0" * 64


@pytest.fixture
def document():
    """A manifest as JSON, which tests change."""
    return {
        "format": 1,
        "run": "r",
        "domain": "Bär <vm>",
        "uuid": "u",
        "snapshot": "s",
        "level": "ram",
        "was_running": True,
        "started": NOW.isoformat(),
        "created": NOW.isoformat(),
        "finished": NOW.isoformat(),
        "pause_ms": 12.5,
        "pause_parts": {"downtime_ms": 10.0, "switch_ms": 2.5},
        "snapshots": [{"dataset": "tank/web", "name": "s", "guid": 2**64 - 1, "createtxg": 7}],
        "disks": [
            {"target": "vda", "source": "/a", "format": "raw", "dataset": "tank/web"},
            {"target": "sda", "format": "raw", "left_out": "removable", "left_out_detail": "cdrom"},
        ],
        "parts": [
            {
                "name": "ram.save",
                "role": "ram",
                "bytes": 10,
                "sha256": DIGEST,
                "payload_bytes": 1000,
                "compression": "zstd",
            },
            {"name": "domain.xml", "role": "inactive-xml", "bytes": 5, "sha256": DIGEST},
        ],
        "versions": {"snaporch": "0.1.0", "libvirt": "11.3.0", "emulator": "", "machine": "pc"},
    }


def stored(tmp_path, document):
    manifests.store(tmp_path / MANIFEST_NAME, document)
    return tmp_path


def test_a_manifest_survives_writing_and_reading(tmp_path, document):
    first = read(stored(tmp_path, document))
    (tmp_path / MANIFEST_NAME).write_bytes(manifest_bytes(first))
    assert read(tmp_path) == first
    assert first.created == NOW
    assert first.snapshots[0].guid == 2**64 - 1


def test_sizes_are_sums_over_parts(tmp_path, document):
    manifest = read(stored(tmp_path, document))
    assert manifest.stored_bytes == 15
    assert manifest.ram_bytes == 1000
    assert manifest.part(Role.RAM).name == "ram.save"
    assert manifest.part(Role.TPM) is None


def test_without_ram_there_is_no_ram_size(tmp_path, document):
    document["parts"] = []
    manifest = read(stored(tmp_path, document))
    assert (manifest.ram_bytes, manifest.stored_bytes) == (None, 0)


@pytest.mark.parametrize("level", Level)
def test_every_level_can_be_recorded(tmp_path, document, level):
    document["level"] = level.value
    assert read(stored(tmp_path, document)).level is level


def spoil(*path, value):
    """The change, and its name in the error."""
    return pytest.param(path, value, id=".".join(map(str, path)) + f"={value!r}"[:24])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        spoil("format", value=2),
        spoil("format", value=0),
        spoil("level", value="best"),
        spoil("created", value="2025-06-01T12:00:00"),
        spoil("parts", 0, "sha256", value="0" * 63),
        spoil("parts", 0, "sha256", value="G" * 64),
        spoil("parts", 0, "sha256", value="A" * 64),
        spoil("parts", 0, "sha256", value=DIGEST + "\n"),
        spoil("parts", 0, "bytes", value=-1),
        spoil("parts", 0, "role", value="swap"),
        spoil("parts", 0, "name", value="../../etc/passwd"),
        spoil("parts", 0, "name", value="/etc/passwd"),
        spoil("parts", 0, "name", value=".."),
        spoil("parts", 0, "name", value=""),
        spoil("parts", 0, "name", value="ram.save\n"),
        spoil("snapshots", 0, "guid", value=None),
    ],
)
def test_an_impossible_value_is_refused_with_its_field(tmp_path, document, path, value):
    holder = document
    for step in path[:-1]:
        holder = holder[step]
    holder[path[-1]] = value
    with pytest.raises(ManifestError) as caught:
        read(stored(tmp_path, document))
    assert str(tmp_path / MANIFEST_NAME) in str(caught.value)
    assert ".".join(map(str, path)) in str(caught.value)


def test_two_parts_with_one_name_are_refused(tmp_path, document):
    document["parts"].append(document["parts"][0])
    with pytest.raises(ManifestError, match=r"parts: .*two parts have the same name"):
        read(stored(tmp_path, document))


def test_a_later_format_is_reported_even_with_more_fields(tmp_path, document):
    document |= {"format": 2, "novelty": True}
    with pytest.raises(ManifestError, match="format: "):
        read(stored(tmp_path, document))


@pytest.mark.parametrize("name", ["novelty", "parts.0.novelty"])
def test_unknown_fields_are_refused(tmp_path, document, name):
    holder = document["parts"][0] if "." in name else document
    holder["novelty"] = 1
    with pytest.raises(ManifestError, match=name):
        read(stored(tmp_path, document))


@pytest.mark.parametrize("missing", ["domain", "parts", "snapshots", "was_running", "versions"])
def test_nothing_may_be_missing(tmp_path, document, missing):
    del document[missing]
    with pytest.raises(ManifestError, match=missing):
        read(stored(tmp_path, document))


def test_a_change_of_any_byte_is_noticed(tmp_path, document):
    path = stored(tmp_path, document) / MANIFEST_NAME
    whole = path.read_bytes()
    for place, byte in enumerate(whole):
        for damaged in (whole[:place], whole[:place] + bytes([byte ^ 1]) + whole[place + 1 :]):
            path.write_bytes(damaged)
            with pytest.raises(ManifestError, match="it is damaged"):
                read(tmp_path)


def test_its_checksum_is_what_sha256sum_prints_for_the_rest(tmp_path, document):
    """The command is on the page of the bundle's format."""
    command = "head -n -2 manifest.json | head -c -2 | sha256sum"
    done = subprocess.run(
        command, shell=True, cwd=stored(tmp_path, document), capture_output=True, check=True
    )
    text = (tmp_path / MANIFEST_NAME).read_text()
    assert json.loads(text)["sha256"] == done.stdout.decode().split()[0]


def test_nothing_may_follow_the_checksum(tmp_path, document):
    path = stored(tmp_path, document) / MANIFEST_NAME
    path.write_bytes(path.read_bytes() + b"\n")
    with pytest.raises(ManifestError, match="it is damaged"):
        read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe{}", b"{}garbage"])
def test_an_invalid_manifest_is_reported_with_its_path(tmp_path, content):
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(ManifestError, match=MANIFEST_NAME):
        read(tmp_path)


def test_a_missing_manifest_is_reported_with_its_path(tmp_path):
    with pytest.raises(ManifestError, match=r"manifest\.json: No such file"):
        read(tmp_path)


def test_a_manifest_is_frozen(tmp_path, document):
    manifest = read(stored(tmp_path, document))
    with pytest.raises(ValueError, match="frozen"):
        manifest.level = Level.OFF
    assert isinstance(manifest, Manifest)


def test_times_are_kept_to_the_millisecond():
    assert (
        cut_to_milliseconds(datetime(2025, 1, 1, 0, 0, 0, 123_999, tzinfo=UTC)).microsecond
        == 123_000
    )


def test_a_manifest_that_is_too_large_is_refused(tmp_path):
    with (tmp_path / "manifest.json").open("wb") as stream:
        stream.truncate((1 << 20) + 1)
    with pytest.raises(ManifestError, match="is larger than 1 MiB"):
        read(tmp_path)
