"""What saved activations take: bytes and seconds by what is dropped, beside the planner's.

    python -m bench.saved_activations [--model llama|gpt2] [--hidden 512] [--layers 3]
                                      [--sequence 256] [--dtype float32|bfloat16] [--device cpu]
                                      [--threads 1] [--rounds 5]

One micro-batch through a Hugging Face model with a tiny vocabulary, all of it one stage. ``kept``
is MiB of activations per layer after the forward, ``saved`` the share that dropping saves, and
``planner`` the share by :mod:`penstock.planner.cost.operators` (kernels fused as Megatron's are;
Hugging Face's norms are not and keep more). Times are medians; ``forward`` and ``backward`` are
held against a run without the store (first line), and ``recompute`` is the explicit one between
them.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from penstock.models.binding import BoundBlock
from penstock.models.saved_activations import (
    BoundWeights,
    SavedActivations,
    SavedTensorPolicy,
    saving_activations,
)
from penstock.models.torch_device import torch_device
from penstock.planner.cost.language_models import LanguageModel
from penstock.planner.cost.layer_kernels import Shape, attention_kernels, mlp_kernels
from penstock.planner.cost.operators import OPERATOR_SETS

HEAD_SIZE = 64
VOCABULARY = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCost:
    """Medians of one policy; bytes right after the forward."""

    kept_bytes: int
    forward_s: float
    recompute_s: float
    backward_s: float


class LayerAnnouncer:
    """Announces each layer of a model to the SavedActivations of the moment."""

    def __init__(self, layers: Iterable[torch.nn.Module]) -> None:
        self.activations: SavedActivations | None = None
        for index, layer in enumerate(layers):
            layer.forward = functools.partial(self._run, index, layer.forward)

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.activations is None:
            return forward(*args, **kwargs)
        with self.activations.block(index):
            return forward(*args, **kwargs)


def make_model(options: argparse.Namespace) -> Any:
    """Returns the model on its device, with flash attention where there is one."""
    heads = options.hidden // HEAD_SIZE
    common = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
    config: GPT2Config | LlamaConfig
    if options.model == "gpt2":
        config = GPT2Config(
            n_embd=options.hidden,
            n_layer=options.layers,
            n_head=heads,
            n_positions=options.sequence,
            **common,
        )
    else:
        config = LlamaConfig(
            hidden_size=options.hidden,
            intermediate_size=round(options.hidden * 2.7),
            num_hidden_layers=options.layers,
            num_attention_heads=heads,
            **common,
        )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    return model.to(options.device).train()


def planner_share(options: argparse.Namespace, drop: frozenset[str]) -> float:
    """Returns the shares of a layer's kept bytes that the planner expects to save."""
    gated = options.model == "llama"
    model = LanguageModel(
        name="bench",
        hidden_size=options.hidden,
        num_layers=options.layers,
        num_heads=options.hidden // HEAD_SIZE,
        key_value_size=options.hidden,
        intermediate_size=round(options.hidden * (2.7 if gated else 4)),
        vocab_size=VOCABULARY,
        gated=gated,
        tied=not gated,
    )
    itemsize = getattr(torch, options.dtype).itemsize
    shape = Shape(sequence_length=options.sequence, micro_batch=1, itemsize=itemsize)
    kernels = attention_kernels(model, shape, residual_kept=True) + mlp_kernels(model, shape)
    total = shape.bytes_of(options.hidden) + sum(kernel.kept_bytes for kernel in kernels)
    return sum(k.kept_bytes for k in kernels if k.operator in drop) / total


def measure(
    loss: Callable[[], torch.Tensor],
    blocks: LayerAnnouncer,
    weights: BoundWeights,
    policy: SavedTensorPolicy | None,
    options: argparse.Namespace,
) -> PolicyCost:
    """Returns medians over the rounds, after a warm-up round."""
    times: list[tuple[float, float, float]] = []
    kept_bytes = 0
    for _ in range(options.rounds + 1):
        marks = [_now(options)]
        activations: SavedActivations | None = None
        if policy is None:
            value = loss()
        else:
            with saving_activations(policy, weights) as blocks.activations:
                value = loss()
            activations, blocks.activations = blocks.activations, None
            kept_bytes = activations.bytes
        marks.append(_now(options))
        if activations is not None:
            activations.recompute()
        marks.append(_now(options))
        value.backward()
        marks.append(_now(options))
        times.append((marks[1] - marks[0], marks[2] - marks[1], marks[3] - marks[2]))
    medians = [statistics.median(column) for column in zip(*times[1:], strict=True)]
    return PolicyCost(
        kept_bytes=kept_bytes,
        forward_s=medians[0],
        recompute_s=medians[1],
        backward_s=medians[2],
    )


def _now(options: argparse.Namespace) -> float:
    torch_device(torch.device(options.device)).synchronize()
    return time.perf_counter()


def main() -> None:
    """Prints one line a policy."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", choices=("llama", "gpt2"), default="llama")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = make_model(options)
    blocks = LayerAnnouncer(model.transformer.h if options.model == "gpt2" else model.model.layers)
    leaves = dict(model.named_parameters())
    weights = BoundWeights([BoundBlock(index=0, leaves=leaves)])
    ids = torch.randint(0, VOCABULARY, (1, options.sequence), device=options.device)

    def loss() -> torch.Tensor:
        result: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return result

    plain = measure(loss, blocks, weights, None, options)
    print(f"{'drop':>10}  kept MiB/layer  saved  planner  forward ms  recompute ms  backward ms")
    print(f"{'no store':>10}{'':33}{plain.forward_s * 1e3:>12.1f}{'':14}", end="")
    print(f"{plain.backward_s * 1e3:>13.1f}")
    whole = 0
    for name, drop in (("nothing", frozenset[str]()), *map(_named, OPERATOR_SETS)):
        found = measure(loss, blocks, weights, SavedTensorPolicy(drop=drop), options)
        whole = whole or found.kept_bytes
        print(
            f"{name:>10}{found.kept_bytes / options.layers / 2**20:>16.2f}"
            f"{1 - found.kept_bytes / whole:>7.1%}{planner_share(options, drop):>9.1%}"
            f"{found.forward_s * 1e3:>12.1f}{found.recompute_s * 1e3:>14.1f}"
            f"{found.backward_s * 1e3:>13.1f}"
        )


def _named(name: str) -> tuple[str, frozenset[str]]:
    return name, frozenset(OPERATOR_SETS[name])


if __name__ == "__main__":
    main()
