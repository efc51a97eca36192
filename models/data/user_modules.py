"""Modules of the user: those of ``model.imports``, and the one of ``data.objective``.

They lie in the folder ``model.import_path``. Python searches it last, so a user's file with the
name of another module (random.py, profile.py) hides nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from penstock.config.schema import Config


def import_user_module(name: str, config: Config) -> ModuleType:
    """Returns a module of the user. All errors of the module pass through."""
    folder = str(config.model.import_path)
    if folder not in sys.path:
        sys.path.append(folder)
        importlib.invalidate_caches()
    return importlib.import_module(name)


def import_hint(config: Config) -> str:
    """Returns the searched folder, for errors."""
    return f"your modules are searched in model.import_path = {str(config.model.import_path)!r}"
