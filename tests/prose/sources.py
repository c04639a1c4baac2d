"""The code as the index reads it: parsed modules, the texts in them, and who imports what."""

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
CODE = TOP / "snaporch"
ROLE = re.compile(r":(?:\w+:)?\w+:`~?([^`]*)`")


@cache
def modules() -> dict[str, ast.Module]:
    """All modules by their path below ``snaporch/``."""
    paths = sorted(CODE.rglob("*.py"))
    return {str(path.relative_to(CODE)): ast.parse(path.read_text("utf-8")) for path in paths}


def dotted(path: str) -> str:
    """The name of a module, of its path."""
    return f"snaporch.{path.removesuffix('.py').replace('/', '.').removesuffix('.__init__')}"


def path_of(name: str) -> str | None:
    """The path of a module, of its name; ``None`` for one of other programs."""
    below = name.removeprefix("snaporch.").replace(".", "/")
    return next(
        (each for each in (f"{below}.py", f"{below}/__init__.py") if each in modules()), None
    )


@cache
def users() -> dict[tuple[str, str], dict[str, None]]:
    """The modules that import each name, by the name of the module that it is imported of."""
    found: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for path in modules():
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom):
                for each in node.names:
                    found[str(node.module), each.name][path] = None
    return found


@cache
def origins(path: str) -> dict[str, str]:
    """The module that each imported name is defined in; packages that pass one on are resolved."""
    found = {}
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("snaporch"):
            for each in node.names:
                if home := _home(str(node.module), each.name):
                    found[each.asname or each.name] = home
    return found


def _home(module: str, name: str) -> str | None:
    path = path_of(f"{module}.{name}") or path_of(module)
    if path and path.endswith("__init__.py"):
        return origins(path).get(name, path)
    return path


def text_of(node: ast.AST | None) -> str:
    """A string of the code on one line, ``…`` for what is filled in; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = [str(each.value) if isinstance(each, ast.Constant) else "…" for each in node.values]
        return " ".join("".join(parts).split())
    return ""


def called(node: ast.AST) -> str:
    """The name of the function that is called, without what it belongs to."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "id", getattr(node.func, "attr", ""))


@cache
def nodes(path: str) -> list[ast.AST]:
    """All nodes of a module."""
    return list(ast.walk(modules()[path]))


@cache
def calls() -> dict[str, dict[str, None]]:
    """The modules that call each function or class, by its name."""
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for path in modules():
        for node in nodes(path):
            if name := called(node):
                found[name][path] = None
    return found


@cache
def attributes() -> dict[str, dict[str, set[str]]]:
    """By attribute: by module, the names of what it is read of."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for path in modules():
        for node in nodes(path):
            if isinstance(node, ast.Attribute):
                of = node.value.func if isinstance(node.value, ast.Call) else node.value
                owner = getattr(of, "attr", getattr(of, "id", ""))
                found[node.attr][path].add(owner.strip("_").lower())
    return found


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """All classes, with the paths of their modules."""
    return [
        (path, node)
        for path, tree in modules().items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    ]


def said(node: ast.ClassDef | ast.FunctionDef | ast.Module) -> str:
    """The first paragraph of a docstring."""
    return plain((ast.get_docstring(node) or "").split("\n\n")[0])


def described(node: ast.stmt | None) -> str:
    """The description below a constant or a field; empty if there is none."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return plain(str(node.value.value).split("\n\n")[0])
    return ""


def plain(text: str) -> str:
    """Markdown of a docstring: roles and literals as code; a table stays in its code."""
    text = ROLE.sub(lambda match: f"`{match[1].removeprefix('snaporch.')}`", text)
    text = text.partition("\n=====")[0].replace("``", "`")
    return text.strip() if "\n\n" in text else " ".join(text.split())


def listed(paths: dict[str, None] | set[str] | list[str]) -> str:
    """Paths as code, with commas."""
    return ", ".join(f"`{each}`" for each in paths)
