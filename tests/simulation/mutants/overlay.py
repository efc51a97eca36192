"""One module replaced in this process: asked for it, the first of all finders gives the changed
source under the real file's name. Nothing is copied or written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

from tests.simulation.mutants.mutant import PACKAGE


class _ChangedLoader(SourceFileLoader):
    """Loads a module of the real name and file from changed source; nothing is cached."""

    def __init__(self, fullname: str, path: str, source: str) -> None:
        super().__init__(fullname, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._source, self.path, "exec")


class _ChangedFinder:
    """Finds one module, and leaves all others to the next."""

    def __init__(self, module: str, source: str) -> None:
        self._module = module
        self._source = source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._module:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _ChangedLoader(fullname, spec.origin, self._source)
        return spec


def is_package_imported() -> bool:
    """Returns whether a change would come too late: other modules hold the real one already."""
    return any(name.partition(".")[0] == PACKAGE for name in sys.modules)


def plant(module: str, source: str) -> None:
    """Have ``module`` loaded from ``source`` when it is imported."""
    sys.meta_path.insert(0, _ChangedFinder(module, source))
