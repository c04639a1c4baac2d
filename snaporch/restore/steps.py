"""The steps of a restore; recovery uses the same steps to finish an interrupted one.

The steps depend only on the facts in the journal, so both do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from snaporch import default_paths
from snaporch.bundle.firmware_files import replace_host_file
from snaporch.catalog.safety_copy_holds import UNDO_HOLD, hold_bases
from snaporch.context import Context
from snaporch.errors import AttentionError, RefusedError, RunFailedError, SnaporchError
from snaporch.journal import forget
from snaporch.model import Domain, PoolSnapshot
from snaporch.restore.disk_checks import check_volumes_unused
from snaporch.restore.journal import (
    FRESH,
    HOLD,
    Ending,
    HostFile,
    KeptDataset,
    RestoreFacts,
    RestoreJournal,
    RestoreProgress,
    RestoreStep,
    Target,
    forget_all_off,
    unfinished,
)
from snaporch.restore.newer_snapshot_checks import check_destroyable, is_safety
from snaporch.restore.other_files import excluded_images, own_by_dataset
from snaporch.restore.processes_in_datasets import check_not_in_use
from snaporch.restore.safety_copy import SafetyCopyWriter
from snaporch.restore.start_bar import with_start_bar, without_bar
from snaporch.restore.written_since_rollback import written_now
from snaporch.zfs import DatasetListing, PoolError


class RestoreSteps:
    """The steps of one restore."""

    def __init__(
        self,
        context: Context,
        facts: RestoreFacts,
        journal: RestoreJournal,
        progress: RestoreProgress = FRESH,
    ) -> None:
        self._context = context
        self._facts = facts
        self._journal = journal
        self._progress = progress
        self._safety: SafetyCopyWriter | None = None
        self.undo: Path | None = None
        """The script that undoes the restore, once it exists."""

    # -- before the first rollback -----------------------------------------------------------

    def save(self) -> None:
        """Hold the targets, and write the large part of the safety copy while the guest runs."""
        hold(self._context, self._facts.targets)
        if not self._facts.safety:
            return
        self._report("saving what will be discarded")
        self._safety = SafetyCopyWriter.begin(
            self._context, Path(self._facts.safety), self._facts.targets
        )
        if self._facts.keep_running and not self._safety.has_ram:
            self._safety.check_room(self._context.hypervisor.ram_in_use(self._facts.uuid))
        self._safety.save()

    def save_again(self) -> None:
        """Write what the guest has changed since :meth:`save`."""
        if self._safety is not None:
            self._safety.save()

    def check_room(self) -> None:
        """Refuse if the store has too little room for what changed since :meth:`save`."""
        if self._safety is not None:
            self._safety.check_room_for_rest()

    def stop(self) -> None:
        """Bar the definition, stop the guest, complete the safety copy.

        Raises:
            SnaporchError: nothing was rolled back; the caller has to call cancel_restore().
        """
        domain = without_bar(self._context, self._find())
        bar = with_start_bar(self._context, self._facts.before) if self._facts.before else None
        if bar is not None:
            self._context.hypervisor.define(bar)
        self._end_guest(domain)
        if self._safety is not None:
            if self._facts.boot:
                self._safety.save()
            self._safety.keep_files(domain)
            self.undo = self._safety.write_script(
                domain,
                facts=self._facts,
                there=self._context.pool.listing(self._facts.datasets),
                own=self._own(domain),
                journal=self._journal.path,
                lock=default_paths.LOCKS / f"{self._facts.uuid}.lock",
                barred=bar,
            )
        there = self._context.pool.listing(self._facts.datasets)  # writing may have taken long
        if self._safety is None or self._progress is FRESH:
            check_nothing_new(self._context, self._facts, there)
        check_newer_may_go(self._context, self._facts, there)

    def _own(self, domain: Domain | None) -> dict[str, list[str]]:
        """Return the guest's files by dataset, before the restore and after it.

        Images that its snapshots leave out are not included.
        """
        live = domain.live_xml if domain is not None else None
        xmls = [xml for xml in (self._facts.before, self._facts.after, live) if xml is not None]
        sources = [disk.source for disk in domain.disks] if domain is not None else []
        found = own_by_dataset(
            self._context.resolver, xmls, [source for source in sources if source]
        )
        apart = (
            own_by_dataset(self._context.resolver, [], excluded_images(self._context, domain))
            if domain is not None
            else {}
        )
        return {
            name: [place for place in places if place not in apart.get(name, ())]
            for name, places in found.items()
        }

    def _end_guest(self, domain: Domain | None) -> None:
        if domain is not None and domain.active:
            if not self._facts.boot:
                raise RefusedError(self._facts.domain, "was started meanwhile", "restore it again")
            if self._safety is not None and domain.inactive_xml is None:
                self._safety.keep_files(
                    domain
                )  # libvirt deletes the TPM state of a transient guest
            self._report("stopping the guest")
            if self._facts.keep_running and self._safety is not None:
                self._context.hypervisor.save(self._facts.uuid, self._safety.ram)
                self._safety.ram.chmod(0o600)
            else:
                self._context.hypervisor.destroy(self._facts.uuid)
        self._check_off()

    # -- from the first rollback to the end --------------------------------------------------

    def go_forward(self) -> None:
        """Do all steps from the first rollback to the guest's start that are not done already.

        Raises:
            SnaporchError, OSError: a step failed; the call can be repeated.
        """
        if self._context.hypervisor.find(self._facts.uuid) is not None:
            self._context.hypervisor.drop_managed_save(self._facts.uuid)
        self._roll_back()
        if not self._progress.has_ended(RestoreStep.FILES):
            with self._journal.step(RestoreStep.FILES):
                for file in self._facts.files:
                    _put_back(file)
        if self._facts.ending is Ending.RESUME:
            self._resume()
        self.define()
        if self._facts.ending is Ending.BOOT:
            with self._journal.step(RestoreStep.BOOT):
                self._report("booting")
                self._context.hypervisor.start(self._facts.uuid, paused=False)
        release_targets(self._context, self._facts)

    def define(self) -> None:
        """Define the domain as in the snapshot, so that it can be started again."""
        if self._progress.has_ended(RestoreStep.DEFINE):
            return
        with self._journal.step(RestoreStep.DEFINE):
            if self._facts.after is not None:
                self._context.hypervisor.define(self._facts.after)

    def _resume(self) -> None:
        self._journal.wrote(written_now(self._context, self._facts))
        with self._journal.step(RestoreStep.RESUME):
            self._report("resuming from RAM")
            try:
                self._context.hypervisor.restore(Path(self._facts.ram), running=self._facts.running)
            except SnaporchError:
                if not self._is_active():
                    self._journal.failed(RestoreStep.RESUME)
                raise

    def _roll_back(self) -> None:
        """Roll back each dataset that was not yet; newer snapshots and bookmarks go first."""
        left = [
            target
            for target in self._facts.targets
            if not self._progress.has_ended(RestoreStep.ROLLBACK, target.dataset)
        ]
        if not left:
            return
        self._report(f"rolling back {', '.join(target.dataset for target in left)}")
        there = check_targets(self._context, left)
        for target in left:
            self._check_off()
            with self._journal.step(RestoreStep.ROLLBACK, target.dataset):
                if target is not left[0]:
                    there = self._context.pool.listing([target.dataset])
                self._roll_back_one(target, there)
                for kept in self._facts.kept:
                    if kept.dataset == target.dataset:
                        self._receive(kept)

    def _receive(self, kept: KeptDataset) -> None:
        """Receive the safety copy's data over a dataset that an undo has rolled back."""
        pool = self._context.pool
        for stream in kept.streams:
            pool.receive(kept.dataset, Path(stream))
        for name, properties in kept.properties.items():
            pool.set_properties([name], properties)
        for name, of in kept.bookmarks.items():
            pool.bookmark(of, name.partition("#")[2])

    def _roll_back_one(self, target: Target, there: DatasetListing) -> None:
        pool = self._context.pool
        newer = there.newer(target.full_name)
        for name in newer:
            if name not in self._facts.newer and not is_safety(name):
                self._context.progress.note(
                    self._facts.domain,
                    f"destroying {name}, which was taken after the guest was stopped",
                )
        snapshots = [name for name in newer if "@" in name]
        # holds of restores that this one replaces, and of their safety copies
        release_holds(self._context, snapshots, HOLD, UNDO_HOLD)
        pool.destroy_snapshots(snapshots)
        for name in newer:
            if "#" in name:
                pool.destroy_bookmark(name)
        pool.rollback(target.full_name)

    # -- helpers -----------------------------------------------------------------------------

    def _find(self) -> Domain | None:
        return self._context.hypervisor.find(self._facts.uuid)

    def _is_active(self) -> bool:
        with suppress(SnaporchError):
            domain = self._find()
            return domain is not None and domain.active
        return True

    def _check_off(self) -> None:
        domain = self._find()
        if domain is not None and domain.active:
            raise RunFailedError(
                self._facts.domain, "was started by another program during the restore"
            )

    def _report(self, text: str) -> None:
        self._context.progress.step(self._facts.domain, text)


