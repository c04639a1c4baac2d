"""``check`` and ``render sanoid`` with the real sanoid, real guests, real ZFS."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from guests.disks import Disk
from guests.guest import Guest
from support import config, must, one_line_error, run, snaporch, wait_for

from snaporch.hypervisor.libvirt_driver import LibvirtHypervisor
from snaporch.known_faults import Component, FaultCondition, known_faults
from snaporch.sanoid.config.resolve import load_sanoid
from snaporch.zfs.open_pool import open_pool
from snaporch.zfs.parity import ParityGroup

SANOID = Path("/etc/sanoid")
QEMU_CONF = Path("/etc/libvirt/qemu.conf")
HERE = (
    {FaultCondition.APPARMOR} if Path("/sys/kernel/security/apparmor/profiles").exists() else set()
)
OLD = {"automount-deadlock", "apparmor-commit"}
EXTRA = ("tank/vm/one/child", "tank/tree", "tank/tree/a", "tank/tree/a/b", "flash/other")


@pytest.fixture(scope="module")
def guests():
    """One with a dataset of its own, one with two under a parent, one on two pools (and off)."""
    must("zfs", "create", "-p", "tank/vm/two")
    made = [
        Guest.create("one", disks=[Disk("file", "tank/vm/one")]),
        Guest.create("two", disks=[Disk("file", "tank/vm/two/a"), Disk("zvol", "tank/vm/two/b")]),
        Guest.create("pools", disks=[Disk("file", "tank/vm/pools"), Disk("zvol", "flash/pools")]),
    ]
    yield made
    for guest in made:
        guest.remove()


@pytest.fixture(scope="module")
def rendered(guests):
    """What is rendered for all of them."""
    return must("snaporch", "render", "sanoid")


@pytest.fixture
def sanoid(rendered):
    """Writes sanoid's configuration; the rendered one to begin with."""
    SANOID.mkdir(exist_ok=True)

    def write(text):
        (SANOID / "sanoid.conf").write_text(text)

    write.rendered = rendered
    write(rendered)
    yield write
    (SANOID / "sanoid.conf").unlink(missing_ok=True)


def findings(*arguments, env=None):
    """The findings, without the hints about known faults of the lab's own versions."""
    outcome = snaporch("check", "--json", *arguments, env=env)
    assert outcome.err == ""
    found = {(each["code"], each["subject"]): each for each in outcome.json}
    return outcome.status, {key: each for key, each in found.items() if key[0] not in OLD}


def codes(*arguments, env=None):
    status, found = findings(*arguments, env=env)
    return status, {code for code, _ in found}


def sanoid_says(tmp_path, name):
    """What the real sanoid prints that it would do."""
    arguments = [f"--cache-dir={tmp_path}/{name}-cache", f"--run-dir={tmp_path}/{name}-run"]
    return must("sanoid", "--take-snapshots", "--readonly", "--verbose", *arguments)


def calls_in(output):
    """The snapshots that sanoid reports: dataset → whether recursively."""
    taken = re.findall(r"^taking snapshot (.+)@\S+?( \(zfs recursive\))?$", output, re.MULTILINE)
    return {dataset: bool(recursive) for dataset, recursive in taken}


def test_what_is_rendered_is_clean_and_sanoid_takes_it(sanoid, tmp_path):
    output = sanoid_says(tmp_path, "rendered")
    assert calls_in(output) == {
        "tank/vm/one": False,
        "tank/vm/two": True,
        "tank/vm/pools": False,
        "flash/pools": False,
    }
    program = must("sh", "-c", "command -v snaporch").strip()
    for phase in ("pre", "post"):
        assert f"{phase}_snapshot_script '{program} hook sanoid {phase}' on dataset" in output
    status, found = findings()
    several = {("confined-overlays", name) for name in ("two", "pools")}
    assert (status, set(found)) == (0, {("not-atomic", "pools"), *several})


def test_faults_in_the_file_are_found(sanoid):
    keys = ("script_timeout", "no_inconsistent", "post_snapshot", "pruning_script")
    lines = sanoid.rendered.splitlines(True)
    sanoid("".join(line for line in lines if not line.strip().startswith(keys)))
    lacking = {
        *("script-timeout", "inconsistent-snapshot", "post-missing", "pruning-missing"),
        "other-snapshots",  # what is not held still is snapshotted beside us
    }
    assert codes("one") == (9, lacking)

    text = sanoid.rendered.replace("[tank/vm/one]", "[web]\n\tpath = tank/vm/one")
    text = text.replace("recursive = zfs", "recursive = yes")
    text = text.replace("[flash/pools]", "[flash/gone]")
    sanoid(text.replace("hook sanoid prune", "hook sanoid post"))
    status, found = findings()
    assert status == 9
    assert {
        *(("path-section", "[web]"), ("not-atomic", "two"), ("partly-scheduled", "pools")),
        *(("dataset-missing", "[flash/gone]"), ("hook-phase", "[tank/vm/two]")),
    } <= set(found)

    sanoid(sanoid.rendered.replace("\thourly", "\tHourly"))
    assert codes("one") == (9, {"sanoid-refuses"})
    assert run("sanoid", "--take-snapshots", "--readonly").status != 0


