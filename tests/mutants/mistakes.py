"""Deliberate mistakes: every small change of a module that its author could make by accident."""

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_SUMS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
_TURNED = {"all": "any", "any": "all", "min": "max", "max": "min"}
_NAMED = (ast.FunctionDef, ast.ClassDef)
_WORDS = (ast.JoinedStr, ast.Raise)
"""What is only said to people is looked at by its own tests."""


@dataclass(frozen=True)
class Mistake:
    """One change, identified by what it does rather than by its line."""

    where: str
    """The function, with its class."""
    was: str
    now: str
    number: int
    """Among those of this function that read the same."""
    lines: range
    """Of the statement; empty for what is executed when the module is imported."""
    tree: ast.Module
    is_control: bool = False
    """Nothing is changed at all: all tests have to pass."""

    @property
    def title(self) -> str:
        """The key of the mistake in ``accepted.toml``."""
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.where}: {self.was} -> {self.now}{again}"


def mistakes(source: str) -> Iterator[Mistake]:
    """All mistakes of a module, in order."""
    tree = ast.parse(source)
    seen: dict[tuple[str, str, str], int] = {}
    for place in list(_places(tree)):
        node = place.node
        for changed in _changes(node):
            was, now = _short(node), _short(changed)
            if hasattr(changed, "left_out"):
                was, now = _short(changed.left_out), "left out"
            key = place.where, was, now
            number = seen[key] = seen.get(key, -1) + 1
            place.put(changed)
            made = ast.fix_missing_locations(copy.deepcopy(tree))
            place.put(node)
            lines = _lines(place.statement) if place.inside else range(0)
            yield Mistake(place.where, was, now, number, lines, made)


@dataclass(frozen=True)
class _Place:
    """The place of a node in its parent."""

    holder: ast.AST
    field: str
    index: int | slice | None
    where: str
    statement: ast.stmt
    inside: bool
    """In a function's body; what is not is executed when the module is imported."""

    @property
    def node(self) -> ast.AST | list[ast.stmt]:
        """The node there, or two statements if ``index`` is a slice."""
        value = getattr(self.holder, self.field)
        return value if self.index is None else value[self.index]

    def put(self, node: ast.AST | list[ast.stmt]) -> None:
        if self.index is None:
            setattr(self.holder, self.field, node)
        else:
            getattr(self.holder, self.field)[self.index] = node


def _places(tree: ast.Module) -> Iterator[_Place]:
    """Every node that may be changed."""
    for statement in tree.body:
        named = isinstance(statement, _NAMED)
        if named or isinstance(statement, (ast.Assign, ast.AnnAssign)):
            yield from _below(statement, (statement.name,) if named else (), statement, False)


def _below(
    holder: ast.AST, where: tuple[str, ...], statement: ast.stmt, inside: bool
) -> Iterator[_Place]:
    for field, value in ast.iter_fields(holder):
        if field in ("annotation", "returns", "decorator_list", "bases"):
            continue
        many = isinstance(value, list)
        deeper = inside or (isinstance(holder, ast.FunctionDef) and field == "body")
        for index, child in enumerate(value if many else [value]):
            if not isinstance(child, ast.AST) or _is_docstring(child):
                continue
            about = child if isinstance(child, ast.stmt) else statement
            title = ".".join(where) or "module"
            if not _is_no_choice(holder, child):
                yield _Place(holder, field, index if many else None, title, about, deeper)
            if many and index and _is_act(child) and _is_act(value[index - 1]):
                both = slice(index - 1, index + 1)
                yield _Place(holder, field, both, title, value[index - 1], deeper)
            if not isinstance(child, _WORDS):
                name = (child.name,) if isinstance(child, _NAMED) else ()
                yield from _below(child, (*where, *name), about, deeper)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_no_choice(holder: ast.AST, child: ast.AST) -> bool:
    """A mistake in it shows nothing new: an element that is also left out, or an unpacked tuple."""
    if isinstance(child, ast.Tuple):
        to_names = isinstance(holder, ast.Assign) and isinstance(holder.targets[0], ast.Tuple)
        return to_names or isinstance(holder, (ast.Return, ast.Subscript))
    match holder, child:
        case ast.Assign(targets=[ast.Name(id=name)]), ast.Constant(value=str(value)):
            return value == name.lower()  # the name of a member of an enumeration
    is_element = isinstance(holder, (ast.Tuple, ast.List, ast.Set))
    return is_element and isinstance(child, ast.Constant) and isinstance(child.value, str)


