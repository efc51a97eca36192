"""The models of the ladder, and what a token of them costs.

LLaMA-shaped, 32,000 tokens, sequences of 2,048, bf16 weights with fp32 masters, AdamW, clipping,
full recomputation. **Model FLOPs** of a token are ``6 P + 6 L h s``: P parameters that a token is
multiplied with (all but the embedding's table), L layers of width h, s tokens of a sequence; of
attention's square the half that a causal mask leaves is counted. **Recomputation** is counted
apart: ``2 P' + 2 L h s``, with P' those of the layers. Norms and softmax are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

VOCABULARY = 32_000
MICRO_BATCH_TOKENS = 8192
STEP_TOKENS = 65_536


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and the batches that it is measured with; ``sequence`` in tokens, the others in
    sequences.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    vocabulary: int = VOCABULARY
    sequence: int = 2048
    micro_batch: int = MICRO_BATCH_TOKENS // 2048
    global_batch: int = STEP_TOKENS // 2048

    @cached_property
    def layer_parameters(self) -> int:
        """Of all layers: attention, gated MLP, norms."""
        attention = 4 * self.hidden * self.hidden
        return self.layers * (attention + self.hidden * (3 * self.intermediate + 2))

    @cached_property
    def parameters(self) -> int:
        """All: the head is not the embedding's table."""
        return self.layer_parameters + (2 * self.vocabulary + 1) * self.hidden

    @cached_property
    def model_flops(self) -> float:
        """Of a token, forward and backward."""
        multiplied = self.parameters - self.vocabulary * self.hidden
        return 6.0 * multiplied + 6.0 * self.layers * self.hidden * self.sequence

    @cached_property
    def recompute_flops(self) -> float:
        """Of a token, of the second forward of the layers."""
        return 2.0 * self.layer_parameters + 2.0 * self.layers * self.hidden * self.sequence

    @property
    def step_tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.sequence

    @property
    def hf(self) -> dict[str, Any]:
        """As a Hugging Face configuration."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.heads,
            "max_position_embeddings": self.sequence,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
        }

    def tokens(self, steps: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
        """Returns random tokens of so many steps, flat; the same ones each time."""
        count = steps * self.step_tokens
        return np.random.default_rng(1).integers(0, self.vocabulary, count, dtype=np.uint16)


SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "1.2 B": Shape(name="1.2 B", layers=22, hidden=2048, intermediate=5632, heads=16),
        "4 B": Shape(name="4 B", layers=34, hidden=3072, intermediate=8192, heads=24),
        "7 B": Shape(name="7 B", layers=32, hidden=4096, intermediate=11_008, heads=32),
    }
)
TINY = Shape(
    name="tiny",
    layers=4,
    hidden=32,
    intermediate=88,
    heads=2,
    vocabulary=300,
    sequence=32,
    micro_batch=2,
    global_batch=4,
)


def shape(name: str, *, tiny: bool) -> Shape:
    """Returns a model by name, or the one that tries the code."""
    return TINY if tiny else SHAPES[name]
