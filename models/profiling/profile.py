"""``python -m penstock.models.profiling.profile CONFIG --out FILE``: measure what a model takes on
this machine.

Runs the real blocks with random weights (:mod:`penstock.models.profiling.blocks`), and the
machine's copies, messages and optimizer sweeps (:mod:`penstock.models.profiling.machine`), one
after the other on an otherwise idle machine: what workers, optimizer and copies take from each
other while they run together is not in it. Works with the number of threads that a worker will
have. Makes no run directory and needs no data.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from penstock.models.binding import TORCH_DTYPES
from penstock.models.data.objectives import own_objective
from penstock.models.data.tokenizer import open_tokenizer
from penstock.models.profiling.blocks import BlockBench, Progress, measure_kinds
from penstock.models.profiling.machine import (
    measure_copies,
    measure_messages,
    measure_update,
)
from penstock.models.runtime import ModelRuntime
from penstock.models.surgery.hf import resolve_hf_config
from penstock.models.surgery.table import build_table
from penstock.models.torch_device import first_device, torch_device
from penstock.protocol.config.schema import Config, load_config
from penstock.protocol.errors import ConfigError
from penstock.protocol.plan.profile import MachineProfile, Profile, to_json
from penstock.protocol.plan.sweep_rates import measure_optimizer
from penstock.protocol.run.files import write_atomically
from penstock.protocol.run.process import tool_main
from penstock.shm.cgroup import memory_limits, usable_cpus

BUDGET_S = 0.25
"""Seconds that each median may take, beyond its least number of runs."""


def measure(
    config: Config, progress: Progress = lambda message: None, *, budget_s: float = BUDGET_S
) -> Profile:
    """Measure the model and the machine of a configuration; ``progress`` hears what is next.

    ``budget_s``: seconds that each median may take. Micro-batches of one and two sequences, and of
    the configured number.

    Raises:
        ConfigError: the model is impossible, or there is no such device.
    """
    device = _device(config)
    tokenizer = open_tokenizer(config)
    hf_config = resolve_hf_config(
        config,
        tokenizer_vocab_size=None if tokenizer is None else tokenizer.vocab_size,
        eos=None if tokenizer is None else tokenizer.eos,
    )
    table = build_table(config, hf_config)
    own_memory = torch_device(device).own_memory
    compute_dtype = TORCH_DTYPES[table.weight_dtype] if own_memory else torch.float32
    micro_batches = sorted({1, 2, config.train.micro_batch or 1})
    with _threads(config) as num_threads:
        bench = BlockBench(
            ModelRuntime(hf_config, table, device=device, compute_dtype=compute_dtype, seed=0),
            device=device,
            compute_dtype=compute_dtype,
            sequence_length=config.data.sequence_length,
            budget_s=budget_s,
            objective=own_objective(config),
        )
        blocks = measure_kinds(bench, table, micro_batches, progress)
        machine = _machine(config, device, blocks.instruction_s, progress)
    return Profile(
        device=_description(device, num_threads),
        sequence_length=config.data.sequence_length,
        micro_batch=config.train.micro_batch or 1,
        machine=machine,
        kinds=blocks.kinds,
        table=table,
    )


def _machine(
    config: Config, device: torch.device, instruction_s: float, progress: Progress
) -> MachineProfile:
    progress("copies between host and device")
    copies = measure_copies(config, device)
    progress("messages between workers")
    messages = measure_messages()
    progress("optimizer passes")
    optimizer = measure_optimizer(config)
    return MachineProfile(
        instruction_s=instruction_s,
        fetch_bandwidth=copies.fetch,
        offload_bandwidth=copies.offload,
        peer_bandwidth=messages.bandwidth,
        latency_s=messages.latency_s,
        advance_rate=optimizer.advance,
        preview_rate=optimizer.preview,
        settle_rate=optimizer.settle,
        in_place_rate=optimizer.in_place,
        device_update_rate=measure_update(config, device, optimizer),
        device_memory_bytes=torch_device(device).memory_bytes,
        host_memory_bytes=float(min(limit.limit for limit in memory_limits())),
    )


def _device(config: Config) -> torch.device:
    if config.cluster.platform.models_time:
        raise ConfigError(
            f"cluster.device = {config.cluster.device!r}: there is nothing to measure on an"
            " emulated device; use --set cluster.device=cpu or cuda"
        )
    found = first_device(config.cluster.device)
    if found is None:
        raise ConfigError(
            f"cluster.device = {config.cluster.device!r}: there is no GPU here to measure; run this"
            " on a machine of the cluster, or use --costs analytic:GPU:MODEL"
        )
    return found.device


@contextmanager
def _threads(config: Config) -> Iterator[int]:
    """Compute inside with as many threads as a worker will have; yields how many."""
    before = torch.get_num_threads()
    share = usable_cpus() // (config.cluster.workers * len(config.cluster.nodes))
    num_threads = config.cluster.threads_per_worker or max(1, share)
    torch.set_num_threads(num_threads)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(before)


def _description(device: torch.device, num_threads: int) -> str:
    found = torch_device(device)
    threads = "" if found.own_memory else f", compute threads of a worker: {num_threads}"
    return f"{found.name}{threads}"


def _say(message: str) -> None:
    sys.stdout.write(f"measuring {message}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.models.profiling.profile", description=__doc__)
    parser.add_argument("config", type=Path, help="configuration (YAML)")
    parser.add_argument("--out", type=Path, required=True, help="where the profile goes")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)

    def work() -> None:
        profile = measure(load_config(options.config, tuple(options.set)), _say)
        write_atomically(options.out, to_json(profile))

    return tool_main(work, options.out, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
