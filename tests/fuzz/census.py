"""Which functions of the package turn bytes from outside into values.

Two rules, both over the sources: a function calls a *primitive* (what makes values of bytes or
text: ``json.loads``, ``msgpack.unpackb``, ``struct``'s ``unpack``, …), or it is named as such
functions are here. Both find more than decoders; :data:`tests.fuzz.table.EXCUSED` says of each that
has no target what it is.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.tidy import PRODUCT

ROOT = Path(__file__).parents[2]
FOLDERS = sorted({*PRODUCT} - {"deploy", "grafana"})

PRIMITIVES = frozenset(
    {
        "FromString",
        "GzipFile",
        "ParquetFile",
        "ParseFromString",
        "b64decode",
        "from_bytes",
        "frombuffer",
        "fromhex",
        "input_stream",
        "load_pem_private_key",
        "load_pem_x509_certificate",
        "loads",
        "memmap",
        "model_validate",
        "open_stream",
        "parse_json",
        "raw_decode",
        "reader",
        "safe_load",
        "safe_open",
        "unpack",
        "unpack_from",
        "unpackb",
    }
)
NAMED = re.compile(
    r"_?(parse(_\w+)?|read_(?!only)\w+|decode|decoded|from_(json|list|fields|frames)|unpack"
    r"|malformed|cut_short)"
)
_WORTH_PARSING = re.compile(rf"\b(?:{'|'.join(sorted(PRIMITIVES))})\(|\bdef (?:{NAMED.pattern})\(")
"""Of most files it need not be asked where."""


def readers(root: Path = ROOT) -> frozenset[str]:
    """Returns the functions that the rules find, by dotted name."""
    return frozenset(
        name
        for folder in FOLDERS
        for path in (root / folder).rglob("*.py")
        if "generated" not in path.parts
        for name in _readers(path.relative_to(root), path.read_text(encoding="utf-8"))
    )


def _readers(path: Path, text: str) -> Iterator[str]:
    if not _WORTH_PARSING.search(text):
        return
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    for name, function in _functions(ast.parse(text), module):
        if NAMED.fullmatch(function.name) or any(map(_is_primitive, ast.walk(function))):
            yield name


def _functions(node: ast.AST, name: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields functions of modules and classes; what is inside of a function belongs to it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{name}.{child.name}")
        elif isinstance(child, ast.FunctionDef):
            yield f"{name}.{child.name}", child


def _is_primitive(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    return name in PRIMITIVES
