"""Running ranges of blocks: parameters that alias given memory, forward, loss and backward.

Modules hold no parameters of their own. :meth:`ModelRuntime.bind` makes leaf tensors that are views
of the flat weight arrays, with ``.grad`` views of the flat gradient arrays; they are put into the
modules while a block runs. Nothing is copied. Blocks of one kind share one module object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PretrainedConfig

from penstock.models.batch import MicroBatch
from penstock.models.loss import chunked_cross_entropy
from penstock.models.pieces import BatchTensors, LayerCall, Pieces
from penstock.models.skeleton import LAYER_NUMBERS, Part, Skeleton, build_skeleton
from penstock.protocol.errors import ConfigError
from penstock.shm.table import BlockSpec, BlockTable, TensorSpec

HIDDEN = "hidden"
"""Name of the tensor that blocks hand on: (micro_batch, sequence, hidden)."""

Borrowed = tuple[torch.Tensor, torch.Tensor | None]
"""Flat array of the owner that holds the tied tensor, and the flat gradients of this use (None:
none)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundBlock:
    """A block with memory: leaf tensors by the name under which the block's module knows them.

    Leaves are views of the arrays given to :meth:`ModelRuntime.bind`, which stay referenced until
    the last BoundBlock (and the last autograd graph made with it) is gone.
    """

    index: int
    leaves: Mapping[str, torch.Tensor]

    @property
    def trains(self) -> bool:
        """Whether any leaf collects gradients."""
        return any(leaf.requires_grad for leaf in self.leaves.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """Results of a forward over consecutive blocks.

    ``tensors`` are the named tensors for the next block (empty after the head). ``checkpoints[b]``
    are the detached inputs of block ``b``. ``loss_sum`` is the detached sum over counted tokens
    (head only), ``loss`` the same times ``loss_weight`` with its graph. ``inputs`` are the leaves
    whose gradient :meth:`ModelRuntime.backward` returns.
    """

    tensors: dict[str, torch.Tensor]
    checkpoints: dict[int, dict[str, torch.Tensor]]
    loss_sum: torch.Tensor | None
    loss: torch.Tensor | None
    inputs: dict[str, torch.Tensor]


class _Kind:
    """The module objects of one kind of block, and where its parameters go."""

    def __init__(self, part: Part, modules: Sequence[nn.Module], prefix: str) -> None:
        self._modules = modules
        self._slots = {
            name.removeprefix(prefix): (module._parameters, attribute)
            for name, (module, attribute) in part.tensors.items()
        }
        self._meta = {name: places[key] for name, (places, key) in self._slots.items()}
        self._numbered = [
            (vars(module), name)
            for top in modules
            for module in top.modules()
            for name in LAYER_NUMBERS
            if name in vars(module)
        ]
        self._training: bool | None = None

    @contextmanager
    def installed(self, bound: BoundBlock, prefix: str, layer_index: int | None) -> Iterator[None]:
        """Put the leaves into the modules meanwhile; ``prefix`` starts the names of this block's
        tensors.
        """
        slots = self._slots
        cut = len(prefix)
        for name, leaf in bound.leaves.items():
            places, key = slots[name[cut:]]
            places[key] = leaf  # type: ignore[assignment]  # a leaf serves as a parameter
        for attributes, name in self._numbered:
            attributes[name] = layer_index
        try:
            yield
        finally:
            # A reference left behind would keep shared memory mapped after the worker let go of it.
            for name, (places, key) in slots.items():
                places[key] = self._meta[name]

    def set_training(self, training: bool) -> None:
        """Dropout on or off; walks the modules only when it changes."""
        if training != self._training:
            for module in self._modules:
                module.train(training)
            self._training = training


class ModelRuntime:
    """Forward and backward of any range of blocks of one model on one device.

    Runs that train seed torch's default generator of the device, for each block, from (seed, data
    position, micro-batch, block): whoever recomputes a block sees the same dropout.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        table: BlockTable,
        *,
        device: torch.device | str,
        compute_dtype: torch.dtype,
        seed: int,
    ) -> None:
        self._table = table
        self._device = torch.device(device)
        self._seed = seed
        skeleton = build_skeleton(hf_config)
        _check_same_parts(skeleton, table)
        for module in skeleton.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = buffer.to(self._device)
        self._pieces = Pieces(skeleton, device=self._device, compute_dtype=compute_dtype)
        self._layers = skeleton.layers
        self._prefixes = _prefixes(skeleton)
        self._representative: dict[str, nn.Module] = {}
        self._kinds = self._make_kinds(skeleton)
        self._calls_by_shape: dict[tuple[int, int], tuple[LayerCall, ...]] = {}
        self._latest: tuple[MicroBatch, tuple[LayerCall, ...]] | None = None

    @property
    def table(self) -> BlockTable:
        """The block table the runtime was made for."""
        return self._table

    def bind(
        self,
        block: int,
        *,
        weights: torch.Tensor | None,
        frozen: torch.Tensor | None = None,
        grads: torch.Tensor | None = None,
        borrowed: Mapping[str, Borrowed] | None = None,
    ) -> BoundBlock:
        """Make the block's leaves over flat 1-D arrays; nothing is copied.

        ``weights`` and ``grads`` have ``trainable_elements``, ``frozen`` ``frozen_elements``
        elements (None where there are none). Gradients add up in ``grads``, in its own dtype, over
        all backwards; ``grads=None`` means inference. ``borrowed`` maps each tied tensor's
        ``local_name`` to the owner's flat array (its weights, or its frozen array if the tensor is
        frozen there) and the gradient range of this contribution, which has the owner's
        ``trainable_elements``.

        Raises:
            ValueError: an array is missing or has another length than the table says.
        """
        spec = self._table.blocks[block]
        _check_length(spec, "weights", weights, spec.trainable_elements)
        _check_length(spec, "frozen", frozen, spec.frozen_elements)
        if grads is not None:
            _check_length(spec, "grads", grads, spec.trainable_elements)
        leaves: dict[str, torch.Tensor] = {}
        for tensor in spec.tensors:
            source = weights if tensor.trainable else frozen
            assert source is not None
            leaves[tensor.name] = _leaf(tensor, source, grads if tensor.trainable else None)
        for lent in spec.borrows:
            if borrowed is None or lent.local_name not in borrowed:
                raise ValueError(f"block {spec.name!r} needs borrowed {lent.local_name!r}")
            flat, contribution = borrowed[lent.local_name]
            owner = self._table.blocks[lent.owner]
            tensor = next(t for t in owner.tensors if t.name == lent.name)
            wanted = owner.trainable_elements if tensor.trainable else owner.frozen_elements
            _check_length(owner, f"array lent as {lent.local_name}", flat, wanted)
            if contribution is not None:
                _check_length(owner, "contribution", contribution, owner.trainable_elements)
            leaves[lent.local_name] = _leaf(
                tensor, flat, contribution if tensor.trainable else None
            )
        return BoundBlock(index=block, leaves=leaves)

    def forward(
        self,
        bound: Sequence[BoundBlock],
        inputs: Mapping[str, torch.Tensor],
        batch: MicroBatch,
        *,
        data_position: int,
        micro_batch_index: int,
        training: bool,
        loss_weight: float,
        checkpoints_at: Collection[int] = (),
        autograd: bool | None = None,
    ) -> StageOutput:
        """Run consecutive blocks on one micro-batch.

        ``inputs`` are the named tensors that the block before handed on (empty for block 0).
        ``training`` switches dropout. ``autograd``: record a graph for :meth:`backward`; by default
        when any bound block collects gradients. ``checkpoints_at``: blocks (numbers in the model)
        whose inputs are wanted.
        """
        if autograd is None:
            autograd = any(block.trains for block in bound)
        # Detached, so that the graph ends at the stage's border and .grad appears there.
        leaves = {
            name: value.detach().requires_grad_(autograd and value.is_floating_point())
            for name, value in inputs.items()
        }
        tensors, checkpoints = dict(leaves), {}
        batch_tensors = self._on_device(batch)
        loss = None
        with torch.set_grad_enabled(autograd):
            for block in bound:
                if block.index in checkpoints_at:
                    checkpoints[block.index] = {k: v.detach() for k, v in tensors.items()}
                if training:
                    self._reseed(data_position, micro_batch_index, block.index)
                if block.index == len(self._table.blocks) - 1:
                    loss, tensors = self._run_head(block, tensors[HIDDEN], batch, training), {}
                else:
                    hidden = self._run_block(block, tensors, batch, batch_tensors, training)
                    tensors = {HIDDEN: hidden}
            weighted = None if loss is None else loss * loss_weight
        return StageOutput(
            tensors=tensors,
            checkpoints=checkpoints,
            loss_sum=None if loss is None else loss.detach(),
            loss=weighted,
            inputs=leaves,
        )

    def backward(
        self, output: StageOutput, gradients: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Add the weights' gradients to the bound arrays; returns those of the stage's inputs by
        name.

        ``gradients`` are those of ``output.tensors`` (what the next stage returned); the head
        starts from its weighted loss and takes none. A stage without anything to train below it
        returns nothing.
        """
        roots: list[torch.Tensor] = []
        seeds: list[torch.Tensor | None] = []
        if output.loss is not None and output.loss.requires_grad:
            roots.append(output.loss)
            seeds.append(None)
        for name, tensor in output.tensors.items():
            if tensor.requires_grad and name in gradients:
                roots.append(tensor)
                seeds.append(gradients[name])
        if roots:
            torch.autograd.backward(roots, seeds)
        return {name: leaf.grad for name, leaf in output.inputs.items() if leaf.grad is not None}

    def _run_block(
        self,
        block: BoundBlock,
        tensors: Mapping[str, torch.Tensor],
        batch: MicroBatch,
        batch_tensors: BatchTensors,
        training: bool,
    ) -> torch.Tensor:
        layer_index = self._table.blocks[block.index].layer_index
        with self._installed(block, training):
            if layer_index is None:
                ids = torch.from_numpy(batch.input_ids).to(self._device)
                return self._pieces.embed(ids, batch_tensors)
            kind = self._table.blocks[block.index].kind
            call = self._layer_calls(batch, batch_tensors)[layer_index]
            return call.run(self._representative[kind], tensors[HIDDEN])

    def _run_head(
        self, block: BoundBlock, hidden: torch.Tensor, batch: MicroBatch, training: bool
    ) -> torch.Tensor:
        labels = torch.from_numpy(batch.labels).to(self._device).reshape(-1)
        with self._installed(block, training):
            finished = self._pieces.finish(hidden)

        def logits_of(rows: torch.Tensor) -> torch.Tensor:
            # Installed per call: chunks run again in the backward, when the forward is long over.
            with self._installed(block, training):
                return self._pieces.logits(rows)

        return chunked_cross_entropy(
            logits_of,
            finished.reshape(-1, finished.shape[-1]),
            labels,
            vocab_size=self._table.vocab_size,
        )

    def _layer_calls(self, batch: MicroBatch, batch_tensors: BatchTensors) -> tuple[LayerCall, ...]:
        """Masks, positions and rotary embeddings: by shape, else for the latest micro-batch."""
        if batch_tensors.plain:
            calls = self._calls_by_shape.get(batch_tensors.shape)
            if calls is None:
                calls = self._pieces.layer_calls(batch_tensors)
                self._calls_by_shape[batch_tensors.shape] = calls
            return calls
        if self._latest is None or self._latest[0] is not batch:
            calls = self._pieces.layer_calls(batch_tensors)
            if batch.document_ids is not None:
                check_documents_apart(calls, torch.from_numpy(batch.document_ids))
            self._latest = (batch, calls)
        return self._latest[1]

    def _on_device(self, batch: MicroBatch) -> BatchTensors:
        mask, positions = batch.attention_mask, batch.position_ids
        return BatchTensors(
            shape=batch.shape,
            attention_mask=None if mask is None else torch.from_numpy(mask).to(self._device),
            position_ids=(
                None if positions is None else torch.from_numpy(positions).to(self._device)
            ),
        )

    @contextmanager
    def _installed(self, block: BoundBlock, training: bool) -> Iterator[None]:
        spec = self._table.blocks[block.index]
        kind = self._kinds[spec.kind]
        kind.set_training(training)
        with kind.installed(block, self._prefixes[block.index], spec.layer_index):
            yield

    def _reseed(self, *position: int) -> None:
        digest = hashlib.blake2b(repr((self._seed, *position)).encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1
        if self._device.type == "cuda":
            index = self._device.index
            index = torch.cuda.current_device() if index is None else index
            torch.cuda.default_generators[index].manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)

    def _make_kinds(self, skeleton: Skeleton) -> dict[str, _Kind]:
        kinds: dict[str, _Kind] = {}
        outside = [
            child
            for name, child in skeleton.decoder.named_children()
            if name != skeleton.layers_name
        ]
        for part, prefix in zip(skeleton.parts, self._prefixes, strict=True):
            if part.kind in kinds:
                continue
            modules: Sequence[nn.Module] = outside
            if part.layer_index is not None:
                layer = skeleton.layers[part.layer_index]
                self._representative[part.kind] = layer
                modules = (layer,)
            kinds[part.kind] = _Kind(part, modules, prefix)
        return kinds


