"""The model's runtime: parameters over given memory, forward, loss and backward of ranges of
blocks.

Modules hold no parameters of their own. :meth:`ModelRuntime.bind` makes leaf tensors that are views
of the flat weight arrays. Their ``.grad`` are views of the flat gradient arrays. The leaves are in
the modules while a block runs. Nothing is copied. Blocks of one kind share one module object.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from penstock.config.adapter import AdapterConfig
from penstock.host.errors import StateError
from penstock.models.binding import (
    TORCH_DTYPES,
    Borrowed,
    BoundBlock,
    SkeletonModules,
    bind_block,
    bind_gradients,
    check_same_parts,
    gathering,
    summing,
)
from penstock.models.compiled import CompiledLayer, Compiler
from penstock.models.data.batch import MicroBatch
from penstock.models.forward_storage import ForwardStorage, StoredForward
from penstock.models.loss import (
    LabelSums,
    LogitsOf,
    LossHead,
    Targets,
    chunked_cross_entropy,
    chunked_scores,
)
from penstock.models.pair_losses import PairTargets, chunked_pairs
from penstock.models.saved_activations import release_values
from penstock.models.saved_activations.op_log import tensors_in
from penstock.models.split_backward.deferred_entries import AtOnce
from penstock.models.split_backward.layer_products import LayerProducts, ProductWatch
from penstock.models.split_backward.products import NoSink, Sink, ticket_memory
from penstock.models.surgery.decoder_parts import BatchTensors, DecoderParts, LayerCall, LayerCalls
from penstock.models.surgery.skeleton import Skeleton, build_skeleton
from penstock.models.torch_device import torch_device
from penstock.protocol.run.checksums import CONSTANTS
from penstock.shm.table import BlockTable

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["HIDDEN", "Borrowed", "BoundBlock", "ModelRuntime", "StageOutput"]

HIDDEN = "hidden"
"""Name of the tensor between blocks: (micro_batch, sequence, hidden)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOutput:
    """Results of a forward over consecutive blocks.

    ``tensors`` are the named tensors for the next block (empty after the head): :data:`HIDDEN`,
    (micro_batch, sequence, hidden) in the compute dtype. ``checkpoints[b]`` are the detached inputs
    of block ``b``, of the same shape.

    ``loss_sum`` is the detached sum over counted tokens, with weights if the batch has some, a
    fp32 scalar in nats (head only; NaN for several chunks until the backward). ``loss`` is the same
    times ``loss_weight`` with its graph. ``right`` counts right predictions of counted tokens (head
    of a held-out batch only). ``scores``: see :class:`~penstock.models.loss.LabelSums`.
    ``inputs`` are leaves; :meth:`ModelRuntime.backward` returns their gradients. ``stored``: the
    tensors kept for the backward, if the forward had a storage.
    """

    tensors: dict[str, torch.Tensor]
    checkpoints: dict[int, dict[str, torch.Tensor]]
    loss_sum: torch.Tensor | None
    loss: torch.Tensor | None
    inputs: dict[str, torch.Tensor]
    stored: StoredForward | None = None
    right: torch.Tensor | None = None
    scores: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Prepared:
    """A micro-batch on the device, with the layers' arguments (empty if no layer runs).

    ``place``: data position and number of the micro-batch, for random numbers. ``drops``: operators
    are dropped, so layers must not be compiled to one. ``splits``: the backward comes in halves.
    ``discarded``: number of the layer with an unread output, None without one.
    """

    batch: MicroBatch
    tensors: BatchTensors
    calls: tuple[LayerCall, ...]
    training: bool
    place: tuple[int, int]
    drops: bool
    splits: bool
    discarded: int | None


