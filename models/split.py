"""Split backward of any module: BACKWARD_INPUT now, BACKWARD_WEIGHT later (2BP, arXiv 2405.18047).

    store = DeferredWeights()
    with split_backward(store, inputs=[hidden]):
        output = blocks(hidden)
    backward_input(store, [output], [gradient])  # hidden.grad; no weight gradients
    store.run()  # .grad of the parameters

:func:`split_backward` watches the torch functions that the forward calls. Tensors computed from
parameters alone (``weight.t()``, ``-exp(A_log.float())``) are on the *parameter side*; where one
meets an activation, parameter paths leave the input path and the graph is cut:

- A matrix product (``F.linear``, ``addmm``) runs with detached parameters; a hook takes the
  gradient of its output.
- Any other function that is linear in its parameters (convolutions, norms, embeddings, sums and
  products) runs on detached activations and gets a small graph of its own. A node in the main graph
  asks it for the gradients of the activations, and leaves it with the gradient of its output.

What is left of the main graph is an ordinary one without parameters: it frees what it saved as the
backward passes, so afterwards the store keeps only what weight gradients need. Nothing runs twice.

A function that may read weights for a weight gradient, or changes a tensor in place, stays unsplit:
BACKWARD_INPUT computes its weight gradients, and ``store.unsplit`` says why. So does everything
inside ``torch.utils.checkpoint`` (it would have to compute everything again for BACKWARD_WEIGHT);
a stage recomputed by running its forward again under :func:`split_backward` is split.

Not seen, so unsplit without a word, are ``autograd.Function.apply`` and reentrant checkpoints.
The entries and what BACKWARD_WEIGHT does with them are in :mod:`penstock.models.deferred`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from penstock.models.deferred import (
    DeferredWeights,
    GraphEntry,
    Kept,
    Lent,
    ParameterRecord,
    ProductEntry,
    SavedTensorHooks,
    Unsplit,
    run_together,
)

__all__ = ["DeferredWeights", "Unsplit", "backward_input", "run_together", "split_backward"]

_LINEAR_IN_PARAMETERS = frozenset(
    """
    linear conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    embedding embedding_bag __getitem__ index_select gather
    layer_norm rms_norm group_norm batch_norm instance_norm
    mul multiply __mul__ __rmul__ matmul __matmul__ __rmatmul__ mm bmm mv addmm baddbmm
    add __add__ __radd__ sub subtract __sub__ __rsub__ rsub
    cat concat concatenate stack where
    """.split()
)
"""Functions whose weight gradients read no weights."""

_KEEP_NO_INPUT = frozenset(
    """
    add __add__ __radd__ sub subtract __sub__ __rsub__ rsub cat concat concatenate stack where
    """.split()
)
"""Those of them whose weight gradients do not read the activations either."""

_ONLY_LIKE = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})
"""Methods that take no values from tensors other than the first."""

_NOT_COMPUTED = frozenset(
    """
    requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook backward detach
    detach_ data_ptr untyped_storage storage size stride dim numel nelement is_contiguous
    __repr__ __format__ __len__ __hash__
    """.split()
)
"""Methods that return no part of the graph."""

_KEYWORDS = {
    "linear": {"input": "rows"},
    "addmm": {"input": "bias", "mat1": "rows", "mat2": "weight"},
}
"""Names of the products' arguments, beside ``weight`` and ``bias``."""

_VIEW_PROPERTIES = frozenset({"T", "mT", "H", "mH", "real", "imag"})
_IN_PLACE_OPERATORS = frozenset(
    """
    __setitem__ __iadd__ __isub__ __imul__ __itruediv__ __ifloordiv__ __imod__ __ipow__
    __iand__ __ior__ __ixor__ __ilshift__ __irshift__
    """.split()
)


@contextmanager
def split_backward(
    store: DeferredWeights,
    *,
    inputs: Iterable[torch.Tensor],
    constants: Iterable[torch.Tensor] = (),
) -> Iterator[None]:
    """Make the backward of the forward inside a split one; ``store`` takes the weight gradients.

    ``inputs``: the stage's inputs; every other leaf that requires gradients is a parameter.
    ``constants``: frozen tensors that are no ``nn.Parameter``. Gradients go where ``.grad`` points
    during the forward.
    """
    mode = _SplitMode(store, inputs, constants)
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
    """BACKWARD_INPUT: ``.grad`` of the stage's inputs, and the store ready to run."""
    torch.autograd.backward(outputs, gradients)
    store.seal()


