"""Training throughput of the tiny model beside a plain PyTorch loop of the same work.

    python -m bench.throughput [--config examples/tiny.yaml] [--steps 40] [--rounds 3] [--out FILE]

Each round trains every scheme through real daemons and, after it, the plain loop with the same
batch, micro-batches and number of threads (``1f1b`` runs without recomputation; the other schemes
are held against a loop that checkpoints every layer, as they do). The ratio of a round is taken
between neighbours in time and the median is printed: on noisy machines only ratios count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.config.schema import Config
from penstock.protocol.run.rundir import RunDirectory
from penstock.workers.data import TokenDataset, micro_batches

WARMUP_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputCase:
    """A scheme with its settings, and whether the plain loop beside it recomputes."""

    name: str
    settings: tuple[str, ...]
    recompute: bool


CASES = (
    ThroughputCase(
        name="1f1b",
        settings=("schedule.scheme=1f1b", "schedule.recompute=none"),
        recompute=False,
    ),
    ThroughputCase(
        name="gpipe", settings=("schedule.scheme=gpipe", "schedule.recompute=full"), recompute=True
    ),
    ThroughputCase(
        name="mobius",
        settings=("schedule.scheme=mobius", "schedule.recompute=full"),
        recompute=True,
    ),
    ThroughputCase(
        name="spipe", settings=("schedule.scheme=spipe", "schedule.recompute=full"), recompute=True
    ),
)
ONE_PIPELINE = (
    "schedule.forward_stages=null",
    "schedule.backward_stages=null",
    "schedule.replicas=1",
    "train.micro_batch=1",
)


def penstock_rate(config: Path, run_dir: Path, case: ThroughputCase, steps: int) -> float:
    """Returns tokens/s of ``penstock train``: all tokens after the warm-up over the time they
    took.
    """
    settings = (*ONE_PIPELINE, *case.settings, f"train.steps={steps}")
    command = [sys.executable, "-m", "penstock.client.main", "train", str(config)]
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(
        [*command, "--run-dir", str(run_dir)], check=True, stdout=subprocess.DEVNULL, timeout=900
    )
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["phase"] == "train"][WARMUP_STEPS:]
    return float(sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines))


def plain_rate(
    run_dir: Path, config: Config, *, recompute: bool, steps: int, threads: int
) -> float:
    """Returns tokens/s of a plain loop over the same data with AdamW and clipping."""
    torch.set_num_threads(threads)
    torch.manual_seed(config.run.seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run_dir / "model"))
    model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.optimizer.lr, fused=True)
    dataset = TokenDataset.open(run_dir / "data", "train", config)
    tokens, start = 0, 0.0
    for step in range(steps):
        if step == WARMUP_STEPS:
            tokens, start = 0, time.perf_counter()
        batches, counted = micro_batches(
            dataset,
            step * config.train.global_batch,
            config.train.global_batch,
            config.train.micro_batch,
        )
        optimizer.zero_grad(set_to_none=False)
        for batch in batches:
            inputs = torch.as_tensor(batch.input_ids, dtype=torch.long)
            labels = torch.as_tensor(batch.labels, dtype=torch.long)
            logits = model(input_ids=inputs, use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / counted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.clip_grad_norm or 1e9)
        optimizer.step()
        tokens += counted
    return tokens / (time.perf_counter() - start)


def measure(config_path: Path, steps: int, rounds: int, names: list[str]) -> dict[str, list[float]]:
    """Returns the ratio penstock / plain loop for each case and round."""
    ratios: dict[str, list[float]] = {case.name: [] for case in CASES if case.name in names}
    for round_index in range(rounds):
        for case in (case for case in CASES if case.name in names):
            with tempfile.TemporaryDirectory() as folder:
                run_dir = Path(folder) / "run"
                ours = penstock_rate(config_path, run_dir, case, steps)
                config = RunDirectory(run_dir).config
                plain = plain_rate(
                    run_dir,
                    config,
                    recompute=case.recompute,
                    steps=steps,
                    threads=config.num_workers,
                )
            ratios[case.name].append(ours / plain)
            sys.stdout.write(
                f"round {round_index} {case.name:8} penstock {ours:8.0f} tokens/s"
                f"  plain loop {plain:8.0f}  ratio {ours / plain:.3f}\n"
            )
            sys.stdout.flush()
    return ratios


def main() -> None:
    """Parses arguments, measures, and prints medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=Path("examples/tiny.yaml"))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="*", default=[case.name for case in CASES])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    ratios = measure(arguments.config, arguments.steps, arguments.rounds, arguments.cases)
    for name, values in ratios.items():
        sys.stdout.write(
            f"{name:8} median ratio {statistics.median(values):.3f}  of {len(values)}\n"
        )
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(ratios))


if __name__ == "__main__":
    main()
