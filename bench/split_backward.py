"""Cost and memory of the split backward beside the unsplit one and beside torch's own split.

    python -m bench.split_backward [--kinds llama gpt2 bert mamba resnet] [--device cpu]
        [--rounds 7] [--resnet-152] [--record bench/papers/data/two_bp_stages.json]

A stage from hidden states to hidden states (pictures to features) per kind, in training mode. Each
round runs forward and backward unsplit, split, split with reductions deferred, and by
``torch.distributed.pipelining``; ratios are taken within a round and the median is printed. On a
CPU times are processor time of one thread, so a busy machine does not matter much, and freed memory
stays with the process, as on a GPU: otherwise the first touch of pages is most of what is measured.

Columns: ``B`` ms of the unsplit backward; ``BI/B``, ``BW/B`` and ``sum/B``; ``F/F`` the forward
against the unsplit one's; ``kept`` MiB alive between BACKWARD_INPUT and BACKWARD_WEIGHT, weights,
inputs and gradient sums apart; ``of`` the MiB alive after the forward.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import BertConfig, GPT2Config, LlamaConfig, MambaConfig, ResNetConfig

from penstock.models.split_backward.split import (
    DeferredWeights,
    backward_input,
    run_together,
    split_backward,
)

_MIB = 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MICRO_BATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A model without its head, and the shape of what goes in."""

    model: nn.Module
    shape: tuple[int, ...]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns hidden states, (batch, sequence, hidden), or features of pictures."""
        name = "pixel_values" if len(self.shape) == 4 else "inputs_embeds"
        output: torch.Tensor = self.model(**{name: inputs}).last_hidden_state
        return output * 1.0  # torch's split refuses an output that is a view


def make_stage(kind: str, *, full_resnet: bool) -> Stage:
    """Returns a stage of moderate size: products outweigh what a call costs."""
    attention = {"num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 1408}
    config: Any
    shape: tuple[int, ...] = (2, 128, 512)
    if kind == "llama":
        config = LlamaConfig(vocab_size=64, hidden_size=512, **attention)
    elif kind == "gpt2":
        config = GPT2Config(vocab_size=64, n_embd=512, n_layer=3, n_head=8, n_positions=128)
    elif kind == "bert":
        config = BertConfig(vocab_size=64, hidden_size=512, **attention)
    elif kind == "mamba":
        config = MambaConfig(vocab_size=64, hidden_size=512, num_hidden_layers=2, state_size=8)
        shape = (2, 32, 512)
    else:
        config = ResNetConfig(depths=[3, 8, 36, 3] if full_resnet else [1, 2, 3, 1])
        shape = (8, 3, 96, 96)
    return Stage(model=transformers.AutoModel.from_config(config).train(), shape=shape)


class StageRun:
    """One micro-batch, step by step: forward, first half, second half."""

    def __init__(self, stage: Stage, clock: Callable[[], float]) -> None:
        self._stage, self._clock = stage, clock
        self._parameters = list(stage.model.parameters())
        device = self._parameters[0].device
        self.inputs = torch.randn(stage.shape, device=device, requires_grad=True)
        self.seconds: list[float] = []

    def _timed(self, step: Callable[[], Any]) -> Any:
        start = self._clock()
        result = step()
        self.seconds.append(self._clock() - start)
        return result

    def unsplit(self) -> None:
        """Runs forward and backward."""
        output = self._timed(lambda: self._stage.forward(self.inputs))
        gradient = torch.ones_like(output)
        self._timed(lambda: output.backward(gradient))

    def split(self, at_half: Callable[[], None], *, reductions: bool) -> None:
        """Runs the split backward; ``at_half`` is called between the halves."""
        store = self._timed(lambda: self.first_half(reductions=reductions))
        at_half()
        self._timed(store.run)

    def first_half(self, *, reductions: bool = False) -> DeferredWeights:
        """Runs a forward (timed separately) and BACKWARD_INPUT."""
        store = DeferredWeights()

        def forward() -> torch.Tensor:
            with split_backward(store, self._parameters, reductions=reductions):
                return self._stage.forward(self.inputs)

        output = self._timed(forward)
        backward_input(store, [output], [torch.ones_like(output)])
        return store

    def torch_split(self, at_half: Callable[[], None]) -> None:
        """Runs the split backward of torch.distributed.pipelining."""
        outputs = [self._timed(lambda: self._stage.forward(self.inputs))]
        gradients = [torch.ones_like(outputs[0])]
        weights = self._parameters
        _, groups = self._timed(
            lambda: stage_backward_input(outputs, gradients, [self.inputs], iter(weights))
        )
        outputs.clear()
        gradients.clear()
        at_half()
        self._timed(lambda: stage_backward_weight(iter(weights), groups))


class Alive(TorchDispatchMode):
    """Memory that operations made and that still exists, that of some tensors apart."""

    def __init__(self, apart: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._apart = {tensor.untyped_storage().data_ptr() for tensor in apart}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return result

    def mib(self) -> float:
        """Returns the MiB allocated now."""
        living = (
            size
            for address, (storage, size) in self._made.items()
            if address not in self._apart and not storage.expired()
        )
        return sum(living) / _MIB


def kept_mib(stage: Stage, way: Callable[[StageRun, Callable[[], None]], None]) -> float:
    """Returns the MiB that are alive between the halves."""
    run = StageRun(stage, time.perf_counter)
    run.inputs.grad = torch.zeros_like(run.inputs)
    sums = [p.grad for p in stage.model.parameters() if p.grad is not None]
    apart = (run.inputs, run.inputs.grad, *stage.model.parameters(), *stage.model.buffers(), *sums)
    found: list[float] = []
    with Alive(apart) as alive:
        way(run, lambda: found.append(alive.mib()))
    return found[0]


def forward_mib(stage: Stage) -> float:
    """Returns the MiB that an unsplit forward leaves alive beside its output."""
    run = StageRun(stage, time.perf_counter)
    apart = (run.inputs, *stage.model.parameters(), *stage.model.buffers())
    with Alive(apart) as alive:
        output = stage.forward(run.inputs)
        kept = alive.mib()
    return kept - output.nbytes / _MIB


Way = Callable[[StageRun, Callable[[], None]], None]
WAYS: tuple[tuple[str, Way], ...] = (
    ("split", lambda run, at_half: run.split(at_half, reductions=False)),
    ("+reductions", lambda run, at_half: run.split(at_half, reductions=True)),
    ("torch", lambda run, at_half: run.torch_split(at_half)),
)


def report(kind: str, stage: Stage, clock: Callable[[], float], rounds: int) -> None:
    """Prints one line per way."""
    for parameter in stage.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    unsplit: list[list[float]] = []
    split: dict[str, list[list[float]]] = {name: [] for name, _ in WAYS}
    for _ in range(rounds + 1):  # the first warms up
        run = StageRun(stage, clock)
        run.unsplit()
        unsplit.append(run.seconds)
        for name, way in WAYS:
            run = StageRun(stage, clock)
            way(run, lambda: None)
            split[name].append(run.seconds)
    of_mib = forward_mib(stage)
    backward_ms = 1e3 * statistics.median(seconds[1] for seconds in unsplit[1:])
    for name, way in WAYS:
        ratios = [
            (_parts(name, ours), plain)
            for ours, plain in zip(split[name][1:], unsplit[1:], strict=True)
        ]
        forward = statistics.median(o[0] / p[0] for o, p in ratios)
        first = statistics.median(o[1] / p[1] for o, p in ratios)
        second = statistics.median(o[2] / p[1] for o, p in ratios)
        total = statistics.median((o[1] + o[2]) / p[1] for o, p in ratios)
        print(
            f"{kind:7} {name:12} {backward_ms:8.1f} {first:6.2f} {second:6.2f} {total:6.2f}"
            f" {forward:6.2f} {kept_mib(stage, way):8.2f} {of_mib:8.2f}",
            flush=True,
        )


def _parts(name: str, seconds: list[float]) -> tuple[float, float, float]:
    """Returns times of forward, first half and second half; our first half includes the forward."""
    if name == "torch":
        return seconds[0], seconds[1], seconds[2]
    return seconds[0], seconds[1] - seconds[0], seconds[2]


def report_concatenation(stage: Stage, clock: Callable[[], float], rounds: int) -> None:
    """Compares a loop with a concatenation of several micro-batches."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds + 1):
        for concatenate, found in seconds.items():
            runs = [StageRun(stage, clock) for _ in range(_MICRO_BATCHES)]
            stores = [run.first_half() for run in runs]
            start = clock()
            run_together(stores, concatenate=concatenate)
            found.append(clock() - start)
    loop, joined = (statistics.median(found[1:]) for found in seconds.values())
    print(
        f"BACKWARD_WEIGHT of {_MICRO_BATCHES} micro-batches {stage.shape}:"
        f" loop {loop * 1e3:.1f} ms, concatenated {joined * 1e3:.1f} ms",
        flush=True,
    )


