"""``RUN_DIR/software.json``: software and machine of a run's last start, for reports.

Bits depend on them, so a start with others says so, or is refused by ``run.strict``.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import penstock
from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.host.files import DAMAGED, holds_text, parse_json, write_atomically
from penstock.protocol.run.numerics import differences

FILE = "software.json"
_GPUS = Path("/proc/driver/nvidia/gpus")
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
"""Those that decide bytes."""
_ROUNDING = ("torch", "transformers")
"""Packages that determine how layers round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions by the name of the package, and the machine that prepared the run. Empty texts and 0
    are what is not known. ``gpus``: models of the NVIDIA GPUs, as the driver's files name them;
    None: of an older Penstock, which wrote none.
    """

    packages: dict[str, str]
    system: str
    processor: str
    cpus: int
    memory_bytes: int
    gpus: tuple[str, ...] | None = None

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
            gpus=tuple(_field(str(path), "Model") for path in sorted(_GPUS.glob("*/information"))),
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
                gpus=_texts(fields.get("gpus")),
            )
        except (OSError, *DAMAGED):
            return None

    def rounding(self, *, counts_cpus: bool) -> dict[str, str]:
        """Returns the facts that rounding depends on, as far as they are known, by their names.
        ``counts_cpus``: the number of compute threads follows from that of the CPUs.
        """
        facts = {name: self.packages.get(name, "") for name in _ROUNDING}
        facts["processor"] = self.processor
        facts["CPUs"] = str(self.cpus) if counts_cpus and self.cpus else ""
        facts["GPUs"] = ", ".join(self.gpus or ())
        return {name: fact for name, fact in facts.items() if fact}

    def differences(self, earlier: Software, *, counts_cpus: bool) -> list[str]:
        """Returns in words what rounding depends on and was otherwise ``earlier``, as far as both
        know it.
        """
        before = earlier.rounding(counts_cpus=counts_cpus)
        return differences(before, self.rounding(counts_cpus=counts_cpus))

    def write(self, run_dir: Path) -> None:
        """Makes the note, or leaves it as it is when nothing has changed.

        Raises:
            PenstockError: it cannot be written.
        """
        text = json.dumps(asdict(self), indent=1)
        if not holds_text(run_dir / FILE, text):
            write_atomically(run_dir / FILE, text)


def check_software(
    config: Config, run_dir: Path, software: Software, progress: Callable[[str], None]
) -> None:
    """Compares ``software`` with that of the last start of a run that has trained, and says in one
    line what rounds otherwise from now on.

    Raises:
        ConfigError: something differs, and ``run.strict`` is set.
    """
    earlier = Software.read(run_dir)
    if earlier is None:
        return
    counts_cpus = not config.cluster.threads_per_worker
    differences = software.differences(earlier, counts_cpus=counts_cpus)
    if not differences:
        return
    words = "; ".join(differences)
    if config.run.strict:
        raise ConfigError(
            f"run.strict: software or hardware has changed since the run's last start ({words}), so"
            " layers may round differently; restore it, or start without --strict"
        )
    progress(f"since the last start: {words}; layers may round differently from the next step on")


def _texts(values: object) -> tuple[str, ...] | None:
    return tuple(map(str, values)) if isinstance(values, list) else None


def _field(path: str, name: str) -> str:
    """Returns the value of the first line ``name: value`` of a file of /proc; empty without one."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    fields = (line.partition(":") for line in lines)
    return next((value.strip() for key, _, value in fields if key.strip() == name), "")
