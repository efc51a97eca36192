"""Bytes of live storages that blocks keep, and that they need while they run.

Bytes are counted as a worker's memory is (:mod:`penstock.models.profiling.storages`). Each storage
counts once. Weights, gradient sums, and tensors that outlive a micro-batch (tokens, masks, rotary
tables) do not count. Memory inside kernels is invisible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from penstock.models.profiling.storages import StorageLedger, StorageMode
from penstock.models.runtime import StageOutput
from penstock.models.saved_activations import SavedTensorPolicy, release_values
from penstock.models.split_backward.split import run_together

Gradients = Mapping[str, torch.Tensor]
RunBackward = Callable[[StageOutput, Gradients], Gradients]


class RunForward(Protocol):
    """A forward of the blocks on one micro-batch, with the same inputs each time."""

    def __call__(
        self, *, autograd: bool = True, split: bool = False, policy: SavedTensorPolicy | None = None
    ) -> StageOutput:
        """Runs the forward. ``split``: for a backward in two halves; ``policy``: the policy of a
        store of activations, None for autograd alone.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMeasure:
    """Bytes of one micro-batch; fields as in
    :class:`~penstock.protocol.plan.profile.KindProfile`.
    """

    output_bytes: float
    constant_bytes: float
    activation_bytes: float
    deferred_bytes: float
    forward_workspace_bytes: float
    graph_workspace_bytes: float
    backward_workspace_bytes: float
    backward_input_workspace_bytes: float
    backward_weight_workspace_bytes: float


def measure_memory(
    forward: RunForward, backward: RunBackward, constants: Iterable[torch.Tensor]
) -> MemoryMeasure:
    """Runs forwards and backwards, split and not; returns the bytes that they keep and need.

    ``backward`` takes the gradients of a forward's outputs, of the outputs' shapes, and returns
    those of its inputs. ``constants`` are tensors of any shape that outlive a micro-batch. The
    first forward of all must be over: it fills the caches, which are such constants.
    """
    _, without_graph, output_bytes = _forward(forward, autograd=False)
    activation_bytes, graph, _ = _forward(forward, autograd=True)
    return MemoryMeasure(
        output_bytes=output_bytes,
        constant_bytes=_storage_bytes(constants),
        activation_bytes=activation_bytes,
        forward_workspace_bytes=without_graph,
        graph_workspace_bytes=graph,
        backward_workspace_bytes=_backward(forward, backward),
        **_split(forward, backward),
    )


def _forward(forward: RunForward, *, autograd: bool) -> tuple[float, float, float]:
    """Returns three numbers of bytes. First, those that a forward keeps, its input included.
    Second, those needed meanwhile beyond these and its output. Third, those of its output.
    """
    ledger = StorageLedger()
    with StorageMode(ledger, ""):
        output = forward(autograd=autograd)
        output_bytes = _bytes(output.tensors)
        workspace_bytes = ledger.peak_bytes - ledger.live_bytes
        # The output counts by itself; the live rest is what the graph saved.
        for tensor in output.tensors.values():
            release_values(tensor)
    kept_bytes = ledger.live_bytes
    return float(kept_bytes + _bytes(output.inputs)), float(workspace_bytes), float(output_bytes)


def _backward(forward: RunForward, backward: RunBackward) -> float:
    """Returns the bytes that a backward needs beyond the graph and its incoming and outgoing
    gradients.
    """
    ledger = StorageLedger()
    with StorageMode(ledger, ""):
        output, seeds = _prepared(forward, split=False)
        before_bytes = ledger.restart()
        gradients = backward(output, seeds)
    return _workspace(ledger.peak_bytes - before_bytes, gradients)


def _split(forward: RunForward, backward: RunBackward) -> dict[str, float]:
    """Returns the bytes of both halves of a split backward, and those that stay in between."""
    ledger = StorageLedger()
    with StorageMode(ledger, ""):
        output, seeds = _prepared(forward, split=True)
        before_bytes = ledger.restart()
        gradients = backward(output, seeds)
        input_workspace = _workspace(ledger.peak_bytes - before_bytes, gradients)
        assert output.stored is not None and output.stored.deferred is not None
        deferred = output.stored.deferred
        deferred_bytes = float(deferred.bytes)
        # Between the halves the store alone may keep anything alive.
        del output, seeds, gradients
        before_bytes = ledger.restart()
        run_together([deferred])
    return {
        "deferred_bytes": deferred_bytes,
        "backward_input_workspace_bytes": input_workspace,
        "backward_weight_workspace_bytes": float(ledger.peak_bytes - before_bytes),
    }


def _prepared(forward: RunForward, *, split: bool) -> tuple[StageOutput, Gradients]:
    output = forward(split=split)
    seeds = {name: torch.ones_like(tensor) for name, tensor in output.tensors.items()}
    for tensor in output.tensors.values():
        release_values(tensor)
    return output, seeds


def _workspace(peak_bytes: int, gradients: Gradients) -> float:
    return max(0.0, float(peak_bytes - _bytes(gradients)))


def _storage_bytes(tensors: Iterable[torch.Tensor]) -> float:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return float(sum(storages.values()))


def _bytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
