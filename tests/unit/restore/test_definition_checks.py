"""Definitions in a bundle that are of another guest."""

from pathlib import Path

import pytest
from fakes import manifests

from snaporch.bundle.manifest import Role, read_manifest
from snaporch.bundle.save_image_copy import copy_with_xml, read_preface
from snaporch.bundle.store import RAM_NAME
from snaporch.errors import RefusedError
from snaporch.restore.bundle_checks import check_bundle
from snaporch.restore.definition_checks import check_identity, check_ram_definition
from snaporch.restore.run import restore

from .plans import plan

VICTIM = "11111111-2222-4333-8444-555555555555"


def bundle_of(story):
    return Path(story.record.bundle)


@pytest.mark.parametrize("cold", [False, True])
def test_the_definition_of_another_guest_replaces_none(story, world, cold):
    made = plan(world, cold=cold, discard_newer=True)
    part = made.manifest.part(Role.INACTIVE_XML)
    path = bundle_of(story) / part.name
    path.write_text(path.read_text().replace(story.record.uuid, VICTIM))
    with pytest.raises(RefusedError, match="the definition in its bundle is of another guest"):
        restore(world.context, made, safety=False)
    assert "pool.rollback" not in world.hooks.acts()


@pytest.mark.parametrize(
    ("uuid", "name"),
    [
        (VICTIM, "<name>web</name>"),
        ("UUID", "<name>victim</name>"),
        ("UUID", "<name>web<b>-victim</b></name>"),
        ("UUID", "<x><name>web</name></x>"),
        ("<b>UUID</b>x", "<name>web</name>"),
    ],
)
def test_another_uuid_or_name_is_another_guest(story, uuid, name):
    manifest = read_manifest(bundle_of(story))
    xml = f"<domain>{name}<uuid>{uuid.replace('UUID', manifest.uuid)}</uuid></domain>"
    with pytest.raises(RefusedError, match="it is of another guest"):
        check_identity("web@s1", "it", xml, manifest)
    own = f"<domain><name>web</name><uuid>{manifest.uuid}</uuid></domain>"
    check_identity("web@s1", "it", own, manifest)


EMULATOR = "<emulator>/tank/evil</emulator>"
SOURCE = "<hostdev><source><address bus='0x03'/></source></hostdev>"
LABEL = "<seclabel type='static' model='dac'><label>+0:+0</label></seclabel>"
ARGUMENT = (
    "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'>"
    "<q:arg value='-snapshot'/></q:commandline>"
)


def change_ram(directory, old, new):
    """Change the definition in the RAM image."""
    path = directory / RAM_NAME
    xml = read_preface(path).xml
    assert old in xml
    copy_with_xml(path, directory / "changed", xml.replace(old, new))
    (directory / "changed").rename(path)


SCRIPT = "<interface type='ethernet'><script path='up'/></interface>"
LOG = "<log file='etc/cron.d/x'/>"
KERNEL = "<kernel>etc/shadow</kernel>"


@pytest.mark.parametrize("more", [EMULATOR, SOURCE, LABEL, ARGUMENT, SCRIPT, LOG, KERNEL])
def test_ram_with_a_definition_that_was_not_shown_is_not_resumed(story, more):
    directory = bundle_of(story)
    manifest = read_manifest(directory)
    check_ram_definition("web@s1", directory, manifest)
    change_ram(directory, "</domain>", f"{more}</domain>")
    with pytest.raises(RefusedError, match="definition in its RAM has what its bundle's has not"):
        check_ram_definition("web@s1", directory, manifest)


def test_ram_with_a_definition_that_can_be_read_two_ways_is_not_resumed(story):
    directory = bundle_of(story)
    manifest = read_manifest(directory)
    change_ram(directory, "<driver ", "<driver xmlns:x='urn:x' x:type='qcow2' ")
    with pytest.raises(RefusedError, match="an attribute type with a namespace in <driver>"):
        check_ram_definition("web@s1", directory, manifest)


@pytest.mark.parametrize("what", ["uuid", "name"])
def test_ram_of_another_guest_is_not_resumed(story, what):
    directory = bundle_of(story)
    manifest = read_manifest(directory)
    old = {"uuid": manifest.uuid, "name": "<name>web</name>"}[what]
    change_ram(directory, old, {"uuid": VICTIM, "name": "<name>victim</name>"}[what])
    with pytest.raises(RefusedError, match="the definition in its RAM is of another guest"):
        check_ram_definition("web@s1", directory, manifest)


def test_a_restore_looks_into_the_ram(story, world):
    directory = bundle_of(story)
    change_ram(directory, "</domain>", f"{EMULATOR}</domain>")
    manifests.with_sums(directory)
    with pytest.raises(RefusedError, match="/tank/evil") as raised:
        check_bundle(world.context, plan(world, discard_newer=True))
    assert "--cold" in raised.value.step
    check_bundle(world.context, plan(world, discard_newer=True, cold=True))