def test_the_lines_of_a_finding_fix_it(sanoid):
    sanoid("[tank/vm/one]\n\thourly = 1\n")
    for _ in ("hooks", "what hooks need"):
        _, found = findings("one")
        lines = [f"\t{line}\n" for each in found.values() for line in each["lines"]]
        assert lines
        with (SANOID / "sanoid.conf").open("a") as stream:
            stream.writelines(lines)
    assert findings("one") == (0, {})


def test_what_sanoid_takes_is_what_we_say_is_covered(sanoid, guests, tmp_path):
    """With datasets from the real ``zfs list``, and sanoid's own output of what it would do."""
    for name in EXTRA:
        must("zfs", "create", name)
    texts = (
        "[tank]\n\trecursive = yes\n[tank/vm/two]\n\trecursive = zfs\n[flash]\nrecursive = zfs\n",
        "[tank/tree]\nrecursive = yes\nprocess_children_only = yes\n[tank/tree/a]\nautosnap = no\n",
        "[tank/vm]\nrecursive = yes\n[tank/vm/two]\nskip_children = yes\n[x]\npath = flash\n",
        "[tank/vm/two]\nrecursive = zfs\n[tank/vm]\nrecursive = yes\nautosnap = 1\nhourly = 1\n",
    )
    known = must("zfs", "list", "-Ho", "name").split()
    for number, text in enumerate(texts):
        sanoid(text)
        calls = calls_in(sanoid_says(tmp_path, str(number)))
        resolved = load_sanoid(SANOID, known)
        for dataset in known:
            theirs = dataset in calls or any(
                dataset.startswith(f"{parent}/") for parent, zfs in calls.items() if zfs
            )
            section = resolved.covering(dataset)
            assert (section is not None) == theirs, f"{dataset}\n{text}"
            if section is not None:
                assert calls[section.path] == (section.recursive == "zfs"), f"{dataset}\n{text}"
    for name in reversed(EXTRA):
        must("zfs", "destroy", name)


def test_what_stands_in_a_guests_way(sanoid, tmp_path):
    with config(tmp_path, '[defaults]\nlevel = "quiesced"\n') as env:
        _, found = findings("one", env=env)
        assert "no guest agent is connected" in found["no-snapshot", "one"]["what"]
    with config(tmp_path, '[paths]\nbundles = "/tank/vm/one/bundles"\n') as env:
        assert codes("one", env=env) == (9, {"no-snapshot", "store-snapshotted"})


def test_an_encrypted_guest_and_a_store_in_the_clear(sanoid, tmp_path):
    key = ["-o", "encryption=on", "-o", "keyformat=passphrase", "-o", "keylocation=prompt"]
    words = ["zfs", "create", *key, "tank/secret"]
    subprocess.run(words, input=b"a long passphrase\n" * 2, check=True, stdout=subprocess.DEVNULL)
    guest = Guest.create("secret", disks=[Disk("zvol", "tank/secret/v")])
    sanoid(must("snaporch", "render", "sanoid", "secret"))
    assert codes("secret") == (10, {"store-unencrypted"})
    with config(tmp_path, '[paths]\nbundles = "/tank/secret/bundles"\n') as env:
        assert codes("secret", env=env) == (0, set())
    for dataset, expected in [
        ("tank/ram", (10, {"pages-unencrypted"})),
        ("tank/secret/ram", (0, set())),
        ("gone/ram", (9, {"pages-missing"})),
    ]:
        text = '[paths]\nbundles = "/tank/secret/bundles"\n[defaults]\nram_store = "pages"\n'
        with config(tmp_path, f'{text}[ram_pages]\ndataset = "{dataset}"\n') as env:
            assert codes("secret", env=env) == expected
    guest.remove()


def test_known_faults_of_the_labs_own_versions(sanoid):
    """By the versions that the real programs print: no fixed fault, and no missing one."""
    zfs = Path("/sys/module/zfs/version").read_text().strip()
    library = must("virsh", "version").partition("Using library: libvirt ")[2].splitlines()[0]
    found = {each["code"]: each["subject"] for each in snaporch("check", "--json", "one").json}
    expected = {
        *(
            fault
            for fault in known_faults(Component.OPENZFS, zfs)
            if fault.need is FaultCondition.SNAPDIR
        ),
        *(fault for fault in known_faults(Component.LIBVIRT, library) if fault.need in HERE),
    }
    assert found == {
        fault.code: f"{fault.component} {zfs if fault.component is Component.OPENZFS else library}"
        for fault in expected
    }
    assert expected


