"""What is looked at on the host: sanoid itself, snaporch's directories, what runs have left."""

from __future__ import annotations

from collections.abc import Iterator

from snaporch.check.facts import HostFacts, PageStoreFacts
from snaporch.check.findings import Finding, Severity, listed
from snaporch.faults import known_faults, parse_release

_OTHERS = 0o077


def host_findings(facts: HostFacts) -> Iterator[Finding]:
    """All that is about no guest and no section."""
    yield from _sanoid(facts)
    yield from _runs(facts)
    yield from _overlays(facts)
    yield from _store(facts)
    yield from _forgetful(facts)
    yield from _pages(facts)
    yield from _replicas(facts)
    yield from _secrets(facts)
    yield from _capture(facts)
    yield from _faults(facts)
    if facts.unguarded is not None:
        yield Finding(
            "unguarded-start",
            Severity.WARNING,
            "libvirt",
            facts.unguarded.reason,
            "after a power loss in a run it may start a guest on its overlays, before these are "
            "committed, or though they are older than what they lie on",
            "run",
            (facts.unguarded.step,),
        )


def _faults(facts: HostFacts) -> Iterator[Finding]:
    for component, version in facts.releases.items():
        if parse_release(version) is None:
            yield Finding(
                "version-unknown",
                Severity.HINT,
                component,
                f"its version ({version or 'none'}) cannot be read",
                "known faults of its versions were not looked for",
                "compare it with docs/hosts.md, known faults",
            )
        for fault in known_faults(component, version):
            if fault.need in facts.needs:
                who = listed(facts.needs[fault.need])
                yield Finding(
                    fault.code,
                    Severity.WARNING if fault.harmful else Severity.HINT,
                    f"{component} {version}",
                    fault.what,
                    f"{fault.need}{f' ({who})' if who else ''}; snaporch {fault.meanwhile}",
                    fault.mend,
                )


def _capture(facts: HostFacts) -> Iterator[Finding]:
    mode = facts.capture
    if mode is None or mode.streams or mode.wanted == "file":
        return
    only = mode.wanted == "stream"
    yield Finding(
        "no-streaming",
        Severity.ERROR if only else Severity.WARNING,
        "RAM",
        f"it cannot be streamed ({mode.reason})",
        "no RAM can be saved, since ram_capture is stream"
        if only
        else "it goes through a raw file: guests pause for longer the more memory they have",
        "see the reason; paths.runtime and compression are settings of snaporch.toml",
    )


def _sanoid(facts: HostFacts) -> Iterator[Finding]:
    sanoid = facts.sanoid
    path = str(sanoid.directory / "sanoid.conf")
    if not sanoid.installed:
        yield Finding(
            "sanoid-missing",
            Severity.HINT,
            "sanoid",
            "it is not installed",
            "snapshots are taken by `snaporch snapshot` alone, nothing was said of sections",
            "if sanoid is to take snapshots, run",
            ("apt install sanoid",),
        )
        return
    if sanoid.unused:
        yield Finding(
            "sanoid-unused",
            Severity.HINT,
            path,
            "it is not there",
            "sanoid takes no snapshots; its syncoid needs no such file",
            "nothing must be done; if sanoid is to take snapshots, write there what this prints",
            ("snaporch render sanoid",),
        )
        return
    if sanoid.config is None:
        yield Finding(
            "sanoid-refuses",
            Severity.ERROR,
            path,
            sanoid.refusal,
            "sanoid dies of it, and takes no snapshot of anything",
            "mend the file; `snaporch render sanoid` prints one that works",
        )
        return
    if sanoid.scheduled is False:
        yield Finding(
            "sanoid-timer",
            Severity.HINT,
            "sanoid.timer",
            "it is off",
            "sanoid takes snapshots only when somebody calls it",
            "run",
            ("systemctl enable --now sanoid.timer",),
        )
    for complaint in sanoid.config.complaints:
        yield Finding(
            "sanoid-ignores",
            Severity.WARNING,
            path,
            complaint,
            "sanoid does not do what the file seems to say",
            "mend the file",
        )
    yield from _absent(facts, path)


def _absent(facts: HostFacts, path: str) -> Iterator[Finding]:
    config = facts.sanoid.config
    sections = [s for s in config.sections.values() if s.takes_snapshots] if config else []
    for name in sorted({s.origin for s in sections if s.path not in facts.datasets}):
        yield Finding(
            "dataset-missing",
            Severity.WARNING,
            f"[{name}]",
            "there is no such dataset",
            "sanoid fails to take its snapshots, again and again",
            f"correct or remove the section in {path}",
        )


def _runs(facts: HostFacts) -> Iterator[Finding]:
    for run in facts.runs:
        if not run.alive:
            yield Finding(
                "unfinished-run",
                Severity.ERROR,
                run.domain,
                f"the run {run.run} was cut short",
                "the guest may be on its overlays still",
                "run",
                ("snaporch recover",),
            )


