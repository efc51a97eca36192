"""Blocks over memory: leaf tensors that alias flat arrays, and their modules.

Nothing is copied: a leaf is a view of the weights, its ``.grad`` a view of the gradients. At the
end of the file :func:`pack` and :func:`unpack` convert between a block's tensors by name and its
two flat arrays, with NumPy alone. :mod:`penstock.shm.table` has the offsets of tensors in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from penstock.host.errors import ConfigError
from penstock.models.surgery.skeleton import EMBEDDING_KIND, LAYER_NUMBERS, Part, Skeleton
from penstock.shm.table import BlockSpec, BlockTable, BorrowedTensor, DType, TensorSpec

TORCH_DTYPES: Mapping[DType, torch.dtype] = MappingProxyType(
    {DType.FP32: torch.float32, DType.BF16: torch.bfloat16, DType.FP16: torch.float16}
)
"""Torch's types of stored weights and gradients."""

Borrowed = tuple[torch.Tensor, torch.Tensor | None]
"""The owner's flat array that holds the tied tensor, and the flat gradients of this use, both 1-D
(None: no gradients, or not yet)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundBlock:
    """A block with memory: leaf tensors by the names in the block's module.

    Leaves are views of the arrays given to :meth:`ModelRuntime.bind`. The arrays stay referenced
    until the last BoundBlock, and the last autograd graph made with it, is gone. The leaves'
    ``.grad`` may be bound later.
    """

    index: int
    leaves: Mapping[str, torch.Tensor]

    @property
    def trains(self) -> bool:
        """True if a leaf collects gradients."""
        return any(leaf.requires_grad for leaf in self.leaves.values())

    @property
    def widens(self) -> bool:
        """True if gradients add up in a wider type than they are computed in."""
        return any(
            leaf.requires_grad and leaf.grad_dtype != leaf.dtype for leaf in self.leaves.values()
        )


def check_same_parts(skeleton: Skeleton, table: BlockTable) -> None:
    """Refuses a table of another model; the table may come from a file."""
    expected = [(part.kind, set(part.tensors)) for part in skeleton.parts]
    described = [
        (b.kind, {t.name for t in b.tensors} | {t.local_name for t in b.borrows})
        for b in table.blocks
    ]
    if expected != described:
        raise ConfigError(
            "table.json does not describe the model of model/config.json; delete both from the run"
            " directory and start again"
        )


def bind_block(
    table: BlockTable,
    block: int,
    *,
    weights: torch.Tensor | None,
    frozen: torch.Tensor | None,
    borrowed: Mapping[str, Borrowed],
    sums: torch.dtype | None,
) -> BoundBlock:
    """Returns the block over flat 1-D arrays, without gradients bound.

    Arguments and errors are those of :meth:`penstock.models.runtime.ModelRuntime.bind`. ``weights``
    has (trainable_elements,), ``frozen`` (frozen_elements,), both in the compute dtype. ``sums`` is
    the dtype of later gradients, None for inference.

    Raises:
        ValueError: an array is missing, or its shape differs from the table's.
    """
    spec = table.blocks[block]
    _check_length(spec, "weights", weights, spec.trainable_elements)
    _check_length(spec, "frozen", frozen, spec.frozen_elements)
    leaves: dict[str, torch.Tensor] = {}
    for tensor in spec.tensors:
        source = weights if tensor.trainable else frozen
        assert source is not None
        leaves[tensor.name] = _leaf(tensor, source, sums)
    for tied in spec.borrows:
        if tied.local_name not in borrowed:
            raise ValueError(f"block {spec.name!r} needs borrowed {tied.local_name!r}")
        (flat, _), owner = borrowed[tied.local_name], table.blocks[tied.owner]
        tensor = _tied_tensor(table, tied)
        elements = owner.trainable_elements if tensor.trainable else owner.frozen_elements
        _check_length(owner, f"array of the tied tensor {tied.local_name}", flat, elements)
        leaves[tied.local_name] = _leaf(tensor, flat, sums)
    return BoundBlock(index=block, leaves=leaves)


def bind_gradients(
    table: BlockTable,
    bound: BoundBlock,
    *,
    grads: torch.Tensor | None,
    borrowed: Mapping[str, torch.Tensor],
) -> None:
    """Makes ``.grad`` of the block's leaves views of flat 1-D arrays, of the ``sums`` dtype.

    ``grads`` is (trainable_elements,) of the block, each array of ``borrowed`` the same of its
    owner; see :meth:`penstock.models.runtime.ModelRuntime.bind_gradients`.

    Raises:
        ValueError: an array is missing, or its shape differs from the table's.
    """
    spec = table.blocks[bound.index]
    _check_length(spec, "grads", grads, spec.trainable_elements)
    for tensor in spec.tensors:
        if tensor.trainable:
            assert grads is not None
            # Set by hand: autograd then adds into this memory, and never allocates a gradient.
            bound.leaves[tensor.name].grad = _view(tensor, grads).detach()
    for tied in spec.borrows:
        tensor = _tied_tensor(table, tied)
        if tensor.trainable:
            owner, flat = table.blocks[tied.owner], borrowed[tied.local_name]
            _check_length(owner, "gradient partial", flat, owner.trainable_elements)
            bound.leaves[tied.local_name].grad = _view(tensor, flat).detach()


def summing(block: BoundBlock) -> BoundBlock:
    """Returns the block over tensors that share its leaves' memory. One kernel each adds a gradient
    to the leaf's sum. Autograd would first convert a 16-bit gradient to the type of its sum, with
    the same bits.
    """
    # Without autograd nothing is added up, and a detached tensor is alias enough.
    grads = torch.is_grad_enabled()
    leaves = {
        name: _summing(leaf, leaf) if grads and leaf.requires_grad else leaf.detach()
        for name, leaf in block.leaves.items()
    }
    return BoundBlock(index=block.index, leaves=leaves)


@contextmanager
def gathering(block: BoundBlock, now: BoundBlock) -> Iterator[BoundBlock]:
    """Yields the block over the memory of ``now``, for several backwards. A gradient narrower than
    its sum is added to the sum at once. Other gradients of a leaf are added up first, as in a
    backward of one graph. They reach the sum when the context ends.
    """
    with torch.enable_grad():
        leaves = {
            name: _summing(leaf, now.leaves[name])
            if leaf.requires_grad and leaf.grad_dtype != leaf.dtype
            else now.leaves[name].detach().requires_grad_(leaf.requires_grad)
            for name, leaf in block.leaves.items()
        }
    yield BoundBlock(index=block.index, leaves=leaves)
    for name, alias in leaves.items():
        if alias.is_leaf and alias.grad is not None:
            _add_to_sum(block.leaves[name], alias.grad)


class _Summing(torch.autograd.Function):
    """A tensor over given memory. Autograd takes it for neither a leaf nor a view of a leaf. Its
    gradients are added to the sum of ``leaf``.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        # None instead of zeros where sinks have the gradients of all uses.
        ctx.set_materialize_grads(False)
        ctx.leaf = leaf
        return memory.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        # The sum may have been bound since the forward.
        if gradients[0] is None or ctx.leaf.grad is None:
            return gradients[0], None
        _add_to_sum(ctx.leaf, gradients[0])
        return None, None


