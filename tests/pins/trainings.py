"""Saved bytes of a few tiny trainings: golden/trainings.json.

Bits of matrix products depend on the processor and on the versions of torch and transformers. The
file has the digests of each such combination, and a machine with another one compares nothing.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tests.pins.comparing import Comparison, compared, counted, read, write

GOLDEN = Path(__file__).parent / "golden" / "trainings.json"
TIMEOUT_S = 600.0
INSTRUCTIONS = re.compile(r"avx2|avx512f|avx512_bf16|avx512_fp16|avx_vnni|amx_\w+|asimd|bf16|sve2?")
"""Processor flags by which the libraries of torch choose their kernels."""

MODEL: Mapping[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CASES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "spipe": {"schedule": {"scheme": "spipe"}},
    "1f1b, clipped": {"schedule": {"scheme": "1f1b"}, "train": {"clip_grad_norm": 0.5}},
    "mobius, bf16": {"schedule": {"scheme": "mobius"}, "model": {"dtype": "bf16"}},
    "zb-h1, tied weights": {
        "schedule": {"scheme": "zb-h1"},
        "model": {"hf": {**MODEL, "tie_word_embeddings": True}},
    },
}
"""Sections that a training changes, by its name."""


def compare(seeds: int) -> Comparison:
    """Trains and compares saved arrays with the digests for this machine."""
    key = machine()
    stored = read(GOLDEN)
    if key not in stored:
        return Comparison(unpinned=f"not pinned on this machine ({key})")
    return compared(stored[key], digests())


def rewrite(seeds: int) -> None:
    """Trains and stores digests for this machine; those of other machines stay."""
    write(GOLDEN, {**read(GOLDEN), machine(): digests()})


def machine() -> str:
    """Returns the software and instruction set that bits of products depend on."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    fields = dict(
        (name.strip(), value.strip())
        for name, _, value in (line.partition(":") for line in reversed(text.splitlines()))
    )
    flags = fields.get("flags", fields.get("Features", "")).split()
    chosen = sorted(flag for flag in flags if INSTRUCTIONS.fullmatch(flag))
    vendor = fields.get("vendor_id", fields.get("CPU implementer", "unknown"))
    software = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    return f"{software}, {vendor} {' '.join(chosen)}"


def digests() -> dict[str, str]:
    """Returns a digest for each array kind of each training's last saved state."""
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-pins-") as folder:
        for name in counted("saved bytes", 0, list(CASES)):
            run = _train(Path(folder), name)
            outcomes |= {f"{name}: {kind}": text for kind, text in _of_state(run).items()}
    return outcomes


def _train(folder: Path, name: str) -> Path:
    """Runs ``penstock train`` and returns its run directory.

    Raises:
        RuntimeError: the training failed.
    """
    data = folder / "data.txt"
    data.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(2000)), encoding="utf-8")
    run = folder / re.sub(r"\W+", "-", name)
    config = run.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(_sections(CASES[name], data, run)), encoding="utf-8")
    command = [str(Path(sys.executable).with_name("penstock")), "train", str(config)]
    process = subprocess.run(
        command,
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if process.returncode != 0:
        raise RuntimeError(f"{name}: exit code {process.returncode}\n{process.stdout[-3000:]}")
    return run


def _sections(
    changes: Mapping[str, Mapping[str, Any]], data: Path, run: Path
) -> dict[str, dict[str, Any]]:
    """Returns the configuration of a training."""
    sections: dict[str, dict[str, Any]] = {
        "run": {"seed": 7, "dir": str(run)},
        "model": {"dtype": "fp32", "hf": dict(MODEL)},
        "data": {"path": str(data), "tokenizer": "byte", "sequence_length": 16},
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 1},
        "optimizer": {"lr": 1.0e-3, "threads": 2},
        "cluster": {"workers": 2, "threads_per_worker": 1},
    }
    return {
        section: {**values, **changes.get(section, {})}
        for section, values in {"schedule": {}, **sections}.items()
    }


def _of_state(run: Path) -> dict[str, str]:
    """Returns digests of the newest saved state: of weights, masters and moments of all blocks."""
    state = max((run / "state").glob("step-*"))
    sums: dict[str, Any] = {}
    for file in sorted(state.glob("*.safetensors")):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        for name, place in sorted(header.items()):
            if name == "__metadata__":
                continue
            first, last = place["data_offsets"]
            array, _, tensor = name.partition(".")
            kind = array if tensor in header else "weights"
            digest = sums.setdefault(kind, hashlib.sha256())
            digest.update(f"{name} {place['dtype']} {place['shape']}".encode())
            digest.update(content[start + first : start + last])
    return {kind: digest.hexdigest()[:16] for kind, digest in sums.items()}
