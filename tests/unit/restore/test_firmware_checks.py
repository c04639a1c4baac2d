"""Where UEFI variables and TPM state may be put back."""

import os
from pathlib import Path

import pytest
from fakes import manifests

from snaporch.restore.bundle_checks import check_bundle
from snaporch.restore.losses import losses
from snaporch.restore.run import restore

from .plans import plan, refusal
from .test_disk_checks import read_only  # noqa: F401


@pytest.fixture
def firmware(world, make_story):
    """A guest with UEFI variables and a TPM."""
    nvram, tpm = world.root / "vars.fd", world.root / "tpm2"
    nvram.write_bytes(b"then")
    tpm.mkdir()
    (tpm / "tpm2-00.permall").write_bytes(b"secret")
    return make_story(nvram=str(nvram), tpm=str(tpm))


@pytest.mark.parametrize("kind", ["link", "directory", "pipe"])
def test_only_regular_files_are_replaced(firmware, world, kind):
    place = world.root / "vars.fd"
    place.unlink()
    match kind:
        case "link":
            place.symlink_to("/etc/hostname")
        case "directory":
            place.mkdir()
        case "pipe":
            os.mkfifo(place)
    assert "vars.fd is not a regular file" in refusal(world)


@pytest.mark.parametrize("kind", ["device", "other"])
def test_the_disks_alone_come_back_where_variables_have_no_place(firmware, world, kind):
    """An earlier snaporch made copies of UEFI variables on a volume."""
    place, manifest = world.root / "zvol", Path(firmware.record.bundle) / "manifest.json"
    place.symlink_to("/dev/null")
    if kind == "device":
        variables = str(world.root / "vars.fd")
        manifests.replace_text(manifest, variables, str(place))
    else:
        world.add_guest("mail", {"vda": "tank/mail"}, nvram=str(world.root / "vars.fd"))
    world.hooks.log.clear()
    for way in ({}, {"cold": True}):
        assert "or restore with --disks-only, which leaves it as it is" in refusal(world, **way)
    made = check_bundle(world.context, plan(world, disks_only=True))
    assert any("nvram.fd stays as it is" in line for line in losses(world.context, made))
    assert any("nvram.fd stays as it is" in text for text in world.heard.notes)
    (world.root / "vars.fd").write_bytes(b"now")
    (world.root / "tpm2" / "tpm2-00.permall").write_bytes(b"now")
    restore(world.context, made, safety=True)
    assert firmware.content() == {b"first"}
    assert (world.root / "vars.fd").read_bytes() == b"now"
    assert (world.root / "tpm2" / "tpm2-00.permall").read_bytes() == b"secret"
    assert place.is_symlink()


def test_a_missing_file_may_be_restored(firmware, world):
    (world.root / "vars.fd").unlink()
    assert plan(world).ram


def test_variables_that_another_domain_uses_are_refused(firmware, world):
    world.add_guest("mail", {"vda": "tank/mail"}, nvram=str(world.root / "vars.fd"))
    assert "is used by the domain mail" in refusal(world)


def test_a_tpm_that_another_domain_uses_is_refused(firmware, world):
    world.add_guest("mail", {"vda": "tank/mail"}, tpm=str(world.root / "tpm2"))
    assert "is used by the domain mail" in refusal(world)


@pytest.mark.parametrize("kind", ["nvram", "tpm"])
def test_a_file_of_another_domain_is_found_under_any_of_its_names(firmware, world, kind):
    """Through a link, or through ``..``: both definitions may name one file differently."""
    (world.root / "sub").mkdir()
    (world.root / "link").symlink_to(world.root)
    mine = {"nvram": "vars.fd", "tpm": "tpm2"}[kind]
    for above in (world.root / "link", f"{world.root}/sub/.."):
        other = world.add_guest("mail", {"vda": "tank/mail"}, **{kind: f"{above}/{mine}"})
        world.hooks.log.clear()
        assert "is used by the domain mail" in refusal(world)
        world.hypervisor.guests.pop(other.uuid)


def test_a_path_that_the_definition_does_not_name_is_refused(firmware, world):
    """A manifest may name any path; only the definition counts."""
    path = Path(firmware.record.bundle) / "manifest.json"
    manifests.replace_text(path, str(world.root / "vars.fd"), "/etc/passwd")
    assert "its nvram belongs to /etc/passwd, which is not what" in refusal(world)


def test_variables_on_a_file_system_that_was_made_read_only(firmware, world, read_only):  # noqa: F811
    read_only.add(world.root)
    said = refusal(world, cold=True)
    assert "read-only, and vars.fd has to be written there" in said
    made = plan(world, disks_only=True)
    assert any("stays as it is" in line for line in losses(world.context, made))


LINKED = b"QFI\xfb\0\0\0\3\0\0\0\0\0\0\0\x68\0\0\0\x0b".ljust(104, b"\0") + b"/etc/shadow"
"""The header of a qcow2 image, with the name of its backing file."""


def test_variables_by_which_the_emulator_would_open_another_file(firmware, world):
    """An emulator writes them, and a replica may have any."""
    bundle = Path(firmware.record.bundle)
    (bundle / "nvram.fd").write_bytes(LINKED)
    manifests.with_sums(bundle)
    for way in ({}, {"cold": True}):
        assert "its nvram.fd needs another file, or a key" in refusal(world, **way)
    made = plan(world, disks_only=True)
    assert any("nvram.fd stays as it is" in line for line in losses(world.context, made))


def test_a_file_that_no_tpm_has_is_refused(firmware, world):
    path = Path(firmware.record.bundle) / "manifest.json"
    manifests.replace_text(path, "tpm2-00.permall", "swtpm.log")
    assert "its TPM has an unknown file: 'swtpm.log'" in refusal(world)
