"""torchtitan's names of parameters and its order of rows, for llama3 and qwen3.

The names of llama3 are those of torchtitan at commit 9db065018e077ae3fc2693e0d28dd426ac659a2f, in
its ``state_dict_adapter.py``. Those of qwen3 are of 1a618d1d75dc67b78977fb35a785633b70e5999e. Both
are in release 0.2.2. An export writes the names of this release. In release 0.3.0 some names have
``qkv_linear`` and ``lm_head``.

torchtitan's llama3 rotates neighbouring rows of q and k. transformers rotates rows of two halves of
a head. So these rows are moved, in weights and in moments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import PretrainedConfig

from penstock.config.optimizers import OptimizerName
from penstock.host.errors import ConfigError
from penstock.models.checkpoints.exports.training import TrainingState

EMBEDDING = "tok_embeddings.weight"
LLAMA, QWEN = "llama", "qwen3"
"""transformers' types of models that torchtitan calls llama3 and qwen3."""

_TOP: Mapping[str, str] = MappingProxyType(
    {
        EMBEDDING: "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "lm_head.weight": "lm_head.weight",
    }
)
_MODULES: Mapping[str, str] = MappingProxyType(
    {
        **{f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkvo"},
        **{f"attention.qkv_linear.w{x}": f"self_attn.{x}_proj" for x in "qkv"},
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w2": "mlp.down_proj",
        "feed_forward.w3": "mlp.up_proj",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }
)
"""Modules of a layer. Of several names for a module the first is that of release 0.2.2."""
FUSED = "attention.qkv_linear.wqkv"
_PROJECTIONS = tuple(f"self_attn.{x}_proj" for x in "qkv")
_NAME = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_OURS = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_ADAM = (OptimizerName.ADAM, OptimizerName.ADAMW)
_REMEDY = "leave --names out"


def names_of(name: str) -> tuple[str, ...]:
    """Returns transformers' names of torchtitan's parameter ``name``; three for a joined
    projection, none if neither llama3 nor qwen3 has the parameter.
    """
    if name in _TOP:
        return (_TOP[name],)
    match = _NAME.fullmatch(name)
    if match is None:
        return ()
    layer, module = match.groups()
    modules = _PROJECTIONS if module == FUSED else tuple(filter(None, [_MODULES.get(module)]))
    return tuple(f"model.layers.{layer}.{each}.weight" for each in modules)


def fused_name(name: str) -> str:
    """Returns torchtitan's name of the joined projection in the layer of ``name``, or nothing."""
    match = _NAME.fullmatch(name)
    return "" if match is None else f"layers.{match[1]}.{FUSED}.weight"


def titan_name(name: str) -> str | None:
    """Returns the name in release 0.2.2 of transformers' parameter; None if it has none."""
    match = _OURS.fullmatch(name)
    if match is None:
        return next((titan for titan, ours in _TOP.items() if ours == name), None)
    layer, module = match.groups()
    named = (titan for titan, ours in _MODULES.items() if ours == module)
    return next((f"layers.{layer}.{titan}.weight" for titan in named), None)


@dataclass(frozen=True, slots=True)
class Heads:
    """Rows of a head."""

    size: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> Heads:
        """Returns the heads of a model's configuration."""
        size = getattr(config, "head_dim", None)
        return cls(size or config.hidden_size // config.num_attention_heads)

    def halves(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns rows of pairs as rows of halves, head by head. Shape ``(rows, columns)``."""
        parts = tensor.reshape(-1, self.size // 2, 2, *tensor.shape[1:])
        return parts.transpose(1, 2).reshape(tensor.shape)

    def pairs(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns rows of halves as rows of pairs, head by head. Shape ``(rows, columns)``."""
        parts = tensor.reshape(-1, 2, self.size // 2, *tensor.shape[1:])
        return parts.transpose(1, 2).reshape(tensor.shape)

    def part(self, tensor: torch.Tensor, number: int, queries: int) -> torch.Tensor:
        """Returns the rows of q, k or v of a joined tensor. Each group has ``queries`` heads of q,
        one of k and one of v.
        """
        groups = tensor.reshape(-1, queries + 2, self.size, *tensor.shape[1:])
        first, last = ((0, queries), (queries, queries + 1), (queries + 1, queries + 2))[number]
        return groups[:, first:last].reshape(-1, *tensor.shape[1:])


def has_moved_rows(name: str) -> bool:
    """Returns whether llama3 orders the rows of transformers' parameter in its own way."""
    return ".q_proj." in name or ".k_proj." in name


class TitanLayout:
    """Names and rows of torchtitan for a saved state, and the counters of its trainer."""

    section = ""

    def __init__(self, state: TrainingState) -> None:
        """Checks that torchtitan has the model and the optimizer.

        Raises:
            ConfigError: torchtitan has no such model or optimizer; names the remedy.
        """
        self._state = state
        config = state.source.hf_config
        self._heads, self._rotates_pairs = Heads.of(config), config.model_type == LLAMA
        if problem := self._problem(config):
            raise ConfigError(f"--names torchtitan: {problem}; {_REMEDY}")

    def name(self, name: str) -> str:
        """Returns torchtitan's name of transformers' parameter."""
        titan = titan_name(name)
        assert titan is not None, name
        return titan

    def moved(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a parameter's weights or moments with torchtitan's order of rows."""
        if self._rotates_pairs and has_moved_rows(name):
            return self._heads.pairs(tensor)
        return tensor

    def others(self) -> dict[str, dict[str, Any]]:
        """Returns the states of torchtitan's trainer and of its scheduler of the rate."""
        state, peak = self._state, self._state.optimizer.lr
        optimizer = torch.optim.SGD([torch.empty(0)], lr=peak)
        # The key lr_lambdas has settings of functions, of which torchtitan's has none.
        known = LambdaLR(optimizer, lambda step: 1.0).state_dict()
        del known["lr_lambdas"]
        counts = {"last_epoch": state.step, "_step_count": state.step + 1, "_last_lr": [state.rate]}
        return {
            "train_state": {"step": state.step, "ntokens_seen": state.tokens_seen},
            "lr_scheduler": {**known, **counts},
        }

    def _problem(self, config: PretrainedConfig) -> str | None:
        """Returns the reason why torchtitan does not have the model or the optimizer."""
        state = self._state
        names = [name for each in state.parameters for name in each.names]
        unknown = [n for n in (*names, *state.source.constants) if titan_name(n) is None]
        if config.model_type not in (LLAMA, QWEN):
            return f"models of type {config.model_type!r} have no names there, only llama and qwen3"
        if unknown:
            return f"{unknown[0]} has no name in its llama3 and qwen3"
        if self._rotates_pairs and len(names) > len(state.parameters):
            return "its llama3 ties no weights, and tie_word_embeddings is true"
        if self._rotates_pairs and self._heads.size * config.num_attention_heads != (
            config.hidden_size
        ):
            return f"its llama3 has no head_dim of its own, such as {self._heads.size}"
        if state.optimizer.name not in _ADAM:
            return f"it trains with Adam and AdamW, and optimizer.name is {state.optimizer.name}"
        return None


def titan_notes(state: TrainingState) -> Iterator[str]:
    """Yields settings that torchtitan changes at a load: its optimizer has a single group, which
    trains all parameters.
    """
    trained = [each for each in state.parameters if each.spec.trainable]
    first = {"weight_decay": trained[0].weight_decay, "lr": trained[0].lr}
    for setting, value in first.items():
        differing = [each.name for each in trained if getattr(each, setting) != value]
        if differing:
            yield (
                f"torchtitan has one {setting} for all parameters, {value:g}, as of"
                f" {trained[0].name}; {len(differing)} tensors such as {differing[0]} have others"
                " in the run"
            )
    if frozen := [each.name for each in state.parameters if not each.spec.trainable]:
        yield (
            f"{len(frozen)} tensors such as {frozen[0]} are not trained and have no moments;"
            " torchtitan loads the folder if it does not train them either"
        )