def test_libvirts_sparse_images(sanoid):
    before = QEMU_CONF.read_text()
    QEMU_CONF.write_text(f'{before}\nsnapshot_image_format = "sparse"\n')
    assert codes("one") == (0, {"sparse-images"})
    QEMU_CONF.write_text(before)


def test_volumes_that_can_grow_by_more_than_the_pool_has(sanoid):
    before = must("zfs", "get", "-Hpo", "value", "volsize", "flash/pools").strip()
    must("zfs", "set", "volsize=1T", "flash/pools")
    try:
        assert codes("pools") == (0, {"not-atomic", "thin-volumes", "confined-overlays"})
        _, found = findings("pools")
        assert "can grow by 1024.0 GiB" in found["thin-volumes", "flash"]["what"]
    finally:
        must("zfs", "set", f"volsize={before}", "flash/pools")


def test_a_guest_that_writes_is_counted_and_gets_no_advice_yet(sanoid, guests):
    """What libvirt and ZFS report, by which storage is advised on."""
    hypervisor, pool = LibvirtHypervisor("qemu:///system"), open_pool(read_only=True)
    uuid = guests[0].domain().UUIDString()
    first = hypervisor.disk_writes(uuid)["vda"]
    guests[0].wait_count(guests[0].wait_count() + 20)
    more = hypervisor.disk_writes(uuid)["vda"]
    requests, written = more.requests - first.requests, more.bytes - first.bytes
    assert requests >= 20
    assert 512 <= written / requests <= 4096
    assert pool.sector_bytes("tank") == 1 << int(
        must("zdb", "-C", "tank").partition("ashift: ")[2].split()[0]
    )
    assert codes("one") == (0, set())


@pytest.mark.parametrize(
    ("layout", "disks", "group"),
    [
        ("raidz1", 3, ParityGroup(1, 2)),
        ("raidz2", 6, ParityGroup(2, 4)),
        ("draid1:2d:4c:1s", 4, ParityGroup(1, 2, is_draid=True)),
    ],
)
def test_the_vdevs_of_raidz_and_draid_and_what_a_record_takes_there(tmp_path, layout, disks, group):
    files = [tmp_path / f"disk{number}" for number in range(disks)]
    for file in files:
        file.touch()
        os.truncate(file, 256 << 20)
    must("zpool", "create", "-o", "ashift=12", "-m", "none", "parity", layout, *files)
    try:
        pool = open_pool(read_only=True)
        assert (pool.parity_groups("parity"), pool.sector_bytes("parity")) == ((group,), 4096)
        shares = {}
        for kib in (8, 16, 128):
            name = f"parity/v{kib}"
            must("zfs", "create", "-V", "16M", "-o", f"volblocksize={kib}K", name)
            device = Path("/dev/zvol") / name
            wait_for(device.exists, str(device))
            before = allocated("parity")
            with device.open("r+b") as volume:
                for _ in range(16):
                    volume.write(os.urandom(1 << 20))
                os.fsync(volume.fileno())
            must("zpool", "sync", "parity")
            shares[kib] = (allocated("parity") - before) / (16 << 20)
        for kib, share in shares.items():
            expected = group.allocated(kib << 10, 4096) / (kib << 10)
            assert share == pytest.approx(expected, rel=0.1), (kib, shares)
    finally:
        must("zpool", "destroy", "parity")


def allocated(pool):
    """The bytes of a pool's devices that are in use, parity included."""
    return int(must("zpool", "list", "-Hpo", "allocated", pool))


def test_monitoring(sanoid):
    sanoid("[tank/vm/one]\n")
    outcome = snaporch("check", "--nagios", "one")
    assert outcome.status == 2
    assert outcome.out.startswith("SNAPORCH CRITICAL - 1 error, 1 warning, ")
    assert " - [tank/vm/one]: " in outcome.out
    outcome = snaporch("check", "--nagios", "absent")
    assert outcome.status == 3
    assert outcome.out.startswith("SNAPORCH UNKNOWN - absent: no such domain; ")


def test_for_people_in_eighty_columns(sanoid):
    sanoid("[tank/vm/one]\n[tank/vm/two]\nrecursive = yes\n")
    outcome = snaporch("check", env={"COLUMNS": "80"})
    assert outcome.status == 9
    print(outcome.out)
    assert max(len(line) for line in outcome.out.splitlines()) <= 80, outcome.out
    assert "\n3 guests checked: " in outcome.out
    assert "\nnext: take a first snapshot: snaporch snapshot " in outcome.out


def test_refusals(guests):
    one_line_error(snaporch("check", "absent"), 4, "absent")
    one_line_error(snaporch("check", "--nagios", "--json"), 2, "--nagios")
    one_line_error(snaporch("render", "sanoid", "absent"), 4, "absent")
    assert json.loads(snaporch("check", "--json", "--configdir", "/nowhere").out)
