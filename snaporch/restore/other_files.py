"""Find files in a guest's datasets that are not the guest's, and that a rollback would change.

Whether they prevent a restore is decided by :mod:`snaporch.restore.shared_dataset_checks`.

A file that is the same as in the snapshot loses nothing. Files are compared by inode, size and
modification time, in the dataset and in the snapshot; this host's clock does not matter.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from snaporch.context import Context
from snaporch.disks.backing_chain import FileState
from snaporch.errors import RefusedError, UnavailableError
from snaporch.hypervisor import domain_xml
from snaporch.model import DatasetKind, Domain, PoolSnapshot
from snaporch.zfs import PoolError
from snaporch.zfs.resolver import Mount, NotOnZfsError, Resolver

MOST = 100_000
"""Entries of a dataset that are examined."""
_DEEPEST = 100
_NAMED = 3
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_WITHOUT_DATA = (stat.S_IFSOCK, stat.S_IFIFO)


class TooManyError(Exception):
    """A dataset has more entries than are examined, or deeper directories."""


@dataclass(frozen=True, slots=True)
class OtherFile:
    """A file, a link or a device node: anything but a directory."""

    path: str
    """Relative to the directory where the walk began."""
    device: int
    state: FileState


def guests_paths(xmls: Sequence[str]) -> set[str]:
    """Return every path in the ``<devices>`` and ``<os>`` elements of a guest's definitions."""
    found = set()
    for xml in xmls:
        root = domain_xml.parse(xml)
        parts = [part for name in ("os", "devices") for part in root.findall(name)]
        texts = [
            text
            for part in parts
            for element in part.iter()
            for text in (element.text or "", *element.attrib.values())
        ]
        found |= {text.strip() for text in texts if text.strip().startswith("/")}
    return found | tpm_states(xmls)


def tpm_states(xmls: Sequence[str]) -> set[str]:
    """Return the directories, or files, of the emulated TPMs in a guest's definitions."""
    states = (domain_xml.tpm_state(domain_xml.parse(xml)) for xml in xmls)
    return {state.path for state in states if state is not None}


def excluded_images(context: Context, domain: Domain) -> list[str]:
    """Return the images of the guest that ``exclude_disks`` leaves out of its snapshots."""
    names = context.config.settings(domain.name, domain.uuid).exclude_disks
    return [disk.source for disk in domain.disks if disk.target in names and disk.source]


def own_files(
    resolver: Resolver, paths: Iterable[str], directories: Collection[str]
) -> set[tuple[int, int]]:
    """Return device and inode of each path that is a file, and of the files in ``directories``.

    For a path that is a link, both the link and its target count.
    """
    mounts = resolver.mounts()
    found: set[tuple[int, int]] = set()
    for path in paths:
        with suppress(OSError, NotOnZfsError, TooManyError):
            for place in _both(resolver, path, mounts):
                status = os.lstat(place)
                if not stat.S_ISDIR(status.st_mode):
                    found.add((status.st_dev, status.st_ino))
                elif path in directories:
                    found |= {(each.device, each.state.inode) for each in walk(place, frozenset())}
    return found


def _both(resolver: Resolver, path: str, mounts: list[Mount]) -> set[Path]:
    """Return the real path, and the path of the link itself if ``path`` is one."""
    above, name = os.path.split(path)
    return {Path(resolver.real_path(above, mounts), name), Path(resolver.real_path(path, mounts))}


def own_by_dataset(
    resolver: Resolver, xmls: Sequence[str], more: Iterable[str]
) -> dict[str, list[str]]:
    """Return for each dataset the guest's paths in it, whether they exist at present or not."""
    mounts = resolver.mounts()
    states = tpm_states(xmls)
    found: dict[str, set[str]] = {}
    for path in {*guests_paths(xmls), *more}:
        with suppress(OSError, NotOnZfsError):
            for place in _both(resolver, path, mounts):
                if path in states or not place.is_dir():
                    dataset = resolver.resolve_nearest(str(place), mounts).name
                    found.setdefault(dataset, set()).add(str(place))
    return {dataset: sorted(places) for dataset, places in found.items()}