def _prefixes(skeleton: Skeleton) -> tuple[str, ...]:
    """What the names of each block's tensors start with and its kind's module does not know."""
    layers = f"{skeleton.decoder_path}.{skeleton.layers_name}"
    return tuple(
        "" if part.layer_index is None else f"{layers}.{part.layer_index}."
        for part in skeleton.parts
    )


def _check_same_parts(skeleton: Skeleton, table: BlockTable) -> None:
    """The table may come from a file; it must describe this model."""
    wanted = [(part.kind, set(part.tensors)) for part in skeleton.parts]
    found = [
        (b.kind, {t.name for t in b.tensors} | {t.local_name for t in b.borrows})
        for b in table.blocks
    ]
    if wanted != found:
        raise ConfigError(
            "table.json does not describe the model of model/config.json; delete both from the run"
            " directory and start again"
        )


def check_documents_apart(calls: Sequence[LayerCall], document_ids: torch.Tensor) -> None:
    """Refuse models whose decoder ignores restarting position ids when it makes masks.

    ``document_ids`` is (micro_batch, sequence).

    Raises:
        ConfigError: a layer would attend from one document to another.
    """
    borders = torch.nonzero(torch.diff(document_ids, dim=1))
    if len(borders) == 0:
        return
    row, query = int(borders[0][0]), int(borders[0][1]) + 1
    for call in calls:
        values = (*call.args, *call.kwargs.values())
        masks = [v for v in values if isinstance(v, torch.Tensor) and v.ndim == 4]
        if not masks or any(_attends(mask, row, query, query - 1) for mask in masks):
            raise ConfigError(
                "data.document_masks: true: this model type builds no masks that keep documents"
                " apart; set data.document_masks: false"
            )


