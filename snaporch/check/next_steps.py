"""What to do next on a host on which snaporch is new: a pure function."""

from __future__ import annotations

import shlex

from snaporch.check.facts import HostFacts


def next_steps(facts: HostFacts) -> list[str]:
    """The steps from the installation to snapshots that are taken and copied by themselves.

    Returns:
        A line for each step that is left; none once there is a snapshot, and a policy or sanoid
        takes others.
    """
    ready = [guest.name for guest in facts.guests if guest.datasets and guest.refusal is None]
    scheduled = facts.policies or _by_sanoid(facts)
    if not ready or (facts.store.has_bundles and scheduled):
        return []
    steps = []
    if not facts.store.has_bundles:
        steps.append(f"take a first snapshot: snaporch snapshot {shlex.quote(ready[0])}")
    if not scheduled:
        steps.append("have snapshots taken by a policy: see docs/how-to/schedule.md")
    if not facts.replicas:
        steps.append("copy them to another pool or host: see docs/how-to/replication.md")
    return [f"{'then' if number else 'next'}: {step}" for number, step in enumerate(steps)]


def _by_sanoid(facts: HostFacts) -> bool:
    """Whether sanoid takes snapshots of a guest."""
    config = facts.sanoid.config
    datasets = [dataset for guest in facts.guests for dataset in guest.datasets]
    return config is not None and any(config.covering(dataset) for dataset in datasets)