def other_files(resolver: Resolver, root: Path, own: set[tuple[int, int]]) -> list[OtherFile]:
    """Return the files of a file system that are not the guest's.

    Args:
        root: its mount point; files beneath other mounts are not seen.
        own: the guest's files, from :func:`own_files`.

    Raises:
        TooManyError: there are more entries than are examined.
        OSError: a directory cannot be read.
    """
    covered = frozenset(mount.mount_point for mount in resolver.mounts())
    return [each for each in walk(root, covered) if (each.device, each.state.inode) not in own]


def _changed(context: Context, others: list[OtherFile], member: PoolSnapshot) -> list[str]:
    """Return the paths of those files that differ from the snapshot."""
    before: set[FileState] = set()
    if others:
        # if the snapshot cannot be read, all of them count as changed
        with (
            suppress(OSError, PoolError),
            context.pool.mounted_snapshot(member.full_name) as then,
        ):
            before = {each.state for each in walk(then, frozenset(), linked=True)}
    return sorted(each.path for each in others if each.state not in before)


def walk(
    root: Path, covered: frozenset[str], *, linked: bool = False, most: int = MOST
) -> Iterator[OtherFile]:
    """Yield everything below a directory except directories, sockets and pipes.

    No link is followed.

    Args:
        covered: mount points, which are skipped without access to them.
        linked: ``root`` may be a link, because it leads to a mount of snaporch's own.
        most: how many entries are examined.

    Raises:
        TooManyError: there are more entries, or too deep directories.
        OSError: a directory cannot be read.
    """
    descriptor = os.open(root, _OPEN & ~os.O_NOFOLLOW if linked else _OPEN)
    try:
        for count, each in enumerate(_walk(descriptor, root, PurePosixPath(), covered)):
            if count >= most:
                raise TooManyError
            if each is not None:
                yield each
    finally:
        os.close(descriptor)


def _walk(
    directory: int, root: Path, below: PurePosixPath, covered: frozenset[str]
) -> Iterator[OtherFile | None]:
    if len(below.parts) > _DEEPEST:
        raise TooManyError
    with os.scandir(directory) as entries:
        for entry in entries:
            path = below / entry.name
            if str(root / path) in covered or str(path) == ".zfs":
                continue
            try:
                if entry.is_dir(follow_symlinks=False):
                    yield None
                    descriptor = os.open(entry.name, _OPEN, dir_fd=directory)
                    try:
                        yield from _walk(descriptor, root, path, covered)
                    finally:
                        os.close(descriptor)
                    continue
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed since scandir() returned it
                continue
            if stat.S_IFMT(status.st_mode) in _WITHOUT_DATA:
                yield None
            else:
                yield OtherFile(str(path), status.st_dev, FileState.from_stat(status))


def changed_other_files(
    context: Context,
    members: Iterable[PoolSnapshot],
    xmls: Sequence[str],
    more: Iterable[str] = (),
    apart: Iterable[str] = (),
) -> dict[str, list[str]]:
    """Return for each file system the files that are not the guest's and differ from the snapshot.

    Args:
        members: the snapshots that would be rolled back to.
        xmls: definitions of the guest, from the snapshot and of today.
        more: other paths that belong to the guest.
        apart: the guest's images that were left out of the snapshot. A rollback must not change
            them either, so they are treated like files of others.

    Raises:
        RefusedError: a file system is not mounted, too large or unreadable.
    """
    resolver = context.resolver
    own = _files(resolver, xmls, more) - own_files(resolver, apart, ())
    kinds = {dataset.name: dataset.kind for dataset in context.pool.datasets()}
    found = {}
    for member in members:
        if kinds.get(member.dataset) is not DatasetKind.FILESYSTEM:
            continue
        step = "use --also-roll-back if it has no files but the guest's"
        try:
            root = resolver.mount_point_of(member.dataset)
            found[member.dataset] = _changed(context, other_files(resolver, root, own), member)
        except NotOnZfsError as error:
            raise RefusedError(
                member.dataset,
                "is not mounted, so it is unknown whether others have written to it",
                f"zfs mount -l {shlex.quote(member.dataset)}, or {step}",
            ) from error
        except TooManyError as error:
            raise RefusedError(
                member.dataset, f"has more than the {MOST} entries that are examined", step
            ) from error
        except OSError as error:
            raise RefusedError(
                member.dataset, f"cannot be examined ({error.strerror})", step
            ) from error
    return {dataset: others for dataset, others in found.items() if others}