class ModelRuntime:
    """Forward and backward of any range of blocks of one model on one device.

    One thread at a time uses it: blocks of a kind share their module objects. Training forwards
    seed the device's default generator for each block, from (seed, data position, micro-batch,
    block). So a recomputation has the same dropout.
    """

    def __init__(
        self,
        hf_config: PretrainedConfig,
        table: BlockTable,
        *,
        device: torch.device | str,
        compute_dtype: torch.dtype,
        seed: int,
        compiler: Compiler | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
        label_smoothing: float = 0.0,
        adapter: AdapterConfig | None = None,
    ) -> None:
        """Builds the model's modules on ``device``, without parameters.

        ``compute_dtype`` is the type of hidden states and of bound weights. ``compiler`` compiles
        the layers, and sets torch's options for the process (:mod:`penstock.models.compiled`).
        None: layers run uncompiled. ``constants`` are the model's persistent buffers by name;
        without them, those of a new model. ``label_smoothing``: the share of training losses.
        ``adapter``: the adapters that ``table`` has tensors of.

        Raises:
            ConfigError: the model cannot be taken apart, or ``table`` describes another one.
            StateError: ``constants`` lacks one.
        """
        self._table = table
        self._device = torch.device(device)
        self._seed, self._compute_dtype = seed, compute_dtype
        self._label_smoothing = label_smoothing
        skeleton = build_skeleton(hf_config, adapter)
        check_same_parts(skeleton, table)
        self._buffers: list[torch.Tensor] = []
        for module in skeleton.model.modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[key] = moved = buffer.to(self._device)
                    self._buffers.append(moved)
        self._parts = DecoderParts(skeleton, device=self._device, compute_dtype=compute_dtype)
        self._calls = LayerCalls(self._parts)
        self._modules = SkeletonModules(skeleton, self._install_constants(skeleton, constants))
        if compiler is not None:
            compiler.set_up_process()
        self._compiled = {
            kind: CompiledLayer(layer, compiler)
            for kind, layer in self._modules.layers.items()
            if compiler is not None
        }
        self._products: dict[str, LayerProducts] = {}
        self._at_once = AtOnce()

    def _install_constants(
        self, skeleton: Skeleton, constants: Mapping[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor]:
        """Returns the model's constants on the device, by name. Each is put into its module, too:
        the decoder's own code around the layers reads them there.
        """
        stored = TORCH_DTYPES[self._table.weight_dtype]
        moved: dict[str, torch.Tensor] = {}
        for part in skeleton.parts:
            for name, (module, attribute) in part.constants.items():
                value = module._buffers[attribute] if constants is None else constants.get(name)
                if value is None:
                    raise StateError(
                        f"{CONSTANTS} of the run lacks {name}; restore it as Penstock wrote it"
                    )
                # Constants that transformers loads in the type of weights have the type of weights
                # here, too.
                dtype = self._compute_dtype if value.dtype is stored else value.dtype
                moved[name] = value.to(self._device, dtype)
                module._buffers[attribute] = moved[name]
        self._buffers += moved.values()
        return moved

    @property
    def device(self) -> torch.device:
        """The device that the runtime computes on."""
        return self._device

    @property
    def compute_dtype(self) -> torch.dtype:
        """The type of hidden states and of bound weights."""
        return self._compute_dtype

    @property
    def table(self) -> BlockTable:
        """The block table the runtime was made for."""
        return self._table

    def compiles(self, block: int) -> bool:
        """Returns whether ``block`` runs as a compiled layer if no operators are dropped."""
        return self._table.blocks[block].kind in self._compiled

    def bind(
        self,
        block: int,
        *,
        weights: torch.Tensor | None,
        frozen: torch.Tensor | None = None,
        grads: torch.Tensor | None = None,
        borrowed: Mapping[str, Borrowed] | None = None,
        sums: torch.dtype | None = None,
    ) -> BoundBlock:
        """Returns the block's leaves as views of flat 1-D arrays; nothing is copied.

        ``weights`` and ``grads`` have ``trainable_elements`` elements, ``frozen`` has
        ``frozen_elements`` (None for zero elements). Gradients add up in ``grads``, in its own
        dtype, over all backwards. Without ``grads``, ``sums`` is the type of gradients that
        :meth:`bind_gradients` binds before the first backward; without both the block serves
        inference.

        ``borrowed`` maps each tied tensor's ``local_name`` to two arrays. The first is the owner's
        flat array: its weights, or its frozen array if the tensor is frozen. The second is this
        use's gradient range, with the owner's ``trainable_elements``.

        Raises:
            ValueError: an array is missing, or its length differs from the table's.
        """
        borrowed = borrowed or {}
        partials = {name: grad for name, (_, grad) in borrowed.items() if grad is not None}
        given = next((g for g in (grads, *partials.values()) if g is not None), None)
        sums = sums if given is None else given.dtype
        bound = bind_block(
            self._table, block, weights=weights, frozen=frozen, borrowed=borrowed, sums=sums
        )
        if given is not None:
            self.bind_gradients(bound, grads=grads, borrowed=partials)
        return bound

    def bind_gradients(
        self,
        bound: BoundBlock,
        *,
        grads: torch.Tensor | None,
        borrowed: Mapping[str, torch.Tensor],
    ) -> None:
        """Lets gradients add up in ``grads``, (trainable_elements,). Those of tied tensors of other
        blocks add up in ``borrowed``, by ``local_name``. This holds from now on, also for graphs
        that were made before. The arrays have the dtype of ``sums`` of :meth:`bind`.

        Raises:
            ValueError: an array is missing, or its length differs from the table's.
        """
        bind_gradients(self._table, bound, grads=grads, borrowed=borrowed)

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
        storage: ForwardStorage | None = None,
        output_read: bool = True,
    ) -> StageOutput:
        """Runs consecutive blocks on one micro-batch.

        ``inputs`` are the named tensors of the block before: (micro_batch, sequence, hidden) in the
        compute dtype (none for block 0). ``training`` switches dropout on; its random numbers
        follow from seed, ``data_position``, ``micro_batch_index`` and block. ``loss_weight``
        multiplies the summed loss. ``autograd``: record a graph for :meth:`backward`; by default if
        a block collects gradients. ``checkpoints_at``: blocks (numbers in the model) with requested
        inputs. ``storage`` saves tensors for the backward; a store of activations frees values of
        the inputs' leaves. Without ``output_read``, the last layer's output has no value.

        Raises:
            ConfigError: documents are to be kept apart, and the model cannot.
        """
        autograd = any(block.trains for block in bound) if autograd is None else autograd
        tensors = dict(leaves := _leaves(inputs, autograd=autograd))
        checkpoints, scores, stored = {}, None, None
        prepared = self._prepare(
            batch,
            bound,
            training=training,
            place=(data_position, micro_batch_index),
            storage=storage,
            output_read=output_read or not autograd,
        )
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(autograd))
            if storage is not None:
                stored = stack.enter_context(storage.around(bound, self._constants(prepared)))
            for block in bound:
                if block.index in checkpoints_at:
                    checkpoints[block.index] = {k: v.detach() for k, v in tensors.items()}
                with self._within(stored, block, prepared):
                    tensors, scores = self._run(block, tensors, prepared, storage, stored)
            weighted = None if scores is None else scores.loss * loss_weight
        _free_inputs(leaves, stored)
        return StageOutput(
            tensors=tensors,
            checkpoints=checkpoints,
            loss_sum=None if scores is None else scores.loss.detach(),
            loss=weighted,
            inputs=leaves,
            stored=stored,
            right=None if scores is None else scores.right,
            scores=None if scores is None else scores.scores,
        )

    def backward(
        self, output: StageOutput, gradients: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Adds the weights' gradients to the bound arrays. Returns the gradients of the stage's
        inputs by name, (micro_batch, sequence, hidden) in the compute dtype.

        ``gradients`` are those of ``output.tensors``, as the next stage returned them, of the same
        shape and dtype. The head starts from its weighted loss and takes none. A stage without
        trainable tensors below it returns nothing. After a split forward, the weights' gradients
        wait in ``output.stored.deferred`` instead. The graph is freed.
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
        if output.stored is not None and output.stored.deferred is not None:
            output.stored.deferred.seal()
        return {name: leaf.grad for name, leaf in output.inputs.items() if leaf.grad is not None}

    def _run(
        self,
        block: BoundBlock,
        tensors: Mapping[str, torch.Tensor],
        prepared: _Prepared,
        storage: ForwardStorage | None,
        stored: StoredForward | None,
    ) -> tuple[dict[str, torch.Tensor], LabelSums | None]:
        """Runs one block; returns the tensors for the next one, and the sums of the head."""
        # A compiled graph is made with the operator; otherwise it is for recomputations alone.
        if self._compiled_of(block, prepared) is not None or block.index == prepared.discarded:
            self._find_products(block, tensors, prepared)
        if prepared.training:
            # Seeded for each block: a recomputation from the block's checkpoint draws the same
            # numbers, independent of earlier blocks.
            self._reseed(*prepared.place, block.index)
        if block.index == len(self._table.blocks) - 1:
            return {}, self._run_head(block, tensors[HIDDEN], prepared, storage)
        sink = None if stored is None else stored.deferred
        return {HIDDEN: self._run_block(block, tensors, prepared, sink or self._at_once)}, None

    def _within(
        self, stored: StoredForward | None, block: BoundBlock, prepared: _Prepared
    ) -> AbstractContextManager[None]:
        """Returns the context to run a block in."""
        if stored is None:
            return nullcontext()
        compiled = self._compiled_of(block, prepared) is not None
        return stored.block(block.index, compiled=compiled)

    def _compiled_of(self, block: BoundBlock, prepared: _Prepared) -> CompiledLayer | None:
        """Returns the compiled layer that runs the block; None: the block runs uncompiled."""
        kind = self._table.blocks[block.index].kind
        return None if prepared.drops else self._compiled.get(kind)

    def _run_block(
        self,
        block: BoundBlock,
        tensors: Mapping[str, torch.Tensor],
        prepared: _Prepared,
        sink: Sink,
    ) -> torch.Tensor:
        spec, training = self._table.blocks[block.index], prepared.training
        compiled = self._compiled_of(block, prepared)
        if compiled is not None:
            return self._run_compiled(block, tensors[HIDDEN], prepared, compiled, sink)
        # A split backward and dropped operators know the leaves themselves.
        aliased = block.widens and not (prepared.drops or prepared.splits)
        with ExitStack() as stack:
            if block.index == prepared.discarded and spec.layer_index is not None:
                stack.enter_context(self._products[spec.kind].leaving_out())
            over = summing(block) if aliased else block
            stack.enter_context(self._modules.installed(over, training))
            if spec.layer_index is None:
                ids = self._moved(prepared.batch.input_ids)
                return self._parts.embed(ids, prepared.tensors, training=training)
            call = prepared.calls[spec.layer_index]
            return call.run(self._modules.layers[spec.kind], tensors[HIDDEN])

    def _run_compiled(
        self,
        block: BoundBlock,
        hidden: torch.Tensor,
        prepared: _Prepared,
        compiled: CompiledLayer,
        sink: Sink,
    ) -> torch.Tensor:
        """Runs a layer as a compiled graph. A training forward without a graph runs as if the graph
        were needed. A graph without autograd would round differently from the one that computes the
        gradients later. The graph's saved tensors are freed at once.
        """
        spec = self._table.blocks[block.index]
        assert spec.layer_index is not None
        call, training = prepared.calls[spec.layer_index], prepared.training
        unneeded = training and not torch.is_grad_enabled()
        if unneeded:
            block, hidden, sink = self._as_trained(block), hidden.detach(), NoSink()
        with ExitStack() as stack:
            if unneeded:
                stack.enter_context(torch.enable_grad())
                hidden.requires_grad_()
            # The compiler's stand-ins for leaves cannot have gradients of another type.
            over = summing(block)
            stack.enter_context(self._modules.installed(over, training))
            leaves = {id(over.leaves[name]): leaf for name, leaf in block.leaves.items()}
            products = self._products[spec.kind]
            left_out = block.index == prepared.discarded
            stack.enter_context(products.handed_over(leaves, sink, left_out=left_out))
            output = call.run(compiled, hidden)
        return output.detach() if unneeded else output

    def _find_products(
        self, block: BoundBlock, tensors: Mapping[str, torch.Tensor], prepared: _Prepared
    ) -> None:
        """Runs a layer once for its kind, uncompiled, to find its products."""
        spec = self._table.blocks[block.index]
        if spec.layer_index is None or spec.kind in self._products:
            return
        layer, call = self._modules.layers[spec.kind], prepared.calls[spec.layer_index]
        watch = ProductWatch(layer)
        with torch.enable_grad():
            alone = BoundBlock(
                index=block.index,
                leaves={name: t.detach().requires_grad_() for name, t in block.leaves.items()},
            )
            with self._modules.installed(alone, prepared.training), watch.watching():
                output = call.run(layer, tensors[HIDDEN].detach().requires_grad_())
        self._products[spec.kind] = watch.products(output)

    def _as_trained(self, block: BoundBlock) -> BoundBlock:
        """Returns the block over new leaves that require gradients where training does."""
        spec = self._table.blocks[block.index]
        tied = {name.local_name for name in spec.borrows}
        trained = {tensor.name for tensor in spec.tensors if tensor.trainable} | tied
        leaves = {
            name: leaf.detach().requires_grad_(name in trained)
            for name, leaf in block.leaves.items()
        }
        return BoundBlock(index=block.index, leaves=leaves)

    def _run_head(
        self,
        block: BoundBlock,
        hidden: torch.Tensor,
        prepared: _Prepared,
        storage: ForwardStorage | None,
    ) -> LabelSums:
        training = prepared.training

        def logits_of(over: BoundBlock) -> LogitsOf:
            def logits(rows: torch.Tensor) -> torch.Tensor:
                # Installed per call: chunks run in the backward, long after the forward.
                with self._modules.installed(over, training):
                    return self._parts.logits(rows)

            return logits

        @contextmanager
        def in_backward() -> Iterator[LogitsOf]:
            # Gradients go to the leaves of the forward; their memory may serve another stage by
            # now.
            now = block if storage is None else storage.block_now(block)
            with gathering(block, now) as over:
                yield logits_of(over)

        with self._modules.installed(block, training):
            finished = self._parts.finish(hidden)
        rows, chunk_rows = finished.reshape(-1, finished.shape[-1]), self._table.rows_of_loss
        head = LossHead(logits_of=logits_of(block), in_backward=in_backward)
        if prepared.batch.preferences is not None:
            pairs = PairTargets.of(prepared.batch, self._moved)
            return chunked_pairs(head, rows, pairs, chunk_rows=chunk_rows)
        smoothing = self._label_smoothing if training else 0.0
        targets = Targets.of(prepared.batch, self._moved, smoothing)
        if not (training or torch.is_grad_enabled()):
            return chunked_scores(head.logits_of, rows, targets, chunk_rows=chunk_rows)
        return LabelSums(loss=chunked_cross_entropy(head, rows, targets, chunk_rows=chunk_rows))

    def _prepare(
        self,
        batch: MicroBatch,
        bound: Sequence[BoundBlock],
        *,
        training: bool,
        place: tuple[int, int],
        storage: ForwardStorage | None,
        output_read: bool,
    ) -> _Prepared:
        """Returns the inputs that all blocks of the stage share. Runs before the generator is
        seeded for a block: random numbers of the decoder's own code must not shift those of a
        block.
        """
        mask, positions = batch.attention_mask, batch.position_ids
        tensors = BatchTensors(
            shape=batch.shape,
            attention_mask=None if mask is None else self._moved(mask),
            position_ids=None if positions is None else self._moved(positions),
        )
        layers = any(self._table.blocks[b.index].layer_index is not None for b in bound)
        calls = self._calls.of(batch, tensors) if layers else ()
        compiled = self._table.blocks[bound[-1].index].kind in self._compiled
        drops = storage is not None and storage.drops
        splits = storage is not None and storage.split
        watched = drops or (splits and not compiled)
        return _Prepared(
            batch=batch,
            tensors=tensors,
            calls=calls,
            training=training,
            place=place,
            drops=drops,
            splits=splits,
            discarded=None if output_read or watched else bound[-1].index,
        )

    def _moved(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Returns a copy of the array on the device, of its shape and dtype; the array itself on a
        CPU.
        """
        tensor = torch.from_numpy(array)
        if torch_device(self._device).own_memory:
            # A copy from pageable memory may wait for the work before it.
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)

    def _constants(self, prepared: _Prepared) -> list[torch.Tensor]:
        """Returns the tensors that outlive the forward: the micro-batch, buffers, layers'
        arguments.
        """
        constants = [torch.from_numpy(array) for array in prepared.batch.arrays] + self._buffers
        if self._compiled:
            constants.append(ticket_memory())
        for call in prepared.calls:
            constants += tensors_in((call.args, call.kwargs))
        return constants

    def called_with(self, batch: MicroBatch) -> tuple[torch.Tensor, ...]:
        """Returns the layers' arguments other than hidden states, for all plain micro-batches of
        the batch's shape (micro_batch, sequence). They are masks and rotary tables, of the model's
        shapes and types. Empty before the first forward of that shape.
        """
        calls = self._calls.by_shape.get(batch.shape, ())
        return tuple(t for call in calls for t in tensors_in((call.args, call.kwargs)))

    def _reseed(self, *position: int) -> None:
        digest = hashlib.blake2b(repr((self._seed, *position)).encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little") >> 1  # 63 bits: a seed for any torch generator
        torch_device(self._device).generator().manual_seed(seed)


def _leaves(inputs: Mapping[str, torch.Tensor], *, autograd: bool) -> dict[str, torch.Tensor]:
    """Returns the inputs detached: the graph ends at the stage's border, which collects .grad."""
    return {
        name: value.detach().requires_grad_(autograd and value.is_floating_point())
        for name, value in inputs.items()
    }


def _free_inputs(leaves: Mapping[str, torch.Tensor], stored: StoredForward | None) -> None:
    """Frees the memory of inputs that a store of activations has swapped or dropped: the caller
    holds the output, and with it the leaves.
    """
    if stored is not None and stored.activations is not None:
        for leaf in leaves.values():
            release_values(leaf)
