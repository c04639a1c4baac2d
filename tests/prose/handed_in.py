"""Who implements an interface or a function that is handed in, and who uses it.

A call by way of ``Context`` or of a protocol imports nothing, so that imports do not show it.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from sources import (
    attributes,
    called,
    classes,
    described,
    dotted,
    listed,
    modules,
    nodes,
    origins,
    users,
)

MOST_USERS = 15
"""A field with more is used everywhere, so that the list leads nowhere."""


def implementations(path: str, node: ast.ClassDef) -> str:
    """For a protocol: the classes that have all its methods, and the modules that import it."""
    if not any("Protocol" in ast.unparse(base) for base in node.bases):
        return ""
    methods = {each.name: _parameters(each) for each in node.body if _is_method(each)}
    made = {
        f"{place}:{other.name}"
        for place, other in classes()
        if other is not node
        and not any("Protocol" in ast.unparse(base) for base in other.bases)
        and (_inherits(other, node.name) or _has(other, methods))
    }
    used = users().get((dotted(path), node.name), {})
    package = users().get((dotted(path).rpartition(".")[0], node.name), {})
    both = [each for each in dict.fromkeys([*used, *package]) if not each.endswith("__init__.py")]
    texts = [
        f"implemented by {', '.join(_shown(each) for each in sorted(made))}" if made else "",
        f"used by {listed(sorted(both))}" if both else "",
    ]
    shown = "; ".join(text for text in texts if text)
    return f" ({shown})" if shown else ""


def _shown(made: str) -> str:
    place, _, name = made.partition(":")
    return f"`{name}` in `{place}`"


def _inherits(node: ast.ClassDef, name: str) -> bool:
    return any(ast.unparse(base).partition("[")[0] == name for base in node.bases)


def _is_method(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and not node.name.startswith("__")


def _parameters(node: ast.FunctionDef) -> list[str]:
    return [each.arg for each in [*node.args.args, *node.args.kwonlyargs]]


def _has(node: ast.ClassDef, methods: dict[str, list[str]]) -> bool:
    """Whether a class has all methods with the same parameters; one method may be so by chance."""
    return len(methods) > 1 and methods.items() <= _methods(node).items()


def _methods(node: ast.ClassDef) -> dict[str, list[str]]:
    bases = {base.id for base in node.bases if isinstance(base, ast.Name)} - {node.name}
    found = {}
    for _, other in classes():
        if other.name in bases:
            found |= _methods(other)
    return found | {each.name: _parameters(each) for each in node.body if _is_method(each)}


def fields(path: str, node: ast.ClassDef) -> Iterator[str]:
    """For a class of functions that are handed in: each field, who implements and who uses it."""
    own = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    functions = [each for each in own if "Callable" in ast.unparse(each.annotation)]
    if node.name.startswith("_") or not any(each.value for each in functions):
        return
    after = dict(zip(node.body, [*node.body[1:], None], strict=True))
    for field in own:
        name = field.target.id
        made, used = _made(path, field), _used(path, node.name, name)
        if made and len(used) <= MOST_USERS:
            about = f": {described(after[field])}" if described(after[field]) else ""
            where = f"; used in {listed(used)}" if used else ""
            yield f"`{node.name}.{name}`{about} (implemented in {listed(made)}{where})"


def _made(path: str, field: ast.AnnAssign) -> list[str]:
    """The module of the default; for a default that does nothing, those that hand one in."""
    value = field.value
    if called(value) == "field":
        value = next((each.value for each in value.keywords if each.arg == "default_factory"), None)
    name = getattr(value, "id", "")
    if name and name != "dict":
        return [origins(path).get(name, path)]
    is_function = isinstance(value, ast.Lambda | ast.Name)
    return [each for each in _handed_in().get(field.target.id, ()) if is_function and each != path]


@cache
def _handed_in() -> dict[str, dict[str, None]]:
    found: dict[str, dict[str, None]] = defaultdict(dict)
    for path in modules():
        for node in nodes(path):
            if isinstance(node, ast.keyword) and node.arg:
                found[node.arg][path] = None
    return found


def _used(path: str, owner: str, name: str) -> list[str]:
    """The modules that read a field of what is named as its class."""
    whole = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", owner).lower()
    package = path.rpartition("/")[0]
    found = []
    for each, of in attributes()[name].items():
        is_known = each in attributes()[whole] or (package and each.startswith(f"{package}/"))
        near = is_known and whole.rpartition("_")[2] in of
        if each != path and (near or whole in of or (whole == "context" and "opened" in of)):
            found.append(each)
    return found
