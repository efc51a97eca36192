"""Training on conversations that share rows, and a row for each one.

    python -m bench.packing [--records 400] [--rounds 3] [--json]

The records have log-normal lengths with a median of 250 tokens, cut at 1,024: the length of a row.
Each round trains a small model on all of them with ``data.packing: none`` and with ``best-fit``,
once. The rate is that of tokens which count in the loss, so padding counts for nothing; ``ratio``
is that of best-fit over none. The work of attention is masked, not left out, on CPUs.
"""

from __future__ import annotations

import json
import sys
from math import log
from pathlib import Path
from random import Random
from typing import Any

from bench.two_ways import Figures, compare, parser, train

LENGTH, MEDIAN = 1024, 250
ROWS = {"none": 16, "best-fit": 4}
"""Rows of a step, so that steps have about equally many records."""
MODEL = {
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
}


def write_records(path: Path, count: int) -> None:
    """Writes conversations of one question and one answer; ``byte`` makes a token of a letter."""
    random = Random(36)
    lines = []
    for _ in range(count):
        length = max(8, min(LENGTH, int(random.lognormvariate(log(MEDIAN), 0.9))) - 70)
        answer = "".join(random.choices("abcdefgh ", k=length))
        turns = [{"role": "user", "content": "Say."}, {"role": "assistant", "content": answer}]
        lines.append(json.dumps({"messages": turns}))
    path.write_text("\n".join(lines))


def trained(folder: Path, records: Path, packing: str) -> dict[str, float]:
    """Trains on all records; returns counted tokens per second, and the share of padding."""
    config: dict[str, Any] = {
        "run": {"dir": str(folder / packing)},
        "model": {"hf": MODEL},
        "data": {
            "path": str(records),
            "tokenizer": "byte",
            "chat_template": "chatml",
            "sequence_length": LENGTH,
            "packing": packing,
        },
        "train": {"epochs": 1, "global_batch": ROWS[packing], "micro_batch": 2},
        "cluster": {"workers": 2},
    }
    rate = train(config)
    rows = json.loads((folder / packing / "data" / "meta.json").read_text())["train"]["rows"]
    return {"rate": rate, "padding": 1 - rows["tokens"] / (rows["rows"] * LENGTH)}


def main() -> int:
    """Measures, and prints a line for each round and the median."""
    options = parser(__doc__)
    options.add_argument("--records", type=int, default=400)
    chosen = options.parse_args()

    def measure(folder: Path) -> dict[str, dict[str, float]]:
        records = folder / "chats.jsonl"
        write_records(records, chosen.records)
        return {packing: trained(folder, records, packing) for packing in ROWS}

    compare(chosen, measure, _shown)
    return 0


def _shown(packing: str, figures: Figures) -> str:
    return f"{packing} {figures['rate']:,.0f} tokens/s, {figures['padding']:.1%} padding"


if __name__ == "__main__":
    sys.exit(main())
