"""The description of a snapshot, and the commands that restore it without snaporch."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from snaporch.bundle.manifest import Manifest, Part, Role
from snaporch.catalog.records import missing_datasets, one_per_dataset, run_members
from snaporch.catalog.renamed_datasets import check_names
from snaporch.clone.find_clones import clones_of
from snaporch.context import Context
from snaporch.errors import RefusedError
from snaporch.model import BundleState, Level, SnapshotRecord, VerificationResult, iso
from snaporch.restore.source import manifest_and_snapshots

_DEFAULT_URI = "qemu:///system"
_LOOK = r"""stop() { echo "$*; nothing was touched" >&2; exit 1; }
look() {
    name=$1 guid=$2
    shift 2
    [ "$(zfs get -Hpo value guid "$name")" = "$guid" ] || stop "$name is another of that name"
    newer=$(zfs list -Hpo createtxg,name -t snapshot,bookmark -d 1 "${name%@*}" |
        awk -F'\t' -v t="$(zfs get -Hpo value createtxg "$name")" '$1 > t { print $2 }' | sort)
    [ "$newer" = "$(printf '%s\n' "$@" | sort)" ] ||
        stop "print these commands again: newer than $name is now ${newer:-nothing}"
    for later; do
        case $later in *@*) ;; *) continue ;; esac
        [ "$(zfs get -Hpo value userrefs,clones "$later" | tr -d '\n-')" = 0 ] ||
            stop "$later is held or cloned: see zfs holds $later, zfs get clones $later"
    done
}"""
"""Shell functions that check that nothing changed since the commands were printed.

