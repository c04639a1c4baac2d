"""Tables of what users and admins name, and of the modules that have it."""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator

from sources import (
    TOP,
    attributes,
    called,
    calls,
    classes,
    described,
    listed,
    modules,
    nodes,
    origins,
    said,
    text_of,
    users,
)

_SECTIONS = {
    *("copies", "defaults", "domain", "group", "metrics", "notify", "paths", "policy", "prune"),
    *("ram_pages", "replica", "schedule", "source", "status"),
}
_PLACE = re.compile(r"/(?:boot|dev|etc|proc|run|sys|usr|var)/\S+")
_UNIT = re.compile(r"snaporch[\w.-]*\.(?:service|timer|slice|scope)")
_VARIABLE = re.compile(r"(?:SNAPORCH|SANOID|RESTIC|NOTIFY|WATCHDOG|XDG|JOURNAL)_[A-Z_]+")
_PROGRAM = re.compile(r"[a-z][a-z0-9.+-]+")


def tables() -> Iterator[str]:
    """All tables, each below its heading."""
    for title, rows in TABLES.items():
        yield f"### {title}\n"
        yield "\n".join(f"- {row}" for row in rows() if row) + "\n"


def commands() -> Iterator[str]:
    """Each command with the modules that its own imports, and each of its options."""
    main = modules()["cli/main.py"]
    named = [(node.func.args[0], node.args[0]) for node in ast.walk(main) if _names(node)]
    for name, function in named:
        path = origins("cli/main.py")[function.id]
        yield from _command(text_of(name), function.id, path)
    yield from _command("render sanoid", "render_sanoid_command", "cli/render.py")