def check_nothing_new(context: Context, facts: RestoreFacts, there: DatasetListing) -> None:
    """Refuse if a dataset has snapshots that the user was not shown, or is used by the host.

    Args:
        there: what exists of the datasets.

    Raises:
        RefusedError: snapshots have appeared, or the host uses a volume.
    """
    check_volumes_unused(context, facts.thing, facts.datasets)
    for target in facts.targets:
        newer = there.newer(target.full_name)
        unknown = [name for name in newer if name not in facts.newer and not is_safety(name)]
        if unknown:
            raise RefusedError(
                target.dataset, f"{', '.join(unknown)} appeared meanwhile", "restore it again"
            )


def check_newer_may_go(context: Context, facts: RestoreFacts, there: DatasetListing) -> None:
    """Check that ZFS can destroy everything newer than the targets, and unmount those snapshots.

    Args:
        there: what exists of the datasets.

    Raises:
        RefusedError: a newer snapshot is held, cloned or in use.
    """
    newer = [name for target in facts.targets for name in there.newer(target.full_name)]
    check_destroyable(context, facts.thing, facts.uuid, newer, there)
    check_not_in_use(context.resolver, facts.thing, newer)


def check_targets(context: Context, targets: Sequence[Target]) -> DatasetListing:
    """Check by GUID that the snapshots to roll back to still exist.

    Returns: what exists of their datasets.

    Raises:
        PoolError: one does not.
    """
    there = context.pool.listing([target.dataset for target in targets])
    present = _present(targets, there.snapshots)
    if missing := [target.full_name for target in targets if target not in present]:
        raise PoolError(", ".join(missing), "is missing, so the restore cannot be finished")
    return there