def _attends(mask: torch.Tensor, row: int, query: int, key: int) -> bool:
    value = mask[row if mask.shape[0] > 1 else 0, 0, query, key]
    return bool(value) if mask.dtype is torch.bool else float(value) > -1.0


def _check_length(spec: BlockSpec, what: str, flat: torch.Tensor | None, wanted: int) -> None:
    if flat is None:
        if wanted:
            raise ValueError(f"block {spec.name!r} needs {what} of {wanted} elements, got none")
    elif flat.ndim != 1 or flat.numel() != wanted:
        raise ValueError(
            f"block {spec.name!r}: {what} must be flat with {wanted} elements, got"
            f" shape {tuple(flat.shape)}"
        )


def _leaf(tensor: TensorSpec, flat: torch.Tensor, grads: torch.Tensor | None) -> torch.Tensor:
    """A leaf over ``flat`` at the tensor's place; its ``.grad`` lies in ``grads`` at the same
    place.
    """
    leaf = _view(tensor, flat).detach()
    if grads is not None:
        leaf.requires_grad_(True)
        # The gradient may be wider than the parameter: fp32 sums for bf16 weights.
        leaf.grad_dtype = grads.dtype
        leaf.grad = _view(tensor, grads).detach()
    return leaf


def _view(tensor: TensorSpec, flat: torch.Tensor) -> torch.Tensor:
    return flat.narrow(0, tensor.offset, tensor.num_elements).view(tensor.shape)
