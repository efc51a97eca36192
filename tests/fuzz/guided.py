"""The process that fuzzes: ``python -m tests.fuzz.guided NAME`` with libFuzzer's options.

The package is instrumented while it is imported, so nothing of it is imported before.
"""

from __future__ import annotations

import logging
import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["penstock"]):
    from tests.fuzz.corpus import kept
    from tests.fuzz.mutating import Mutator
    from tests.fuzz.table import TARGETS
    from tests.fuzz.target import attempt


def main() -> None:
    """Fuzz until libFuzzer ends the process."""
    name, *options = sys.argv[1:]
    target = TARGETS[name]
    logging.disable(logging.CRITICAL)
    mutator = Mutator(target.form, [*target.seeds(), *kept(name)])

    def changed(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.5:
            return atheris.Mutate(data, max_size)  # type: ignore[no-any-return]  # of bytes
        return mutator.changed(data, chance)[:max_size]

    with tempfile.TemporaryDirectory() as folder, target.open(Path(folder)) as decode:
        atheris.Setup(
            [sys.argv[0], *options],
            lambda data: attempt(target, decode, data),
            custom_mutator=changed,
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
