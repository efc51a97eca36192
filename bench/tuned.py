"""Speed of written configurations beside the tuner's, and the seconds of its searches.

    python -m bench.tuned [CONFIG ...] [--steps 25] [--rounds 5] [--out FILE]

``penstock tune CONFIG --out FILE`` tunes each configuration (by default those that README and
``penstock init`` write). Each round trains both files, one after the other. The ratio is the tuned
median of a step's seconds over that of the configuration: at 0.9 and above the configuration is
within 10 %. On noisy machines only ratios of many rounds count.

Then ``schedule: auto`` searches for models of the catalogue on one GPU, from its data sheet; a
search is to take 10 s at most.
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

from penstock.config.schema import Config, parse_config
from penstock.planner.cost.catalogue import GPUS
from penstock.planner.cost.costs import Costs
from penstock.planner.cost.emulation import Emulation
from penstock.planner.cost.profile import guess_of_gpu
from penstock.planner.planning.auto import choose
from penstock.protocol.plan.plan import Plan
from penstock.shm.table import DType

WARMUP_STEPS = 3
MODELS = ("gpt3-125m", "llama3-1b", "llama2-7b", "llama2-70b")
NEEDED_S = 10.0

FINETUNE = """\
run: {name: mine}
model:
  dtype: bf16
  hf: {model_type: qwen3, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 6,
       num_attention_heads: 4, num_key_value_heads: 2, head_dim: 32, vocab_size: 2048}
data: {path: "@stdlib", sequence_length: 512, tokenizer: byte}
train: {steps: 200, global_batch: 8, micro_batch: 2}
optimizer: {lr: 1.0e-5}
schedule: {scheme: 1f1b, replicas: 2, recompute: none}
cluster: {workers: 2}
"""
"""README's fine-tuning, of a model that two cores train in seconds."""


class _Room:
    """A machine with room for every plan."""

    def check(self, config: Config, plan: Plan, costs: Costs) -> None:
        """Takes it."""


def penstock(*arguments: str) -> None:
    """Runs a command of ``penstock``."""
    command = [sys.executable, "-m", "penstock.client.main", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=900)


def step_s(config: Path, run_dir: Path, steps: int) -> float:
    """Returns the median seconds of a step after the warm-up."""
    penstock("train", str(config), "--run-dir", str(run_dir), "--set", f"train.steps={steps}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    seconds = [line["seconds"] for line in lines if line["phase"] == "train"]
    return statistics.median(seconds[WARMUP_STEPS:])


def ratios_of(config: Path, folder: Path, steps: int, rounds: int) -> list[float]:
    """Returns seconds of the tuned steps over those of the configuration, by round."""
    tuned = folder / f"{config.stem}-tuned.yaml"
    penstock("tune", str(config), "--out", str(tuned))
    ratios = []
    for index in range(rounds):
        own_s, tuned_s = (
            step_s(path, folder / f"{path.stem}-{index}", steps) for path in (config, tuned)
        )
        ratios.append(tuned_s / own_s)
        sys.stdout.write(f"{config.name} {own_s:.4f} s, tuned {tuned_s:.4f} s, {ratios[-1]:.3f}\n")
        sys.stdout.flush()
    return ratios


def search_s(gpu: str, model: str) -> float:
    """Returns the seconds of a search for a model on one GPU."""
    raw: dict[str, Any] = {
        "model": {"hf": {"model_type": "llama"}, "dtype": "bf16"},
        "data": {"path": "@stdlib", "sequence_length": 2048},
        "train": {"global_batch": 32, "micro_batch": "auto"},
        "schedule": {"scheme": "auto"},
    }
    emulated = {"workers": 1, "device": f"emulated:analytic:{gpu}:{model}"}
    table = Emulation.of(parse_config({**raw, "cluster": emulated})).table
    config = parse_config({**raw, "cluster": {"workers": 1, "device": "cuda"}})
    start_s = time.perf_counter()
    winner = choose(config, table, _Room(), guess=guess_of_gpu(gpu, DType.BF16))
    seconds = time.perf_counter() - start_s
    sys.stdout.write(f"{gpu} {model}: {seconds:.1f} s (needed {NEEDED_S:g})\n{winner}\n")
    sys.stdout.flush()
    return seconds


def main() -> None:
    """Parses arguments, measures, and prints medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("configs", nargs="*", type=Path)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gpu", choices=tuple(GPUS), default="H200")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        finetune = Path(folder) / "finetune.yaml"
        finetune.write_text(FINETUNE)
        configs = arguments.configs or [Path("examples/tiny.yaml"), finetune]
        ratios = {
            config.name: ratios_of(config, Path(folder), arguments.steps, arguments.rounds)
            for config in configs
        }
    for name, values in ratios.items():
        sys.stdout.write(f"{name}: median ratio {statistics.median(values):.3f}\n")
    seconds = {model: search_s(arguments.gpu, model) for model in MODELS}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"ratios": ratios, "search_s": seconds}))


if __name__ == "__main__":
    main()
