import hashlib
import os
from datetime import UTC, datetime

import pytest

from snaporch.bundle.compression_tuning import RamSaveTimes
from snaporch.bundle.manifest import (
    MANIFEST_NAME,
    DiskEntry,
    Manifest,
    ManifestError,
    Role,
    VersionsEntry,
)
from snaporch.bundle.store import BundleError, BundleStore
from snaporch.errors import UnavailableError
from snaporch.model import BundleState, LeftOutCode, Level
from snaporch.private_files import private_directory, replace_private, sha256_of

NOW = datetime(2025, 6, 1, tzinfo=UTC)
UUID = "7f1c0d4e-4f7d-4a6e-9d0a-0d7c5a1b2c3d"
RUN = "20250601T120000Z-0badcafe"
REFERENCE = f"{UUID}/{RUN}"


def manifest(*parts, disks=()):
    return Manifest(
        run=RUN,
        domain="web",
        uuid=UUID,
        snapshot="s",
        level=Level.OFF,
        was_running=False,
        started=NOW,
        created=NOW,
        finished=NOW,
        pause_ms=0.0,
        snapshots=(),
        disks=disks,
        parts=parts,
        versions=VersionsEntry(snaporch="", libvirt="", emulator="", machine=""),
    )


@pytest.fixture
def store(tmp_path):
    return BundleStore(tmp_path / "deep" / "bundles")


def seal_without_ram(store, run):
    bundle = store.create(UUID, run)
    bundle.seal(manifest().model_copy(update={"run": run}))


def seal_with_pace(store, run, pace, **more):
    bundle = store.create(UUID, run)
    part = bundle.add_text("ram.save", Role.RAM, "RAM").model_copy(update={"pace": pace, **more})
    bundle.seal(manifest(part).model_copy(update={"run": run}))


def test_the_save_times_of_the_latest_snapshot_with_any(store):
    assert store.last_save_times(UUID) is None
    for second, level in enumerate([5, -3, None]):
        pace = (
            None
            if level is None
            else RamSaveTimes(level=level, seconds=2.0, waited_for_ram=1.0, waited_for_store=0.5)
        )
        seal_with_pace(store, f"20250601T12000{second}Z-0badcafe", pace)
    (store.root / UUID / "20250601T120003Z-0badcafe").mkdir()
    (store.root / UUID / "20250601T120003Z-0badcafe" / "ram.save").touch()
    for number in range(10, 60):  # of a policy that takes no RAM
        seal_without_ram(store, f"20250601T1201{number}Z-0badcafe")
    assert store.last_save_times(UUID) == RamSaveTimes(-3, 2.0, 1.0, 0.5)
    assert store.last_save_times(UUID.replace("7", "8")) is None


def test_the_speed_of_the_latest_save_of_a_second_or_more(store):
    """Its size is 100 bytes."""
    assert store.last_save_speed(UUID) is None
    for second, seconds in enumerate([4.0, 2.0, 0.9]):
        pace = RamSaveTimes(level=1, seconds=seconds, waited_for_ram=0.0, waited_for_store=0.0)
        seal_with_pace(store, f"20250601T12000{second}Z-0badcafe", pace, payload_bytes=100)
    seal_with_pace(store, "20250601T120005Z-0badcafe", None)
    assert store.last_save_speed(UUID) == 50.0


@pytest.fixture
def sealed(store):
    """The directory of a whole bundle of one part."""
    bundle = store.create(UUID, RUN)
    part = bundle.add_text("domain.xml", Role.INACTIVE_XML, "<domain/>")
    return bundle.seal(manifest(part))


def modes(path):
    return {p.name: oct(p.stat().st_mode & 0o777) for p in path.rglob("*")}


# -- writing ------------------------------------------------------------------------------------


def test_store_and_bundle_are_private(store, sealed):
    assert store.root.stat().st_mode & 0o777 == 0o700
    assert modes(store.root) == {
        ".snaporch-store": "0o600",
        UUID: "0o700",
        RUN: "0o700",
        "domain.xml": "0o600",
        MANIFEST_NAME: "0o600",
    }


