"""Imports every module of the installed package, for ``make versions``."""

from __future__ import annotations

import importlib
import pkgutil
import sys

import penstock

EXTRAS = ("mlflow", "trackio", "wandb")
"""Packages that the tests do not install."""


def main() -> None:
    """Imports all but scripts, and says how many there are.

    Raises:
        ImportError: a module does not import with this Python and this torch.
    """
    names = [module.name for module in pkgutil.walk_packages(penstock.__path__, "penstock.")]
    for name in names:
        try:
            if not name.endswith("__main__"):
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in EXTRAS:
                raise
    sys.stdout.write(f"{len(names)} modules import\n")


if __name__ == "__main__":
    main()
