"""Which of sanoid's sections takes the snapshots of which guests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from snaporch.sanoid.conf import SanoidConfig, Section
from snaporch.sanoid.facts import Guest


@dataclass
class Covering:
    """A section of the file, with what it or its recursion covers of the guests."""

    section: Section
    """As sanoid has resolved it for one of the datasets."""
    settings: Mapping[str, str] | None
    """Where sanoid looks for the hooks; ``None`` when it looks nowhere."""
    guests: list[Guest] = field(default_factory=list)
    datasets: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        """The section to write in."""
        return self.section.origin

    def setting(self, key: str) -> str:
        """What sanoid will use."""
        return (self.settings or {}).get(key, "")

    @property
    def of_guests(self) -> str:
        """Whose datasets it covers, for a message."""
        return listed([guest.name for guest in self.guests])


def coverings(config: SanoidConfig, guests: Sequence[Guest]) -> list[Covering]:
    """The sections that matter to the guests, each section of the file once."""
    found: dict[tuple[str, bool], Covering] = {}
    for guest in guests:
        for dataset in guest.datasets:
            section = config.covering(dataset)
            if section is None:
                continue
            settings = hook_settings(config, section)
            covering = found.setdefault(
                (section.origin, settings is None), Covering(section, settings)
            )
            covering.datasets.add(dataset)
            if guest not in covering.guests:
                covering.guests.append(guest)
    return list(found.values())


def hook_settings(config: SanoidConfig, section: Section) -> Mapping[str, str] | None:
    """sanoid takes a hook's command from the section that has the dataset's name."""
    if section.runs_hooks:
        return section.settings
    named = config.sections.get(section.path)
    return named.settings if named else None


def fitting_parent(wanted: Collection[str], existing: Collection[str]) -> str | None:
    """The dataset under which one recursive snapshot takes these datasets and no others.

    Never a whole pool, which a guest will not have to itself for long; and none with a blank in
    its name, below which sanoid finds no children.
    """
    if len(wanted) < 2:  # noqa: PLR2004 - one needs no parent
        return None
    paths = [dataset.split("/") for dataset in wanted]
    length = 0
    while all(len(p) > length and p[length] == paths[0][length] for p in paths):
        length += 1
    parent = "/".join(paths[0][:length])
    below = {dataset for dataset in existing if dataset.startswith(f"{parent}/")}
    others = [d for d in below - set(wanted) if not any(w.startswith(f"{d}/") for w in wanted)]
    return None if "/" not in parent or " " in parent or others else parent


def listed(names: Sequence[str], most: int = 4) -> str:
    """``a, b and c``; beyond ``most`` the rest is a number."""
    unique = list(dict.fromkeys(names))
    if len(unique) > most:
        unique = [*unique[: most - 1], f"{len(unique) - most + 1} more"]
    return " and ".join(filter(None, [", ".join(unique[:-1]), unique[-1]])) if unique else ""