Arguments of ``look``: a snapshot, its GUID, and the names of all newer snapshots and bookmarks. The
script has no comments, because an interactive zsh does not accept them.
"""


@dataclass(frozen=True, slots=True)
class ShownDataset:
    """A ZFS snapshot of the described one; sizes in bytes, all ``None`` if it does not exist."""

    name: str
    guid: int | None
    used: int | None
    referenced: int | None

    def as_json(self) -> dict[str, object]:
        """Return the documented JSON object."""
        return {
            "name": self.name,
            "guid": None if self.guid is None else str(self.guid),
            "used_bytes": self.used,
            "referenced_bytes": self.referenced,
        }


@dataclass(frozen=True, slots=True)
class Description:
    """All facts that ``snaporch show`` prints of a snapshot."""

    record: SnapshotRecord
    manifest: Manifest | None
    datasets: tuple[ShownDataset, ...]
    clones: tuple[str, ...]
    by_hand: tuple[str, ...]

    def as_json(self) -> dict[str, object]:
        """Return the documented JSON object."""
        manifest = self.manifest.model_dump(mode="json") if self.manifest else None
        return self.record.as_json() | {
            "snapshots": [dataset.as_json() for dataset in self.datasets],
            "clones": list(self.clones),
            "manifest": manifest,
            "by_hand": list(self.by_hand),
        }


def describe(context: Context, record: SnapshotRecord) -> Description:
    """Collect the facts of a snapshot; missing parts are described as missing."""
    manifest, own = manifest_and_snapshots(context, record)
    members = one_per_dataset(manifest, own, record.snapshot)
    names = [member.full_name for member in members]
    sizes = context.pool.sizes(names)
    shown = [
        ShownDataset(member.full_name, member.guid, *sizes.get(member.full_name, (None, None)))
        for member in members
    ]
    for dataset in missing_datasets(manifest, members) if manifest else ():
        shown = [one for one in shown if one.name.split("@")[0] != dataset]
        shown.append(ShownDataset(f"{dataset}@{record.snapshot}", None, None, None))
    return Description(
        record=record,
        manifest=manifest,
        datasets=tuple(sorted(shown, key=lambda dataset: dataset.name)),
        clones=tuple(clones_of(context, names)),
        by_hand=tuple(by_hand(context, record)),
    )


def by_hand(context: Context, record: SnapshotRecord) -> list[str]:
    """Return the shell commands that restore a snapshot with ``zfs``, ``virsh`` and coreutils.

    They check first that no snapshot or bookmark was made since they were printed, and that none
    that they destroy is held or cloned. They stop at the first command that fails.

    Returns: an empty list if the snapshot is incomplete, damaged or failed its verification.
    """
    _, manifest = context.store.state(f"{record.uuid}/{record.run}")
    whole = record.state is BundleState.COMPLETE and not record.has_failed
    if manifest is None or record.bundle is None or not whole:
        return []
    everything = context.pool.snapshots()
    try:
        check_names(context.pool, record.full_name, manifest, everything)
    except RefusedError as error:
        return [f"# {error.reason}: {error.step}"]
    bundle = Path(record.bundle)
    virsh = _virsh(context)
    looks, rollbacks = [], []
    own = run_members(manifest, record.run, everything)
    for member in one_per_dataset(manifest, own, record.snapshot, newest=True):
        full = member.full_name
        newer = context.pool.listing([member.dataset]).newer(full)
        looks.append(shlex.join(["look", full, str(member.guid), *newer]))
        rollbacks += [shlex.join(["echo", "destroying", *newer])] if newer else []
        rollbacks.append(shlex.join(["zfs", "rollback", *(["-r"] if newer else []), full]))
    files = shlex.join(str(bundle / part.name) for part in manifest.parts)
    ram, image = manifest.part(Role.RAM), None
    if ram is not None:
        image = bundle / ram.name
        if ram.pages is not None:
            image = Path("/var/tmp") / f"{manifest.run}.save"  # noqa: S108 - the admin may edit it
    return [
        "(",
        "set -eu",
        *_LOOK.splitlines(),
        *looks,
        f'for file in {files}; do [ -r "$file" ] || stop "$file cannot be read"; done',
        f'running=$({virsh} list --uuid) || stop "libvirt does not answer"',
        *([_put_together(manifest, image)] if image and ram and ram.pages else []),
        f"case $running in *{record.uuid}*) {virsh} destroy {record.uuid} ;; esac",
        *rollbacks,
        *(_install(bundle, part) for part in manifest.parts if part.source is not None),
        *_up(virsh, bundle, manifest, image),
        ")",
    ]


def _virsh(context: Context) -> str:
    uri = context.config.libvirt_uri
    return "virsh" if uri == _DEFAULT_URI else shlex.join(["virsh", "-c", uri])


def _install(bundle: Path, part: Part) -> str:
    words = ["install"]
    for option, value in (("-o", part.uid), ("-g", part.gid)):
        words += [option, str(value)] if value is not None else []
    words += ["-m", f"{part.mode if part.mode is not None else 0o600:o}"]
    return shlex.join([*words, str(bundle / part.name), str(part.source)])


def _up(virsh: str, bundle: Path, manifest: Manifest, image: Path | None) -> list[str]:
    """Return the commands that define the guest and resume or boot it.

    A managed save image is removed, because libvirt would resume that one instead.
    """
    lines = []
    definition = manifest.part(Role.INACTIVE_XML)
    if definition is not None:
        lines.append(f"{virsh} define {shlex.quote(str(bundle / definition.name))}")
        lines.append(f"{virsh} managedsave-remove {manifest.uuid}")
    if image is not None:
        state = "--running" if manifest.was_running else "--paused"
        lines.append(f"{virsh} restore {shlex.quote(str(image))} {state}")
    elif manifest.level is not Level.OFF and definition is not None:
        lines.append(f"{virsh} start {manifest.uuid}")
    return lines


def _put_together(manifest: Manifest, image: Path) -> str:
    """Return the command that makes a save image of RAM in pages, which libvirt cannot read.

    It needs snaporch, or the script in docs/concepts/ram-pages.md.
    """
    name = f"{manifest.domain}@{manifest.snapshot}"
    return shlex.join(["snaporch", "extract", "--ram", name, str(image)])


def provenance(record: SnapshotRecord, manifest: Manifest | None) -> list[tuple[str, str]]:
    """Return how a snapshot was made and verified, as pairs of label and text."""
    found = [("run", record.run), ("created", iso(record.created))]
    if manifest is not None:
        versions = manifest.versions
        found += [
            ("begun", iso(manifest.started)),
            ("sealed", iso(manifest.finished)),
            ("made by", f"snaporch {versions.snaporch}"),
            ("libvirt", versions.libvirt),
            ("emulator", versions.emulator),
            ("machine", versions.machine),
        ]
        if manifest.group is not None:
            members = ", ".join(member.domain for member in manifest.group.members)
            found.append(("group", f"{manifest.group.name}: {members}"))
    if record.kept is not None:
        found.append(("kept", f"since {iso(record.kept)}; to release it: snaporch unkeep"))
    if record.note:
        found.append(("note", record.note))
    verified = "never"
    if record.verified is not None:
        verified = _verified(record.verified)
    return [*((label, text or "unknown") for label, text in found), ("verified", verified)]


def _verified(result: VerificationResult) -> str:
    """The result of the verifications, with the times of those that did more than the last one."""
    text = f"{iso(result.at)} {'passed' if result.passed else 'failed'}, {result.reached}"
    if result.earlier_reached is not None:
        text += f" on {iso(result.earlier_reached)}"
    text += ", disks read" if result.disks else ""
    if result.earlier_disks is not None:
        text += f" on {iso(result.earlier_disks)}"
    text += ", verify_command passed" if result.command else ""
    if result.earlier_command is not None:
        text += f" on {iso(result.earlier_command)}"
    failed = " and ".join(result.failed_steps)
    return f"{text}; failed in: {failed}" if failed else text
