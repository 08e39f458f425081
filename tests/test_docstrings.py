"""Every public function, class and method says what it is for, and arguments have types."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.drawing import spine

pytestmark = spine
PACKAGES = ("hybrid_jax", "pallas_kernels")
LEAST_ANNOTATED = 0.95
Function = ast.FunctionDef | ast.AsyncFunctionDef


def files_of(root: Path, package: str) -> list[Path]:
    return sorted((root / package).rglob("*.py"))


def public(body: list[ast.stmt], owner: tuple[str, ...] = ()) -> Iterator[tuple[tuple, ast.AST]]:
    """Names, as in a.B.c, and nodes of what a module's or class's body defines without an underscore in front."""
    for node in body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield (*owner, node.name), node
            if isinstance(node, ast.ClassDef):
                yield from public(node.body, (*owner, node.name))


def inherited(root: Path, file: Path, name: tuple[str, ...]) -> bool:
    """A base class has a docstring for a method of this name."""
    module = importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))
    found: object = module
    for part in name[:-1]:
        found = getattr(found, part)
    bases = found.__mro__[1:] if isinstance(found, type) else ()
    said = (vars(base)[name[-1]] for base in bases if name[-1] in vars(base))
    return any(getattr(method, "__doc__", None) for method in said)


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_public_has_a_docstring(root, package):
    without = []
    for file in files_of(root, package):
        tree = ast.parse(file.read_text())
        assert ast.get_docstring(tree) or file.name == "__main__.py", f"{file} says nothing"
        for name, node in public(tree.body):
            if any(ast.unparse(mark) == "overload" for mark in getattr(node, "decorator_list", ())):
                continue  # the function itself has it
            if not ast.get_docstring(node) and not inherited(root, file, name):
                without.append(f"{file.relative_to(root)}:{node.lineno} {'.'.join(name)}")
    assert not without, "\n".join(without)


@pytest.mark.parametrize("package", PACKAGES)
def test_arguments_are_annotated(root, package):
    total, bare = 0, []
    for file in files_of(root, package):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, Function):
                continue
            args = node.args
            named = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
            for arg in named:
                if arg is None or arg.arg in ("self", "cls"):
                    continue
                total += 1
                if arg.annotation is None:
                    bare.append(f"{file.relative_to(root)}:{node.lineno} {node.name}({arg.arg})")
    assert len(bare) <= (1 - LEAST_ANNOTATED) * total, "\n".join(bare)
