"""What a run leaves, and how it differs from what an undisturbed run leaves.

Where a step is taken back by arithmetic (``optimizer.rollback``), rounding errors stay: losses and
states are then compared as ``tests/system/test_arithmetic.py`` compares them with those of an exact
run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.daemons.memory.tensorfile import read_header
from penstock.protocol.run.saved_base import base_paths
from tests.simulation.vouched import Key

TOLERANCE = 1e-4
"""Of an array's largest value, and of a loss or norm."""
_SAID = ("phase", "step", "loss", "grad_norm", "lr", "loss_scale", "tokens", "data_position")

GOLDEN = Path(__file__).with_name("golden.json")
"""Digests of what undisturbed runs leave, by shape: no change of the code may change a bit."""

Arrays = dict[str, np.ndarray[Any, np.dtype[np.float32]]]


@dataclass(frozen=True)
class Result:
    """``states``: a checksum of each saved state, or its arrays where bits are not kept; ``lines``:
    what lines of metrics say; ``broken``: lines that say nothing; ``vouched``: checksums of what
    words vouched for.
    """

    states: dict[str, str | Arrays]
    lines: dict[str, dict[str, Any]]
    final: str
    broken: tuple[str, ...] = ()
    vouched: Mapping[Key, int] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, vouched: Mapping[Key, int], *, keeps_bits: bool) -> Result:
        """Read a run directory."""
        read = _checksum if keeps_bits else _arrays
        states = {d.name: read(d) for d in sorted((path / "state").glob("step-*"))}
        lines: dict[str, dict[str, Any]] = {}
        metrics = path / "metrics.jsonl"
        broken = []
        for text in metrics.read_text().splitlines() if metrics.exists() else ():
            try:
                said = json.loads(text)
            except ValueError:
                broken.append(text)
                continue
            key = f"{said['phase']} {said.get('decision', '')} {said['step']}"
            lines[key] = {name: said[name] for name in sorted(said) if name in _SAID}
        return cls(
            states=states,
            lines=lines,
            final=max(states, default=""),
            broken=tuple(broken),
            vouched=dict(vouched),
        )

    @property
    def digest(self) -> str:
        """A checksum of states and lines; empty where bits are not kept."""
        text = json.dumps([self.states, self.lines], sort_keys=True) if self._exact else ""
        return hashlib.sha256(text.encode()).hexdigest()[:16] if text else ""

    def differences(self, expected: Result) -> list[str]:
        """Returns what is not as in the undisturbed run."""
        wrong = [f"metrics have a broken line: {text[:80]!r}" for text in self.broken]
        if self.final != expected.final:
            wrong.append(f"the run ended at {self.final}, undisturbed at {expected.final}")
        for name, state in self.states.items():
            if name in expected.states:
                wrong += [f"{name} {why}" for why in _unlike(state, expected.states[name])]
        for key, said in self.lines.items():
            other = expected.lines.get(key)
            if other is not None and not _alike(said, other, exact=self._exact):
                wrong.append(f"metrics of {key}: {said}, undisturbed {other}")
        missing = expected.lines.keys() - self.lines.keys()
        if missing:
            wrong.append(f"metrics lack {sorted(missing)[:3]}")
        return wrong

    @property
    def _exact(self) -> bool:
        return all(isinstance(state, str) for state in self.states.values())


def _checksum(directory: Path) -> str:
    digest = hashlib.sha256()
    base = base_paths(directory)
    for block, file in enumerate(sorted(directory.glob("block-*"))):
        files = [file, base[block]] if block in base else [file]
        digest.update(file.name.encode() + _in_one(files))
    return digest.hexdigest()


def _in_one(files: Sequence[Path]) -> bytes:
    """All tensors of a block in one file, as states of format 1 have them. Digests of seeds are
    those of such files.
    """
    if len(files) == 1:
        return files[0].read_bytes()
    fields: dict[str, Any] = {}
    bodies = b""
    for file in files:
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        for name, entry in json.loads(content[8:start]).items():
            offsets = [offset + len(bodies) for offset in entry["data_offsets"]]
            fields[name] = {**entry, "data_offsets": offsets}
        bodies += content[start:]
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + bodies


def _arrays(directory: Path) -> Arrays:
    found: Arrays = {}
    base = base_paths(directory)
    for block, file in enumerate(sorted(directory.glob("block-*"))):
        for part in [file, base[block]] if block in base else [file]:
            content = part.read_bytes()
            for name, place in read_header(part).items():
                data = content[place.start : place.start + place.num_bytes]
                found[f"{file.name} {name}"] = np.frombuffer(data, dtype=np.float32)
    return found


def _unlike(found: str | Arrays, expected: str | Arrays) -> Iterator[str]:
    if isinstance(found, str) or isinstance(expected, str):
        if found != expected:
            yield "has other bytes than undisturbed"
        return
    if found.keys() != expected.keys():
        yield "has other tensors than undisturbed"
        return
    for name, array in found.items():
        wanted = expected[name]
        error = float(np.max(np.abs(array - wanted))) / max(float(np.max(np.abs(wanted))), 1e-30)
        if not error <= TOLERANCE:  # of NaN neither holds
            yield f"is off by {error:.1e} in {name}, which is more than rounding errors"


def _alike(found: dict[str, Any], expected: dict[str, Any], *, exact: bool) -> bool:
    if exact:
        return json.dumps(found) == json.dumps(expected)
    return found.keys() == expected.keys() and all(
        value == expected[name]
        or (
            isinstance(value, float)
            and abs(value - expected[name]) <= TOLERANCE * abs(expected[name])
        )
        for name, value in found.items()
    )
