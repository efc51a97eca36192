"""The store of the tensors that one forward of a stage keeps for its backward.

Guarantees about bits: dropping, swapping and moving weights leave gradients equal to those of a
plain forward and backward, bit for bit. The device's kernels must give the same bits for the same
input. Dropped kernels run again on the same bytes and strides and draw the same random numbers,
independent of the generator's later state. Swaps copy bytes. Weights must have the bytes of the
forward when they are bound again.

Guarantees about memory:

* A storage is held once, even if several kernels saved it or views of it, until the backward of the
  last of them. Weights and constants are neither held nor counted.
* Dropped tensors are freed during the forward as soon as the model's code has released them.
* After a swap the device's memory is free if no other reference exists. The input leaf still
  references the stage's input (:func:`release_values`), and the channel the output.

Outside of this module: forwards that keep only their input (nothing to store), and the deferred
tensors of the split backward (:mod:`penstock.models.split_backward.split`). A nested
``torch.utils.checkpoint`` (the loss in chunks) manages its own saved tensors.
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
    """The tensors of a forward that stay.

    ``drop``: operators (:mod:`~penstock.models.saved_activations.operators`) without kept outputs;
    their kernels run again. ``rebind``: weights are found by name when they are needed, so that
    their memory may serve another stage meanwhile. Otherwise the forward's memory is referenced, as
    in autograd.
    """

    drop: frozenset[str] = frozenset()
    rebind: bool = False


class SavedActivations:
    """The kept tensors of one forward of one stage on one micro-batch, from
    :func:`saving_activations`.

    One thread at a time uses the object; forward and backward may run on different threads.
    ``constants``: tensors of any shape and dtype, see :func:`saving_activations`.
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
        """Bytes of activations on the device now. Every storage counts once; weights, constants,
        dropped and swapped tensors do not count. The number falls while the backward proceeds.
        """
        return sum(slot.num_bytes for slot in self._activations() if slot.present)

    @property
    def slots(self) -> list[StorageSlot]:
        """The slots of saved activations, and of activations needed to make those again, on the
        device or elsewhere.
        """
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
        """Runs block ``index`` of the model inside, within :func:`saving_activations`.

        Inputs of a block are kept, even if a dropped operator of the block before made them, as the
        planner counts. So every block can be recomputed alone. Without this context the whole
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
        """Starts to move ``fraction`` (0 to 1) of :attr:`bytes` elsewhere; returns bytes moved.

        Whole storages move, the largest first
        (:func:`~penstock.models.saved_activations.tensor_slots.chosen`). ``allocate`` gives flat
        uint8 memory elsewhere. The device's memory is released at once; ``copies`` keeps the
        allocator from reusing it before the copy has read it.

        Raises:
            ValueError: ``fraction`` is outside 0 to 1.
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
        """Starts to bring back all activations that are out; returns their bytes.

        The first use of each storage waits for its copy, and releases the memory elsewhere.
        """
        stream = copies or PlainCopies()
        moved = [slot for slot in self._activations() if slot.elsewhere]
        # Copies out and back may run on two streams: a copy back must not read bytes that are still
        # being written.
        for arrival in {id(left): left for slot in moved if (left := slot.left_with)}.values():
            stream.follow(arrival)
        for slot in moved:
            slot.move_in(stream.copy)
        return _finish(moved, stream)

    def recompute(self) -> int:
        """Makes all dropped tensors that are still needed, now; returns the number of kernels run.

        Without this call, each block's part is made when the backward first needs one of its
        tensors.

        Raises:
            SavedActivationError: a kernel needs an activation that is swapped out, or a weight that
                is not bound.
        """
        return sum(log.run_again() for log in self._logs)

    def discard(self) -> None:
        """Frees everything, even if a graph still refers to it; a later backward is an error.

        For a micro-batch that is dropped.
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
    """Runs one forward with autograd inside; the SavedActivations store its saved tensors.

    ``weights``: the locations of the stage's weights. With ``policy.rebind`` they may move
    afterwards; backward and recomputation find them there. ``constants``: tensors that outlive the
    forward (the batch, masks, rotary tables, buffers); they are referenced, not counted and not
    swapped. The context nests with other modes and other hooks for saved tensors; the innermost
    hooks win.

    With operators to drop every kernel passes through Python once more, and compiled modules cannot
    be recorded.
    """
    saved = SavedActivations(policy, weights, constants)
    with saved._recording():
        yield saved


def release_values(leaf: torch.Tensor) -> None:
    """Makes a leaf of a graph, of any shape and dtype, refer to one element, seen in that shape.

    Its gradient still arrives in ``leaf.grad``, in full. Its values live on only in saved tensors.
    """
    # When a gradient arrives, autograd checks the leaf's shape, dtype and device, not its values.
    with torch.no_grad():
        leaf.data = leaf.new_zeros(()).expand(leaf.shape)


def _finish(moved: Sequence[StorageSlot], stream: CopyStream) -> int:
    """Records the end of the copies of these slots; returns their bytes."""
    if moved:
        arrival = stream.record()
        for slot in moved:
            slot.arrives_with(arrival)
    return sum(slot.num_bytes for slot in moved)


def _tensor(view: SavedTensor) -> torch.Tensor:
    return view.tensor()
