"""Deliberate mistakes: every small change that somebody could make to a module without noticing."""

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
_NAMED = (ast.FunctionDef, ast.ClassDef)
_WORDS = (ast.JoinedStr, ast.Raise)
"""What is only said to people is looked at by its own tests."""


@dataclass(frozen=True)
class Mistake:
    """One change, by what it does rather than by its line, so that it is known again."""

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
        """By which a mistake is accepted."""
        again = f" ({self.number + 1})" if self.number else ""
        return f"{self.where}: {self.was} -> {self.now}{again}"


def mistakes(source: str) -> Iterator[Mistake]:
    """All of them, in order."""
    tree = ast.parse(source)
    seen: dict[tuple[str, str, str], int] = {}
    for place in list(_places(tree)):
        node = place.node
        for changed in _changes(node):
            was, now = _short(node), _short(changed)
            key = place.where, was, now
            number = seen[key] = seen.get(key, -1) + 1
            place.put(changed)
            made = ast.fix_missing_locations(copy.deepcopy(tree))
            place.put(node)
            lines = _lines(place.statement) if place.inside else range(0)
            yield Mistake(place.where, was, now, number, lines, made)


@dataclass(frozen=True)
class _Place:
    """Where a node is."""

    holder: ast.AST
    field: str
    index: int | None
    where: str
    statement: ast.stmt
    inside: bool
    """In a function's body; what is not is executed when the module is imported."""

    @property
    def node(self) -> ast.AST:
        value = getattr(self.holder, self.field)
        return value if self.index is None else value[self.index]

    def put(self, node: ast.AST) -> None:
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
            yield _Place(holder, field, index if many else None, title, about, deeper)
            if not isinstance(child, _WORDS):
                name = (child.name,) if isinstance(child, _NAMED) else ()
                yield from _below(child, (*where, *name), about, deeper)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.AST) -> Iterator[ast.AST]:  # noqa: C901, PLR0912 - a table
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
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value + 1)
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if not isinstance(test, (ast.Compare, ast.UnaryOp)):
                yield _with(node, test=ast.UnaryOp(ast.Not(), copy.deepcopy(test)))
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
        case ast.Call(func=ast.Name(id="all")):
            yield _with(node, func=ast.Name("any", ast.Load()))
        case ast.Call(func=ast.Name(id="any")):
            yield _with(node, func=ast.Name("all", ast.Load()))
        case ast.Call(func=ast.Name(id="min")):
            yield _with(node, func=ast.Name("max", ast.Load()))
        case ast.Call(func=ast.Name(id="max")):
            yield _with(node, func=ast.Name("min", ast.Load()))


def _is_none_or_false(value: ast.expr) -> bool:
    """None is as false as False, which is made True anyway."""
    return isinstance(value, ast.Constant) and (value.value is None or value.value is False)


def _with(node: ast.AST, **fields: object) -> ast.AST:
    made = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _short(node: ast.AST) -> str:
    """Its first line."""
    if isinstance(node, ast.comprehension):
        conditions = " ".join(f"if {ast.unparse(each)}" for each in node.ifs)
        return f"for {ast.unparse(node.target)} in … {conditions}".strip()
    return ast.unparse(node).splitlines()[0]


def _lines(statement: ast.stmt) -> range:
    """Of the statement itself, without those inside it."""
    body = getattr(statement, "body", None)
    end = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))