def test_modes_do_not_depend_on_the_umask(store):
    before = os.umask(0)
    try:
        bundle = store.create(UUID, RUN)
        bundle.add_text("domain.xml", Role.INACTIVE_XML, "<domain/>")
    finally:
        os.umask(before)
    assert set(modes(store.root).values()) == {"0o700", "0o600"}


def test_a_directory_that_was_there_before_is_left_as_it_is(store):
    """It may be /var/tmp; what is made inside is private."""
    store.root.mkdir(parents=True)
    store.root.chmod(0o1777)
    bundle = store.create(UUID, RUN)
    assert store.root.stat().st_mode & 0o7777 == 0o1777
    assert bundle.directory.parent.stat().st_mode & 0o777 == 0o700


def test_until_it_is_sealed_a_bundle_has_a_hidden_name(store):
    bundle = store.create(UUID, RUN)
    bundle.add_text("domain.xml", Role.INACTIVE_XML, "<domain/>")
    assert bundle.directory.name == f".{RUN}.partial"
    assert store.state(REFERENCE) == (BundleState.MISSING, None)


def test_sealing_renames_after_everything_is_on_stable_storage(store, to_disk):
    bundle = store.create(UUID, RUN)
    part = bundle.add_text("domain.xml", Role.INACTIVE_XML, "<domain/>")
    assert bundle.seal(manifest(part)) == store.root / UUID / RUN
    assert to_disk == [
        "domain.xml",
        MANIFEST_NAME,
        f".{RUN}.partial",
        f".{RUN}.partial -> {RUN}",
        UUID,
        store.root.name,
    ]


def test_a_bundle_is_referred_to_by_uuid_and_run(store):
    bundle = store.create(UUID, RUN)
    assert bundle.reference == REFERENCE
    assert store.path(REFERENCE) == store.root / UUID / RUN