def changed_own_files(context: Context, member: PoolSnapshot, paths: Iterable[str]) -> list[str]:
    """Return which of these files in a file system differ from its snapshot, by size or time.

    Args:
        member: the snapshot.
        paths: of the guest's images.

    Raises:
        UnavailableError: the file system or the snapshot cannot be examined.
    """
    resolver = context.resolver
    try:
        own = own_files(resolver, paths, ())
        root = resolver.mount_point_of(member.dataset)
        covered = frozenset(mount.mount_point for mount in resolver.mounts())
        images = [e for e in walk(root, covered) if (e.device, e.state.inode) in own]
        with context.pool.mounted_snapshot(member.full_name) as then:
            before = {_content(each) for each in walk(then, frozenset(), linked=True)}
    except NotOnZfsError as error:
        step = f"run: {shlex.join(['zfs', 'mount', '-l', member.dataset])}; then try again"
        raise UnavailableError(member.dataset, "is not mounted", step) from error
    except TooManyError as error:
        reason = f"has more than the {MOST} entries that are examined"
        raise UnavailableError(member.dataset, reason, "remove what is not the guest's") from error
    except (OSError, PoolError) as error:
        reason = f"cannot be examined ({error.strerror if isinstance(error, OSError) else error})"
        raise UnavailableError(member.full_name, reason, "try again") from error
    return [each.path for each in images if _content(each) not in before]


def _content(file: OtherFile) -> tuple[str, int, int]:
    return file.path, file.state.bytes, file.state.mtime_ns


def guest_files(resolver: Resolver, domains: Iterable[Domain]) -> set[tuple[int, int]]:
    """Return device and inode of each file of these guests."""
    found: set[tuple[int, int]] = set()
    for domain in domains:
        xmls = [xml for xml in (domain.inactive_xml, domain.live_xml) if xml is not None]
        sources = [disk.source for disk in domain.disks if disk.source is not None]
        found |= _files(resolver, xmls, sources)
    return found


def _files(resolver: Resolver, xmls: Sequence[str], more: Iterable[str]) -> set[tuple[int, int]]:
    return own_files(resolver, {*guests_paths(xmls), *more}, tpm_states(xmls))


def describe_other_files(
    resolver: Resolver, datasets: Iterable[str], own: set[tuple[int, int]]
) -> list[str]:
    """Describe the other files in each dataset that has files besides ``own``."""
    found = []
    for dataset in datasets:
        try:
            root = resolver.mount_point_of(dataset)
            others = [each.path for each in other_files(resolver, root, own)]
        except TooManyError:
            found.append(f"{dataset} (more than {MOST} entries)")
        except (OSError, NotOnZfsError):  # a volume, or not mounted
            continue
        else:
            found += [f"{dataset} ({named(sorted(others))})"] if others else []
    return found


def named(others: list[str]) -> str:
    """Return the number of files and the names of the first ones, for a message."""
    some = ", ".join(others[:_NAMED])
    more = len(others) - _NAMED
    what = "other file" if len(others) == 1 else "other files"
    return f"{len(others)} {what}: {some}{f' and {more} more' if more > 0 else ''}"
