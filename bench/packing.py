"""Training on conversations that share rows, and a row for each one.

    python -m bench.packing [--records 400] [--rounds 3] [--json]

The records have log-normal lengths with a median of 250 tokens, cut at 1,024: the length of a row.
Each round trains a small model on all of them with ``data.packing: none`` and with ``best-fit``,
once. The rate is that of tokens which count in the loss, so padding counts for nothing; ``ratio``
is that of best-fit over none. The work of attention is masked, not left out, on CPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from math import log
from pathlib import Path
from random import Random
from typing import Any

from penstock.host.files import write_atomically

WARMUP_STEPS = 3
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
    path = folder / f"{packing}.yaml"
    write_atomically(path, json.dumps(config))
    command = [sys.executable, "-m", "penstock.client.main", "train", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=1800.0)
    run = folder / packing
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["phase"] == "train"][WARMUP_STEPS:]
    rows = json.loads((run / "data" / "meta.json").read_text())["train"]["rows"]
    return {
        "rate": sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines),
        "padding": 1 - rows["tokens"] / (rows["rows"] * LENGTH),
    }


def main() -> int:
    """Measures, and prints a line for each round and the median."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--records", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    lines: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory() as name:
            records = Path(name, "chats.jsonl")
            write_records(records, options.records)
            line: dict[str, Any] = {key: trained(Path(name), records, key) for key in ROWS}
        line["ratio"] = line["best-fit"]["rate"] / line["none"]["rate"]
        lines.append(line)
        if not options.json:
            print(
                "  ".join(
                    f"{key} {line[key]['rate']:,.0f} tokens/s, {line[key]['padding']:.1%} padding"
                    for key in ROWS
                )
                + f"  ratio {line['ratio']:.2f}",
                flush=True,
            )
    if options.json:
        print(json.dumps(lines, indent=1))
    else:
        print(f"median ratio {statistics.median(line['ratio'] for line in lines):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