def _add_to_sum(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    if leaf.grad is None:
        leaf.grad = gradient.to(leaf.grad_dtype)
        return
    with torch.no_grad():
        leaf.grad.add_(gradient)


def _summing(leaf: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    alias: torch.Tensor = _Summing.apply(leaf, memory)  # type: ignore[no-untyped-call]
    return alias


class BlockModules:
    """The module objects of one kind of block, and the places of its parameters."""

    def __init__(self, part: Part, modules: Sequence[nn.Module], prefix: str) -> None:
        self._modules = modules
        self._slots = {
            name.removeprefix(prefix): [(module._parameters, attribute)]
            for name, (module, attribute) in part.tensors.items()
        }
        for name, others in part.others.items():
            slots = self._slots[name.removeprefix(prefix)]
            slots += [(module._parameters, attribute) for module, attribute in others]
        self._meta = {name: places[0][0][places[0][1]] for name, places in self._slots.items()}
        self._constants = {
            name.removeprefix(prefix): (module._buffers, attribute)
            for name, (module, attribute) in part.constants.items()
        }
        self._numbered = [
            (vars(module), name)
            for top in modules
            for module in top.modules()
            for name in LAYER_NUMBERS
            if name in vars(module)
        ]
        self._training: bool | None = None

    @contextmanager
    def installed(
        self,
        bound: BoundBlock,
        prefix: str,
        layer_index: int | None,
        constants: Mapping[str, torch.Tensor],
    ) -> Iterator[None]:
        """Puts the block's leaves into the modules while the context lasts.

        ``prefix`` starts the names of this block's tensors; ``layer_index`` is the number that its
        modules read; ``constants`` are the model's. Blocks of one kind take turns: contexts of one
        kind must not overlap.

        Raises:
            ConfigError: the forward changed a constant.
        """
        slots = self._slots
        cut = len(prefix)
        for name, leaf in bound.leaves.items():
            for places, key in slots[name[cut:]]:
                # Bypasses nn.Module's __setattr__, which refuses tensors that are no nn.Parameter.
                places[key] = leaf  # type: ignore[assignment]
        for attributes, name in self._numbered:
            attributes[name] = layer_index
        versions = {}
        for name, (buffers, key) in self._constants.items():
            buffers[key] = constant = constants[prefix + name]
            versions[name] = constant._version
        try:
            yield
            for name, (buffers, key) in self._constants.items():
                constant = constants[prefix + name]
                if buffers[key] is not constant or constant._version != versions[name]:
                    raise ConfigError(
                        f"model: its forward changes the buffer {prefix}{name}; supported models"
                        " have parameters and constants alone"
                    )
        finally:
            # A reference left behind would keep shared memory mapped after the worker has released
            # it.
            for name, uses in slots.items():
                for places, key in uses:
                    places[key] = self._meta[name]

    def set_training(self, training: bool) -> None:
        """Switches dropout on or off; walks the modules only at a change."""
        if training != self._training:
            for module in self._modules:
                module.train(training)
            self._training = training


class SkeletonModules:
    """The modules of a skeleton: one set per kind of block, which holds the leaves of the running
    block.

    ``layers`` has the module of each kind of layer; all layers of the kind run on it.
    """

    def __init__(self, skeleton: Skeleton, constants: Mapping[str, torch.Tensor]) -> None:
        """Makes the modules. ``constants`` are the persistent buffers of all blocks, on their
        device, by name.
        """
        self.layers: dict[str, nn.Module] = {}
        self._parts, self._constants = skeleton.parts, constants
        self._prefixes = _prefixes(skeleton)
        self._kinds: dict[str, BlockModules] = {}
        around = skeleton.around()
        after = [around[name] for name in skeleton.after]
        before = [child for name, child in around.items() if name not in skeleton.after]
        for part, prefix in zip(skeleton.parts, self._prefixes, strict=True):
            if part.kind in self._kinds:
                continue
            modules: Sequence[nn.Module] = before if part.kind == EMBEDDING_KIND else after
            if part.layer_index is not None:
                self.layers[part.kind] = layer = skeleton.layers[part.layer_index]
                modules = (layer,)
            self._kinds[part.kind] = BlockModules(part, modules, prefix)

    @contextmanager
    def installed(self, bound: BoundBlock, training: bool) -> Iterator[None]:
        """Keeps the leaves of a block in the modules of its kind while the context lasts.

        ``training`` switches their dropout. Contexts of blocks of one kind must not overlap.
        """
        part, prefix = self._parts[bound.index], self._prefixes[bound.index]
        modules = self._kinds[part.kind]
        modules.set_training(training)
        with modules.installed(bound, prefix, part.layer_index, self._constants):
            yield


def _prefixes(skeleton: Skeleton) -> tuple[str, ...]:
    """Returns the prefix of each block's tensor names, which the module of its kind leaves out."""
    layers = f"{skeleton.decoder_path}.{skeleton.layers_name}"
    return tuple(
        "" if part.layer_index is None else f"{layers}.{part.layer_index}."
        for part in skeleton.parts
    )


def _check_length(spec: BlockSpec, what: str, flat: torch.Tensor | None, wanted: int) -> None:
    if flat is None:
        if wanted:
            raise ValueError(f"block {spec.name!r} needs {what} of {wanted} elements, got none")
    elif flat.ndim != 1 or flat.numel() != wanted:
        raise ValueError(
            f"block {spec.name!r}: {what} must be flat with {wanted} elements, got"
            f" shape {tuple(flat.shape)}"
        )


def _leaf(tensor: TensorSpec, flat: torch.Tensor, sums: torch.dtype | None) -> torch.Tensor:
    """Returns a leaf over ``flat`` at the tensor's place; ``sums``: dtype of its ``.grad``, None:
    none.
    """
    leaf = _view(tensor, flat).detach()
    if sums is not None and tensor.trainable:
        leaf.requires_grad_(True)
        # The gradient may be wider than the parameter: fp32 sums for bf16 weights.
        leaf.grad_dtype = sums
    return leaf


def _tied_tensor(table: BlockTable, tied: BorrowedTensor) -> TensorSpec:
    return next(t for t in table.blocks[tied.owner].tensors if t.name == tied.name)


def _view(tensor: TensorSpec, flat: torch.Tensor) -> torch.Tensor:
    return flat.narrow(0, tensor.offset, tensor.num_elements).view(tensor.shape)


Flat = NDArray[np.float32]
"""A 1-D array of all trainable, or all frozen, elements of a block, padding between tensors."""


def pack(block: BlockSpec, tensors: Mapping[str, Any]) -> tuple[Flat, Flat]:
    """Returns flat fp32 arrays of (trainable_elements,) and (frozen_elements,); padding is zero.

    ``tensors`` maps the names of the block's tensors to arrays or CPU tensors of their shapes, of
    any floating type; the values are copied.

    Raises:
        ValueError: a tensor is missing or has another shape.
    """
    trainable = np.zeros(block.trainable_elements, dtype=np.float32)
    frozen = np.zeros(block.frozen_elements, dtype=np.float32)
    for spec in block.tensors:
        if spec.name not in tensors:
            raise ValueError(f"block {block.name!r}: tensor {spec.name!r} is missing")
        value = np.asarray(tensors[spec.name], dtype=np.float32)
        if value.shape != spec.shape:
            raise ValueError(
                f"block {block.name!r}: {spec.name!r} has shape {value.shape}, expected"
                f" {spec.shape}"
            )
        flat = trainable if spec.trainable else frozen
        flat[spec.offset : spec.offset + spec.num_elements] = value.reshape(-1)
    return trainable, frozen


def unpack(
    block: BlockSpec, trainable: NDArray[Any] | None, frozen: NDArray[Any] | None
) -> dict[str, NDArray[Any]]:
    """Returns views of the flat arrays by tensor name, of the tensors' shapes and the arrays'
    dtype.

    Nothing is copied: a view keeps its array alive. An array given as None leaves its tensors out.
    """
    views = {}
    for spec in block.tensors:
        flat = trainable if spec.trainable else frozen
        if flat is not None:
            views[spec.name] = flat[spec.offset : spec.offset + spec.num_elements].reshape(
                spec.shape
            )
    return views
