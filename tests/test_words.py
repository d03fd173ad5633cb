"""Names and sentences are those of the field: no participles, no bare prepositions, no riddles."""

import ast
import re
from pathlib import Path

import pytest
from daily import read_cases, with_cases

ROOT = Path(__file__).parents[1]
FOLDERS = ("pipejax", "sweeps", "figures", "benchmarks", "pages", "tests")
WORDS = (
    "found own one each given told said known wanted kept taken left some every made drawn mine "
    "most behind beside meets lasts of"
)
NO_QUESTION = re.compile(r"(What|Whether|Which|Who|Whose|Of|How|Where|When)\b")


def is_banned(name):
    word = name.strip("_")
    return word in WORDS.split() or word.startswith("of_") or word.endswith("_of")


def names(node):
    """Names that a node of the syntax tree gives to something."""
    if isinstance(node, ast.Name | ast.Attribute):
        name = node.id if isinstance(node, ast.Name) else node.attr
        return [name] if isinstance(node.ctx, ast.Store) else []
    if isinstance(node, ast.arg):
        return [node.arg]
    is_named = isinstance(node, ast.FunctionDef | ast.ExceptHandler)
    return [node.name] if is_named and node.name else []


def is_text(node):
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def is_flag(node):
    """Return whether a factor of a text is a truth value: text * flag is a riddle, text * 3 is none."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    return isinstance(node, ast.Compare | ast.BoolOp) or (is_call and node.func.id == "bool")


def faults(tree):
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 1)
        yield from (f"{line}: {name} names nothing" for name in names(node) if is_banned(name))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if NO_QUESTION.match(first):
                yield f"{line}: a docstring begins with {first.split()[0]}"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            pair = node.left, node.right
            if any(map(is_text, pair)) and any(map(is_flag, pair)):
                yield f"{line}: text times a flag: write a conditional expression"
        if isinstance(node, ast.For) and isinstance(node.body[0], ast.Raise):
            yield f"{line}: a loop that raises at once: find the first, then raise"


@pytest.mark.parametrize("folder", FOLDERS)
def test_names_are_nouns_and_docstrings_are_sentences(folder):
    for path in sorted((ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        seen = list(faults(ast.parse(path.read_text())))
        assert seen == [], name


@with_cases("source", *read_cases("test_each_fault_is_seen"))
def test_each_fault_is_seen(source):
    assert list(faults(ast.parse(source)))