def _present(targets: Sequence[Target], there: Sequence[PoolSnapshot]) -> list[Target]:
    guids = {(each.full_name, each.guid) for each in there}
    return [target for target in targets if (target.full_name, target.guid) in guids]


def hold(context: Context, targets: Sequence[Target]) -> None:
    """Hold the snapshots that are rolled back to, so that they cannot be destroyed meanwhile.

    Raises:
        PoolError: a snapshot does not exist any more.
    """
    for name, tags in context.pool.holds_of([each.full_name for each in targets]).items():
        if HOLD not in tags:
            context.pool.hold([name], HOLD)


def release_holds(context: Context, snapshots: Sequence[str], *tags: str) -> None:
    """Release snaporch's own holds with these tags, so that the snapshots can be destroyed."""
    for name, there in context.pool.holds_of(snapshots).items():
        for tag in sorted({*tags}.intersection(there)):
            context.pool.release([name], tag)


def release_targets(context: Context, facts: RestoreFacts) -> None:
    """Release the holds on a restore's targets, except on targets of another interrupted restore.

    The base snapshot of a safety copy stays held with another tag as long as the copy exists.
    """
    hold_bases(context.pool, context.store.root / facts.uuid)
    others = unfinished(context.config.paths.journal, facts.uuid)
    kept = {each for old in others if old.facts.run != facts.run for each in old.facts.targets}
    over = [each for each in facts.targets if each not in kept]
    there = context.pool.snapshots([target.dataset for target in over])
    release_holds(context, [target.full_name for target in _present(over, there)], HOLD)


def forget_restore(context: Context, path: Path, facts: RestoreFacts) -> None:
    """Delete a restore that is over: its RAM image, the holds on its targets, its journal."""
    context.store.discard_partial(facts.uuid, facts.run)
    release_targets(context, facts)
    forget(path)
    forget_together(context, facts)


def forget_together(context: Context, facts: RestoreFacts) -> None:
    """Forget that all guests of a restore's group were off, if it was the last of them."""
    if facts.together:
        with suppress(SnaporchError):  # another journal is unreadable, which is reported itself
            forget_all_off(context.config.paths.journal, facts.together)


def cancel_restore(context: Context, facts: RestoreFacts, journal: Path) -> str:
    """Undo a restore that has rolled back nothing.

    Returns: the state of the guest afterwards, for a message.

    Raises:
        AttentionError: the restore could not be undone.
    """
    try:
        domain = context.hypervisor.find(facts.uuid)
        if facts.before is not None and domain is not None and not facts.supersedes:
            _put_definition_back(context, facts, domain)
        safety = (
            SafetyCopyWriter(context, Path(facts.safety), facts.targets) if facts.safety else None
        )
        off = domain is None or not domain.active
        text = "the guest was not touched"
        if off and facts.boot:
            text = "the guest is off, its disks are as they were"
            if safety is not None and safety.has_ram:
                context.hypervisor.restore(safety.ram, running=facts.ran)
                text = "the guest goes on where it was"
        if safety is not None:
            safety.forget()
    except (SnaporchError, OSError) as error:
        raise AttentionError(
            facts.thing,
            f"the restore could not be undone ({error}); nothing was rolled back",
            f"fix the cause, then: snaporch recover {facts.uuid}",
        ) from error
    forget_restore(context, journal, facts)
    return text


def _put_definition_back(context: Context, facts: RestoreFacts, domain: Domain) -> None:
    if facts.before is None or domain.inactive_xml == facts.before:
        return
    if without_bar(context, domain) is not domain:  # this restore barred it
        context.hypervisor.define(facts.before)


def _put_back(file: HostFile) -> None:
    """Write a file of the bundle back, with its owner and mode."""
    replace_host_file(Path(file.place), Path(file.copy).read_bytes(), file.uid, file.gid, file.mode)
