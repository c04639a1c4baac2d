"""What the pages promise has a test: ``tests/promises.toml`` says which."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]
TABLE = tomllib.loads((TOP / "tests/promises.toml").read_text("utf-8"))
PROMISES = TABLE["promise"]


def words(text):
    """Without the breaks of its lines."""
    return " ".join(text.split())


@cache
def names_in(path):
    """The names of the tests in a module."""
    tree = ast.parse((TOP / path).read_text("utf-8"))
    return {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


def name_of(promise):
    return f"{promise['page']}: {words(promise['says'])[:60]}"


@pytest.mark.parametrize("promise", PROMISES, ids=name_of)
def test_a_promise_is_on_its_page_and_has_a_test(promise):
    page = (TOP / promise["page"]).read_text("utf-8")
    assert words(promise["says"]) in words(page), "the page says something else by now"
    assert promise["tests"]
    for test in promise["tests"]:
        module, _, name = test.partition("::")
        assert name.startswith("test_")
        assert name in names_in(module), f"there is no {test}"


def test_all_that_readme_promises_has_a_test():
    readme = (TOP / "README.md").read_text("utf-8")
    section = re.search(r"^## What it promises\n(.*?)^## ", readme, re.MULTILINE | re.DOTALL)
    left = words(section[1])
    for promise in PROMISES:
        if promise["page"] == "README.md":
            left = left.replace(words(promise["says"]), "")
    left = re.sub(r"\*\*[^*]*\*\*:?|\(\[[^]]*\]\([^)]*\)\)", "", left)  # headings, and links alone
    assert set(left) <= set(" -."), f"promised, and without a test: {left}"


def test_a_page_has_a_promise_or_a_reason_to_have_none():
    pages = {str(path.relative_to(TOP)) for path in (TOP / "docs").glob("*/*.md")} - {
        "docs/benchmarks/README.md",
        "docs/benchmarks/native.md",
        "docs/benchmarks/ram-difference.md",
        "docs/benchmarks/storage.md",
    }
    assert pages - {promise["page"] for promise in PROMISES} == set(TABLE["without"])
    assert all(TABLE["without"].values())


def test_a_promise_is_made_once():
    made = [(promise["page"], words(promise["says"])) for promise in PROMISES]
    assert len(made) == len(set(made))
