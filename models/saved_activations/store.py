"""The store of what one forward of a stage keeps for its backward.

Guarantees about bits: gradients are those of a plain forward and backward, bit for bit, whatever is
dropped, swapped or bound anew, if the device's kernels give the same bits for the same input.
Dropped kernels run again on the same bytes and strides and draw the same random numbers, wherever
the generator is by then; copies are of bytes. Weights must have the bytes of the forward when they
are bound again.

Guarantees about memory: a storage is held once, however many kernels saved it or views of it, and
until the backward of the last of them; weights and constants are neither held nor counted. What is
dropped is freed during the forward as soon as the model's code lets go of it. After a swap the
device's memory is free if nobody else refers to it: of a stage's input its leaf does
(:func:`let_go`), of its output whoever sends it.

Not here: forwards that keep their input only (nothing to store), and what the split backward defers
(:mod:`penstock.models.split_backward.split`). What a nested ``torch.utils.checkpoint`` saves (the
loss in chunks) is that checkpoint's business.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch.autograd.graph import saved_tensors_hooks

from penstock.models.saved_activations.op_log import OpLog, RecordedKernel
from penstock.models.saved_activations.operators import OperatorTracker
from penstock.models.saved_activations.recorder import Recorder
from penstock.models.saved_activations.saved_tensors import SavedTensor, SavedTensors
from penstock.models.saved_activations.tensor_slots import StorageSlot, chosen
from penstock.models.saved_activations.weights import BoundWeights
from penstock.models.torch_device import Allocate, CopyStream, PlainCopies, host_memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensorPolicy:
    """What stays of a forward.

    ``drop``: operators (:mod:`~penstock.models.saved_activations.operators`) whose outputs do not
    stay: their kernels run again.
    ``rebind``: weights are looked up when they are needed, so that their memory may have changed
    hands; otherwise the forward's memory is referred to, as autograd would.
    """

    drop: frozenset[str] = frozenset()
    rebind: bool = False


class SavedActivations:
    """What one forward of one stage on one micro-batch keeps. Made by :func:`saving_activations`.

    Used by one thread at a time (the backward's may be another than the forward's). ``constants``
    are tensors of any shape and dtype, see there.
    """

    def __init__(
        self, policy: SavedTensorPolicy, weights: BoundWeights, constants: Iterable[torch.Tensor]
    ) -> None:
        self._saved = SavedTensors(weights, constants, rebind=policy.rebind)
        self._tracker = OperatorTracker()
        self._recorder = Recorder(policy.drop, self._saved, self._tracker)
        self._logs = [self._recorder.log]
        self._records = bool(policy.drop)
        self._running = False

    @property
    def bytes(self) -> int:
        """Bytes of activations on the device now: every storage once, without weights, constants,
        and what is dropped or swapped out. Falls while the backward proceeds.
        """
        return sum(slot.num_bytes for slot in self._activations() if slot.present)

    @property
    def slots(self) -> list[StorageSlot]:
        """What was saved of activations, or is needed to make that again, wherever it is."""
        return self._activations()

    @property
    def kernels(self) -> list[RecordedKernel]:
        """The kernels that will run again, in the order of the forward."""
        return [kernel for log in self._logs for kernel in log.kernels]

    @property
    def bytes_elsewhere(self) -> int:
        """Bytes of activations that are swapped out now, and not on their way back."""
        return sum(slot.num_bytes for slot in self._activations() if slot.elsewhere)

    @contextmanager
    def block(self, index: int) -> Iterator[None]:
        """Run block ``index`` of the model inside, within :func:`saving_activations`.

        What goes into a block is kept, even if a dropped operator of the block before made it (so
        the planner counts, too): every block can be recomputed by itself. Without this, all of the
        forward is one block.
        """
        self._begin(index)
        try:
            yield
        finally:
            self._begin(None)

    def swap_out(
        self,
        fraction: float,
        *,
        allocate: Allocate = host_memory,
        copies: CopyStream | None = None,
    ) -> int:
        """Start moving ``fraction`` (0 to 1) of :attr:`bytes` elsewhere; returns bytes moved.

        Whole storages, the largest first (:func:`~penstock.models.saved_activations.tensor_slots.chosen`).
        ``allocate`` gives flat uint8 memory elsewhere. The device's memory is let go of at once;
        ``copies`` sees to it that it is not used again too early.

        Raises:
            ValueError: the fraction is not one.
        """
        assert not self._running, "a swap belongs behind the forward"
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"fraction = {fraction}: expected 0 to 1")
        stream = copies or PlainCopies()
        moved = chosen([slot for slot in self._activations() if slot.present], fraction)
        for slot in moved:
            slot.move_out(allocate(slot.num_bytes)[: slot.num_bytes], stream.copy)
        return _finish(moved, stream)

    def swap_in(self, *, copies: CopyStream | None = None) -> int:
        """Start bringing back everything that is out; returns its bytes.

        The first use of each storage orders itself after the copies, and lets go of the memory
        elsewhere.
        """
        stream = copies or PlainCopies()
        moved = [slot for slot in self._activations() if slot.elsewhere]
        # Out and back may be two streams: no copy back may read what is still being written.
        for arrival in {id(left): left for slot in moved if (left := slot.left_with)}.values():
            stream.follow(arrival)
        for slot in moved:
            slot.move_in(stream.copy)
        return _finish(moved, stream)

    def recompute(self) -> int:
        """Make what was dropped and is still needed, now; returns the number of kernels run.

        Without this call each block's part is made when the backward first needs any of it.

        Raises:
            SavedActivationError: a kernel needs an activation that is swapped out, or a weight
                that is not bound.
        """
        return sum(log.run_again() for log in self._logs)

    def discard(self) -> None:
        """Free everything, though a graph may still refer to it; its backward is an error then.

        For a micro-batch that is given up.
        """
        for log in self._logs:
            log.forget()
        for slot in self._saved.slots():
            slot.discard()

    @contextmanager
    def _recording(self) -> Iterator[None]:
        self._running = True
        with ExitStack() as stack:
            stack.callback(self._end)  # runs last: the recorder has seen the last kernel by then
            stack.enter_context(saved_tensors_hooks(self._recorder.save, _tensor))
            if self._records:
                stack.enter_context(self._tracker.watching())
                stack.enter_context(self._recorder)
            yield

    def _end(self) -> None:
        self._running = False
        self._recorder.log.close()

    def _begin(self, block: int | None) -> None:
        self._recorder.log.close()
        self._recorder.log = OpLog()
        self._logs.append(self._recorder.log)
        self._tracker.restart()
        self._saved.block = block

    def _activations(self) -> list[StorageSlot]:
        return [slot for slot in self._saved.slots() if slot.movable]


@contextmanager
def saving_activations(
    policy: SavedTensorPolicy, weights: BoundWeights, constants: Iterable[torch.Tensor] = ()
) -> Iterator[SavedActivations]:
    """Run one forward with autograd inside; what it saves goes into the SavedActivations.

    ``weights``: where the stage's weights are; with ``policy.rebind`` they may be bound elsewhere
    afterwards, and are looked up there by backward and recomputation. ``constants``: tensors that
    outlive the forward (the batch, masks, rotary tables, buffers): saved ones are referred to, not
    counted and not swapped. Nests with other modes, and with other hooks for saved tensors, of
    which the innermost win.

    With operators to drop every kernel passes through Python once more, and compiled modules cannot
    be recorded.
    """
    saved = SavedActivations(policy, weights, constants)
    with saved._recording():
        yield saved


def let_go(leaf: torch.Tensor) -> None:
    """Make a leaf of a graph, of any shape and dtype, refer to one element, seen in that shape.

    Its gradient still arrives in ``leaf.grad``, in full; its values live on only in what was saved.
    """
    # Autograd looks at the leaf's shape, dtype and device when a gradient arrives, not at its
    # values.
    with torch.no_grad():
        leaf.data = leaf.new_zeros(()).expand(leaf.shape)


def _finish(moved: Sequence[StorageSlot], stream: CopyStream) -> int:
    """Remember where the copies of these slots end; returns their bytes."""
    if moved:
        arrival = stream.record()
        for slot in moved:
            slot.arrives_with(arrival)
    return sum(slot.num_bytes for slot in moved)


def _tensor(view: SavedTensor) -> torch.Tensor:
    return view.tensor()
