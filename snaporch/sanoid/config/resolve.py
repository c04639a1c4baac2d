"""Resolves ``sanoid.conf`` as sanoid does: defaults, templates, own settings, recursion.

A port of ``init`` of sanoid 2.2.0 and 2.3.0; a contract test compares it with the original. (2.1
differs in settings given twice, of which it uses none.) 2.3 strips blanks from the ends of values,
and uses a list of datasets that may be 20 minutes old. The result for a dataset depends only on its
name and the sections' names, so the dataset may be newer than the configuration that was read.
Imports only the standard library, because the hooks use it.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from snaporch.errors import ConfigError
from snaporch.sanoid.config.hook_command import PATH
from snaporch.sanoid.config.ini import Ini, IniError, read_ini

CONFIG_DIR = Path("/etc/sanoid")
DEFAULTS = Path("/usr/share/sanoid/sanoid.defaults.conf")
"""The path in Debian's package; a sanoid from source reads the file beside ``sanoid.conf``."""
TYPES = ("yearly", "monthly", "weekly", "daily", "hourly", "frequently")

Recursive = Literal["no", "yes", "zfs"]

_TRUE = ("1", "true", "True", "TRUE", "yes", "Yes", "YES", "on", "On", "ON")
_FALSE = ("0", "false", "False", "FALSE", "no", "No", "NO", "off", "Off", "OFF")
_TOGGLES = (
    "autosnap",
    "autoprune",
    "monitor_dont_warn",
    "monitor_dont_crit",
    "monitor",
    "process_children_only",
    "skip_children",
    "no_inconsistent_snapshot",
    "force_post_snapshot_script",
)
_ZFS_RECURSION = "zfs_recursion"
_MINIMUM_VERSION = 2
_NUMBER = re.compile(r"\s*([+-]?\d+)", re.ASCII)
_RELEASE = re.compile(rb"^\$::VERSION = '(\d+)\.(\d+)", re.MULTILINE)
_RELEASE_BYTES = 4096
_TRIMMING = (2, 3)
_BLANKS = " \t\n\r\f\v"
_DATASETS = "datasets.txt"


class SanoidConfigError(ConfigError):
    """sanoid exits with an error on this configuration, or has none."""


def number(text: str) -> int:
    """The whole number that perl reads from a text."""
    match = _NUMBER.match(text)
    return int(match[1]) if match else 0


def release_of(program: Path | None) -> tuple[int, int]:
    """The release that a sanoid script states, as ``(2, 3)``; ``(0, 0)`` if unknown."""
    try:
        with open(program or "", "rb") as script:
            match = _RELEASE.search(script.read(_RELEASE_BYTES))
    except OSError:
        return 0, 0
    return (int(match[1]), int(match[2])) if match else (0, 0)


def installed_sanoid() -> Path | None:
    """The script of the installed sanoid; ``None`` if sanoid is not installed."""
    found = shutil.which("sanoid", path=PATH)
    return Path(found) if found else None


def truth(text: str | None) -> bool:
    """Whether perl treats the text as true."""
    return text not in (None, "", "0")


@dataclass(frozen=True, slots=True)
class Section:
    """The resolved settings of sanoid for one dataset."""

    name: str
    path: str
    """The dataset; with a ``path`` setting it differs from the name."""
    settings: Mapping[str, str]
    """From defaults, templates, a recursive parent and itself; toggles are ``0`` or ``1``."""
    recursive: Recursive
    """``zfs``: one call snapshots all below too. ``yes``: each dataset below has a section."""
    origin: str
    """The section of the file that it comes from: itself, or the recursive section above."""

    @property
    def autosnap(self) -> bool:
        """Whether the section takes snapshots."""
        return truth(self.settings.get("autosnap"))

    @property
    def process_children_only(self) -> bool:
        """Whether only the datasets below are snapshotted."""
        return truth(self.settings.get("process_children_only"))

    @property
    def takes_snapshots(self) -> bool:
        """Whether sanoid ever snapshots the dataset because of this section."""
        if self.name.startswith("template") or not self.autosnap or self.process_children_only:
            return False
        return any(number(self.settings.get(kind, "")) > 0 for kind in TYPES)

    @property
    def runs_hooks(self) -> bool:
        """Whether sanoid runs its snapshot hooks: it finds them by the name of the dataset."""
        return self.name == self.path

    @property
    def timeout(self) -> int:
        """Seconds after which sanoid is killed by its own alarm if a hook takes longer; 0 for none.

        sanoid compares texts (``$timeout gt 0``) and passes the number to ``alarm``.
        """
        text = self.settings.get("script_timeout", "")
        return max(number(text), 0) if text > "0" else 0


