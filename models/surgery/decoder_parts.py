"""Runs the parts of a skeleton: the decoder's work before, between and after its layers.

Every part is the model's own forward code around stubs. So scaled embeddings, learned positions,
sliding windows, rotary variants and soft-capped logits are those of the model's authors.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from penstock.host.errors import ConfigError
from penstock.models.data.batch import MicroBatch
from penstock.models.surgery.probe import ModuleStub, WeightlessStub, layer_stubs, shell
from penstock.models.surgery.skeleton import Skeleton


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCall:
    """The arguments that the decoder passes to one layer in addition to the hidden states.

    Masks, positions and rotary embeddings, of the shapes and dtypes that the model gives them.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    hidden_by_name: bool

    def run(self, layer: Any, hidden: torch.Tensor) -> torch.Tensor:
        """Calls the layer on hidden states (micro_batch, sequence, hidden) in the compute dtype.
        Returns the hidden states after it, of the same shape and dtype.
        """
        if self.hidden_by_name:
            result = layer(hidden_states=hidden, **self.kwargs)
        else:
            result = layer(hidden, *self.args, **self.kwargs)
        after: torch.Tensor = result[0] if isinstance(result, (tuple, list)) else result
        return after


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTensors:
    """The parts of a micro-batch that a decoder's forward takes, on the device.

    ``shape`` is (micro_batch, sequence); ``attention_mask`` (bool, False at padding) and
    ``position_ids`` (int64, from 0 in each document) have it.
    """

    shape: tuple[int, int]
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None

    @property
    def plain(self) -> bool:
        """True if the batch has no masks or positions of its own: its shape decides everything."""
        return self.attention_mask is None and self.position_ids is None


