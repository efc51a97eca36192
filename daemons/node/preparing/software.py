"""``RUN_DIR/software.json``: with what a run was prepared last, for reports and for whoever looks
for a difference between two runs. Nothing depends on it.
"""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import penstock
from penstock.protocol.run.files import DAMAGED, holds_text, parse_json, write_atomically

FILE = "software.json"
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
"""Those that decide bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions by the name of the package, and the machine that prepared the run. Empty texts and 0
    are what is not known.
    """

    packages: dict[str, str]
    system: str
    processor: str
    cpus: int
    memory_bytes: int

    @classmethod
    def here(cls) -> Software:
        """Returns what is on this machine. Nothing is imported for it."""
        packages = {"penstock": penstock.__version__, "python": platform.python_version()}
        for name in _PACKAGES:
            try:
                packages[name] = version(name)
            except PackageNotFoundError:
                continue
        return cls(
            packages=packages,
            system=f"{platform.system()} {platform.release()} {platform.machine()}",
            processor=_field("/proc/cpuinfo", "model name"),
            cpus=os.cpu_count() or 0,
            memory_bytes=int((_field("/proc/meminfo", "MemTotal").split() or ["0"])[0]) * 1024,
        )

    @classmethod
    def read(cls, run_dir: Path) -> Software | None:
        """Returns what the run was prepared with; None where there is no such note."""
        try:
            fields = parse_json((run_dir / FILE).read_bytes())
            return cls(
                packages={str(name): str(value) for name, value in fields["packages"].items()},
                system=str(fields["system"]),
                processor=str(fields["processor"]),
                cpus=int(fields["cpus"]),
                memory_bytes=int(fields["memory_bytes"]),
            )
        except (OSError, *DAMAGED):
            return None

    def write(self, run_dir: Path) -> None:
        """Makes the note, or leaves it as it is when nothing has changed.

        Raises:
            PenstockError: it cannot be written.
        """
        text = json.dumps(asdict(self), indent=1)
        if not holds_text(run_dir / FILE, text):
            write_atomically(run_dir / FILE, text)


def _field(path: str, name: str) -> str:
    """Returns the value of the first line ``name: value`` of a file of /proc; empty without one."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    found = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in found if key.strip() == name), "")