def _overlays(facts: HostFacts) -> Iterator[Finding]:
    overlays = facts.overlays
    subject = str(overlays.path)
    if overlays.left:
        yield Finding(
            "overlays-left",
            Severity.WARNING,
            subject,
            f"no run knows of {listed(overlays.left)}",
            "an overlay may hold a guest's writes",
            "look whether a guest uses it (`virsh domblklist`); docs/recovery.md, By hand",
        )
    if overlays.set_aside:
        yield Finding(
            "overlays-set-aside",
            Severity.WARNING,
            f"{subject}/quarantine",
            f"overlays are set aside: {listed(overlays.set_aside)}",
            "they hold writes that their bases have not got",
            "compare them, then commit or delete them: docs/recovery.md, By hand",
        )
    if overlays.free_mib < overlays.reserve_mib:
        yield Finding(
            "overlay-space",
            Severity.ERROR,
            subject,
            f"{overlays.free_mib} MiB are free, {overlays.reserve_mib} MiB are needed",
            "guests are not switched to overlays that could not grow",
            "make room, or see paths.overlays and paths.overlay_reserve_mib in snaporch.toml",
        )
    if section := _snapshotted(facts, overlays.dataset):
        yield Finding(
            "overlays-snapshotted",
            Severity.WARNING,
            subject,
            f"it lies in {overlays.dataset}, of which [{section}] takes snapshots",
            "what guests write during a run stays in the snapshots and takes up room",
            "set paths.overlays in snaporch.toml to a place that sanoid leaves alone",
        )


def _forgetful(facts: HostFacts) -> Iterator[Finding]:
    for place, kind in facts.forgetful.items():
        yield Finding(
            "forgetful-place",
            Severity.ERROR,
            str(place),
            f"it is on {kind}, which a power loss empties",
            "overlays hold guests' writes, journals what recovery has to do, and bundles the RAM "
            "of snapshots; no overlay is used while overlays or journals are there",
            "set paths.overlays, .journal and .bundles in snaporch.toml to places on a disk",
        )


def _snapshotted(facts: HostFacts, dataset: str | None) -> str:
    if dataset is None or facts.sanoid.config is None:
        return ""
    section = facts.sanoid.config.covering(dataset)
    return section.origin if section else ""


def _store(facts: HostFacts) -> Iterator[Finding]:
    store = facts.store
    subject = str(store.path)
    if not store.writable:
        yield Finding(
            "store-unwritable",
            Severity.ERROR,
            subject,
            "it cannot be written" if store.exists else "it cannot be made",
            "RAM, NVRAM and definitions have no place, so no snapshot has them",
            "see paths.bundles in snaporch.toml, and the file system's mount",
        )
    elif store.exists and store.mode & _OTHERS:
        yield Finding(
            "store-open",
            Severity.WARNING,
            subject,
            f"its mode is {store.mode:04o}",
            "it holds the guests' RAM: keys, passwords and all",
            "run",
            (f"chmod 700 {subject}",),
        )
    if section := _snapshotted(facts, store.dataset):
        yield Finding(
            "store-snapshotted",
            Severity.WARNING,
            subject,
            f"it lies in {store.dataset}, of which [{section}] takes snapshots",
            "bundles that were pruned stay in those snapshots, with the RAM that is in them",
            "set paths.bundles in snaporch.toml to a place that sanoid leaves alone",
        )


def _replicas(facts: HostFacts) -> Iterator[Finding]:
    for name, trouble in facts.replicas.items():
        if trouble:
            yield Finding(
                "replica-away",
                Severity.WARNING,
                f"replica {name}",
                trouble,
                "nothing can be copied there, and policies want it",
                "see docs/replication.md, how a replica is set up",
            )


def _has_pool(facts: HostFacts, pages: PageStoreFacts) -> bool:
    return pages.dataset.split("/")[0] in facts.datasets


def _pages(facts: HostFacts) -> Iterator[Finding]:
    pages = facts.pages
    if pages is not None and not _has_pool(facts, pages):
        yield Finding(
            "pages-missing",
            Severity.ERROR,
            pages.dataset,
            "there is no such pool",
            f"RAM of {listed(pages.guests)} stays whole images in the bundle store",
            "import the pool, or see ram_pages.dataset in snaporch.toml",
        )


def _secrets(facts: HostFacts) -> Iterator[Finding]:
    held = {d: guest.name for guest in facts.guests for d in guest.datasets}
    secret = sorted(facts.encrypted & held.keys())
    if secret and not facts.store.encrypted:
        yield Finding(
            "store-in-clear",
            Severity.WARNING,
            str(facts.store.path),
            f"it is not encrypted, but {listed(secret)} is",
            f"the RAM of {listed([held[dataset] for dataset in secret])} lies there in the clear",
            "put paths.bundles on an encrypted dataset, in snaporch.toml",
        )
    pages = facts.pages
    open_guests = sorted({held[d] for d in secret} & set(pages.guests)) if pages else []
    if pages is not None and open_guests and not pages.encrypted and _has_pool(facts, pages):
        yield Finding(
            "pages-in-clear",
            Severity.WARNING,
            pages.dataset,
            f"it is not encrypted, but datasets of {listed(open_guests)} are",
            "their RAM lies there in the clear",
            "put ram_pages.dataset below an encrypted dataset, in snaporch.toml",
        )
