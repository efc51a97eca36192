"""Compiles the layers of a run before its first step: ``python -m penstock.workers.compiling RUN``.

Preparation runs this module once, to see whether every kind of layer is one graph, and to fill the
run's cache (``RUN/compiled``). Each worker compiles its layers the same way before it takes part;
the cache leaves a worker the tracing alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.host.limits.cgroup import usable_cpus
from penstock.models.data.batch import MicroBatch
from penstock.models.runtime import HIDDEN, BoundBlock, ModelRuntime
from penstock.models.torch_internals import compilation_error, num_compiled_graphs
from penstock.protocol.run.hardware.cpus import threads_per_worker
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockSpec
from penstock.workers.data import open_dataset, training_batches
from penstock.workers.device import WorkerSite
from penstock.workers.platforms.registry import open_platform

_REASON_LETTERS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCompilation:
    """The compilation of a runtime's layers for micro-batches like ``batch``; ``evaluates``: also
    for held-out data. Weights are zeros, and are freed afterwards.
    """

    runtime: ModelRuntime
    batch: MicroBatch
    evaluates: bool

    @classmethod
    def of(cls, config: Config, runtime: ModelRuntime, batch: MicroBatch) -> LayerCompilation:
        """Returns the compilation for a run's training, and for its evaluations if it has any."""
        return cls(runtime=runtime, batch=batch, evaluates=bool(config.evaluation_sets))

    def run(self) -> None:
        """Compiles one layer of each kind, and the last one.

        If the last one made another graph, the model's code reads the layer's number, and the other
        layers of the kind follow.

        Raises:
            ConfigError: a kind of layer cannot be compiled to one graph; names kind and reason.
        """
        hidden = self._hidden()
        for blocks in self._kinds():
            first, *others = blocks
            self._compile(first, hidden)
            if others:
                before = num_compiled_graphs()
                self._compile(others[-1], hidden)
                for block in others[:-1] if num_compiled_graphs() > before else ():
                    self._compile(block, hidden)

    def _kinds(self) -> Iterable[list[BlockSpec]]:
        """Returns the layers by kind and frozen tensors."""
        kinds: dict[object, list[BlockSpec]] = {}
        for block in self.runtime.table.blocks:
            if block.layer_index is not None:
                frozen = tuple(tensor.trainable for tensor in block.tensors)
                kinds.setdefault((block.kind, frozen), []).append(block)
        return kinds.values()

    def _hidden(self) -> torch.Tensor:
        """Returns hidden states of zeros, of the shape that the embedding gives them."""
        output = self._forward(0, {}, trains=False, training=False)
        return torch.zeros_like(output)

    def _compile(self, block: BlockSpec, hidden: torch.Tensor) -> None:
        try:
            self._forward(block.index, {HIDDEN: hidden}, trains=True, training=True)
            if self.evaluates:
                self._forward(block.index, {HIDDEN: hidden}, trains=False, training=False)
        except (compilation_error(), RuntimeError) as error:
            reason = " ".join(str(error).split())[:_REASON_LETTERS]
            raise ConfigError(
                f"model.compile: layers of kind {block.kind!r} cannot be compiled"
                f" ({type(error).__name__}: {reason}); set model.compile to false"
            ) from error

    def _forward(
        self, index: int, inputs: dict[str, torch.Tensor], *, trains: bool, training: bool
    ) -> torch.Tensor:
        """Runs one block on zeros, and backward if it ``trains``; returns its output."""
        runtime = self.runtime
        output = runtime.forward(
            [self._bound(index, trains=trains)],
            inputs,
            self.batch,
            data_position=0,
            micro_batch_index=0,
            training=training,
            loss_weight=1.0,
            autograd=trains,
        )
        hidden = output.tensors[HIDDEN]
        if trains:
            runtime.backward(output, {HIDDEN: torch.zeros_like(hidden)})
        return hidden.detach()

    def _bound(self, index: int, *, trains: bool) -> BoundBlock:
        table = self.runtime.table
        block = table.blocks[index]
        sums = torch.float32 if trains else None
        tied = {}
        for borrowed in block.borrows:
            owner = table.blocks[borrowed.owner]
            tensor = next(t for t in owner.tensors if t.name == borrowed.name)
            length = owner.trainable_elements if tensor.trainable else owner.frozen_elements
            needs_grad = tensor.trainable and trains
            tied[borrowed.local_name] = (
                self._zeros(length),
                self._zeros(length, torch.float32) if needs_grad else None,
            )
        trainable = block.trainable_elements
        return self.runtime.bind(
            index,
            weights=self._zeros(trainable) if trainable else None,
            frozen=self._zeros(block.frozen_elements) if block.frozen_elements else None,
            grads=self._zeros(trainable, torch.float32) if trains and trainable else None,
            borrowed=tied,
            sums=sums,
        )

    def _zeros(self, length: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        runtime = self.runtime
        return torch.zeros(length, dtype=dtype or runtime.compute_dtype, device=runtime.device)


def try_compiling(run_dir: Path) -> None:
    """Compiles the layers of a prepared run as its first worker would.

    Raises:
        ConfigError: the layers cannot be compiled; names the reason.
    """
    files = RunDirectory(run_dir)
    config = files.config
    torch.set_num_threads(threads_per_worker(config, 0, usable_cpus()))
    site = WorkerSite(config=config, table=files.table, run_dir=files.path, device_index=0)
    platform = open_platform(site)
    platform.set_up_process()
    runtime = site.model_runtime(platform.device)
    dataset = open_dataset(files.path / "data", "train", config)
    batches, _ = training_batches(dataset, 0, config.train.micro_batch, config)
    LayerCompilation.of(config, runtime, batches[0]).run()


def main(words: Sequence[str] | None = None) -> int:
    """Compiles, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.workers.compiling", description=__doc__)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--parent-pid", type=int)
    given = parser.parse_args(words)
    return tool_main(lambda: try_compiling(given.run_dir), given.run_dir, given.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
