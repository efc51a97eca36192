"""One module replaced in a whole tree of processes, without a copy of the tree.

A folder is put first in ``PYTHONPATH``. Its ``sitecustomize.py`` calls :func:`install` in every
Python that starts, which puts a finder before all others: asked for the mutant's module, it gives
the changed source under the real file's name.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

CHANGED = "changed.py"
MODULE = "module.json"
_START = """\
import sys
sys.path.insert(0, {root!r})
from tests.simulation.mutants.overlay import install
sys.path.remove({root!r})
install({folder!r})
"""


class _ChangedLoader(SourceFileLoader):
    """Loads a module of the real name and file from changed source; nothing is cached."""

    def __init__(self, fullname: str, path: str, changed: Path) -> None:
        super().__init__(fullname, path)
        self._changed = changed

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._changed.read_text(encoding="utf-8"), self.path, "exec")


class _ChangedFinder:
    """Finds one module, and leaves all others to the next."""

    def __init__(self, module: str, changed: Path) -> None:
        self._module = module
        self._changed = changed

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _ChangedLoader(fullname, spec.origin, self._changed)
        return spec


def install(folder: str) -> None:
    """Have the module that ``folder`` names loaded from its changed source."""
    module = json.loads((Path(folder) / MODULE).read_text(encoding="utf-8"))
    sys.meta_path.insert(0, _ChangedFinder(module, Path(folder) / CHANGED))


def write(folder: Path, module: str, source: str, root: Path) -> None:
    """Fill a folder that is to be first in ``PYTHONPATH``; ``root``: the repository."""
    (folder / MODULE).write_text(json.dumps(module), encoding="utf-8")
    (folder / CHANGED).write_text(source, encoding="utf-8")
    start = _START.format(root=str(root), folder=str(folder))
    (folder / "sitecustomize.py").write_text(start, encoding="utf-8")
