"""A guest that comes back from an encrypted replica, by the commands of the page on replication."""

import shutil
import time

import pytest
from guests.disks import Disk, destroy
from guests.guest import Guest
from support import BUNDLES, must, snaporch, wait_for

pytestmark = pytest.mark.timeout(300)

CLEAR = ["tank/house/own", "flash/house-own"]
CHILD = "tank/vault/own"
DISKS = [Disk("file", CLEAR[0]), Disk("zvol", CLEAR[1]), Disk("file", CHILD)]
CONFIG = """
[policy.rare]
every = "30d"
replicate = ["safe"]
keep = {{ last = 2 }}

[replica.safe]
dataset = "backup/safe"
bundles = "{bundles}"

[replica.clear]
dataset = "backup/clear"
bundles = "{bundles}-clear"
"""


@pytest.fixture(scope="module")
def key(tmp_path_factory):
    path = tmp_path_factory.mktemp("key") / "passphrase"
    path.write_text("open sesame, please\n")
    return f"file://{path}"


@pytest.fixture(scope="module")
def there(tmp_path_factory, key):
    place = tmp_path_factory.mktemp("there")
    with (place / "vdev").open("wb") as stream:
        stream.truncate(1 << 30)
    must("zpool", "create", "-m", str(place / "mounted"), "backup", str(place / "vdev"))
    must(*ENCRYPTED, f"keylocation={key}", "backup/safe")
    for name in ("bundles", "bundles-clear"):
        (place / name).mkdir()
    yield place / "bundles"
    must("zpool", "destroy", "backup")


ENCRYPTED = ("zfs", "create", "-o", "encryption=on", "-o", "keyformat=passphrase", "-o")


@pytest.fixture(scope="module")
def guest(there, key, tmp_path_factory):
    path = tmp_path_factory.mktemp("config") / "snaporch.toml"
    path.write_text(CONFIG.format(bundles=there))
    must("zfs", "create", "tank/house")
    must(*ENCRYPTED, f"keylocation={key}", "tank/vault")
    must("zfs", "set", "snaporch:policy=rare", "tank/house")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SNAPORCH_CONFIG", str(path))
        made = Guest.create("house", disks=DISKS, start=False)
        yield made
        made.remove()
    must("zfs", "destroy", "-r", "tank/house")
    must("zfs", "destroy", "-r", "tank/vault")


@pytest.fixture(scope="module")
def taken(guest):
    """Four snapshots, although the policy keeps two here."""
    return [take(guest) for _ in range(4)]


def take(guest):
    second = int(time.time())
    wait_for(lambda: int(time.time()) > second, "another second: it is in the snapshot's name")
    outcome = snaporch("snapshot", guest.name, "--policy", "rare", "--json")
    assert outcome.status == 0, outcome.err
    return outcome.json["snapshot"]


def copy(dataset, root="backup/safe"):
    return f"{root}/{dataset.replace('/', ':')}"


def value(key, name):
    return must("zfs", "get", "-H", "-o", "value", key, name).strip()


def listed(guest):
    return [each["snapshot"] for each in snaporch("list", guest.name, "--json").json]


def replicate(guest, *options):
    outcome = snaporch("replicate", guest.name, "--json", *options)
    assert outcome.status == 0, outcome.err
    return outcome.json[0]["arrived"]


def run_due():
    outcome = snaporch("run-due", "--no-replicate", "--no-verify", "--json")
    assert outcome.status == 0, outcome.err
    return [each["snapshot"] for each in outcome.json["deleted"]]


def planned(guest):
    """The next snapshot, whether it is due, and the snapshots of the policy."""
    document = snaporch("plan", guest.name, "--json").json
    (run,) = document["runs"]
    return run["due"], [each["snapshot"] for each in document["retention"]]


def test_a_guest_in_clear_is_copied_to_an_encrypted_replica(guest, taken):
    assert replicate(guest) == taken
    for dataset in (*CLEAR, CHILD):
        assert value("encryption", copy(dataset)) == "aes-256-gcm"
        names = must("zfs", "list", "-H", "-d", "1", "-t", "snapshot", "-o", "name", copy(dataset))
        assert [name.partition("@")[2] for name in names.split()] == taken
    policies = [value("snaporch:policy", copy(dataset)) for dataset in (*CLEAR, CHILD)]
    assert policies == ["rare", "-", "-"]


def test_copies_are_not_mounted_when_the_machine_boots(guest, taken):
    assert replicate(guest, "--to", "clear") == taken
    must("zfs", "mount", "-a")
    assert value("mounted", "backup") == "yes"
    assert value("mounted", copy(CLEAR[0], "backup/clear")) == "no"


def test_copies_on_this_host_are_not_the_guests_own(guest, taken):
    assert planned(guest) == (False, taken)
    uuid = must("virsh", "domuuid", guest.name).strip()
    for dataset in (*CLEAR, CHILD):
        destroy(dataset)
    assert planned(guest) == (True, [])
    shutil.rmtree(BUNDLES / uuid)
    assert planned(guest) == (True, [])


def test_it_comes_back_with_its_policy_and_retention_keeps_all(guest, taken, there, key):
    uuid = must("virsh", "domuuid", guest.name).strip()
    must("zfs", "inherit", "snaporch:policy", "tank/house")  # another host does not have it
    for dataset in (*CLEAR, CHILD):
        must(
            "syncoid", "--no-sync-snap", "--sendoptions=pw", "--recvoptions=x readonly",
            copy(dataset), dataset,
        )  # fmt: skip
        must("zfs", "load-key", "-L", key, dataset)
    for dataset in (CLEAR[0], CHILD):
        must("zfs", "mount", dataset)
    must(
        "rsync", "-a", "--exclude", "copy.json", "--exclude", ".*",
        f"{there}/{uuid}/", f"{BUNDLES}/{uuid}/",
    )  # fmt: skip
    assert listed(guest) == taken
    assert planned(guest) == (False, taken)
    assert run_due() == []
    assert set(taken) <= set(listed(guest))


def test_what_is_released_is_under_the_policys_rules(guest, taken):
    for dataset in (*CLEAR, CHILD):
        must("zfs", "inherit", "-r", "snaporch:copy", dataset)
    assert set(run_due()) >= set(taken[:2])
    assert taken[-1] in listed(guest)


def test_an_encrypted_child_inherits_its_key_again(guest, taken):
    assert value("encryptionroot", CHILD) == CHILD
    must("zfs", "change-key", "-i", CHILD)
    assert value("encryptionroot", CHILD) == "tank/vault"
    new = take(guest)
    assert new in replicate(guest)
