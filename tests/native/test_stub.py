"""The type stub and the module say the same."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import penstock
from penstock import _native

STUB = Path(penstock.__file__).with_name("_native.pyi")


def public_names(body: list[ast.stmt]) -> dict[str, list[str]]:
    """Functions and classes of a stub with their arguments or members."""
    names: dict[str, list[str]] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            names[node.name] = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        elif isinstance(node, ast.ClassDef):
            names[node.name] = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
    return names


def test_names_and_arguments_agree() -> None:
    stub = public_names(ast.parse(STUB.read_text()).body)
    module = {name for name in vars(_native) if not name.startswith("_")}
    assert set(stub) == module
    for name, parts in stub.items():
        found = getattr(_native, name)
        if inspect.isclass(found):
            assert [part for part in parts if not hasattr(found, part)] == []
        else:
            signature = found.__nb_signature__[0][0]
            assert [part for part in parts if f"{part}:" not in signature] == []
