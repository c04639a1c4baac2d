"""Pruning and telling, behind ``snaporch prune``."""

from __future__ import annotations

import json as json_format
from functools import partial
from pathlib import Path

from snaporch import zfs
from snaporch.config import Config, load_config
from snaporch.errors import ExitCode, one_line
from snaporch.output.format import size
from snaporch.output.terminal import print_error, print_result
from snaporch.prune.decision import ItemKind, PruneAction, PruneDecision
from snaporch.prune.prune import Pruned, prune

_GONE = (PruneAction.TRASH, PruneAction.DELETE, PruneAction.PUT_BACK)
_STAYING = {
    ItemKind.BUNDLE: ("bundle", "bundles"),
    ItemKind.TRASHED: ("bundle in the trash", "bundles in the trash"),
    ItemKind.SAFETY: ("safety copy", "safety copies"),
}


def prune_and_tell(
    path: Path | None, domain: str | None, *, dry_run: bool, verbose: bool, json: bool
) -> int:
    """Prune one domain's things or all; 9 when something cannot be judged, 8 when it failed."""
    config = load_config(path)
    done = prune(
        config,
        zfs.open_pool(),
        domain=domain,
        dry_run=dry_run,
        may_be_barred=partial(may_be_barred, config),
    )
    if domain is not None and not done.verdicts:
        from snaporch.hypervisor import open_hypervisor

        open_hypervisor(config.libvirt_uri).domain(domain)  # a misspelt name is an error
    if json:
        print_result(json_format.dumps(_document(done, dry_run=dry_run), indent=2))
    else:
        _tell(done, dry_run=dry_run, verbose=verbose)
    for failure in (*done.failures, *done.unjudged):
        print_error(failure.line())
    if done.failures:
        return ExitCode.FAILED
    return ExitCode.ATTENTION if done.unjudged else ExitCode.OK


def may_be_barred(config: Config, uuid: str) -> bool:
    """Whether the guest cannot be started until an undo is finished, or libvirt does not say."""
    from snaporch.hypervisor import open_hypervisor
    from snaporch.restore.start_lock import may_have_bar

    uri = config.libvirt_uri
    return may_have_bar(config.paths.journal, lambda: open_hypervisor(uri).find(uuid))


def _document(done: Pruned, *, dry_run: bool) -> dict[str, object]:
    return {
        "dry_run": dry_run,
        "freed_bytes": done.freed,
        "items": [item(verdict) for verdict in done.verdicts],
    }


def item(verdict: PruneDecision) -> dict[str, object]:
    """The documented JSON object of one thing."""
    return {
        "kind": verdict.found.kind.value,
        "domain": verdict.found.domain or None,
        "uuid": verdict.found.uuid,
        "snapshot": verdict.found.snapshot or None,
        "path": str(verdict.found.path),
        "bytes": verdict.found.bytes,
        "action": verdict.fate.value,
        "reason": verdict.reason,
    }


def _tell(done: Pruned, *, dry_run: bool, verbose: bool) -> None:
    for verdict in done.verdicts:
        worth = verdict.fate in _GONE or verbose or not verdict.usual
        if worth and not verdict.found.trouble:
            print_result(line(verdict, dry_run=dry_run))
    parts = [text for kind in _STAYING if (text := _staying(done, kind))]
    parts.append(f"{'would free' if dry_run else 'freed'} {size(done.freed)}")
    print_result("; ".join(parts))


def line(verdict: PruneDecision, *, dry_run: bool = False) -> str:
    """What became of one thing, or would."""
    what = verdict.fate.value.replace("-", " ") if dry_run else verdict.fate.done
    found = verdict.found
    return one_line(f"{found.title}  {what}  {size(found.bytes)}  {verdict.reason}")


def _staying(done: Pruned, kind: ItemKind) -> str:
    """How many of a kind there are now."""
    there = [v.found for v in done.verdicts if _kind_now(v) is kind]
    if not there:
        return ""
    word = _STAYING[kind][len(there) != 1]
    return f"{len(there)} {word} ({size(sum(found.bytes for found in there))})"


def _kind_now(verdict: PruneDecision) -> ItemKind | None:
    match verdict.fate:
        case PruneAction.DELETE:
            return None
        case PruneAction.TRASH:
            return ItemKind.TRASHED
        case PruneAction.PUT_BACK:
            return ItemKind.BUNDLE
        case _:
            return verdict.found.kind