def measure(stage: Stage, rounds: int) -> dict[str, Any]:
    """Returns medians in ms of processor time: forward and backward unsplit; forward, p1 and p2
    split; p2 of four micro-batches looped and concatenated. And MiB kept by a forward, and between
    the halves.
    """
    clock = time.process_time
    for parameter in stage.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rows: list[dict[str, float]] = []
    for _ in range(rounds + 1):  # the first warms up
        unsplit, split = StageRun(stage, clock), StageRun(stage, clock)
        unsplit.unsplit()
        split.split(lambda: None, reductions=False)
        forward, first, second = split.seconds
        row = {
            "forward_ms": unsplit.seconds[0],
            "backward_ms": unsplit.seconds[1],
            "split_forward_ms": forward,
            "p1_ms": first - forward,  # the first half is timed with its forward
            "p2_ms": second,
        }
        for name, concatenate in (("looped_ms", False), ("concatenated_ms", True)):
            stores = [StageRun(stage, clock).first_half() for _ in range(_MICRO_BATCHES)]
            start = clock()
            run_together(stores, concatenate=concatenate)
            row[name] = clock() - start
        rows.append(row)
    medians = {name: 1e3 * statistics.median(r[name] for r in rows[1:]) for name in rows[0]}
    return {**medians, "forward_mib": forward_mib(stage), "kept_mib": kept_mib(stage, WAYS[0][1])}


