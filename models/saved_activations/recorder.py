"""Recording of the kernels of dropped operators while a forward runs.

A dispatch mode below autograd sees every kernel with the tensors that it reads. Two kinds of
tensors are held as long as a recorded kernel needs them. The first existed before the block began
(its input, masks, the batch); the second comes from kept operators.

Kernels that change a tensor:

* A chain of changes by dropped operators is recorded and repeated in the same order (dropout on a
  CPU: ``empty_like``, ``bernoulli_``, ``div_``).
* A tensor that a kept operator changed is kept.
* Before a kernel changes a tensor that a recorded kernel has read and no kernel can make again, the
  tensor is copied.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from penstock.models.saved_activations.op_log import OpLog, RecordedCall, RecordedKernel, tensors_in
from penstock.models.saved_activations.operators import OperatorTracker
from penstock.models.saved_activations.saved_tensors import SavedTensor, SavedTensors, view_of
from penstock.models.saved_activations.tensor_slots import Blank, SlotView, StorageSlot, storage_of
from penstock.models.torch_internals import OpOverload, TorchDispatchMode, key_of, schema_of

_BY_SHAPE = {
    **dict.fromkeys(
        ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"), (0,)
    ),
    **dict.fromkeys(("new_empty", "new_zeros", "new_ones", "new_full"), (0,)),
    "native_dropout": (1,),
}
"""Outputs of kernels that depend on the shapes of their inputs alone: a dropout's mask is made
again without the product before it.
"""


@dataclass(frozen=True, slots=True)
class _Traits:
    """A kernel's name, the arguments that it changes, and True for a kernel with random numbers.

    All from torch's schema and tags of the kernel; ``written`` are positions, for arguments that
    can have one.
    """

    name: str
    written: tuple[int, ...]
    written_by_name: tuple[str, ...]
    random: bool

    @classmethod
    def of(cls, func: OpOverload[..., Any]) -> _Traits:
        schema = schema_of(func)
        arguments = schema.arguments
        written = [a.alias_info is not None and a.alias_info.is_write for a in arguments]
        return cls(
            name=schema.name.split("::")[-1],
            written=tuple(i for i, a in enumerate(arguments) if written[i] and not a.kwarg_only),
            written_by_name=tuple(a.name for i, a in enumerate(arguments) if written[i]),
            random=torch.Tag.nondeterministic_seeded in func.tags,
        )

    def changed(self, args: Any, kwargs: Any) -> list[torch.UntypedStorage]:
        """Returns the storages that a call with these arguments changes."""
        tensors = [args[i] for i in self.written if i < len(args)]
        tensors += [kwargs[name] for name in self.written_by_name if name in kwargs]
        return [s for tensor in tensors_in(tensors) if (s := storage_of(tensor)) is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """A kernel that has run: its inputs, its outputs, and True for each output in new memory."""

    call: RecordedCall
    operator: str
    name: str
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    new: list[bool]

    @property
    def label(self) -> str:
        """The name of its outputs in errors."""
        return f"{self.operator} ({self.name})"

    def recorded(self, log: OpLog, reads: list[SavedTensor]) -> RecordedKernel:
        """Returns the record for the op log."""
        return RecordedKernel(log=log, operator=self.operator, call=self.call, reads=reads)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the kernels of dropped operators in the current op log.

    ``drop`` names operators; ``saved`` takes held tensors; ``tracker`` names the operator of a
    kernel. ``log`` is that of the running block. One thread's forward at a time.
    """

    supports_higher_order_operators = True

    def __init__(self, drop: frozenset[str], saved: SavedTensors, tracker: OperatorTracker) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = OpLog()
        self._drop = drop
        self._saved = saved
        self._tracker = tracker
        self._traits: dict[Any, _Traits] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)  # of unknown effect, such as flex attention: kept
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = _Traits.of(func)
        operator = self._tracker.operator_of(traits.name)
        changed = traits.changed(args, kwargs)
        for storage in changed:
            self._protect(storage)
        if operator in self._drop and all(self.log.made(s) is not None for s in changed):
            return self._record(func, args, kwargs, changed, traits, operator)
        result = func(*args, **kwargs)
        for storage in changed:
            self.log.leave(storage)
        return result

    def save(self, tensor: torch.Tensor) -> SavedTensor:
        """Returns the same as :meth:`view`, for a tensor that the backward reads."""
        view = self.view(tensor)
        if isinstance(view, SlotView):
            view.slot.saved = True
        return view

    def view(self, tensor: torch.Tensor) -> SavedTensor:
        """Returns the later location of the tensor, of any shape and dtype. Its memory is held if
        no recorded kernel can make the tensor again.
        """
        storage = storage_of(tensor)
        slot = None if storage is None else self.log.made(storage)
        return self._saved.view(tensor) if slot is None else view_of(slot, tensor)

    def _protect(self, storage: torch.UntypedStorage) -> None:
        """Copies the bytes of a storage that a kernel is about to change, if a slot holds them."""
        slot = self._saved.held(storage)
        if slot is not None:
            # The copy comes before the kernel in the order of the stream that both run on.
            slot.fill(storage.clone())  # type: ignore[no-untyped-call]
            self._saved.forget_place(storage)

    def _record(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        changed: list[torch.UntypedStorage],
        traits: _Traits,
        operator: str,
    ) -> Any:
        inputs = list(tensors_in((args, kwargs)))
        device = inputs[0].device if inputs else torch.device("cpu")
        call = RecordedCall.of(func, args, kwargs, device=device, random=traits.random)
        # Before the kernel runs, if the kernel changes its input.
        reads = [self.view(tensor) for tensor in inputs] if changed else []
        result = func(*args, **kwargs)
        outputs = list(tensors_in(result))
        # Addresses identify storage objects: all of these are alive here.
        known = {key_of(s) for t in inputs if (s := storage_of(t)) is not None}
        new = [(s := storage_of(t)) is not None and key_of(s) not in known for t in outputs]
        if changed:
            node = self._add(
                RecordedKernel(log=self.log, operator=operator, call=call, reads=reads)
            )
            self._note_changes(node, changed, f"{operator} ({traits.name})")
            node.makes = [None] * len(outputs)
        elif any(new):  # otherwise a view
            self._note_outputs(
                _Seen(
                    call=call,
                    operator=operator,
                    name=traits.name,
                    inputs=inputs,
                    outputs=outputs,
                    new=new,
                )
            )
        return result

    def _note_changes(
        self, node: RecordedKernel, changed: list[torch.UntypedStorage], label: str
    ) -> None:
        for storage in changed:
            before = self.log.made(storage)
            assert before is not None
            after = self._saved.new_slot(storage, label)
            after.drop(node)
            node.changes.append((before, weakref.ref(after)))
            self.log.enter(storage, after)

    def _note_outputs(self, seen: _Seen) -> None:
        """Records outputs. Outputs that depend on shapes alone have a kernel of their own, which
        reads nothing.
        """
        by_shape = _BY_SHAPE.get(seen.name, ())
        apart = [is_new and i in by_shape for i, is_new in enumerate(seen.new)]
        others = [is_new and not apart[i] for i, is_new in enumerate(seen.new)]
        if any(apart):
            reads = [self._blank(tensor) for tensor in seen.inputs]
            self._note_made(seen.recorded(self.log, reads), seen, apart)
        if any(others):
            reads = [self.view(tensor) for tensor in seen.inputs]
            self._note_made(seen.recorded(self.log, reads), seen, others)

    def _note_made(self, node: RecordedKernel, seen: _Seen, made: list[bool]) -> None:
        self._add(node)
        for tensor, is_made in zip(seen.outputs, made, strict=True):
            slot = self._made_slot(node, tensor, seen.label) if is_made else None
            node.makes.append(None if slot is None else weakref.ref(slot))

    def _made_slot(
        self, node: RecordedKernel, tensor: torch.Tensor, label: str
    ) -> StorageSlot | None:
        storage = tensor.untyped_storage()
        if self.log.made(storage) is not None:
            return None  # an output before shares it
        slot = self._saved.new_slot(storage, label)
        slot.drop(node)
        self.log.enter(storage, slot)
        return slot

    def _add(self, node: RecordedKernel) -> RecordedKernel:
        self.log.add(node)
        return node

    def _blank(self, tensor: torch.Tensor) -> SavedTensor:
        return self.view(tensor) if storage_of(tensor) is None else Blank.like(tensor)
