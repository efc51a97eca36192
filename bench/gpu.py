"""One GPU: streamed weights beside resident ones, and beside FSDP2 with CPU offload.

    python -m bench.gpu [--layers 24] [--hidden 2048] [--steps 12] [--cases resident spipe ...]
    python -m bench.gpu --device cpu --tiny      # the same code, small, where there is no GPU

A LLaMA-shaped model (1.2 billion parameters by default, 18 bytes each of host memory; --layers 26
--hidden 3072 are 3 billion) trains with AdamW, gradient clipping and full recomputation, all cases
on the same tokens. Printed per case: tokens/s without the first steps; the most memory that tensors
took on the GPU; and of the copies in and out the share that ran while the GPU computed, from the
trace. Without a GPU it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import distributed
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.planner.traces.measured import measure
from penstock.planner.traces.overlap import overlap
from penstock.planner.traces.traced import TracedRun
from penstock.protocol.plan.semantics import Lane
from penstock.protocol.run.rundir import RunDirectory
from penstock.protocol.run.trace_reading import read_traces
from penstock.workers.data import TokenDataset, micro_batches

WARMUP_STEPS = 3
MIB = 1 << 20
STREAMED = {"scheme": "spipe", "forward_stages": 6, "backward_stages": 12}
CASES: dict[str, dict[str, Any]] = {
    "resident": {"scheme": "1f1b", "recompute": "full"},
    "spipe": STREAMED,
    "mobius": {"scheme": "mobius", "forward_stages": 6},
    "compiled": STREAMED,
}


def row(case: str, tokens_per_s: float, *figures: float | None) -> str:
    """MiB and shares; ``None``: cannot be measured here."""
    shown = ["-" if value is None else f"{value:.2f}" for value in figures]
    names = ("allocated MiB", "hidden copies in", "out")
    pairs = (f"{name} {value}" for name, value in zip(names, shown, strict=False))
    return f"{case:9}{tokens_per_s:9.0f} tokens/s  {'  '.join(pairs)}\n"


def configuration(options: argparse.Namespace, run_dir: Path, case: str) -> dict[str, Any]:
    """A configuration of ``penstock train``."""
    heads = max(2, options.hidden // 128)
    hf = {
        "model_type": "llama",
        "hidden_size": options.hidden,
        "intermediate_size": options.hidden * 11 // 4,
        "num_hidden_layers": options.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": options.sequence,
        "tie_word_embeddings": False,
    }
    batch = {"global_batch": 4 * options.micro_batch, "micro_batch": options.micro_batch}
    return {
        "run": {"name": case, "dir": str(run_dir)},
        "model": {"dtype": "bf16", "compile": case == "compiled", "hf": hf},
        "data": {"path": "@stdlib", "sequence_length": options.sequence},
        "train": {"steps": options.steps, **batch},
        "optimizer": {"grad_dtype": "bf16"},
        "schedule": CASES[case],
        "cluster": {"workers": 1, "device": options.device},
        "observability": {"trace": True},
    }


def penstock(options: argparse.Namespace, run_dir: Path, case: str) -> str:
    """One run of ``penstock train``."""
    config = run_dir.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(configuration(options, run_dir, case)))
    command = [sys.executable, "-m", "penstock.client.main", "train", str(config)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=3600)
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = [line for line in lines if line["phase"] == "train"][WARMUP_STEPS:]
    run = RunDirectory(run_dir)
    traced = TracedRun.of(read_traces(run_dir), [node.name for node in run.config.cluster.nodes])
    attempts = measure(traced, run.plan).attempts[WARMUP_STEPS:]
    times: defaultdict[Lane, list[tuple[float, float]]] = defaultdict(list)
    for attempt in attempts:
        for span in attempt.spans:
            times[span.lane].append(
                (span.start_s + attempt.origin_s, span.end_s + attempt.origin_s)
            )
    copies = [overlap(times[lane], times[Lane.COMPUTE]) for lane in (Lane.FETCH, Lane.OFFLOAD)]
    peaks = [d.peak.num_bytes / MIB for a in attempts for d in a.trace.devices.values() if d.peak]
    tokens_per_s = sum(s["tokens"] for s in steps) / sum(s["seconds"] for s in steps)
    return row(case, tokens_per_s, max(peaks, default=None), *(copy.share for copy in copies))


def fsdp(options: argparse.Namespace, run_dir: Path) -> str:
    """FSDP2 with CPU offload, in a process of its own, on the data of a run before."""
    command = [sys.executable, __file__, "--fsdp-of", str(run_dir), "--device", options.device]
    command += ["--steps", str(options.steps), "--micro-batch", str(options.micro_batch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        return f"fsdp     did not run: {done.stderr.strip().splitlines()[-1]}\n"
    tokens_per_s, allocated_mib = map(float, done.stdout.split()[-2:])
    return row("fsdp", tokens_per_s, allocated_mib or None)


def fsdp_tokens_per_s(options: argparse.Namespace) -> float:
    """The loop of :func:`fsdp`: layers sharded one by one, fp32 master weights on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    run = RunDirectory(options.fsdp_of)
    cuda = options.device == "cuda"
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.path / "model"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    mesh = distributed.init_device_mesh(options.device, (1,))
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
    if cuda:
        how["offload_policy"] = CPUOffloadPolicy()
    for layer in model.model.layers:
        fully_shard(layer, **how)
    fully_shard(model, **how).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=run.config.optimizer.lr, fused=True)
    dataset = TokenDataset.open(run.path / "data", "train", run.config)
    batch, tokens, start = run.config.train.global_batch, 0, 0.0
    for step in range(options.steps):
        if step == WARMUP_STEPS:
            tokens, start = 0, time.perf_counter()
        batches, counted = micro_batches(dataset, step * batch, batch, options.micro_batch)
        for one in batches:
            inputs, labels = (
                torch.as_tensor(array, dtype=torch.long).to(options.device)
                for array in (one.input_ids, one.labels)
            )
            logits = model(input_ids=inputs, use_cache=False).logits.float()
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss / counted).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += counted
    loss.item()
    seconds = time.perf_counter() - start
    distributed.destroy_process_group()
    return tokens / seconds


def main() -> int:
    """Parse arguments, measure, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a toy model: tries this script only")
    for name, default in (("layers", 24), ("hidden", 2048), ("sequence", 1024), ("steps", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--cases", nargs="*", default=[*CASES, "fsdp"], choices=[*CASES, "fsdp"])
    parser.add_argument("--fsdp-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write("no GPU here (torch.cuda.is_available() is false): nothing measured\n")
        return 0
    if options.fsdp_of is not None:
        tokens_per_s = fsdp_tokens_per_s(options)
        sys.stdout.write(f"{tokens_per_s} {torch.cuda.max_memory_allocated() / MIB}\n")
        return 0
    if options.tiny:
        options.layers, options.hidden, options.sequence, options.micro_batch = 12, 32, 32, 2
        options.steps = WARMUP_STEPS + 2
    cases = [case for case in options.cases if case != "fsdp"] or ["resident"]
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            sys.stdout.write(penstock(options, Path(folder) / case, case))
            sys.stdout.flush()
        if "fsdp" in options.cases:
            sys.stdout.write(fsdp(options, Path(folder) / cases[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
