"""What runs are simulated: small models, all ways of training them, and their prepared directories.

Blocks have a few vectors of parameters, so that a sweep takes microseconds; everything else is as
in a run that ``penstock train`` prepared.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.schema import Config, parse_config
from penstock.daemons.node.preparing.changes import fixed_values
from penstock.planner.planning.configured import build_plan
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockSpec, BlockTable, BorrowedTensor, DType, TensorSpec, padded
from tests.protocol.test_numerics import RECIPE
from tests.simulation.files import REMOVED

NUM_TOKENS = 4096
VOCABULARY = 61
FEW_RESTARTS = {"cluster": {"max_restarts": 4}}
"""A section with so few that many runs end for it, and have to be started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One configuration. ``extra``: sections of the configuration file, merged last. ``undefined``:
    in one backward of so many a gradient is infinite (0: in none). ``frozen``: the second block
    trains nothing, and the third not all of it.
    """

    name: str
    scheme: str = "1f1b"
    nodes: int = 1
    workers: int = 2
    dtype: str = "fp32"
    grad_dtype: str = "fp32"
    settle: str = "auto"
    master: str = "fp32"
    clip: float | None = None
    speculate: str = "auto"
    steps: int = 24
    save_every: int = 0
    eval_every: int = 0
    tied: bool = False
    overflows: bool = False
    initial_scale: float = 1024.0
    rollback: str = "exact"
    undefined: int = 0
    blocks: int = 4
    partners: bool = False
    frozen: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def config(self, path: Path) -> Config:
        """Returns the configuration of a run in ``path``."""
        sections: dict[str, Any] = {
            "run": {"dir": str(path), "seed": 7},
            "model": {"hf": {"model_type": "none"}, "dtype": self.dtype},
            "data": {"path": "@stdlib", "sequence_length": 8},
            "train": {
                "steps": self.steps,
                "global_batch": 4,
                "micro_batch": 2,
                "clip_grad_norm": self.clip,
                "save_every": self.save_every,
                "eval_every": self.eval_every,
                "eval_batches": 1,
                "max_skips": 2,
            },
            "optimizer": {
                "lr": 0.05,
                "warmup_steps": 0,
                "grad_dtype": self.grad_dtype,
                "settle": self.settle,
                "master": self.master,
                "speculate": self.speculate,
                "rollback": self.rollback,
            },
            "schedule": {"scheme": self.scheme},
            "cluster": {
                "workers": self.workers,
                "nodes": [
                    {"name": "abcd"[index], "host": f"127.0.0.{index + 1}"}
                    for index in range(self.nodes)
                ],
                "heartbeat_interval_s": 0.5,
                "heartbeat_timeout_s": 2.0,
                "attempt_timeout_s": 8.0,
                "max_restarts": 10000,
                "transport": "zmq" if self.nodes > 1 else "auto",
            },
            # Locks of bases end with a process; those of simulated processes would not.
            "memory": {"share_base": "never"},
            "observability": {"trace": False},
        }
        if self.partners:
            sections["memory"]["mirror"] = "partner"
        if self.overflows:
            sections["optimizer"]["initial_loss_scale"] = self.initial_scale
        for section, values in self.extra.items():
            sections.setdefault(section, {}).update(values)
        return parse_config(sections)

    @property
    def keeps_bits(self) -> bool:
        """Whether a step that is taken back leaves nothing; otherwise it leaves rounding errors."""
        return self.rollback == "exact"

    def table(self) -> BlockTable:
        """Returns the block table."""
        last = self.blocks - 1
        blocks = [self._block(index, index == last) for index in range(self.blocks)]
        table = BlockTable(
            blocks=tuple(blocks),
            weight_dtype=DType(self.dtype),
            grad_dtype=DType(self.grad_dtype),
            state_arrays=("exp_avg", "exp_avg_sq"),
            vocab_size=VOCABULARY,
            num_parameters=sum(block.trainable_elements for block in blocks),
        )
        table.validate()
        return table

    def _block(self, index: int, last: bool) -> BlockSpec:
        tensors, elements = [], {True: 0, False: 0}
        for number, size in enumerate((48 + 16 * (index % 2), 16)):
            trainable = not (self.frozen and (index == 1 or (index, number) == (2, 1)))
            tensors.append(
                TensorSpec(
                    name=f"block{index}.tensor{number}",
                    shape=(size,),
                    trainable=trainable,
                    decay=trainable and number == 0,
                    offset=elements[trainable],
                )
            )
            elements[trainable] += padded(size)
        borrows: tuple[BorrowedTensor, ...] = ()
        if last and self.tied:
            borrows = (
                BorrowedTensor(name="block0.tensor0", local_name="tied", owner=0, contribution=1),
            )
        return BlockSpec(
            index=index,
            name=f"block{index}",
            kind="vectors",
            layer_index=None,
            tensors=tuple(tensors),
            borrows=borrows,
            trainable_elements=elements[True],
            frozen_elements=elements[False],
            contributions=2 if index == 0 and self.tied else 1,
            forward_flops=1000.0,
            activation_bytes=64.0,
            output_bytes=8.0,
        )


SHAPES = (
    Shape(name="plain"),
    Shape(name="early", settle="early", extra=FEW_RESTARTS),
    Shape(
        name="late",
        settle="advance",
        scheme="spipe",
        extra=FEW_RESTARTS,
    ),
    Shape(name="clipped", clip=0.09, scheme="spipe"),
    Shape(name="held", clip=0.09, speculate="never", extra=FEW_RESTARTS),
    Shape(name="bf16", dtype="bf16", grad_dtype="bf16", scheme="gpipe"),
    Shape(name="split", dtype="bf16", grad_dtype="bf16", master="split", settle="early"),
    Shape(
        name="overflow", dtype="fp16", grad_dtype="fp32", overflows=True, initial_scale=2.0**20
    ),  # skipped more often in a row than max_skips while the scale comes down
    Shape(name="saves", save_every=3, scheme="mobius"),
    Shape(name="evaluates", eval_every=2, save_every=4, frozen=True),
    Shape(name="tied", tied=True, clip=0.09, extra=FEW_RESTARTS),
    Shape(
        name="one",
        workers=1,
        scheme="naive",
        blocks=1,
        extra=FEW_RESTARTS,
    ),
    Shape(
        name="split-held",
        dtype="bf16",
        grad_dtype="bf16",
        master="split",
        speculate="never",
        clip=0.09,
    ),
    Shape(name="few-restarts", extra=FEW_RESTARTS),
    Shape(
        name="in-place",
        rollback="arithmetic",
        clip=0.15,
        undefined=7,
        save_every=4,
        extra={"optimizer": {"loss_scale_min": 0.25}},  # which its scale, always 1, never sees
    ),
    Shape(
        name="hopeless",
        dtype="fp16",
        undefined=7,
        extra={
            "train": {"max_skips": 1},
            "optimizer": {
                "initial_loss_scale": 1024.0,
                "loss_scale_min": 1024.0,
                "loss_scale_growth_interval": 3,
            },
        },
    ),  # ends at times, as max_skips were not enough, and is started again
    Shape(name="replicas", extra={"schedule": {"replicas": 2}}),
    Shape(
        name="sums",  # of so many terms that their order decides the last bit
        clip=0.09,
        tied=True,
        blocks=6,
        extra={
            "train": {"micro_batch": 1},
            "schedule": {"replicas": 2, "reduce_gradients": False},
        },
    ),
    Shape(
        name="devices",
        scheme="spipe",
        tied=True,  # gradients that a device steps with are another device's
        extra={"schedule": {"passes": ["interleave-updates"], "update_stride": 2.0}},
    ),
    Shape(
        name="flushes",
        clip=0.09,
        save_every=3,  # two copies of the state, of which one is read while the next is written
        extra={
            "schedule": {
                "passes": ["interleave-updates"],
                "update_stride": 1.0,
                "device_updates": "flush",
                "replicas": 2,
            }
        },
    ),
    Shape(
        name="two-nodes-replicas",
        nodes=2,
        workers=2,
        dtype="bf16",
        master="split",
        settle="early",  # so gradients have one copy, and sums are sent between nodes
        extra={"schedule": {"replicas": 2, "reduce_gradients": True}},
    ),
    Shape(
        name="two-nodes-pulls",
        nodes=2,
        workers=2,
        clip=0.09,
        extra={"schedule": {"replicas": 2, "reduce_gradients": False}},
    ),
    Shape(
        name="two-nodes-pulls-bf16",
        nodes=2,
        workers=1,
        dtype="bf16",
        grad_dtype="bf16",
        master="split",
        settle="advance",  # the sweep of a split master that overwrites halves which it reads
        extra={"schedule": {"replicas": 2, "reduce_gradients": False}},
    ),
    Shape(name="two-nodes", nodes=2, workers=1, blocks=2, extra=FEW_RESTARTS),
    Shape(
        name="two-nodes-in-place",
        nodes=2,
        workers=1,
        rollback="arithmetic",
        tied=True,
        clip=0.09,
    ),
    Shape(name="two-nodes-overflow", nodes=2, workers=1, dtype="fp16", overflows=True, blocks=2),
    Shape(name="two-nodes-spipe", nodes=2, workers=1, scheme="spipe", save_every=4, frozen=True),
    Shape(name="two-nodes-chimera", nodes=2, workers=2, scheme="chimera", clip=0.09),
    Shape(name="three-nodes", nodes=3, workers=1, blocks=3, eval_every=1),
    Shape(
        name="four-nodes",
        nodes=4,
        workers=1,
        blocks=4,
        dtype="bf16",
        grad_dtype="bf16",
        master="split",
        speculate="never",
        clip=0.09,
    ),
    Shape(name="partners", nodes=2, workers=1, clip=0.09, partners=True, blocks=2),
    Shape(
        name="partners-split",
        nodes=2,
        workers=1,
        dtype="bf16",
        grad_dtype="bf16",
        master="split",
        speculate="never",
        clip=0.09,
        partners=True,
    ),
    Shape(
        name="partners-devices",
        nodes=2,
        workers=2,
        partners=True,
        clip=0.09,
        save_every=5,
        extra={
            "schedule": {
                "passes": ["interleave-updates"],
                "update_stride": 1.0,
                "device_updates": "flush",
            }
        },
    ),
    Shape(
        name="partners-pulls",  # steps that wait for gradients of a node that may be lost
        nodes=2,
        workers=2,
        partners=True,
        clip=0.09,
        tied=True,
        settle="advance",
        extra={"schedule": {"replicas": 2, "reduce_gradients": False}},
    ),
    Shape(name="partners-early", nodes=2, workers=2, settle="early", partners=True),
    Shape(
        name="three-partners",
        nodes=3,
        workers=1,
        blocks=6,
        clip=0.09,
        tied=True,
        settle="advance",
        save_every=4,
        partners=True,
        frozen=True,
    ),
    Shape(
        name="four-partners",
        nodes=4,
        workers=1,
        dtype="fp16",
        overflows=True,
        partners=True,
        extra={"schedule": {"replicas": 2, "reduce_gradients": False}},
    ),
)


def prepare(shape: Shape, path: Path) -> RunDirectory:
    """Prepare a run directory; everything that its processes read is there."""
    config, table = shape.config(path), shape.table()
    run = RunDirectory.create(path)
    plan = build_plan(config, table)
    (path / "resolved.yaml").write_text(config.to_yaml())
    (path / "table.json").write_text(table.to_json())
    (path / "plan.json").write_text(plan.to_json())
    (path / "numerics.json").write_text(RECIPE.to_json())
    (path / "data").mkdir(exist_ok=True)
    (path / "model").mkdir(exist_ok=True)
    (path / "logs").mkdir(exist_ok=True)
    (path / "model" / "config.json").write_text(json.dumps({"model_type": "none"}))
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, NUM_TOKENS).astype("<u2")
    (path / "data" / "train.bin").write_bytes(tokens.tobytes())
    split = {
        "path": "train.bin",
        "token_dtype": "uint16",
        "vocab_size": VOCABULARY,
        "eos": None,
        "mask": None,
        "fingerprint": "none",
    }
    train = {**split, "first_token": 0, "num_tokens": NUM_TOKENS - 512}
    held_out = {**split, "first_token": NUM_TOKENS - 512, "num_tokens": 512}
    meta = {"train": train, "eval": held_out}
    (path / "data" / "meta.json").write_text(json.dumps(meta))
    run = RunDirectory(path)
    run.record_checksums(fixed_values(config))
    return run


def drawn_shape(seed: int) -> Shape:
    """Returns the shape of a seed."""
    return SHAPES[random.Random(f"shape {seed}").randrange(len(SHAPES))]


def seeds_by_shape(first: int, often: frozenset[str] = frozenset()) -> Iterator[int]:
    """Yields seeds from ``first`` on, in rounds of one of each shape. If some shapes come ``often``
    a round has all of them, and no more others than those: the next ones in turn.
    """
    waiting: dict[str, deque[int]] = {shape.name: deque() for shape in SHAPES}
    others = [shape for shape in waiting if shape not in often]
    in_turn = itertools.cycle(others)
    seeds = itertools.count(first)
    while True:
        few = min(len(often) or len(others), len(others))
        for shape in [*sorted(often), *itertools.islice(in_turn, few)]:
            while not waiting[shape]:
                seed = next(seeds)
                waiting[drawn_shape(seed).name].append(seed)
            yield waiting[shape].popleft()


def clean(path: Path) -> None:
    """Remove what a run left in its directory, so that it can begin anew."""
    for file in (*path.glob("journal.sqlite*"), path / "metrics.jsonl"):
        file.unlink(missing_ok=True)
    (path / "ended.json").unlink(missing_ok=True)
    for name in ("state", "trace", "metrics", REMOVED):
        shutil.rmtree(path / name, ignore_errors=True)