class _Source(torch.autograd.Function):
    """A parameter as graphs of the store see it: the node refers to no weights.

    Runs only where the parameter's gradient comes from a function that nobody saw.
    """

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, record: ParameterRecord, box: list[torch.Tensor]) -> Any:
        ctx.record = weakref.ref(record)
        return box[0].detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        record = ctx.record()
        if record is not None:
            record.receive(gradients[0])
        return None, None, None


class _Hollow(torch.autograd.Function):
    """An activation as a graph of the store sees it, where nobody will read its values."""

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
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        ctx.num_inputs = len(inputs)
        return tuple(output.detach() for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        found = ctx.entry.receive(gradients)
        return None, None, *(found or [None] * ctx.num_inputs)


class _SplitMode(TorchFunctionMode):
    def __init__(
        self,
        store: DeferredWeights,
        inputs: Iterable[torch.Tensor],
        constants: Iterable[torch.Tensor],
    ) -> None:
        super().__init__()
        self._store = store
        # Tensors are known by id, so all of them are held until the forward is over.
        self._inputs = {id(tensor): tensor for tensor in inputs}
        self._constants = {id(tensor): tensor for tensor in constants}
        self._parameters: dict[int, tuple[torch.Tensor, ParameterRecord]] = {}
        self._sources: dict[int, torch.Tensor] = {}
        self._catchers: dict[int, torch.Tensor] = {}
        self._derived: dict[int, tuple[torch.Tensor, tuple[ParameterRecord, ...]]] = {}
        self._anchor = torch.zeros((), requires_grad=True)

    def close(self) -> None:
        """Let go of all tensors of the forward."""
        for held in (self._inputs, self._constants, self._parameters, self._sources):
            held.clear()
        self._catchers.clear()
        self._derived.clear()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        if name == "__get__":
            name = func.__self__.__name__
            if name not in _VIEW_PROPERTIES:
                return func(*args, **kwargs)
        elif name == "__set__" or name in _NOT_COMPUTED:
            return func(*args, **kwargs)
        if not torch.is_grad_enabled():
            return func(*args, **kwargs)
        tensors = list(_tensors(args if not kwargs else (*args, *kwargs.values())))
        own = [t for t in tensors if t.requires_grad and self._on_parameter_side(t)]
        if not own:
            return func(*args, **kwargs)
        return self._dispatch(_Call(func, name, args, kwargs), tensors, own)

    def _dispatch(self, call: _Call, tensors: list[torch.Tensor], own: list[torch.Tensor]) -> Any:
        mine = {id(tensor) for tensor in own}
        if call.name in _ONLY_LIKE:
            if id(call.args[0]) not in mine:
                return call.run()
            tensors = own
        others = [t for t in tensors if id(t) not in mine and not self._is_constant(t)]
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if hooks is not None and hooks[0].__qualname__.startswith("_checkpoint_hook."):
            return self._leave_unsplit(call, own, "inside torch.utils.checkpoint")
        if call.in_place:
            return self._leave_unsplit(call, own, "in place") if others else call.run()
        if not others:
            return self._derive(call, own, hooks)
        if call.name not in _LINEAR_IN_PARAMETERS:
            return self._leave_unsplit(call, own, "weight gradients may read weights")
        product = _product(call)
        if product is not None and self._can_detach(product):
            return self._multiply(call, product, hooks)
        return self._cut(call, own, [t for t in tensors if id(t) not in mine], hooks)

    def _on_parameter_side(self, tensor: torch.Tensor) -> bool:
        key = id(tensor)
        if key in self._parameters or key in self._derived:
            return True
        if not tensor.is_leaf or key in self._inputs:
            return False
        self._parameters[key] = tensor, self._store.record_of(tensor)
        return True

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        if id(tensor) in self._constants:
            return True
        return isinstance(tensor, nn.Parameter) and not tensor.requires_grad

    def _records(self, own: Iterable[torch.Tensor]) -> tuple[ParameterRecord, ...]:
        found: dict[ParameterRecord, None] = {}
        for tensor in own:
            derived = self._derived.get(id(tensor))
            records = (self._parameters[id(tensor)][1],) if derived is None else derived[1]
            found |= dict.fromkeys(records)
        return tuple(found)

    def _in_store(self, own: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Parameters replaced by what the store's graphs may refer to."""
        return {
            id(tensor): self._source(tensor) for tensor in own if id(tensor) in self._parameters
        }

    def _source(self, parameter: torch.Tensor) -> torch.Tensor:
        source = self._sources.get(id(parameter))
        if source is None:
            record = self._parameters[id(parameter)][1]
            made = _apply(_Source, self._anchor, record, [parameter])
            record.edge = get_gradient_edge(made)
            self._sources[id(parameter)] = source = made
            # A function that changes nothing (``weight.float()``) may return the source itself.
            self._derived[id(source)] = source, (record,)
        return source

    def _derive(
        self, call: _Call, own: Sequence[torch.Tensor], hooks: SavedTensorHooks | None
    ) -> Any:
        """Nothing but parameters and constants: the result stays on the parameter side."""
        weights = {_storage(tensor) for tensor in own}

        def pack(tensor: torch.Tensor) -> Kept:
            # Buffers of weights may hold another stage when BACKWARD_WEIGHT runs.
            return Kept(tensor.clone() if _storage(tensor) in weights else tensor, hooks)

        with _packing(pack):
            result = call.run(self._in_store(own))
        records = self._records(own)
        for tensor in _tensors((result,)):
            if tensor.requires_grad:
                self._derived[id(tensor)] = tensor, records
        return result

    def _leave_unsplit(self, call: _Call, own: Sequence[torch.Tensor], reason: str) -> Any:
        self._store.note_unsplit(Unsplit(function=call.name, reason=reason))
        if call.in_place and any(call.args[0] is tensor for tensor in own):
            # What shares memory with it is no longer made of parameters alone, nobody knows which.
            sources = {id(source) for source in self._sources.values()}
            for key in self._derived.keys() - sources:
                del self._derived[key]
                self._catchers.pop(key, None)
            return call.run()
        return call.run({id(tensor): self._catcher(tensor) for tensor in own})

    def _catcher(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as a leaf of the main graph, where BACKWARD_INPUT leaves its gradient."""
        found = self._catchers.get(id(tensor))
        if found is None:
            own = self._parameters.get(id(tensor))
            receive = self._caught(tensor) if own is None else own[1].receive
            found = tensor.detach().requires_grad_()

            def take(leaf: torch.Tensor) -> None:
                gradient, leaf.grad = leaf.grad, None
                assert gradient is not None
                receive(gradient)

            found.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
            self._catchers[id(tensor)] = found
        return found

    def _caught(self, derived: torch.Tensor) -> Callable[[torch.Tensor], None]:
        entry = GraphEntry(self._records([derived]), derived=True)
        entry.attach([get_gradient_edge(derived)])
        self._store.append(entry)

        def receive(gradient: torch.Tensor) -> None:
            entry.receive([gradient])

        return receive

    def _can_detach(self, product: _Product) -> bool:
        """Whether the product's derivative is the plain one and its parameters are parameters."""
        rows, weight, bias = product.rows, product.weight, product.bias
        return (
            rows.requires_grad
            and not self._on_parameter_side(rows)
            and rows.dim() >= 2
            and rows.is_contiguous()
            and weight.dim() == 2
            and weight.is_contiguous()
            and all(
                not t.requires_grad or id(t) in self._parameters
                for t in (weight, bias)
                if t is not None
            )
            and not torch.is_autocast_enabled(rows.device.type)
        )

    def _multiply(self, call: _Call, product: _Product, hooks: SavedTensorHooks | None) -> Any:
        records = [
            None if t is None or not t.requires_grad else self._parameters[id(t)][1]
            for t in (product.weight, product.bias)
        ]
        entry = ProductEntry(
            None if records[0] is None else Kept(product.rows.detach(), hooks),
            weight=records[0],
            bias=records[1],
            transposed=product.transposed,
        )
        trained = [t for t in (product.weight, product.bias) if t is not None]
        output: torch.Tensor = call.run({id(t): t.detach() for t in trained})
        # The output may be a view, whose place in the graph moves when it is changed in place.
        base = output._base if output._is_view() else output
        assert base is not None
        base.register_hook(entry.receive)  # type: ignore[no-untyped-call]
        self._store.append(entry)
        return output

    def _cut(
        self,
        call: _Call,
        own: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor],
        hooks: SavedTensorHooks | None,
    ) -> Any:
        """Run it on detached activations, and link its graph into the main one."""
        derived = any(id(tensor) in self._derived for tensor in own)
        entry = GraphEntry(self._records(own), derived=derived)
        activations = {id(t): t for t in others if t.requires_grad}
        alone = {key: self._alone(call, t) for key, t in activations.items()}
        entry.inputs = [get_gradient_edge(t) for t in alone.values()]
        constants = [t for t in others if self._is_constant(t)]
        weights = {_storage(tensor) for tensor in (*own, *constants)}

        def pack(tensor: torch.Tensor) -> Kept | Lent:
            if _storage(tensor) in weights:
                entry.lent.append(Lent(tensor))
                return entry.lent[-1]
            entry.kept.append(Kept(tensor, hooks))
            return entry.kept[-1]

        with _packing(pack):
            result = call.run({**self._in_store(own), **alone})
        outputs = {id(t): t for t in _tensors((result,)) if t.requires_grad}
        if not outputs:
            return result
        entry.attach(get_gradient_edge(t) for t in outputs.values())
        self._store.append(entry)
        beneath = activations.values() or (self._anchor,)
        linked = _apply(_Link, entry, list(outputs.values()), *beneath)
        return _replaced(result, dict(zip(outputs, linked, strict=True)))

    def _alone(self, call: _Call, activation: torch.Tensor) -> torch.Tensor:
        if call.name in _KEEP_NO_INPUT:
            hollow: torch.Tensor = _apply(_Hollow, self._anchor, [activation])
            return hollow
        return activation.detach().requires_grad_()


class _Call:
    """A call of a torch function."""

    __slots__ = ("args", "function", "in_place", "kwargs", "name")

    def __init__(
        self, function: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self.function, self.name, self.args, self.kwargs = function, name, args, kwargs
        self.in_place = (
            name in _IN_PLACE_OPERATORS
            or (name.endswith("_") and not name.endswith("__"))
            or kwargs.get("out") is not None
        )

    def run(self, replaced: Mapping[int, torch.Tensor] | None = None) -> Any:
        """Call it, with some tensors (by id) replaced."""
        if not replaced:
            return self.function(*self.args, **self.kwargs)
        args, kwargs = _replaced((tuple(self.args), self.kwargs), replaced)
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Product:
    """A call of ``F.linear``, or (``transposed``) of ``addmm``."""

    rows: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    transposed: bool


def _product(call: _Call) -> _Product | None:
    if call.name == "linear":
        names, transposed = ("rows", "weight", "bias"), False
    elif call.name == "addmm":
        names, transposed = ("bias", "rows", "weight"), True
    else:
        return None
    given = dict(zip(names, call.args, strict=False))
    given |= {_KEYWORDS[call.name].get(key, key): value for key, value in call.kwargs.items()}
    given.setdefault("bias", None)
    if given.keys() != {"rows", "weight", "bias"}:
        return None
    return _Product(**given, transposed=transposed)


def _apply(function: type[torch.autograd.Function], *values: Any) -> Any:
    return function.apply(*values)  # type: ignore[no-untyped-call]


def _packing(pack: Callable[[torch.Tensor], Kept | Lent]) -> saved_tensors_hooks:
    return saved_tensors_hooks(pack, lambda kept: kept.get())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Tensors in nested lists, tuples and dicts."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _replaced(value: Any, replaced: Mapping[int, torch.Tensor]) -> Any:
    """Nested lists, tuples and dicts with some tensors (by id) replaced."""
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, tuple):
        items = [_replaced(item, replaced) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_replaced(item, replaced) for item in value]
    if isinstance(value, dict):
        return {key: _replaced(item, replaced) for key, item in value.items()}
    return value