def record(path: Path, rounds: int) -> None:
    """Measures the 2BP paper's four kinds for its page, and writes the results."""
    found: dict[str, Any] = {"machine": f"{platform.machine()}, one thread", "kinds": {}}
    for kind in ("llama", "bert", "mamba", "resnet"):
        found["kinds"][kind] = measure(make_stage(kind, full_resnet=False), rounds)
        print(kind, found["kinds"][kind], flush=True)
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Measures the chosen kinds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    kinds = ["llama", "gpt2", "bert", "mamba", "resnet"]
    parser.add_argument("--kinds", nargs="*", choices=kinds, default=kinds)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--resnet-152", action="store_true", help="the full depth")
    parser.add_argument("--record", type=Path, help="write what 2BP's page reads, and no more")
    arguments = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    device = torch.device(arguments.device)

    def wall_clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    clock = wall_clock if device.type == "cuda" else time.process_time
    if device.type == "cpu":
        torch.set_num_threads(1)
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**30)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
    if arguments.record is not None:
        record(arguments.record, arguments.rounds)
        return
    print("kind    way              B ms   BI/B   BW/B  sum/B    F/F kept MiB   of MiB")
    for kind in arguments.kinds:
        stage = make_stage(kind, full_resnet=arguments.resnet_152)
        stage.model.to(device)
        report(kind, stage, clock, arguments.rounds)
        if kind == "llama":
            for tokens in (16, 128):
                shorter = Stage(model=copy.deepcopy(stage.model), shape=(2, tokens, 512))
                report_concatenation(shorter, clock, arguments.rounds)


if __name__ == "__main__":
    main()
