"""Whether a restore has a definition to use, and whether those in a bundle are of its guest.

A bundle may come from another host. libvirt defines whatever guest the definition names, so one of
another guest would replace that. And it resumes a guest with the definition in the RAM image, while
the user is shown the definitions of the bundle. Whether this host can run a definition:
:mod:`snaporch.restore.host_requirements`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from snaporch.bundle.manifest import Manifest, Role
from snaporch.bundle.save_image_copy import read_preface
from snaporch.config.replica import rebuild_step
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.foreign_allowlist import Unlisted, unlisted_of_another_host
from snaporch.hypervisor.foreign_xml import ForeignImage, images
from snaporch.hypervisor.one_reading import two_readings
from snaporch.model import Domain, Level, SnapshotRecord
from snaporch.restore.plan_model import RestorePlan
from snaporch.zfs_names import quoted


def check_definition(
    context: Context, record: SnapshotRecord, manifest: Manifest | None, domain: Domain | None
) -> None:
    """Refuse a domain without any definition, one that was renamed, or one whose name is taken.

    Raises:
        RefusedError: with what to do about it.
    """
    if domain is None and manifest is None:
        steps = ["define it by hand", rebuild_step(context.config.replica, record.domain)]
        step = "; ".join(filter(None, steps))
        raise RefusedError(record.domain, "is undefined, and its bundle is missing", step)
    if domain is not None and domain.name != record.domain:
        raise RefusedError(
            record.domain,
            f"has the name {domain.name} now",
            f"shut it off, and run: virsh domrename {shlex.join([domain.name, record.domain])}",
        )
    for other in context.hypervisor.domains():
        if other.name == record.domain and other.uuid != record.uuid:
            raise RefusedError(
                record.domain,
                f"another domain has this name (UUID {other.uuid})",
                "rename it first",
            )


def check_bootable(
    record: SnapshotRecord, manifest: Manifest | None, domain: Domain | None, *, cold: bool
) -> None:
    """Refuse to boot a transient domain, which has no definition. A RAM image has its own."""
    resumes = record.level is Level.RAM and not cold
    has_definition = (manifest is not None and manifest.part(Role.INACTIVE_XML) is not None) or (
        domain is not None and domain.inactive_xml is not None
    )
    if not resumes and not has_definition:
        raise RefusedError(
            record.domain, "is transient: there is no definition to boot from", "define it first"
        )


def check_definition_may_stay(plan: RestorePlan) -> None:
    """Refuse ``--keep-definition`` where the present definition does not fit the snapshot.

    Raises:
        RefusedError: RAM is resumed, there is no definition, or it names other firmware files.
    """
    if plan.ram is not None:
        reason = "its RAM can be resumed only with the definition that it was saved with"
        raise RefusedError(plan.thing, reason, "use --cold or --disks-only as well")
    if plan.domain is None or plan.domain.inactive_xml is None:
        raise RefusedError(
            plan.thing, "there is no definition to keep", "leave out --keep-definition"
        )

    root = domain_xml.parse(plan.domain.inactive_xml)
    state = domain_xml.tpm_state(root)
    for part in plan.parts:
        if part.source is None or part.source == domain_xml.nvram(root):
            continue
        if state is None or not Path(part.source).is_relative_to(state.path):
            raise RefusedError(
                plan.thing,
                f"the definition that is kept does not have {part.name} in {part.source}",
                "leave out --keep-definition",
            )


def check_identity(thing: str, what: str, xml: str, manifest: Manifest) -> None:
    """Refuse a definition of another guest than the manifest is of, or that can be read two ways.

    So libvirt might use another disk or name than was checked and shown.

    Args:
        thing: the subject of the error.
        what: the definition, for the error.
        xml: the definition.
        manifest: of the bundle that has it.

    Raises:
        RefusedError: its UUID or name is another, or it cannot be read, or not in one way only; see
            :mod:`snaporch.hypervisor.one_reading`.
    """
    root = domain_xml.parse(xml)
    if (found := two_readings(root)) is not None:
        reason = f"{what} has {found}"
        raise RefusedError(thing, reason, "choose another snapshot: its bundle was changed")
    uuid, name = domain_xml.identity(root)
    if (uuid, name) != (manifest.uuid, manifest.domain):
        reason = f"{what} is of another guest: {quoted(name)} ({quoted(uuid)})"
        raise RefusedError(thing, reason, "choose another snapshot: its bundle is not its own")


def check_ram_definition(thing: str, directory: Path, manifest: Manifest) -> None:
    """Refuse a RAM image whose definition takes more of the host than those of its bundle.

    Args:
        thing: the subject of errors.
        directory: of the bundle; its files have the SHA-256 of the manifest.
        manifest: of the bundle, which has RAM.

    Raises:
        RefusedError: the definition is of another guest, or has a path, a device or something
            else that no ordinary guest has, which the bundle's definitions have not, or an image
            in another format.
        SaveImageError: the image is damaged.
        OSError: a file cannot be read.
    """
    ram = manifest.part(Role.RAM)
    assert ram is not None
    xml = read_preface(directory / ram.name).xml
    check_identity(thing, "the definition in its RAM", xml, manifest)
    shown: set[tuple[str, str, str]] = set()
    listed: set[Unlisted] = set()
    known: set[ForeignImage] = set()
    for part in filter(None, map(manifest.part, (Role.LIVE_XML, Role.INACTIVE_XML))):
        data = (directory / part.name).read_bytes()
        definition = domain_xml.parse(data.decode("utf-8", "replace"))
        shown |= domain_xml.host_values(definition)
        listed |= unlisted_of_another_host(definition, _is_any)
        known |= images(definition)
    own = domain_xml.parse(xml)
    other = [quoted(value) for _, _, value in sorted(domain_xml.host_values(own) - shown)]
    other += [
        quoted(each.shown) for each in sorted(unlisted_of_another_host(own, _is_any) - listed)
    ]
    other += sorted(f"{each.target} as {each.format}" for each in images(own) - known)
    if other:
        reason = f"the definition in its RAM has what its bundle's has not: {other[0]}"
        raise RefusedError(thing, reason, "boot from the disks with --cold")


def _is_any(_path: str) -> bool:
    """Paths are compared by themselves."""
    return True
