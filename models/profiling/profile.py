"""``python -m penstock.models.profiling.profile CONFIG --out FILE``: measures a model's costs on
this machine.

Runs the real blocks with random weights (:mod:`penstock.models.profiling.blocks`). Then measures
the machine's copies, messages and optimizer sweeps (:mod:`penstock.models.profiling.machine`).
Measurements run one after the other on an otherwise idle machine: they do not include the slowdown
of concurrent workers, optimizer and copies. The number of threads is that of a worker. Makes no run
directory and needs no data. Layers are compiled if those of a run would be (``model.compile``); the
profile records it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from penstock.config.schema import Config, load_config
from penstock.config.values import AUTO, SDPA
from penstock.host.errors import ConfigError
from penstock.host.files import write_atomically
from penstock.host.limits.cgroup import memory_limits, usable_cpus
from penstock.host.limits.scratch import scratch_folder
from penstock.models.attention import choose_attention
from penstock.models.binding import TORCH_DTYPES
from penstock.models.compiled import Compiler
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
from penstock.models.torch_internals import compilation_error
from penstock.protocol.plan.profile import MachineProfile, Profile, to_json
from penstock.protocol.run.hardware.sweep_rates import measure_optimizer
from penstock.protocol.run.process import tool_main
from penstock.shm.table import BlockTable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BUDGET_S = 0.25
"""Seconds that each median may take, beyond its least number of runs."""


def measure(
    config: Config, progress: Progress = lambda message: None, *, budget_s: float = BUDGET_S
) -> Profile:
    """Measures the model and the machine of a configuration; ``progress`` gets a message for each
    step.

    ``budget_s``: seconds that each median may take. Micro-batches of one and two sequences, and of
    the configured number.

    Raises:
        ConfigError: the model is impossible, or the device does not exist.
    """
    device = _device(config)
    choose_attention(config.model.attention)
    model = _Model.of(config, device, budget_s)
    micro_batches = sorted({1, 2, config.train.micro_batch or 1})
    with _threads(config) as num_threads, _graphs(config) as cache:
        bench = _compiled_bench(config, model, cache, progress)
        compiled = bench is not None
        bench = bench or model.bench(None)
        blocks = measure_kinds(bench, model.table, micro_batches, progress)
        machine = _machine(config, device, blocks.instruction_s, progress)
    return Profile(
        device=_description(device, num_threads, compiled=compiled),
        sequence_length=config.data.sequence_length,
        micro_batch=config.train.micro_batch or 1,
        machine=machine,
        kinds=blocks.kinds,
        table=model.table,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The model of a configuration on one device, to be measured."""

    config: Config
    hf_config: PretrainedConfig
    table: BlockTable
    device: torch.device
    compute_dtype: torch.dtype
    budget_s: float

    @classmethod
    def of(cls, config: Config, device: torch.device, budget_s: float) -> _Model:
        tokenizer = open_tokenizer(config)
        hf_config = resolve_hf_config(
            config,
            tokenizer_vocab_size=None if tokenizer is None else tokenizer.vocab_size,
            eos=None if tokenizer is None else tokenizer.eos,
        )
        table = build_table(config, hf_config)
        own_memory = torch_device(device).own_memory
        return cls(
            config=config,
            hf_config=hf_config,
            table=table,
            device=device,
            compute_dtype=TORCH_DTYPES[table.weight_dtype] if own_memory else torch.float32,
            budget_s=budget_s,
        )

    def bench(self, compiler: Compiler | None) -> BlockBench:
        """Returns a bench of the model; ``compiler`` compiles its layers, if any."""
        return BlockBench(
            self._runtime(compiler),
            device=self.device,
            compute_dtype=self.compute_dtype,
            sequence_length=self.config.data.sequence_length,
            budget_s=self.budget_s,
            objective=own_objective(self.config),
            plain=None if compiler is None else self._runtime(None),
        )

    def _runtime(self, compiler: Compiler | None) -> ModelRuntime:
        return ModelRuntime(
            self.hf_config,
            self.table,
            device=self.device,
            compute_dtype=self.compute_dtype,
            seed=0,
            compiler=compiler,
            label_smoothing=self.config.train.label_smoothing,
            adapter=self.config.adapter,
        )


@contextmanager
def _graphs(config: Config) -> Iterator[Path | None]:
    """Yields a folder for the graphs of a named attention. None for torch's own folder, which would
    return graphs of another attention.
    """
    if config.model.attention in (AUTO, SDPA):
        yield None
        return
    with scratch_folder("graphs") as folder:
        yield folder


def _compiled_bench(
    config: Config, model: _Model, cache: Path | None, progress: Progress
) -> BlockBench | None:
    """Returns a bench with compiled layers; None if those of a run would not be compiled.

    Raises:
        ConfigError: the user asks for compiled layers, and a kind of layer is not one graph.
    """
    choice = config.model.compile
    if choice is False or (choice == AUTO and not torch_device(model.device).own_memory):
        return None
    progress("the time of the compiler (model.compile)")
    compiler = Compiler(deterministic=config.model.deterministic, cache=cache)
    compiler.set_up_process()
    bench = model.bench(compiler)
    try:
        bench.compile(config.train.micro_batch or 1)
    except (compilation_error(), RuntimeError) as error:
        if choice is True:
            raise ConfigError(
                f"model.compile = true: the layers cannot be compiled ({type(error).__name__}); set"
                " model.compile to false"
            ) from error
        progress(f"layers that are not compiled, which they cannot be ({type(error).__name__})")
        return None
    return bench


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
    if config.cluster.platform.simulated_clock:
        raise ConfigError(
            f"cluster.device = {config.cluster.device!r}: there is nothing to measure on an"
            " emulated device; use --set cluster.device=cpu or cuda"
        )
    device = first_device(config.cluster.device)
    if device is None:
        raise ConfigError(
            f"cluster.device = {config.cluster.device!r}: there is no GPU here to measure; run this"
            " on a machine of the cluster, or use --costs analytic:GPU:MODEL"
        )
    return device.device


@contextmanager
def _threads(config: Config) -> Iterator[int]:
    """Computes inside with a worker's number of threads; yields the number."""
    before = torch.get_num_threads()
    share = usable_cpus() // (config.cluster.workers * len(config.cluster.nodes))
    num_threads = config.cluster.threads_per_worker or max(1, share)
    torch.set_num_threads(num_threads)
    try:
        yield num_threads
    finally:
        torch.set_num_threads(before)


def _description(device: torch.device, num_threads: int, *, compiled: bool) -> str:
    described = torch_device(device)
    threads = "" if described.own_memory else f", compute threads of a worker: {num_threads}"
    layers = "compiled" if compiled else "not compiled"
    return f"{described.name}{threads}, layers {layers}"


def _say(message: str) -> None:
    sys.stdout.write(f"measuring {message}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the profile command; returns the exit code."""
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