@dataclass(frozen=True)
class SanoidConfig:
    """sanoid's whole configuration, read by :func:`load_sanoid`."""

    sections: Mapping[str, Section]
    """By name: the sections of the file, and of each dataset that recursion reaches."""
    written: tuple[str, ...]
    """The names of the file's sections and templates, in the order of the file."""
    complaints: tuple[str, ...] = ()
    """Settings that sanoid ignores, or reads otherwise than they look."""
    _existing: tuple[str, ...] = ()
    """Existing datasets that have sections of their own; if no datasets are known, all sections."""
    _ini: Ini = field(default_factory=dict, repr=False)
    _defaults: Mapping[str, str] = field(default_factory=dict, repr=False)
    _release: tuple[int, int] = (0, 0)
    _listed: Collection[str] = ()

    def covering(self, dataset: str) -> Section | None:
        """The section that takes the dataset's snapshots, if any."""
        relevant = sorted({*self._existing, *_with_parents(dataset)})
        resolver = _Resolver(self._ini, self._defaults, self._release, self._listed)
        sections = resolver.resolve(relevant)
        found = [section for section in sections.values() if section.takes_snapshots]
        own = [section for section in found if section.path == dataset]
        if own:
            return min(own, key=lambda section: not section.runs_hooks)
        above = [s for s in found if s.recursive == "zfs" and dataset.startswith(f"{s.path}/")]
        return max(above, key=lambda s: (len(s.path), s.runs_hooks), default=None)


def _with_parents(dataset: str) -> list[str]:
    parts = dataset.split("/")
    return ["/".join(parts[: count + 1]) for count in range(len(parts))]


def load_sanoid(
    config_dir: Path = CONFIG_DIR,
    datasets: Iterable[str] = (),
    defaults: Path | None = None,
    program: Path | None = None,
    cache_dir: Path | None = None,
) -> SanoidConfig:
    """Read sanoid's configuration.

    Args:
        config_dir: sanoid's ``--configdir``.
        datasets: the existing datasets, for which recursive sections make sections. Without any,
            every dataset that has a section is assumed to exist.
        defaults: sanoid's ``sanoid.defaults.conf``; searched for by default.
        program: sanoid's script, for its release; by default the installed one.
        cache_dir: the directory of the running sanoid's list of datasets, which 2.3 uses. Without
            it, recursion reaches all existing datasets.

    Raises:
        SanoidConfigError: sanoid would exit with an error; its text has the reason.
    """
    if defaults is None:
        defaults = DEFAULTS if DEFAULTS.exists() else config_dir / DEFAULTS.name
    known = _read_defaults(defaults)
    path = config_dir / "sanoid.conf"
    ini = _read(path)
    for section, settings in ini.items():
        for key in settings:
            if key not in known:
                raise SanoidConfigError(
                    f"{path}: [{section}]",
                    f"{key} is no setting of this sanoid, which refuses to run",
                    "remove the line",
                )
    release = release_of(program or installed_sanoid())
    listed = _listed(cache_dir) if cache_dir and release >= _TRIMMING else frozenset()
    resolver = _Resolver(ini, known, release, listed)
    present = sorted(datasets)
    sections = resolver.resolve(present)
    existing = tuple(name for name in ini if not present or name in set(present))
    complaints = tuple(resolver.complaints)
    return SanoidConfig(sections, tuple(ini), complaints, existing, ini, known, release, listed)


def _listed(cache_dir: Path) -> frozenset[str]:
    """The datasets in the list of a running sanoid, however old the list is."""
    try:
        text = (cache_dir / _DATASETS).read_text("utf-8", "surrogateescape")
    except OSError:
        return frozenset()
    return frozenset(text.removesuffix("\n").split("\n"))


def _read(path: Path) -> Ini:
    try:
        return read_ini(path.read_bytes().decode("utf-8", "surrogateescape"))
    except OSError as error:
        raise SanoidConfigError(
            str(path), error.strerror or "cannot be read", "see sanoid(8)"
        ) from error
    except IniError as error:
        raise SanoidConfigError(str(path), f"{error}; sanoid refuses to run") from error


def _read_defaults(path: Path) -> dict[str, str]:
    ini = _read(path)
    versions = ini.get("version", {}).get("version") or ["1"]
    if number(versions[0]) < _MINIMUM_VERSION:
        raise SanoidConfigError(str(path), f"is of version {versions[0]}", "reinstall sanoid")
    settings = ini.get("template_default", {})
    return {key: "\n".join(values) for key, values in settings.items() if values}


