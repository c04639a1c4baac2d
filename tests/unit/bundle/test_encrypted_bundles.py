import pytest
from fakes.manifests import load, store

from snaporch.bundle.age import AgeError, Digest, Identity
from snaporch.bundle.encrypted_bundles import (
    ENCRYPTED_NAME,
    EncryptedBundles,
    encrypted_manifest,
    plain_manifest,
    sweep,
)
from snaporch.bundle.manifest import MANIFEST_NAME, ManifestError, manifest_bytes, read_manifest
from snaporch.bundle.store import BundleStore, state_of
from snaporch.model import BundleState
from snaporch.snapshot.request import SnapshotRequest
from snaporch.snapshot.run import take_snapshot


@pytest.fixture
def taken(world):
    world.add_guest(disks={"vda": "tank/web"})
    domain = world.hypervisor.domain("web")
    return take_snapshot(world.context, domain, SnapshotRequest("s1"))


@pytest.fixture
def bundle(taken, world):
    """A store, its only bundle's reference and manifest."""
    store = BundleStore(world.paths.bundles)
    reference = f"{taken.uuid}/{taken.run}"
    return store, reference, store.manifest(reference)


def prepare(bundle, age, replica="nas"):
    store, reference, manifest = bundle
    made = EncryptedBundles(store, replica)
    return made, made.prepare(reference, manifest, [age.keys[0]], lambda _done, _total: None)


def test_what_was_encrypted_is_decrypted_into_the_store(bundle, age):
    store, reference, manifest = bundle
    made, _ = prepare(bundle, age)
    before = {path.name: path.read_bytes() for path in store.path(reference).iterdir()}
    store.path(reference).rename(store.root / "away")
    seen = []
    made.decrypt(reference, Identity(age.right), lambda done, total: seen.append((done, total)))
    assert {path.name: path.read_bytes() for path in store.path(reference).iterdir()} == before
    assert store.verify(reference) == manifest
    assert seen[-1][0] == seen[-1][1]
    assert [path.name for path in made.path(reference).iterdir()] == [MANIFEST_NAME]


def test_a_wrong_key_leaves_nothing_in_the_store(bundle, age):
    store, reference, _ = bundle
    made, _ = prepare(bundle, age)
    store.path(reference).rename(store.root / "away")
    with pytest.raises(AgeError, match="no identity matched"):
        made.decrypt(reference, Identity(age.wrong), lambda _done, _total: None)
    assert list(store.path(reference).parent.iterdir()) == []


def test_encrypted_files_are_no_whole_bundle(bundle, age):
    _, directory = prepare(bundle, age)
    assert state_of(directory) == (BundleState.INCOMPLETE, read_manifest(directory))


def test_the_manifest_goes_there_and_back(bundle, age):
    _, _, manifest = bundle
    _, directory = prepare(bundle, age)
    sent = read_manifest(directory)
    assert sent.is_encrypted
    assert not manifest.is_encrypted
    assert plain_manifest(sent) == manifest == plain_manifest(manifest)
    assert manifest_bytes(plain_manifest(sent)) == manifest_bytes(manifest)
    digests = {part.name.removesuffix(".age"): (part.bytes, part.sha256) for part in sent.parts}
    files = {name: Digest(*each) for name, each in digests.items()}
    assert encrypted_manifest(manifest, files, [age.keys[0]]) == sent


@pytest.mark.parametrize("change", ["one plain", "a name", "no recipients"])
def test_a_manifest_that_is_encrypted_only_in_part_is_invalid(bundle, age, change):
    _, directory = prepare(bundle, age)
    document = load(directory / MANIFEST_NAME)
    if change == "one plain":
        del document["parts"][0]["plain"]
    elif change == "a name":
        document["parts"][0]["name"] = "ram.save"
    else:
        del document["recipients"]
    store(directory / MANIFEST_NAME, document)
    with pytest.raises(ManifestError, match="only in part"):
        plain_manifest(read_manifest(directory))


def test_prune_sweeps_what_has_no_bundle(bundle, age):
    held, reference, _ = bundle
    uuid = reference.partition("/")[0]
    made, directory = prepare(bundle, age)
    old, old_directory = prepare(bundle, age, "former")
    gone = made.path(f"{uuid}/20200101T000000Z-0001")
    trashed = made.path(f"{uuid}/20200101T000000Z-0002")
    partial = made.path(f"{uuid}/run").with_name(".run.partial")
    for each in (gone, trashed, partial):
        each.mkdir(parents=True)
        (each / "ram.save.age").write_bytes(b"x")
    sweep(held, ["nas"], [f"{uuid}/{trashed.name}"])
    assert sorted(path.name for path in directory.parent.iterdir()) == sorted(
        [directory.name, trashed.name]
    )
    assert "ram.save.age" in {path.name for path in directory.iterdir()}
    assert [path.name for path in old_directory.iterdir()] == [MANIFEST_NAME]  # of no replica now
    assert old.record(reference) is not None


def test_a_link_in_its_place_is_not_followed(bundle, tmp_path):
    held = bundle[0]
    place = tmp_path / "elsewhere" / "nas" / "0" / "x"
    place.mkdir(parents=True)
    (held.root / ENCRYPTED_NAME).symlink_to(tmp_path / "elsewhere")
    sweep(held, [], [])
    assert place.is_dir()