def test_a_part_knows_size_and_digest(store):
    part = store.create(UUID, RUN).add_text("domain.xml", Role.LIVE_XML, "Bär\udcff")
    data = "Bär".encode() + b"\xff"
    assert (part.bytes, part.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_a_part_is_never_written_twice(store):
    bundle = store.create(UUID, RUN)
    bundle.add_text("domain.xml", Role.LIVE_XML, "a")
    with pytest.raises(FileExistsError):
        bundle.add_text("domain.xml", Role.LIVE_XML, "b")


@pytest.mark.parametrize(("changed", "exact"), [(-1, True), (0, False), (1, False)])
def test_a_copy_records_whether_the_file_changed_since_the_freeze(store, tmp_path, changed, exact):
    source = tmp_path / "vars.fd"
    source.write_bytes(b"nvram")
    source.chmod(0o640)
    os.utime(source, (1000 + changed, 1000 + changed))
    bundle = store.create(UUID, RUN)
    part = bundle.add_copy("nvram.fd", Role.NVRAM, source, before=1000.0)
    assert part.exact is exact
    assert (part.source, part.mode, part.uid) == (str(source), 0o640, os.getuid())
    assert (bundle.directory / "nvram.fd").read_bytes() == b"nvram"


def test_an_unfinished_bundle_can_be_discarded_and_only_that(store, sealed):
    store.create(UUID, "other")
    store.discard_partial(UUID, "other")
    store.discard_partial(UUID, RUN)
    assert [path.name for path in (store.root / UUID).iterdir()] == [RUN]


def test_ram_without_a_pipe_goes_into_the_same_file_in_all_runs(store):
    """libvirt adds its name to the guest's AppArmor profile each time."""
    assert store.create(UUID, RUN).raw_ram == store.create(UUID, "other").raw_ram
    assert store.create("0" * 36, RUN).raw_ram != store.create(UUID, "third").raw_ram


def test_a_file_of_ram_that_a_run_left_is_removed(store):
    raw = store.create(UUID, RUN).raw_ram
    raw.touch()
    store.discard_partial(UUID, RUN)
    assert list((store.root / UUID).iterdir()) == []
    raw.touch()
    store.create(UUID, RUN)
    assert not raw.exists()


def test_a_store_that_cannot_be_written_is_reported_with_the_next_step(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnavailableError, match="run snaporch as root"):
        BundleStore(tmp_path / "file" / "bundles").create(UUID, RUN)


def test_parents_of_a_private_directory_can_be_passed(tmp_path):
    private_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o711


def test_a_bundle_of_a_guest_with_a_disk_left_out_can_be_read_again(store):
    out = DiskEntry(
        target="sda", source=None, format="raw", dataset=None, left_out=LeftOutCode.REMOVABLE
    )
    sealed = manifest(disks=(out,))
    store.create(UUID, RUN).seal(sealed)
    assert store.manifest(REFERENCE) == sealed


# -- reading ------------------------------------------------------------------------------------


def test_a_whole_bundle_is_complete(store, sealed):
    state, found = store.state(REFERENCE)
    assert state is BundleState.COMPLETE
    assert found.domain == "web"
    assert store.verify(REFERENCE) == found


def test_no_bundle_is_missing(store):
    assert store.state(REFERENCE) == (BundleState.MISSING, None)
    assert store.manifest(REFERENCE) is None
    with pytest.raises(BundleError, match="no such bundle"):
        store.verify(REFERENCE)


@pytest.mark.parametrize("damage", ["shorter", "longer", "gone"])
def test_a_part_of_another_size_makes_it_incomplete(store, sealed, damage):
    part = sealed / "domain.xml"
    if damage == "gone":
        part.unlink()
    else:
        part.write_bytes(part.read_bytes()[:-1] if damage == "shorter" else b"x" * 99)
    state, found = store.state(REFERENCE)
    assert state is BundleState.INCOMPLETE
    assert found is not None
    with pytest.raises(BundleError, match=r"domain\.xml"):
        store.verify(REFERENCE)


def test_a_flipped_bit_is_found_by_verify(store, sealed):
    part = sealed / "domain.xml"
    data = bytearray(part.read_bytes())
    data[3] ^= 1
    part.write_bytes(data)
    assert store.state(REFERENCE)[0] is BundleState.COMPLETE  # sizes only
    with pytest.raises(BundleError, match="damaged"):
        store.verify(REFERENCE)


@pytest.mark.parametrize("content", [None, b"{"])
def test_without_a_readable_manifest_it_is_incomplete(store, sealed, content):
    (sealed / MANIFEST_NAME).unlink()
    if content is not None:
        (sealed / MANIFEST_NAME).write_bytes(content)
    assert store.state(REFERENCE) == (BundleState.INCOMPLETE, None)
    with pytest.raises(ManifestError):
        store.verify(REFERENCE)


@pytest.mark.parametrize(
    "reference",
    [
        "",
        "/",
        UUID,
        f"{UUID}/",
        f"/{RUN}",
        f"{UUID}/{RUN}/x",
        f"../{RUN}",
        f"{UUID}/..",
        f"./{UUID}/{RUN}",
        f"{UUID}/.{RUN}.partial",
        f"{UUID}/../{UUID}/{RUN}",
        f"{UUID}/{RUN}\n",
        f"{UUID}/{RUN}\0",
        "/etc/passwd",
    ],
)
def test_a_reference_cannot_lead_out_of_the_store(store, reference):
    with pytest.raises(BundleError, match="is not a bundle reference"):
        store.path(reference)
    assert store.state(reference) == (BundleState.INCOMPLETE, None)


def test_a_digest_is_of_the_whole_file(tmp_path):
    data = os.urandom((1 << 20) + 17)
    (tmp_path / "x").write_bytes(data)
    assert sha256_of(tmp_path / "x") == hashlib.sha256(data).hexdigest()


def test_a_file_is_replaced_whatever_a_killed_writer_left(tmp_path):
    path = tmp_path / "known.json"
    path.write_text("old")
    (tmp_path / ".known.json").write_text("cut sh")
    replace_private(path, b"new")
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["known.json"]


def test_reading_a_bundle_reports_the_bytes_of_all_its_parts(store):
    bundle = store.create(UUID, RUN)
    parts = [bundle.add_text(name, Role.INACTIVE_XML, name) for name in ("a.xml", "bb.xml")]
    bundle.seal(manifest(*parts))
    amounts = []
    assert store.damage(f"{UUID}/{RUN}", lambda *amount: amounts.append(amount)) == {}
    assert amounts == [(5, 11), (11, 11)]
