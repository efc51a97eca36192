"""Language models as shapes: of which layers they consist, how wide each part is, how many
parameters it has.

The named ones are in :mod:`penstock.planner.cost.catalogue`, what their kernels do in
:mod:`penstock.planner.cost.operators`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.host.errors import ConfigError


class Mixer(StrEnum):
    """The part of a layer's first half that mixes tokens."""

    ATTENTION = "attention"
    WINDOW = "window"
    """Attention to the last :attr:`LanguageModel.window` tokens."""
    STATE_SPACE = "state space"
    """Mamba's selective state space."""


class FeedForward(StrEnum):
    """The second half of a layer."""

    DENSE = "dense"
    EXPERTS = "experts"
    NONE = "none"
    """The layer has no second half (Mamba)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKind:
    """The two halves of a layer."""

    mixer: Mixer = Mixer.ATTENTION
    feed_forward: FeedForward = FeedForward.DENSE


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of an MLP: a router sends each token to ``per_token`` of
    ``number`` gated MLPs.

    ``shared_size``: width of a shared MLP that sees every token, behind a gate of one number
    (Qwen's); 0: none.
    """

    number: int
    per_token: int
    intermediate_size: int
    shared_size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """Mamba's mixer (Gu and Dao 2023): ``inner_size`` channels with ``state_size`` states each,
    after a convolution over ``taps`` tokens; time steps pass through ``time_rank`` numbers.

    ``inner_norms``: norms of time step, B and C (Jamba's).
    """

    inner_size: int
    time_rank: int
    state_size: int = 16
    taps: int = 4
    inner_norms: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel:
    """The shape of a model of one of three families.

    ``gated``: LLaMA's (RMSNorm, gate and up projection with SiLU, no biases, no dropout, rotary
    embedding). Otherwise GPT's (LayerNorm, learned positions, GELU, biases, dropout after both
    halves of a layer). Not ``causal``: BERT's, a masked language model of GPT's kernels. Every
    token sees all others, and norms follow the sums. There are token types, and a dense layer
    before the projection to the vocabulary.

    ``pattern``: layers are of these kinds, in turns. ``key_value_size``: width of keys, and of
    values (the hidden size, or less with grouped queries). ``query_size``: of queries, the hidden
    size unless given. ``query_key_norms``: numbers of each head's norm of queries and of keys
    (Qwen3), 0 without. ``qkv_biases``: of a gated model. ``post_norms``: a norm also after each
    half of a layer (Gemma 2). ``window``: tokens that a query of :attr:`Mixer.WINDOW` sees.
    ``tied``: the head uses the embedding's matrix. ``max_positions``: learned position embeddings,
    0 for rotary ones.
    """

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    key_value_size: int
    vocab_size: int
    gated: bool
    causal: bool = True
    tied: bool = False
    max_positions: int = 0
    query_size: int = 0
    query_key_norms: int = 0
    qkv_biases: bool = False
    post_norms: bool = False
    window: int = 0
    experts: Experts | None = None
    state_space: StateSpace | None = None
    pattern: tuple[LayerKind, ...] = (LayerKind(),)

    def layer(self, index: int) -> LayerKind:
        """Returns the kind of a layer, counted from 0."""
        return self.pattern[index % len(self.pattern)]

    @property
    def head_width(self) -> int:
        """Width of all queries together, and of what attention returns."""
        return self.query_size or self.hidden_size

    @property
    def norm_parameters(self) -> int:
        """Parameters of a norm of hidden states."""
        return self.hidden_size * (1 if self.gated else 2)

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention half of a layer with its norms (and biases)."""
        h, q, kv = self.hidden_size, self.head_width, self.key_value_size
        projections = h * (q + 2 * kv) + q * h
        biases = (q + 2 * kv) * (self.qkv_biases or not self.gated) + h * (not self.gated)
        return projections + biases + 2 * self.query_key_norms + self._half_norms

    @property
    def mlp_parameters(self) -> int:
        """Parameters of the dense MLP half of a layer with its norms (and biases)."""
        h, f = self.hidden_size, self.intermediate_size
        return (3 * h * f if self.gated else 2 * h * f + f + h) + self._half_norms

    @property
    def expert_parameters(self) -> int:
        """Parameters of a half of a layer with experts, all of them, with its norms."""
        experts, h = self.experts, self.hidden_size
        assert experts is not None, "a layer of experts in a model that has none"
        shared = 3 * h * experts.shared_size + h if experts.shared_size else 0
        expert_weights = experts.number * 3 * h * experts.intermediate_size
        return h * experts.number + expert_weights + shared + self._half_norms

    @property
    def state_space_parameters(self) -> int:
        """Parameters of a state space with its norms."""
        space, h = self.state_space, self.hidden_size
        assert space is not None, "a layer of state space in a model that has none"
        e, r, n = space.inner_size, space.time_rank, space.state_size
        products = h * 2 * e + e * (r + 2 * n) + r * e + e * h
        total = e * space.taps + e + e + e * n + e  # convolution, biases, A and D
        return products + total + (r + 2 * n) * space.inner_norms + self._half_norms

    def mixer_parameters(self, kind: LayerKind) -> int:
        """Returns the parameters of the first half of a layer."""
        if kind.mixer is Mixer.STATE_SPACE:
            return self.state_space_parameters
        return self.attention_parameters

    def feed_forward_parameters(self, kind: LayerKind) -> int:
        """Returns the parameters of the second half of a layer."""
        match kind.feed_forward:
            case FeedForward.DENSE:
                return self.mlp_parameters
            case FeedForward.EXPERTS:
                return self.expert_parameters
            case FeedForward.NONE:
                return 0

    @property
    def embedding_parameters(self) -> int:
        """Parameters of token and position embeddings, and of BERT's types and norm."""
        h = self.hidden_size
        rows = self.vocab_size + self.max_positions
        return rows * h if self.causal else (rows + 2) * h + 2 * h

    @property
    def head_own_parameters(self) -> int:
        """Parameters of the head without its matrix to the vocabulary: the last norm, or BERT's
        dense layer with its norm, and the biases.
        """
        h = self.hidden_size
        return self.norm_parameters if self.causal else h * h + h + 2 * h + self.vocab_size

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied matrix counts once."""
        kinds = map(self.layer, range(self.num_layers))
        layers = sum(self.mixer_parameters(k) + self.feed_forward_parameters(k) for k in kinds)
        matrix = 0 if self.tied else self.vocab_size * self.hidden_size
        return self.embedding_parameters + layers + self.head_own_parameters + matrix

    def shard(self, shards: int) -> LanguageModel:
        """Returns the part of the model that each of ``shards`` devices has under tensor
        parallelism (Shoeybi et al. 2019).

        Split are heads, the inner width of MLPs, experts and state spaces, and the vocabulary.
        Norms, position embeddings and the router are on every device.

        Raises:
            ConfigError: a width that does not divide evenly.
        """
        widths = {"heads": self.num_heads, "key and value width": self.key_value_size}
        widths |= {"inner width": self.intermediate_size}
        if self.experts is not None:
            widths["width of an expert"] = self.experts.intermediate_size
            widths["width of the shared expert"] = self.experts.shared_size
        if self.state_space is not None:
            widths["channels"] = self.state_space.inner_size
        for what, width in widths.items():
            if width % shards:
                raise ConfigError(
                    f"tensor_parallel = {shards}: {self.name} has {width} {what}, which does not"
                    " divide; give a divisor"
                )
        experts, space = self.experts, self.state_space
        return replace(
            self,
            num_heads=self.num_heads // shards,
            query_size=self.head_width // shards,
            key_value_size=self.key_value_size // shards,
            intermediate_size=self.intermediate_size // shards,
            vocab_size=-(-self.vocab_size // shards),
            experts=experts
            and replace(
                experts,
                intermediate_size=experts.intermediate_size // shards,
                shared_size=experts.shared_size // shards,
            ),
            state_space=space and replace(space, inner_size=space.inner_size // shards),
        )

    @property
    def summary(self) -> str:
        """Its size and its layers, in a line."""
        parts = [f"{self.num_parameters / 1e9:.3g} billion parameters", f"{self.num_layers} layers"]
        mixers = {kind.mixer for kind in self.pattern}
        if Mixer.WINDOW in mixers:
            where = "" if len(mixers) == 1 else "some "
            parts.append(f"{where}attention windows of {self.window} tokens")
        if Mixer.STATE_SPACE in mixers:
            parts.append("state spaces" if len(mixers) == 1 else "state spaces and attention")
        if self.experts is not None:
            parts.append(f"{self.experts.number} experts, {self.experts.per_token} a token")
        if not self.causal:
            parts.append("bidirectional, masked tokens")
        return ", ".join(parts)

    @property
    def _half_norms(self) -> int:
        return self.norm_parameters * (2 if self.post_norms else 1)
