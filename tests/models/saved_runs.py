"""Runs of tiny models that keep activations, and what their kernels and gradients are."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.models.saved_activations import BoundWeights, SavedTensorPolicy, saving_activations
from penstock.planner.cost.operators import OPERATOR_SETS

MODELS = {"llama": {}, "gpt2": {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1}}
TINY_GPT2 = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
SETS = {
    **{name: frozenset(operators) for name, operators in OPERATOR_SETS.items()},
    "everything": frozenset().union(*OPERATOR_SETS.values()),
    "up": frozenset({"up"}),
}


class Run:
    """One model; forwards of all its blocks, each a graph of its own, into one SavedActivations."""

    def __init__(self, case, batch) -> None:
        self.case, self.batch = case, batch
        self.bound = case.bind(range(len(case.table.blocks)))
        self.weights = BoundWeights(self.bound)

    def forward(self, policy: SavedTensorPolicy, micro_batch: int = 0):
        """The SavedActivations and the outputs of the blocks."""
        with saving_activations(policy, self.weights, self.constants()) as kept:
            outputs = self.plain_forward(micro_batch, kept.block)
        return kept, outputs

    def plain_forward(self, micro_batch: int = 0, around=lambda block: torch.enable_grad()):
        """The outputs of the blocks."""
        outputs, tensors = [], {}
        for block in self.bound:
            with around(block.index):
                output = self.case.runtime.forward(
                    [block],
                    tensors,
                    self.batch,
                    data_position=0,
                    micro_batch_index=micro_batch,
                    training=True,
                    loss_weight=0.5,
                )
            outputs.append(output)
            tensors = output.tensors
        return outputs

    def constants(self) -> list[torch.Tensor]:
        """What the layers are called with besides hidden states, and the batch."""
        calls = self.case.runtime._prepare(
            self.batch,
            self.bound,
            training=True,
            place=(0, 0),
            storage=None,
            output_read=True,
        ).calls
        found = [torch.from_numpy(self.batch.input_ids), torch.from_numpy(self.batch.labels)]
        for value in (v for call in calls for v in (*call.args, *call.kwargs.values())):
            values = value if isinstance(value, tuple) else (value,)
            found += [tensor for tensor in values if isinstance(tensor, torch.Tensor)]
        return found

    def backward(self, outputs) -> list[torch.Tensor]:
        """The gradients of this backward alone."""
        gradients: dict[str, torch.Tensor] = {}
        for output in reversed(outputs):
            gradients = self.case.runtime.backward(output, gradients)
        flats = [flat for contributions in self.case.grads for flat in contributions]
        taken = [flat.clone() for flat in flats]
        for flat in flats:
            flat.zero_()
        return taken

    def release_weights(self) -> None:
        """Another stage's weights overwrite these."""
        self.saved = [flat.clone() for flat in self.case.weights]
        for flat in self.case.weights:
            flat.fill_(float("nan"))
        self.weights.release()

    def fetch_weights(self) -> None:
        """The weights arrive in other memory than before."""
        self.case.weights = self.saved
        self.weights.bind(self.case.bind(range(len(self.case.table.blocks)), train=False))


class Kernels(TorchDispatchMode):
    """Counts kernels, and follows the memory that they make."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        self.counts[func._schema.name.removeprefix("aten::")] += 1
        for value in result if isinstance(result, tuple) else (result,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                if storage._cdata not in given:
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def products(self) -> int:
        return sum(self.counts[name] for name in ("mm", "addmm", "bmm"))

    @property
    def live_bytes(self) -> int:
        return sum(size for place, size in self._made.values() if not place.expired())


@functools.cache
def built(make_case: Callable, name: str):
    return make_case(name, **MODELS[name])


@functools.cache
def plain_gradients(make_case: Callable, make_batch: Callable, name: str) -> list[torch.Tensor]:
    run = Run(built(make_case, name), make_batch())
    return run.backward(run.plain_forward())


def kept_bytes(run: Run, policy: SavedTensorPolicy) -> int:
    kept, graph = run.forward(policy)
    return kept.bytes if graph else 0


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert len(got) == len(wanted)
    for array, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(one, other), f"gradients of array {array}"
