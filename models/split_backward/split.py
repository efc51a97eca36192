"""Split backward of any module: BACKWARD_INPUT now, BACKWARD_WEIGHT later (2BP, arXiv 2405.18047).

    store = DeferredWeights()
    with split_backward(store, blocks.parameters()):
        output = blocks(hidden)
    backward_input(store, [output], [gradient])  # hidden.grad
    store.run()  # .grad of the parameters

:func:`split_backward` watches the torch functions that the forward calls. Tensors computed from
parameters alone (``weight.t()``, ``-exp(A_log.float())``) are on the *parameter side*. Where such a
tensor meets an activation, the parameter's path leaves the input path:

- ``F.linear`` and ``addmm`` run with detached parameters; a hook takes the gradient of the output.
- Other products (convolutions, embeddings, ``matmul``) run on detached activations, so each has a
  small graph of its own. A node in the main graph gives it the gradient of its output and takes the
  gradients of the activations.
- Norms and elementwise functions stay in the main graph by default (``reductions``), so
  BACKWARD_INPUT makes the gradients of their small parameters.

The rest is an ordinary graph without the large parameters. It frees its saved tensors as the
backward passes. Afterwards the store keeps only the tensors for weight gradients. Nothing runs
twice.

Some functions stay unsplit: those not known to be linear in their parameters, and those that change
a tensor in place. BACKWARD_INPUT makes their weight gradients, and ``store.unsplit`` has the
reason. So does everything inside ``torch.utils.checkpoint``, which would compute all of it again
for BACKWARD_WEIGHT. Recomputation that runs the forward again under :func:`split_backward` is
split. ``autograd.Function.apply`` and reentrant checkpoints are invisible, and stay unsplit without
a reason in ``store.unsplit``.

The store is in :mod:`penstock.models.split_backward.deferred`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from penstock.models.split_backward.deferred import DeferredWeights, Unsplit, run_together
from penstock.models.split_backward.deferred_entries import (
    DeferredTensor,
    GraphEntry,
    ParameterRecord,
    ProductEntry,
    SavedWeights,
)
from penstock.models.split_backward.torch_calls import (
    ONLY_LIKE,
    TREATMENTS,
    MatrixProduct,
    TorchCall,
    Treatment,
    computed_name,
    matrix_product,
    replaced,
    storage_of,
    tensors_in,
)
from penstock.models.torch_internals import (
    SavedTensorHooks,
    innermost_saved_tensor_hooks,
    is_of_checkpoint,
    node_of_product,
    unseen_by_modes,
)

__all__ = [
    "DeferredWeights",
    "SplitMode",
    "Unsplit",
    "backward_input",
    "run_together",
    "split_backward",
]


@contextmanager
def split_backward(
    store: DeferredWeights,
    parameters: Iterable[torch.Tensor],
    *,
    reductions: bool = False,
) -> Iterator[None]:
    """Makes the backward of the forward inside a split one; ``store`` takes the weight gradients.

    ``parameters`` are the weights of the forward's modules, of any shapes, trainable or frozen; all
    other tensors are activations. Gradients of parameters go to ``.grad`` as of BACKWARD_INPUT.
    ``reductions``: defer the gradients of norms and elementwise functions too. A store takes one
    forward, on one thread.
    """
    mode = SplitMode(store, parameters, reductions=reductions)
    try:
        with mode:
            yield
    finally:
        mode.close()


def backward_input(
    store: DeferredWeights,
    outputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Runs BACKWARD_INPUT: sets ``.grad`` of the stage's inputs, and makes ``store`` ready to run.

    ``gradients`` have the shapes and dtypes of ``outputs``; None for a scalar loss. The caller
    should release the outputs: their graph has no further use.
    """
    torch.autograd.backward(outputs, gradients)
    store.seal()


