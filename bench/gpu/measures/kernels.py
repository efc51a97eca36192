"""Forward and backward of a layer as a share of the peak, and UPDATE on the device and the CPU.

Figure 16 of Deep Optimizer States gives billions of parameters updated a second for 0, 25, 33 and
50 % of the updates on the GPU: half of them is fastest there. Here the CPU *advances* its blocks
and the GPU *previews* its own (state comes, weights go back; the commit is taken in on the CPU
during the next forward, and not counted), both at once, each block by :class:`CudaPreviewer` or by
the native kernel as in a run.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers.models.llama import modeling_llama  # noqa: F401  seconds that forks need not take

from bench.gpu.measures.attention import attention
from bench.gpu.measures.timing import Timer
from bench.gpu.measures.trained import Recipe
from bench.gpu.memory import waken
from bench.gpu.running import Measurement, Task
from bench.gpu.shapes import SHAPES, TINY, Shape, shape
from penstock import _native
from penstock.config.schema import Config, parse_config
from penstock.models.profiling.blocks import BlockBench
from penstock.models.runtime import ModelRuntime
from penstock.models.surgery.hf import resolve_hf_config
from penstock.models.surgery.table import build_table
from penstock.models.torch_device import repeat_bits
from penstock.planner.cost.catalogue import peak_flops_of
from penstock.planner.planning.configured import build_plan
from penstock.protocol.plan.step import BlockArrays, OptimizerStep, step_terms
from penstock.protocol.run.hardware.placement import place
from penstock.protocol.run.names import ownership, storage
from penstock.shm.layout import NodeLayout
from penstock.shm.memory import MemorySpec, NodeMemory
from penstock.workers.platforms.cuda.device import CudaDevice, gpu_of
from penstock.workers.platforms.cuda.update import CudaPreviewer
from penstock.workers.state.updates import NativePreviewer, Previewer, UpdateScope
from penstock.workers.waiting import Abort

SHARES = (0, 25, 33, 50, 100)
"""Per cent of the blocks that the device updates."""

_TILE = 1 << 20
_STEP = OptimizerStep.speculative(version=1, loss_scale=1.0, learning_rate=1e-4)


def products(task: Task) -> None:
    """Measures TFLOP/s of a large bf16 product of random numbers: the limit of the device."""
    size = 256 if task.tiny else 8192
    dtype = torch.bfloat16 if task.cuda else torch.float32
    left, right = (torch.randn(size, size, device=task.device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)

    def run() -> None:
        for _ in range(10):
            torch.mm(left, right, out=out)

    seconds = Timer(task.device).median(run) / 10
    peak = peak_flops_of(torch.cuda.get_device_name(0)) if task.cuda else None
    task.say(tflops=2.0 * size**3 / seconds / 1e12, data_sheet_tflops=peak and peak / 1e12)


def repeating_layers(task: Task) -> None:
    """Measures as :func:`layers`, with deterministic kernels, which runs use."""
    repeat_bits()
    layers(task)


def layers(task: Task) -> None:
    """Measures TFLOP/s of one layer of each model at 8 K tokens, forward and backward."""
    for one in (TINY,) if task.tiny else SHAPES.values():
        config = configuration(one, task)
        hf_config = resolve_hf_config(config, tokenizer_vocab_size=None, eos=None)
        table = build_table(config, hf_config)
        dtype = torch.bfloat16 if task.cuda else torch.float32
        device = torch.device(task.device, 0)
        runtime = ModelRuntime(hf_config, table, device=device, compute_dtype=dtype, seed=0)
        bench = BlockBench(
            runtime,
            device=device,
            compute_dtype=dtype,
            sequence_length=one.sequence,
            budget_s=0.05 if task.tiny else 1.0,
        )
        found = bench.measure(range(1, 2), one.micro_batch)
        tokens = one.micro_batch * one.sequence
        forward = one.recompute_flops / one.layers * tokens  # a forward of the layers is that
        task.say(
            **{
                one.name: {
                    "forward_tflops": forward / found.forward_s / 1e12,
                    "backward_tflops": 2.0 * forward / found.backward_s / 1e12,
                    "forward_s": found.forward_s,
                    "backward_s": found.backward_s,
                }
            }
        )


def configuration(one: Shape, task: Task) -> Config:
    """Returns the configuration of one worker with resident weights."""
    recipe = Recipe(shape=one, device=task.device, steps=1)
    return parse_config(recipe.configuration(task))


@dataclass(frozen=True, kw_only=True)
class Updates:
    """Blocks in shared memory, and both ways to update them."""

    memory: NodeMemory
    previewer: Previewer
    pool: _native.Pool
    arrays: dict[int, BlockArrays]
    undo: np.ndarray[Any, np.dtype[np.uint8]]

    def on_device(self, block: int) -> None:
        """Previews a block on the device."""
        scope = UpdateScope(
            epoch=1,
            attempt=1,
            step=_STEP,
            abort=Abort(),
            timeout_s=60.0,
            done=lambda block, done: None,
        )
        self.previewer.fetch(block, scope)
        self.previewer.preview(block, scope)

    def on_cpu(self, block: int, hyper: Any) -> None:
        """Advances a block on the CPU: settles one step, previews the next."""
        arrays = self.arrays[block]
        _native.advance(
            self.pool,
            **arrays.state(0),
            ranges=arrays.ranges,
            pending_grads=arrays.grads[0],
            pending_hyper=hyper,
            grads=arrays.grads[1],
            hyper=hyper,
            undo=self.undo,
            weights=arrays.weights[1],
            weights_dtype=arrays.weights_dtype,
        )

    def seconds(self, on_device: Sequence[int], on_cpu: Sequence[int], hyper: Any) -> float:
        """Returns the seconds of all updates, on device and CPU at once."""

        def device_side() -> None:
            for block in on_device:
                self.on_device(block)

        def cpu_side() -> None:
            for block in on_cpu:
                self.on_cpu(block, hyper)

        started_s = time.perf_counter()
        with ThreadPoolExecutor(2) as threads:
            for work in [threads.submit(device_side), threads.submit(cpu_side)]:
                work.result()
        return time.perf_counter() - started_s


def update(task: Task) -> None:
    """Measures billions of parameters a second by the share of blocks that the device updates."""
    one = shape("1.2 B", tiny=task.tiny)
    config = configuration(one, task)
    hyper = _STEP.hyper(config.optimizer)
    waken(24 * one.parameters, task.left_s / 4)
    found: dict[str, float] = {}
    with updates(task, config) as here:
        blocks = [b for b in here.memory.owned_blocks() if 0 < b <= one.layers]
        sizes = {b: here.memory.spec.table.blocks[b].trainable_elements for b in blocks}
        here.seconds(blocks[:1], blocks[1:2], hyper)
        for share in SHARES:
            device = [b for i, b in enumerate(blocks) if _on_device(i, share)]
            rest = [b for b in blocks if b not in device]
            seconds = min(here.seconds(device, rest, hyper) for _ in range(2))
            found[f"{share} %"] = sum(sizes.values()) / seconds / 1e9
            task.say(billions_per_s=found, blocks=len(blocks))


def _on_device(index: int, share: int) -> bool:
    """Returns evenly spread numbers: every second one of 50 %, every third of 33, every fourth
    of 25.
    """
    return share == 100 or (share > 0 and index % round(100 / share) == 0)


@contextmanager
def updates(task: Task, config: Config) -> Iterator[Updates]:
    """Yields a model's state of random numbers, in a private /dev/shm."""
    hf_config = resolve_hf_config(config, tokenizer_vocab_size=None, eos=None)
    table = build_table(config, hf_config)
    plan = build_plan(config, table)
    owners = ownership(config, table, plan)
    spec = MemorySpec(
        run_id=uuid.uuid4().hex[:12],
        node_name="a",
        table=table,
        layout=NodeLayout.compute(table, owners, 0, storage(config, plan)),
        undo_bytes=4096,
        step_terms=step_terms(config),
    )
    memory = NodeMemory.create(spec)
    cores = place(config, 0).optimizer
    blocks, device = memory.owned_blocks(), None
    fill(memory)
    if task.cuda:
        gpu = gpu_of(0)
        device = CudaDevice(gpu, weight_dtype=table.weight_dtype, grad_dtype=table.grad_dtype)
        device.attach(memory, 1 << 20, 1)
        previewer: Previewer = CudaPreviewer(gpu, memory, config.optimizer, blocks)
    else:
        previewer = NativePreviewer(memory, config.optimizer, cores[:1])
    arrays = {b: BlockArrays.of(memory, b, config.optimizer) for b in blocks}
    with _native.Pool(cores) as pool:
        undo = np.zeros(_native.undo_bytes(pool.num_threads) + 4096, np.uint8)
        start = -undo.ctypes.data % 4096
        yield Updates(
            memory=memory, previewer=previewer, pool=pool, arrays=arrays, undo=undo[start:]
        )
    previewer.close()
    if device is not None:
        device.detach()
    arrays.clear()
    memory.unlink()
    memory.close()


def fill(memory: NodeMemory) -> None:
    """Fills states and gradients with a million random numbers, repeated."""
    tile = np.random.default_rng(0).standard_normal(_TILE, np.float32) * np.float32(0.02)
    halves = (tile.view(np.uint32) >> 16).astype(np.uint16)  # of bf16, rounded down
    for block in memory.owned_blocks():
        arrays = [memory.grads(block, copy, 0) for copy in range(2)]
        arrays += [memory.state(block, name) for name in ("master", "exp_avg", "exp_avg_sq")]
        for array in arrays:
            for start in range(0, len(array), _TILE):
                part = array[start : start + _TILE]
                part[:] = (halves if array.dtype == np.uint16 else tile)[: len(part)]
        np.square(arrays[-1], out=arrays[-1])


MEASUREMENTS = (
    Measurement(name="products", deadline_s=20, run=products),
    Measurement(name="layers", deadline_s=40, run=layers),
    Measurement(name="layers that repeat their bits", deadline_s=40, run=repeating_layers),
    Measurement(name="update", deadline_s=75, run=update),
    Measurement(name="attention", deadline_s=90, run=attention),
)
