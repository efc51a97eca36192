"""Rates of training with adapters, over those of training the whole model from the same folder.

    python -m bench.adapters [--steps 12] [--rounds 3] [--hidden 512] [--json]

Each round trains a small llama once whole and once with adapters of rank 16 on all linear modules.
``ratio`` is the rate of adapters over that of the whole model. ``memory`` is the size of the run's
files in /dev/shm while it trains, ``saved`` that of its last saved state.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from bench.two_ways import Figures, compare, parser, train

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
    before, most = shared_bytes(), 0

    def watch() -> None:
        nonlocal most
        most = max(most, shared_bytes() - before)

    rate = train(config, watch)
    state = max((run / "state").glob("step-*"))
    saved = sum(file.stat().st_size for file in state.iterdir())
    return {"rate": rate, "memory": most, "saved": saved}


def main() -> int:
    """Measures, and prints a line for each round and the median."""
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--hidden", type=int, default=512)
    chosen = options.parse_args()

    def measure(folder: Path) -> dict[str, dict[str, float]]:
        write_model(folder / "model", chosen.hidden)
        return {kind: trained(folder, kind, chosen.steps) for kind in KINDS}

    compare(chosen, measure, _shown)
    return 0


def _shown(kind: str, values: Figures) -> str:
    memory, saved = (values[key] / 2**20 for key in ("memory", "saved"))
    return f"{kind} {values['rate']:,.0f} tokens/s, {memory:,.0f} MiB, {saved:,.0f} MiB saved"


if __name__ == "__main__":
    sys.exit(main())