class _ParameterSource(torch.autograd.Function):
    """A parameter in the store's graphs: the node refers to no weights.

    Runs only if the parameter's gradient comes from a function that the mode has not seen.
    """

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, record: ParameterRecord, box: list[torch.Tensor]) -> Any:
        # Weak: the record refers to this node by its edge, so a strong reference would be a cycle.
        ctx.record = weakref.ref(record)
        return box[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        record = ctx.record()
        if record is not None:
            record.receive(gradients[0])
        return None, None, None


class _Hollow(torch.autograd.Function):
    """An activation in a graph of the store: the node does not refer to its values. They are kept
    only if an operation saves them.
    """

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, box: list[torch.Tensor]) -> Any:
        return box[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise AssertionError("gradients are taken at its edge")


class _Link(torch.autograd.Function):
    """The place of an entry's graph in the main graph."""

    @staticmethod
    def forward(
        ctx: Any, entry: GraphEntry, outputs: list[torch.Tensor], *inputs: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)  # None says that an output has no gradient: no zeros
        ctx.entry = entry
        ctx.num_inputs = len(inputs)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        input_gradients = ctx.entry.receive(gradients)
        return None, None, *(input_gradients or [None] * ctx.num_inputs)


class _Own(NamedTuple):
    """A tensor on the parameter side and the parameters it is made of."""

    tensor: torch.Tensor
    records: tuple[ParameterRecord, ...]
    derived: bool


class SplitMode(TorchFunctionMode):
    """The mode of :func:`split_backward`. A forward may enter and leave the mode several times:
    operators outside are ordinary ones. Tensors are known by id, so those of interest are held
    until :meth:`close`.
    """

    def __init__(
        self,
        store: DeferredWeights,
        parameters: Iterable[torch.Tensor],
        *,
        reductions: bool = False,
    ) -> None:
        super().__init__()
        # An id may be reused once its object is gone, so all objects known by id are held here.
        self._store = store
        self._reductions = reductions
        self._parameters = {id(tensor): tensor for tensor in parameters}
        self._memory = {storage_of(tensor) for tensor in self._parameters.values()}
        self._own: dict[int, _Own] = {}
        self._sources: dict[int, torch.Tensor] = {}
        self._detached: dict[int, torch.Tensor] = {}
        self._catchers: dict[int, torch.Tensor] = {}

    def close(self) -> None:
        """Releases all tensors of the forward: graphs and store hold those that the backward
        reads.
        """
        self._parameters, self._own = {}, {}
        self._sources, self._detached, self._catchers = {}, {}, {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = computed_name(func)
        if name is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        tensors = tensors_in(args)
        if kwargs:
            tensors += tensors_in(kwargs)
        trained = [t for t in tensors if t.requires_grad and self._on_parameter_side(t)]
        if not trained:
            return func(*args, **kwargs)
        return self._treat(TorchCall(func, name, args, kwargs), tensors, trained)

    def _on_parameter_side(self, tensor: torch.Tensor) -> bool:
        key = id(tensor)
        if key in self._own:
            return True
        if key not in self._parameters:
            return False
        self._own[key] = _Own(tensor, (self._store.record_of(tensor),), False)
        return True

    def _treat(self, call: TorchCall, tensors: list[torch.Tensor], own: list[torch.Tensor]) -> Any:
        if call.name in ONLY_LIKE:
            if id(call.args[0]) not in self._own:
                return call.run({})
            tensors = own
        hooks = innermost_saved_tensor_hooks()
        if hooks is not None and is_of_checkpoint(hooks):
            return self._leave_unsplit(call, own, "inside torch.utils.checkpoint")
        others = [t for t in tensors if id(t) not in self._own]
        alone = all(id(t) in self._parameters for t in others)
        if call.in_place:
            return call.run({}) if alone else self._leave_unsplit(call, own, "in place")
        if alone:
            return self._derive(call, own, hooks)
        treatment = TREATMENTS.get(call.name)
        if treatment is None:
            return self._leave_unsplit(call, own, "not known to be linear in its parameters")
        if treatment is Treatment.REDUCTION and not self._reductions:
            return call.run(self._catchers_of(own))
        product = matrix_product(call)
        if product is not None and self._can_detach(product):
            return self._multiply(call, product, own, hooks)
        return self._cut(call, own, others, hooks)

    def _records(self, own: Iterable[torch.Tensor]) -> tuple[ParameterRecord, ...]:
        return tuple(dict.fromkeys(r for t in own for r in self._own[id(t)].records))

    def _sources_of(self, own: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Returns replacements for parameters, to which the store's graphs may refer."""
        return {id(t): self._source(self._own[id(t)]) for t in own if not self._own[id(t)].derived}

    def _source(self, parameter: _Own) -> torch.Tensor:
        key = id(parameter.tensor)
        source = self._sources.get(key)
        if source is None:
            record = parameter.records[0]
            made: torch.Tensor = _apply(
                _ParameterSource, self._store.anchor, record, [parameter.tensor]
            )
            record.edge = _node_edge(made)
            # A function that changes nothing (``weight.float()``) may return the source itself.
            self._own[id(made)] = parameter
            self._sources[key] = source = made
        return source

    def _derive(
        self, call: TorchCall, own: Sequence[torch.Tensor], hooks: SavedTensorHooks | None
    ) -> Any:
        """Runs a call of parameters alone: its result stays on the parameter side."""
        memory, shared = self._memory, self._store.shared

        def pack(tensor: torch.Tensor) -> DeferredTensor:
            if storage_of(tensor) in memory:
                # Their buffers may hold another stage when BACKWARD_WEIGHT runs. A mode that
                # replays operations must not see one more.
                with unseen_by_modes():
                    tensor = tensor.clone()
            shared.append(DeferredTensor(tensor, hooks))
            return shared[-1]

        with _packing(pack):
            result = call.run(self._sources_of(own))
        records = self._records(own)
        for tensor in tensors_in(result):
            if tensor.requires_grad and id(tensor) not in self._own:
                self._own[id(tensor)] = _Own(tensor, records, True)
        return result

    def _leave_unsplit(self, call: TorchCall, own: Sequence[torch.Tensor], reason: str) -> Any:
        self._store.note_unsplit(Unsplit(function=call.name, reason=reason))
        if not call.in_place or id(call.args[0]) not in self._own:
            return call.run(self._catchers_of(own))
        # Other tensors over the same memory no longer derive from parameters alone, and the mode
        # cannot list them.
        for key in [key for key, known in self._own.items() if known.derived]:
            del self._own[key]
            self._catchers.pop(key, None)
        return call.run({})

    def _catchers_of(self, own: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Returns replacements: leaves of the main graph, where BACKWARD_INPUT leaves gradients."""
        return {id(t): self._catcher(self._own[id(t)]) for t in own}

    def _catcher(self, own: _Own) -> torch.Tensor:
        leaf_tensor = self._catchers.get(id(own.tensor))
        if leaf_tensor is None:
            receive = self._defer_from(own) if own.derived else own.records[0].receive
            if not own.derived:
                own.records[0].caught = True

            def take(leaf: torch.Tensor) -> None:
                # Taken out at once, so that the leaf does not add up and holds no memory.
                gradient, leaf.grad = leaf.grad, None
                assert gradient is not None
                receive(gradient)

            leaf_tensor = own.tensor.detach().requires_grad_()
            leaf_tensor.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            self._catchers[id(own.tensor)] = leaf_tensor
        return leaf_tensor

    def _defer_from(self, own: _Own) -> Callable[[torch.Tensor], None]:
        """Returns the receiver of a derived tensor's gradient, which defers the rest."""
        entry = GraphEntry(own.records, derived=True)
        entry.attach([_edge(own.tensor)])
        self._store.append(entry)

        def receive(gradient: torch.Tensor) -> None:
            entry.receive([gradient])

        return receive

    def _can_detach(self, product: MatrixProduct) -> bool:
        rows, parameters = product.rows, (product.weight, product.bias)
        if not rows.requires_grad or id(rows) in self._own or not product.plain:
            return False
        trained = [self._own.get(id(t)) for t in parameters if t is not None and t.requires_grad]
        return all(known is not None and not known.derived for known in trained)

    def _multiply(
        self,
        call: TorchCall,
        product: MatrixProduct,
        own: Iterable[torch.Tensor],
        hooks: SavedTensorHooks | None,
    ) -> Any:
        weight, bias = self._own.get(id(product.weight)), self._own.get(id(product.bias))
        rows = None if weight is None else DeferredTensor(product.rows, hooks)
        entry = ProductEntry(
            rows,
            weight and weight.records[0],
            bias and bias.records[0],
            transposed=product.transposed,
        )
        for tensor in own:
            if id(tensor) not in self._detached:
                self._detached[id(tensor)] = tensor.detach()
        output: torch.Tensor = call.run(self._detached)
        # At the node: the output's place in the graph moves when it is changed in place.
        node_of_product(output).register_prehook(lambda gradients: entry.receive(gradients[0]))
        self._store.append(entry)
        return output

    def _cut(
        self,
        call: TorchCall,
        own: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        hooks: SavedTensorHooks | None,
    ) -> Any:
        """Runs the call on detached activations, and links its graph into the main one."""
        entry = GraphEntry(self._records(own), derived=any(self._own[id(t)].derived for t in own))
        activations = {id(t): t for t in others if t.requires_grad}
        alone = {k: _apply(_Hollow, self._store.anchor, [t]) for k, t in activations.items()}
        entry.inputs = [_node_edge(t) for t in alone.values()]
        frozen = [t for t in others if id(t) in self._parameters]
        weights = {storage_of(t) for t in (*own, *frozen)}

        # The graph keeps ``pack`` alive, so ``pack`` must not refer to the entry itself.
        saved, saved_weights = entry.saved, entry.saved_weights

        def pack(tensor: torch.Tensor) -> DeferredTensor | SavedWeights:
            if storage_of(tensor) in weights:
                saved_weights.append(SavedWeights(tensor, hooks))
                return saved_weights[-1]
            saved.append(DeferredTensor(tensor, hooks))
            return saved[-1]

        with _packing(pack):
            result = call.run(self._sources_of(own) | alone)
        outputs = {id(t): t for t in tensors_in(result) if t.requires_grad}
        if not outputs:
            return result
        entry.attach(map(_edge, outputs.values()))
        self._store.append(entry)
        beneath = activations.values() or (self._store.anchor,)
        linked = _apply(_Link, entry, list(outputs.values()), *beneath)
        return replaced(result, dict(zip(outputs, linked, strict=True)))


def _node_edge(tensor: torch.Tensor) -> GradientEdge:
    """Returns the edge of a tensor without a new operation. Another graph keeps its node alive."""
    assert tensor.grad_fn is not None
    return GradientEdge(tensor.grad_fn, tensor.output_nr)


def _edge(tensor: torch.Tensor) -> GradientEdge:
    if isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction):
        return get_gradient_edge(tensor)  # its Python object does not keep the node alive
    return _node_edge(tensor)


def _apply(function: type[torch.autograd.Function], *values: Any) -> Any:
    return function.apply(*values)  # type: ignore[no-untyped-call]


def _packing(pack: Callable[[torch.Tensor], DeferredTensor | SavedWeights]) -> saved_tensors_hooks:
    return saved_tensors_hooks(pack, lambda packed: packed.get())