def _is_act(node: object) -> bool:
    """A call whose result is not used: two such statements can be written in either order."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _changes(node: ast.AST | list[ast.stmt]) -> Iterator[ast.AST | list[ast.stmt]]:
    """The other code that an author could have written by mistake."""
    match node:
        case [first, second]:
            yield [second, first]
        case ast.Call():
            yield from _changes_of_call(node)
        case ast.Constant():
            yield from _changes_of_constant(node)
        case ast.expr():
            yield from _changes_of_expression(node)
        case _:
            yield from _changes_of_statement(node)


def _changes_of_call(node: ast.Call) -> Iterator[ast.AST]:
    yield from _without_each(node, "keywords")
    match node.func:
        case ast.Name(id="suppress") | ast.Attribute(attr="suppress"):
            yield from _without_each(node, "args")
        case ast.Name(id=name) if name in _TURNED:
            yield _with(node, func=ast.Name(_TURNED[name], ast.Load()))


def _changes_of_constant(node: ast.Constant) -> Iterator[ast.AST]:
    match node.value:
        case bool(value):
            yield ast.Constant(not value)
        case int(value):
            yield ast.Constant(value + 1)
        case str(value) if value and not set(value) & set(" {"):  # other strings are messages
            yield ast.Constant(f"{value}~")


def _changes_of_expression(node: ast.expr) -> Iterator[ast.AST]:  # noqa: C901 - a table
    match node:
        case ast.Compare(ops=[operator]):
            if kind := _COMPARISONS.get(type(operator)):
                yield _with(node, ops=[kind()])
        case ast.BoolOp(values=values):
            for left_out in range(len(values)):
                rest = values[:left_out] + values[left_out + 1 :]
                yield _with(node, values=rest) if len(rest) > 1 else copy.deepcopy(rest[0])
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield _with(node, op=other)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield copy.deepcopy(operand)
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield copy.deepcopy(operand)
        case ast.BinOp(op=operator):
            if kind := _SUMS.get(type(operator)):
                yield _with(node, op=kind())
        case ast.IfExp(test=test):
            yield from _turned(node, test)
        case ast.Set(elts=values) | ast.List(elts=values) if len(values) > 1:
            yield from _without_each(node, "elts")
        case ast.Tuple(elts=values, ctx=ast.Load()) if len(values) > 1:
            yield from _without_each(node, "elts")


def _changes_of_statement(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.If(test=test) | ast.While(test=test):
            yield from _turned(node, test)
        case ast.comprehension(ifs=ifs) if ifs:
            yield _with(node, ifs=[])
        case ast.Return(value=value) if value is not None and not _is_none_or_false(value):
            yield ast.Return(ast.Constant(None))
        case ast.Raise() | ast.Expr(value=ast.Call() | ast.Yield() | ast.YieldFrom()):
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
        case ast.ExceptHandler(type=ast.Name()):
            yield _with(node, type=ast.Tuple([], ast.Load()))


def _turned(node: ast.AST, test: ast.expr) -> Iterator[ast.AST]:
    """The negated test; comparisons and negations are changed at their own nodes."""
    if not isinstance(test, (ast.Compare, ast.UnaryOp)):
        yield _with(node, test=ast.UnaryOp(ast.Not(), copy.deepcopy(test)))


def _without_each(node: ast.AST, field: str) -> Iterator[ast.AST]:
    """Copies of the node, each without one value of the field; ``**more`` is never left out."""
    values = getattr(node, field)
    for each in values:
        if not (isinstance(each, ast.keyword) and each.arg is None):
            made = _with(node, **{field: [other for other in values if other is not each]})
            made.left_out = each  # type: ignore[attr-defined]
            yield made


def _is_none_or_false(value: ast.expr) -> bool:
    """Whether it is None or False: they are equivalent, and False is changed to True elsewhere."""
    return isinstance(value, ast.Constant) and (value.value is None or value.value is False)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    made = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _short(node: ast.AST | list[ast.stmt]) -> str:
    """Its first line, or the first lines of two statements."""
    if isinstance(node, list):
        return "; ".join(_short(each) for each in node)
    if isinstance(node, ast.comprehension):
        conditions = " ".join(f"if {ast.unparse(each)}" for each in node.ifs)
        return f"for {ast.unparse(node.target)} in … {conditions}".strip()
    return ast.unparse(node).splitlines()[0]


def _lines(statement: ast.stmt) -> range:
    """The lines of the statement itself, without nested statements."""
    body = getattr(statement, "body", None)
    end = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))
