"""Rates of training with adapters, over those of training the whole model from the same folder.

    python -m bench.adapters [--steps 12] [--rounds 3] [--hidden 512] [--json]

Each round trains a small llama once whole and once with adapters of rank 16 on all linear modules.
``ratio`` is the rate of adapters over that of the whole model. ``memory`` is the size of the run's
files in /dev/shm while it trains, ``saved`` that of its last saved state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from penstock.host.files import write_atomically

WARMUP_STEPS = 3
LENGTH = 256
KINDS: dict[str, dict[str, Any]] = {"whole": {}, "adapters": {"adapter": {"r": 16, "alpha": 32}}}


def write_model(folder: Path, hidden: int) -> None:
    """Saves a random llama of eight layers."""
    disable_progress_bar()
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=8,
        num_attention_heads=8,
        vocab_size=8192,
        max_position_embeddings=LENGTH,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def shared_bytes() -> int:
    """Returns the bytes of all files in /dev/shm."""
    return sum(path.stat().st_blocks * 512 for path in Path("/dev/shm").iterdir())


def trained(folder: Path, kind: str, steps: int) -> dict[str, float]:
    """Trains, and returns tokens per second and bytes."""
    run = folder / kind
    config: dict[str, Any] = {
        "run": {"name": kind, "dir": str(run)},
        "model": {"path": str(folder / "model")},
        "data": {"path": "@stdlib", "tokenizer": "byte", "sequence_length": LENGTH},
        "train": {"steps": steps, "global_batch": 8, "micro_batch": 1},
        "schedule": {"scheme": "1f1b"},
        "cluster": {"workers": 2},
        **KINDS[kind],
    }
    path = folder / f"{kind}.yaml"
    write_atomically(path, json.dumps(config))
    before, most = shared_bytes(), 0
    command = [sys.executable, "-m", "penstock.client.main", "train", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, shared_bytes() - before)
            time.sleep(0.2)
    assert process.returncode == 0, f"{kind}: exit code {process.returncode}"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["phase"] == "train"][WARMUP_STEPS:]
    state = max((run / "state").glob("step-*"))
    return {
        "rate": sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines),
        "memory": most,
        "saved": sum(file.stat().st_size for file in state.iterdir()),
    }


def main() -> int:
    """Measures, and prints a line for each round and the median."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rounds: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            write_model(Path(name, "model"), options.hidden)
            line: dict[str, Any] = {
                kind: trained(Path(name), kind, options.steps) for kind in KINDS
            }
        line["ratio"] = line["adapters"]["rate"] / line["whole"]["rate"]
        rounds.append(line)
        if not options.json:
            print("  ".join(_shown(kind, line[kind]) for kind in KINDS), flush=True)
    if options.json:
        print(json.dumps(rounds, indent=1))
    else:
        print(f"median ratio {statistics.median(line['ratio'] for line in rounds):.2f}")
    return 0


def _shown(kind: str, values: dict[str, float]) -> str:
    memory, saved = (values[key] / 2**20 for key in ("memory", "saved"))
    return f"{kind} {values['rate']:,.0f} tokens/s, {memory:,.0f} MiB, {saved:,.0f} MiB saved"


if __name__ == "__main__":
    sys.exit(main())