def _names(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and called(node.func) == "command"


def _command(name: str, function: str, path: str) -> Iterator[str]:
    tree = modules()[path]
    does = set(origins(path).values()) - {"errors.py", "model.py", "context.py"}
    uses = sorted(each for each in does if not each.startswith("cli/"))
    node = next(each for each in tree.body if getattr(each, "name", "") == function)
    about = said(node) or said(tree)
    yield f"`snaporch {name}`: {about} (`{path}`" + (f"; uses {listed(uses)})" if uses else ")")
    for parameter in [*node.args.args, *node.args.kwonlyargs]:
        for flags, help_text in _options(parameter.annotation):
            yield f"`snaporch {name}` `{flags}`: {help_text} (`{path}`)"


def shared_options() -> Iterator[str]:
    """Options that several commands have."""
    path = "cli/options.py"
    for node in modules()[path].body:
        if isinstance(node, ast.Assign):
            for flags, help_text in _options(node.value):
                of = listed(users()[f"snaporch.{path[:-3].replace('/', '.')}", node.targets[0].id])
                yield f"`{flags}`: {help_text} (`{path}`; of {of})"


def _options(node: ast.AST | None) -> Iterator[tuple[str, str]]:
    for each in ast.walk(node) if node else ():
        if called(each) == "Option":
            flags = ", ".join(text for text in map(text_of, each.args) if text.startswith("-"))
            helps = [text_of(word.value) for word in each.keywords if word.arg == "help"]
            yield flags, (helps or [""])[0]


def _assigned(path: str, name: str) -> ast.AST | None:
    for node in modules()[path].body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name:
            return node.value
    return None


def options() -> Iterator[str]:
    """Each option of the configuration: its description, its class, and who reads it."""
    models = {node.name: (path, node) for path, node in classes() if path.startswith("config/")}
    fields = {name: list(_fields(models, name)) for name in models}
    owners = _owners()
    for element in ast.walk(_assigned_annotated("config/reference.py", "_SECTIONS")):
        if not isinstance(element, ast.Tuple) or not text_of(element.elts[0]):
            continue
        section = re.findall(r"\[([^]]+)\]", text_of(element.elts[0])) or [""]
        model = element.elts[1].id
        words = {model.lower(), *re.findall(r"[a-z_]+", " ".join(section)), "settings"}
        for name, place, about in fields[model]:
            if section == [""] and name in _SECTIONS:
                continue
            unique = owners[name] <= {place}
            shown = ", ".join(f"`{f'{each}.' if each else ''}{name}`" for each in section)
            readers = _readers(name, None if unique else words)
            yield f"{shown}: {about} (`{place}`" + (
                f"; read by {listed(readers)})" if readers else ")"
            )


def _fields(
    models: dict[str, tuple[str, ast.ClassDef]], name: str
) -> Iterator[tuple[str, str, str]]:
    if name not in models:
        return
    path, node = models[name]
    for base in node.bases:
        yield from _fields(models, getattr(base, "id", ""))
    for field in node.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            texts = [
                text_of(word.value)
                for each in ast.walk(field)
                if called(each) == "Field"
                for word in each.keywords
                if word.arg == "description"
            ]
            if texts and texts[0]:
                yield field.target.id, path, texts[0]


def _owners() -> dict[str, set[str]]:
    """The modules that define a field or method of each name."""
    found: dict[str, set[str]] = defaultdict(set)
    for path, node in classes():
        for each in node.body:
            found[getattr(getattr(each, "target", each), "id", getattr(each, "name", ""))].add(path)
    return found


def _readers(name: str, words: set[str] | None) -> list[str]:
    """The modules that read an attribute: of anything, or of what has one of the names."""
    found = [path for path, of in attributes()[name].items() if words is None or of & words]
    return [path for path in found if not path.startswith("config/")]


def _assigned_annotated(path: str, name: str) -> ast.AST:
    return next(
        node.value
        for node in modules()[path].body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == name
    )


def exit_codes() -> Iterator[str]:
    """Each exit code, with the errors that have it and the modules that raise them."""
    places = {node.name: (path, node) for path, node in classes()}
    codes = {each.targets[0].id: each.value.value for each in places["ExitCode"][1].body[1:]}
    for code, number in codes.items():
        yield f"`{number}` ({code}): set by {listed(_naming('ExitCode', code))}"
        for name, (path, node) in places.items():
            if _code(places, name) == code:
                where = f"; raised by {listed(calls()[name])}" if calls()[name] else ""
                yield f"`{number}`: `{name}`: {said(node)} (`{path}`{where})"


def _naming(of: str, name: str) -> list[str]:
    return [path for path, owners in attributes()[name].items() if of.lower() in owners]


def _called_of(node: ast.Attribute) -> str:
    return getattr(node.value, "id", getattr(node.value, "attr", ""))


def _code(places: dict[str, tuple[str, ast.ClassDef]], name: str) -> str | None:
    if name not in places:
        return None
    node = places[name][1]
    for each in node.body:
        target = getattr(each, "target", getattr(each, "targets", [None])[0])
        if getattr(target, "id", "") == "exit_code":
            return each.value.attr
    codes = (_code(places, getattr(base, "id", "")) for base in node.bases)
    return next((code for code in codes if code), None)


def problems() -> Iterator[str]:
    """The codes of problems in ``status``, and the texts that go with them."""
    path = "status/problems.py"
    for function in modules()[path].body:
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if called(node) == "Problem" and node.args:
                    text = text_of(node.args[3]) if len(node.args) > 3 else ""
                    shown = f": {text}" if text else ""
                    yield f"`{text_of(node.args[0]) or '…'}`{shown} (`{function.name}` in `{path}`)"


def findings() -> Iterator[str]:
    """The codes of findings of ``check``: the public functions of the rules."""
    for path, tree in modules().items():
        if path.startswith("check/rules/"):
            for node in tree.body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    yield f"`{node.name.replace('_', '-')}`: {said(node)} (`{path}`)"


def metrics() -> Iterator[str]:
    """Each metric, and the function that makes it."""
    path = "status/metrics.py"
    for function in modules()[path].body:
        for node in ast.walk(function):
            if called(node) in {"_one", "_many"} and text_of(node.args[0]):
                name, about = map(text_of, node.args[:2])
                yield f"`snaporch_{name}`: {about} (`{function.name}` in `{path}`)"


def properties() -> Iterator[str]:
    """Each property of snaporch, with the modules that name it or import its constant."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    constants = _property_constants()
    names = {constant: name for constant, (name, _) in constants.items()}
    for path in modules():
        for node in nodes(path):
            name = _property(node) or _property_read(node) or names.get(getattr(node, "id", ""))
            if name:
                found[name][path] = None
    for each in map(text_of, ast.walk(_assigned("zfs/cli.py", "PROPERTIES"))):
        found[each]["zfs/cli.py"] = None
    about = dict(constants.values())
    for name, paths in sorted(found.items()):
        if re.fullmatch(r"[a-z-]+", name):
            text = f": {about[name]}" if about.get(name) else ""
            yield f"`snaporch:{name}`{text} ({listed(sorted(paths))})"


def _property_constants() -> dict[str, tuple[str, str]]:
    """The constants that are names of properties: the name, and its description."""
    found = {}
    for tree in modules().values():
        for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(node, ast.Assign) and (name := _property(node.value)):
                found[node.targets[0].id] = name, described(after)
    return found


def _property_read(node: ast.AST) -> str:
    """The key in ``properties["key"]`` or ``properties.get("key")``."""
    if isinstance(node, ast.Subscript) and _called_of(node) == "properties":
        return text_of(node.slice)
    is_read = called(node) == "get" and _called_of(node.func) == "properties"
    return text_of(node.args[0]) if is_read else ""


def _property(node: ast.AST) -> str:
    """The name after the prefix, of ``f"{PREFIX}name"`` or ``PREFIX + "name"``."""
    if isinstance(node, ast.JoinedStr) and len(node.values) == 2:
        first = getattr(node.values[0], "value", None)
        return text_of(node.values[1]) if getattr(first, "id", "") == "PREFIX" else ""
    if isinstance(node, ast.BinOp) and getattr(node.left, "id", "") == "PREFIX":
        return text_of(node.right) or _value_of(getattr(node.right, "id", ""))
    return ""


def _value_of(name: str) -> str:
    return next((text for path in modules() if (text := text_of(_assigned(path, name)))), "")


def units() -> Iterator[str]:
    """The units of systemd: those of templates, and those that are started by a run."""
    named = _strings(_UNIT)
    for path in sorted((TOP / "templates").glob("snaporch*.j2")):
        name = path.stem
        about = re.search(r"^Description=(.*)", path.read_text("utf-8"), re.MULTILINE)
        others = [each for each in named.get(name, ()) if each != "install_files.py"]
        used = f"; named by {listed(others)}" if others else ""
        yield f"`{name}`: {about[1] if about else ''} (`templates/{path.name}`{used})"
    for path in modules():
        for node in nodes(path):
            started = node.args[0] if called(node).endswith("start_detached") else node
            text = text_of(started)
            if started is not node or re.fullmatch(r"snaporch-\S*…\S*\.scope", text):
                yield f"`{text}`: started by a process (`{path}`)" if text else ""


def places() -> Iterator[str]:
    """Files and directories of the host that the code names."""
    yield from (f"`{name}` ({listed(paths)})" for name, paths in sorted(_strings(_PLACE).items()))


def variables() -> Iterator[str]:
    """Variables of the environment."""
    found = _strings(_VARIABLE)
    yield from (f"`{name}` ({listed(paths)})" for name, paths in sorted(found.items()))


def programs() -> Iterator[str]:
    """Other programs with their first argument."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for path in modules():
        for node in nodes(path):
            words = _words(node)
            if len(words) > 1 and words[0] in _PROGRAMS:
                shown = next((each for each in words[1:] if not each.startswith("-")), "")
                found[f"{words[0]} {shown}".strip()][path] = None
    yield from (f"`{name}` ({listed(paths)})" for name, paths in sorted(found.items()))


_PROGRAMS = {
    *("age", "busctl", "find", "ionice", "mount", "qemu-img", "restic", "rsync", "sendmail", "ssh"),
    *("swtpm", "systemctl", "systemd-run", "udevadm", "umount", "virsh", "zfs", "zpool", "zstd"),
}


def _words(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Call):
        return [text_of(each) for each in node.args]
    return [text_of(each) for each in node.elts] if isinstance(node, ast.List | ast.Tuple) else []


def _strings(pattern: re.Pattern[str]) -> dict[str, dict[str, None]]:
    """Whole strings of the code that have a form, with their modules."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for path in modules():
        for node in nodes(path):
            text = text_of(node)
            if text and pattern.fullmatch(text):
                found[text][path] = None
    return found


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "Options of snaporch.toml, and who reads them": options,
    "Commands and their options": commands,
    "Options of several commands": shared_options,
    "Exit codes and errors": exit_codes,
    "Problems in status": problems,
    "Findings of check": findings,
    "Metrics": metrics,
    "Properties of ZFS": properties,
    "Units of systemd": units,
    "Files of the host": places,
    "Variables of the environment": variables,
    "Other programs, run or named in a message": programs,
}