class _Resolver:
    """sanoid's ``init``, with its names and its order."""

    def __init__(
        self,
        ini: Ini,
        defaults: Mapping[str, str],
        release: tuple[int, int],
        listed: Collection[str],
    ) -> None:
        self._ini = {name: dict(settings) for name, settings in ini.items()}
        self._defaults = defaults
        self._trims = release >= _TRIMMING
        self._listed = listed
        self._config: dict[str, dict[str, str]] = {}
        self._origin: dict[str, str] = {}
        self._recursive_yes: set[str] = set()
        self.complaints: list[str] = []

    def resolve(self, datasets: Iterable[str]) -> dict[str, Section]:
        """All sections that result if these datasets exist."""
        known = list(datasets)
        for name in self._ini:
            self._normalize(name)
            if not name.startswith("template_"):
                self._section(name)
                self._recurse(name, known)
        return {name: self._to_section(name) for name in self._config}

    def _to_section(self, name: str) -> Section:
        settings = self._config[name]
        by_section: Recursive = "yes" if name in self._recursive_yes else "no"
        zfs = settings.get(_ZFS_RECURSION) == "1"
        shown = {key: value for key, value in settings.items() if key != _ZFS_RECURSION}
        recursive: Recursive = "zfs" if zfs else by_section
        return Section(name, settings["path"], shown, recursive, self._origin[name])

    def _normalize(self, name: str) -> None:
        """sanoid does this section by section: too late for a template that is used before it."""
        for key, values in self._ini[name].items():
            if len(values) > 1:
                self.complaints.append(f"[{name}] sets {key} more than once: the first one counts")
                self._ini[name][key] = values[:1]
            if self._trims:
                self._ini[name][key] = [value.strip(_BLANKS) for value in self._ini[name][key]]

    def _value(self, name: str, key: str) -> str:
        return "\n".join(self._ini[name][key])

    def _section(self, name: str) -> None:
        if name in self._config:
            config = self._config[name]
        else:
            skipped = re.compile("template|recursive|children_only")
            kept = {k: v for k, v in self._defaults.items() if not skipped.search(k)}
            config = self._config[name] = kept
            self._apply(config, "template_default")
        for template in self._templates(name):
            self._apply(config, f"template_{template}", first=self._trims)
        own = re.compile("template|recursive|skip_children")
        config |= {key: self._value(name, key) for key in self._ini[name] if not own.search(key)}
        for toggle in _TOGGLES:
            if config.get(toggle) in _TRUE:
                config[toggle] = "1"
            if config.get(toggle) in _FALSE:
                config[toggle] = "0"
        config["path"] = self._value(name, "path") if self._ini[name].get("path") else name
        self._origin[name] = name
        if config.get(_ZFS_RECURSION) == "1" and number(config.get("autosnap", "")) == 1:
            self.complaints.append(f"[{name}] is part of a zfs recursion: its autosnap is ignored")
            config["autosnap"] = "0"

    def _templates(self, name: str) -> list[str]:
        if not self._ini[name].get("use_template"):
            return []
        listed = re.split(" *, *", self._value(name, "use_template"))
        names = [re.sub(r"\s+\Z", "", each) for each in listed]
        for each in names:
            if each and f"template_{each}" not in self._ini:
                self.complaints.append(f"[{name}] uses the template {each}, which does not exist")
        return names

    def _apply(self, config: dict[str, str], template: str, *, first: bool = False) -> None:
        for key, values in self._ini.get(template, {}).items():
            if re.search("template|recursive", key):
                complaint = f"[{template}] sets {key}, which sanoid ignores in a template"
                if complaint not in self.complaints:
                    self.complaints.append(complaint)
            else:
                config[key] = "\n".join(values[:1] if first else values)

    def _recurse(self, name: str, datasets: list[str]) -> None:
        def own(key: str) -> str:
            return self._value(name, key) if key in self._ini[name] else ""

        zfs = "zfs" in own("recursive").lower()
        recursive = own("recursive") in _TRUE
        skip = own("skip_children") in _TRUE
        config = self._config[name]
        if zfs:
            config[_ZFS_RECURSION] = "1"
        elif recursive and not skip:
            self._recursive_yes.add(name)
        if not (zfs or recursive or skip):
            return
        for dataset in self._children(config["path"], datasets):
            if skip and not zfs:
                self._config.pop(dataset, None)
            else:
                self._apply_to_child(name, dataset, zfs=zfs)

    def _apply_to_child(self, name: str, dataset: str, *, zfs: bool) -> None:
        if dataset in self._ini and dataset in self._config:
            self.complaints.append(
                f"[{dataset}] stands above [{name}], which overrides its settings"
            )
        kept = re.compile("template|recursive|children_only")
        given = {k: v for k, v in self._config[name].items() if not kept.search(k)}
        child = self._config.setdefault(dataset, {})
        child.update(given, path=dataset)
        if zfs:
            child["autosnap"] = "0"
        self._origin[dataset] = name

    def _children(self, path: str, datasets: list[str]) -> list[str]:
        """The datasets that sanoid finds below a path.

        sanoid takes them from its list if that has the path; otherwise from ``zfs list -r`` through
        a shell, in which a name with a blank is two names.
        """
        if path in self._listed:
            known = self._listed
            return [each for each in datasets if each in known and each.startswith(f"{path}/")]
        if path == "":
            return datasets[1:]
        if re.search(r"\s", path):
            return []
        return [dataset for dataset in datasets if dataset.startswith(f"{path}/")]


def hook_settings(config: SanoidConfig, section: Section) -> Mapping[str, str] | None:
    """The settings in which sanoid looks for hooks: the section with the dataset's name."""
    if section.runs_hooks:
        return section.settings
    named = config.sections.get(section.path)
    return named.settings if named else None
