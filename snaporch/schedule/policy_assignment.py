"""Which policies a domain has, and which place assigns them.

The first of these places that assigns policies decides alone: the domain's section of the
configuration, the domain's metadata in libvirt, ``snaporch:policy`` of its datasets, the patterns
of the policies, the defaults. For a clone only its own section counts, because the clone inherits
the metadata and the dataset properties of its origin. A guest with a fence has none: a snapshot of
it here would prevent that it comes back incrementally.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from snaporch.config import Config
from snaporch.context import Context
from snaporch.hypervisor import domain_xml
from snaporch.hypervisor.clone_xml import clone_of
from snaporch.model import Domain
from snaporch.snapshot.locate_disks import datasets_of

METADATA = "{urn:snaporch}policy"
"""The element in a domain's ``<metadata>``."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """A domain's policies."""

    policies: tuple[str, ...]
    source: str
    """The place that assigns them, for messages; empty if no place does."""
    unknown: tuple[str, ...] = ()
    """Assigned names that are not in the configuration."""


def assign(context: Context, domain: Domain, properties: Mapping[str, str]) -> Assignment:
    """The policies of ``domain``; ``properties`` holds ``snaporch:policy`` by dataset."""
    config = context.config
    if context.fences.find(domain.uuid) is not None:
        return Assignment((), "none: it is fenced")
    section = _section(config, domain)
    if section is not None:
        return _assignment(config, section, "its section of the configuration")
    if (origin := clone_of(domain.inactive_xml or domain.live_xml or "<domain/>")) is not None:
        return Assignment((), f"it is a clone of {origin}")
    if (metadata := _metadata(domain)) is not None:
        return _assignment(config, _names(metadata), "its metadata in libvirt")
    places = {name: properties[name] for name in datasets(context, domain) if name in properties}
    if places:
        named = [name for text in places.values() for name in _names(text)]
        return _assignment(config, named, f"snaporch:policy of {', '.join(sorted(places))}")
    matching = [name for name, policy in config.policy.items() if _is_for(policy.domains, domain)]
    if matching:
        return _assignment(config, matching, "the policy's domains")
    everybodys = config.defaults.policies
    return _assignment(config, everybodys, "defaults.policies" if everybodys else "")


def datasets(context: Context, domain: Domain) -> set[str]:
    """Datasets of the domain's disks; of a disk on an overlay, also those of its backing chain."""
    disks = list(domain.disks)
    if domain.active:
        for disk in domain.disks:
            chain = context.hypervisor.backing_chain(domain, disk.target)
            disks += [replace(disk, source=path) for path in chain]
    return datasets_of(context.resolver, replace(domain, disks=tuple(disks)))


def _section(config: Config, domain: Domain) -> list[str] | None:
    own = config.domain_section(domain.name, domain.uuid)
    return list(own["policies"]) if "policies" in own else None


def _metadata(domain: Domain) -> str | None:
    xml = domain.inactive_xml or domain.live_xml
    element = domain_xml.parse(xml).find(f"metadata/{METADATA}") if xml else None
    return None if element is None else element.text or ""


def _names(text: str) -> list[str]:
    """The names in ``hourly, nightly``; ``none`` is no name."""
    return [name for name in text.replace(",", " ").split() if name != "none"]


def _is_for(patterns: Iterable[str], domain: Domain) -> bool:
    return any(p == domain.uuid or fnmatchcase(domain.name, p) for p in patterns)


def _assignment(config: Config, named: Iterable[str], source: str) -> Assignment:
    names = list(dict.fromkeys(named))
    known = tuple(name for name in names if name in config.policy)
    return Assignment(known, source, tuple(name for name in names if name not in config.policy))