class DecoderParts:
    """The parts of one model's decoder on one device, to be run one by one.

    The parameters of a part must be in its modules while it runs. Hidden states are
    (micro_batch, sequence, hidden) in ``compute_dtype``.
    """

    def __init__(
        self, skeleton: Skeleton, *, device: torch.device, compute_dtype: torch.dtype
    ) -> None:
        self._skeleton = skeleton
        self._device, self._dtype = device, compute_dtype
        self._decoder, self._layer_list = skeleton.decoder, list(skeleton.layers)
        # A run of the decoder around a lone module would only build masks without a use.
        self._embeds_alone = _child(self._decoder, skeleton.embeds_alone)
        self._finishes_alone = _child(self._decoder, skeleton.finishes_alone)
        self._hidden_size = int(skeleton.model.config.hidden_size)
        self._accepts_positions = (
            "position_ids" in inspect.signature(self._decoder.forward).parameters
        )

    def layer_calls(self, batch: BatchTensors) -> tuple[LayerCall, ...]:
        """Returns the arguments that the decoder would pass to each layer for this batch: masks,
        positions, rotary embeddings.

        Runs the decoder around stubs, without a graph; needs no parameters.

        Raises:
            ConfigError: the batch has position ids, and the decoder takes none.
        """
        calls: list[LayerCall] = []

        def note(_: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
            by_name = not args
            hidden: torch.Tensor = kwargs["hidden_states"] if by_name else args[0]
            others = {k: v for k, v in kwargs.items() if not (by_name and k == "hidden_states")}
            calls.append(LayerCall(args=args[1:], kwargs=others, hidden_by_name=by_name))
            return hidden

        filler = self._filler(batch.shape)
        stub = WeightlessStub(filler)
        weightless = dict.fromkeys((*self._skeleton.before, *self._skeleton.after), stub)
        decoder = shell(self._decoder, {**weightless, **self._layers(note)})
        with torch.no_grad():
            decoder(inputs_embeds=filler, **self._batch_arguments(batch))
        return tuple(calls)

    def embed(
        self, input_ids: torch.Tensor, batch: BatchTensors, *, training: bool
    ) -> torch.Tensor:
        """Returns the hidden states before the first layer, (micro_batch, sequence, hidden) in the
        compute dtype, for int64 ``input_ids`` of shape (micro_batch, sequence).

        Raises:
            ConfigError: the batch has position ids, and the decoder takes none.
        """
        if self._embeds_alone is not None:
            hidden: torch.Tensor = self._embeds_alone(input_ids)
            return hidden

        def stop(_: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
            raise _FirstLayerReached(args[0] if args else kwargs["hidden_states"])

        weightless = dict.fromkeys(self._skeleton.after, WeightlessStub(self._filler(batch.shape)))
        overrides = {**weightless, **self._layers(stop)}
        decoder = shell(self._decoder, overrides, training=training)
        try:
            decoder(input_ids=input_ids, **self._batch_arguments(batch))
        except _FirstLayerReached as reached:
            return reached.hidden
        raise AssertionError("the decoder has layers but called none")

    def finish(self, hidden: torch.Tensor) -> torch.Tensor:
        """Runs the decoder's code after the last layer (the final norm). Takes the layer's hidden
        states, (micro_batch, sequence, hidden), and returns as many, of the same dtype.
        """
        if self._finishes_alone is not None:
            result: torch.Tensor = self._finishes_alone(hidden)
            return result
        last = len(self._layer_list) - 1

        def substitute(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
            if index == last:
                return hidden
            passed: torch.Tensor = args[0] if args else kwargs["hidden_states"]
            return passed

        filler = self._filler((hidden.shape[0], hidden.shape[1]))
        weightless = dict.fromkeys(self._skeleton.before, WeightlessStub(filler))
        decoder = shell(self._decoder, {**weightless, **self._layers(substitute)})
        finished: torch.Tensor = decoder(inputs_embeds=filler, use_cache=False)[0]
        return finished

    def logits(self, finished: torch.Tensor) -> torch.Tensor:
        """Returns logits (rows, vocabulary), in the dtype that the model's head gives them, of
        final hidden states (rows, hidden).
        """

        def decoder(*_: Any, **__: Any) -> Any:
            return _decoder_output()(last_hidden_state=finished[None])

        stub = ModuleStub(self._decoder, decoder)
        model = shell(self._skeleton.model, {self._skeleton.decoder_path: stub})
        logits: torch.Tensor = model(inputs_embeds=finished[None], use_cache=False).logits
        return logits[0]

    def _layers(self, sink: Any) -> dict[str, Any]:
        results = self._skeleton.layer_results
        return {self._skeleton.layers_name: layer_stubs(self._layer_list, sink, results=results)}

    def _filler(self, shape: tuple[int, int]) -> torch.Tensor:
        # One element, seen in the full shape: it takes no memory, and nothing may write into it.
        zero = torch.zeros((), dtype=self._dtype, device=self._device)
        return zero.expand(*shape, self._hidden_size)

    def _batch_arguments(self, batch: BatchTensors) -> dict[str, Any]:
        arguments: dict[str, Any] = {"use_cache": False}
        if batch.attention_mask is not None:
            arguments["attention_mask"] = batch.attention_mask
        if batch.position_ids is not None:
            if not self._accepts_positions:
                raise ConfigError(
                    f"model: the decoder of type {self._skeleton.model.config.model_type!r} takes"
                    " no position ids, so documents of a row cannot be kept apart; set"
                    " data.document_masks: false and data.packing: none"
                )
            arguments["position_ids"] = batch.position_ids
        return arguments


class LayerCalls:
    """The arguments of the layers, made once. All plain batches of a shape share them; otherwise
    they are those of the latest micro-batch, since its blocks may run one by one.
    """

    def __init__(self, parts: DecoderParts) -> None:
        self.by_shape: dict[tuple[int, int], tuple[LayerCall, ...]] = {}
        self._parts = parts
        self._latest: tuple[MicroBatch, tuple[LayerCall, ...]] | None = None

    def of(self, batch: MicroBatch, tensors: BatchTensors) -> tuple[LayerCall, ...]:
        """Returns one call per layer; ``tensors`` are those of ``batch``.

        Raises:
            ConfigError: the batch has position ids, and the decoder takes none.
        """
        if tensors.plain:
            calls = self.by_shape.get(tensors.shape)
            if calls is None:
                calls = self.by_shape[tensors.shape] = self._parts.layer_calls(tensors)
            return calls
        if self._latest is None or self._latest[0] is not batch:
            calls = self._parts.layer_calls(tensors)
            # The batch is held, too, so that no other one can have its identity.
            self._latest = (batch, calls)
        return self._latest[1]


def _child(decoder: nn.Module, name: str | None) -> nn.Module | None:
    return None if name is None else decoder.get_submodule(name)


class _FirstLayerReached(Exception):
    """Carries the hidden states out of the decoder's forward; nothing after them is needed."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@cache
def _decoder_output() -> type[Any]:
    """Returns the class of a decoder's result. Optional fields that a model's head passes on
    (router logits, cross attentions) are None.
    """
    # Imported here: emulated workers import this module and need no transformers.
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class DecoderOutput(BaseModelOutputWithPast):
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return DecoderOutput
