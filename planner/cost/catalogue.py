"""Named GPUs and named language models: the numbers that data sheets and papers print.

The module has data only; :mod:`penstock.planner.cost.analytic` makes costs of them. No number is
fitted to a measured run of a pipeline.

Sources of the GPUs: NVIDIA's data sheets of V100, A100, A800, H100, H200, B200 (of HGX), RTX A6000
and L40S. RTX 3090, 4090 and 5090: the architecture white papers of GA102, AD102 and GB202.
Rates are dense tensor rates of 16-bit products that accumulate in fp32, memory bandwidth, and
NVLink. For the GeForce cards the rate with fp32 accumulation is half of the advertised rate.

``efficiency`` is the share of the peak that large matrix products reach in steady state.
:mod:`~penstock.planner.cost.analytic` counts element-wise kernels, bubbles and transfers apart. The
share is chosen per generation from published model FLOP utilisation (MFU), which it must exceed:

- A100: 0.65. MFU is 0.51-0.56 for 175B-1T, including pipeline bubbles and tensor-parallel
  communication (Korthikanti et al. 2022, table 5).
- H100: 0.6, as large products meet the power limit. MFU is 0.38-0.43 for 405B (Llama Team 2024,
  table 4) and about 0.5 within one node.
- V100: 0.6. The TFLOP/s that SPipe's artifact prints are 0.41 of the peak without recomputation,
  0.55 with it.
- GeForce cards: 0.75. Their halved accumulation rate is easy to reach.
- A6000, L40S and B200: 0.6, as of H100. No published run of a pipeline supports the number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import TypeVar

from penstock.host.errors import ConfigError
from penstock.planner.cost.language_models import (
    Experts,
    FeedForward,
    LanguageModel,
    LayerKind,
    Mixer,
    StateSpace,
)

_Entry = TypeVar("_Entry")

PCIE_BANDWIDTH: Mapping[int, float] = MappingProxyType({3: 12.5e9, 4: 25.0e9, 5: 55.0e9})
"""Bytes/s each way that copies from and to pinned host memory reach over 16 lanes, by generation.

Generations 4 and 5: Deep Optimizer States, sections 4.1 and 5.1. Generation 3: half of 4.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU. Rates per second; ``nvlink_bandwidth`` each way, 0 where there is none.

    ``peak_flops``: dense products of 16-bit numbers accumulated in fp32. ``vector_flops``: fp32
    outside of tensor cores. ``efficiency``: see the module's text.
    """

    name: str
    peak_flops: float
    memory_bytes: float
    memory_bandwidth: float
    pcie_generation: int
    efficiency: float
    vector_flops: float
    multiprocessors: int
    nvlink_bandwidth: float = 0.0

    @property
    def pcie_bandwidth(self) -> float:
        """Bytes/s each way between device and pinned host memory."""
        return PCIE_BANDWIDTH[self.pcie_generation]


_V100 = {
    "memory_bandwidth": 900e9,
    "pcie_generation": 3,
    "efficiency": 0.6,
    "vector_flops": 15.7e12,
    "multiprocessors": 80,
}
_A100 = {
    "peak_flops": 312e12,
    "pcie_generation": 4,
    "efficiency": 0.65,
    "vector_flops": 19.5e12,
    "multiprocessors": 108,
}
_HOPPER = {
    "peak_flops": 989e12,
    "vector_flops": 67e12,
    "multiprocessors": 132,
    "pcie_generation": 5,
    "efficiency": 0.6,
    "nvlink_bandwidth": 450e9,
}
_GEFORCE = {"memory_bytes": 24e9, "pcie_generation": 4, "efficiency": 0.75}
_GA102 = {"vector_flops": 35.6e12, "multiprocessors": 82}
_AD102 = {"vector_flops": 82.6e12, "multiprocessors": 128}
_GB202 = {
    "memory_bytes": 32e9,
    "pcie_generation": 5,
    "vector_flops": 104.8e12,
    "multiprocessors": 170,
}
_PROFESSIONAL = {"memory_bytes": 48e9, "pcie_generation": 4, "efficiency": 0.6}
_RTX_A6000 = {"vector_flops": 38.7e12, "multiprocessors": 84, "nvlink_bandwidth": 56.25e9}
_RTX_L40S = {"vector_flops": 91.6e12, "multiprocessors": 142}
_BLACKWELL = {
    "peak_flops": 2250e12,
    "vector_flops": 80e12,
    "multiprocessors": 148,
    "pcie_generation": 5,
    "efficiency": 0.6,
    "nvlink_bandwidth": 900e9,
}


def _gpu(name: str, *shared: Mapping[str, float], **own: float) -> Gpu:
    values = {key: value for mapping in (*shared, own) for key, value in mapping.items()}
    generation, multiprocessors = values.pop("pcie_generation"), values.pop("multiprocessors")
    return Gpu(
        name=name, pcie_generation=int(generation), multiprocessors=int(multiprocessors), **values
    )


_GPUS = (
    _gpu("V100-16", _V100, peak_flops=125e12, memory_bytes=16e9, nvlink_bandwidth=150e9),
    _gpu("V100-32", _V100, peak_flops=125e12, memory_bytes=32e9, nvlink_bandwidth=150e9),
    _gpu("V100-PCIE-32", _V100, peak_flops=112e12, memory_bytes=32e9, vector_flops=14e12),
    _gpu("A100-40", _A100, memory_bytes=40e9, memory_bandwidth=1555e9, nvlink_bandwidth=300e9),
    _gpu("A100-80", _A100, memory_bytes=80e9, memory_bandwidth=2039e9, nvlink_bandwidth=300e9),
    _gpu("A800-PCIE-80", _A100, memory_bytes=80e9, memory_bandwidth=1935e9),
    _gpu("RTX3090", _GEFORCE, _GA102, peak_flops=71e12, memory_bandwidth=936e9),
    _gpu("RTX4090", _GEFORCE, _AD102, peak_flops=165e12, memory_bandwidth=1008e9),
    _gpu("RTX5090", _GEFORCE, _GB202, peak_flops=209.5e12, memory_bandwidth=1792e9),
    _gpu("A6000", _PROFESSIONAL, _RTX_A6000, peak_flops=154.8e12, memory_bandwidth=768e9),
    _gpu("L40S", _PROFESSIONAL, _RTX_L40S, peak_flops=362e12, memory_bandwidth=864e9),
    _gpu("H100", _HOPPER, memory_bytes=80e9, memory_bandwidth=3350e9),
    _gpu("H200", _HOPPER, memory_bytes=141e9, memory_bandwidth=4800e9),
    _gpu("B200", _BLACKWELL, memory_bytes=180e9, memory_bandwidth=8000e9),
)

GPUS: Mapping[str, Gpu] = MappingProxyType({gpu.name: gpu for gpu in _GPUS})
"""Every GPU by name. V100-16/32 and A100 are SXM modules with NVLink, the others as named."""


def gpu_called(name: str) -> Gpu | None:
    """Returns the GPU that a driver calls ``name``, "NVIDIA A100-SXM4-80GB" say; None if the
    catalogue has none of its kind.
    """
    written = name.replace(" ", "").upper()
    alike = [gpu for gpu in _GPUS if gpu.name.split("-")[0] in written]
    return max(
        alike, key=lambda gpu: sum(word in written for word in gpu.name.split("-")), default=None
    )


def gpu_named(name: str) -> Gpu:
    """Returns the GPU of a name as users write it.

    Raises:
        ConfigError: the catalogue lacks it; suggests those that are alike.
    """
    return _entry("GPU", name, GPUS)


def _entry(what: str, name: str, known: Mapping[str, _Entry]) -> _Entry:
    """Returns an entry by its name, in letters of any size.

    Raises:
        ConfigError: there is none; suggests those that are alike.
    """
    bare = {_bare(each): each for each in known}
    written = _bare(name)
    if written in bare:
        return known[bare[written]]
    alike = [bare[each] for each in bare if written and (written in each or each in written)]
    alike += [bare[each] for each in get_close_matches(written, bare, n=3)]
    alike = list(dict.fromkeys(alike))[:4]
    hint = f"; did you mean {' or '.join(alike)}?" if alike else ";"
    raise ConfigError(f"{what} {name!r} is not in the catalogue{hint} known: {', '.join(known)}")


def _bare(name: str) -> str:
    """Returns a name without what people write differently."""
    for word in ("nvidia", "geforce", " ", "_", "-"):
        name = name.lower().replace(word, "")
    return name


def peak_flops_of(name: str) -> float | None:
    """Returns the peak of the GPU that a driver calls ``name`` (:func:`gpu_called`)."""
    gpu = gpu_called(name)
    return None if gpu is None else gpu.peak_flops


_LLAMA2_VOCAB, _LLAMA3_VOCAB, _GPT_VOCAB, _BERT_VOCAB = 32000, 128256, 50257, 30522


def _llama(
    name: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    *,
    key_value_heads: int | None = None,
    vocab: int = _LLAMA2_VOCAB,
    tied: bool = False,
) -> LanguageModel:
    groups = heads if key_value_heads is None else key_value_heads
    return LanguageModel(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_heads=heads,
        key_value_size=hidden // heads * groups,
        vocab_size=vocab,
        gated=True,
        tied=tied,
    )


def _llama3(
    name: str, layers: int, hidden: int, intermediate: int, heads: int, *, tied: bool = False
) -> LanguageModel:
    return _llama(
        name,
        layers,
        hidden,
        intermediate,
        heads,
        key_value_heads=8,
        vocab=_LLAMA3_VOCAB,
        tied=tied,
    )


def _gpt(
    name: str, layers: int, hidden: int, heads: int, *, positions: int = 2048
) -> LanguageModel:
    return LanguageModel(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_heads=heads,
        key_value_size=hidden,
        vocab_size=_GPT_VOCAB,
        gated=False,
        tied=True,
        max_positions=positions,
    )


_PUBLISHED = (
    _llama("llama2-7b", 32, 4096, 11008, 32),
    _llama("llama2-13b", 40, 5120, 13824, 40),
    _llama("llama2-70b", 80, 8192, 28672, 64, key_value_heads=8),
    _llama3("llama3-1b", 16, 2048, 8192, 32, tied=True),
    _llama3("llama3-3b", 28, 3072, 8192, 24, tied=True),
    _llama3("llama3-8b", 32, 4096, 14336, 32),
    _llama3("llama3-70b", 80, 8192, 28672, 64),
    _llama3("llama3-405b", 126, 16384, 53248, 128),
    _gpt("gpt3-125m", 12, 768, 12),
    _gpt("gpt3-350m", 24, 1024, 16),
    _gpt("gpt3-760m", 24, 1536, 16),
    _gpt("gpt3-1.3b", 24, 2048, 16),
    _gpt("gpt3-2.7b", 32, 2560, 32),
    _gpt("gpt3-6.7b", 32, 4096, 32),
    _gpt("gpt3-13b", 40, 5120, 40),
    _gpt("gpt3-175b", 96, 12288, 96),
)
"""LLaMA-2 and 3 (Touvron et al. 2023, Llama Team 2024), and GPT-3 (Brown et al. 2020, table 2.1).
The 13B model has Megatron's hidden size of 5120 instead of 5140.
"""

_OBSCURA = (
    _llama("llama2-18b", 56, 5120, 13824, 40),
    _llama("llama2-23b", 72, 5120, 13824, 40),
    _llama("llama2-28b", 88, 5120, 13824, 40),
    _gpt("gpt3-18b", 56, 5120, 40, positions=4096),
    _gpt("gpt3-23b", 72, 5120, 40, positions=4096),
    _gpt("gpt3-28b", 88, 5120, 40, positions=4096),
)
"""Obscura, section 9.2: the 13B models with layers added. The paper does not print numbers of
layers. Multiples of eight (stages) give the printed sizes: 18.1, 23.2, 28.2 and 17.9, 23.0, 28.0
billion parameters.
"""

_MARIO = (
    _gpt("mario-gpt3-1.6b", 128, 1024, 16),
    _gpt("mario-gpt3-13b", 128, 3000, 40),
    _llama("mario-llama2-3b", 64, 2048, 5632, 16),
    _llama("mario-llama2-13b", 64, 4096, 11008, 32),
)
"""Mario, table 4 (sequence length 1024). The width of LLaMA's MLP is not printed; it follows
LLaMA's rule, 8/3 of the hidden size rounded up to a multiple of 256.
"""

_SPIPE = tuple(
    _llama(f"spipe-{size}b", layers, hidden, intermediate, hidden // 128, vocab=_GPT_VOCAB)
    for size, layers, hidden, intermediate in (
        (10, 48, 4096, 10880),
        (19, 48, 5632, 14976),
        (30, 96, 5120, 13632),
        (40, 96, 5888, 15680),
        (52, 96, 6656, 17728),
        (69, 96, 7680, 20480),
        (88, 192, 6144, 16384),
        (110, 192, 6912, 18432),
    )
)
"""SPipe, table 2. Keys and values have the full width, and the vocabulary is GPT-2's. Read as
grouped queries, the column "# KV heads" would make models smaller than their names (8.4 instead of
10 billion). So would LLaMA's vocabulary. The artifact's TFLOP/s are those of full attention and
50,257 tokens, too.
"""

_WINDOWED, _OF_EXPERTS = LayerKind(mixer=Mixer.WINDOW), LayerKind(feed_forward=FeedForward.EXPERTS)
_MAMBA_LAYER = LayerKind(mixer=Mixer.STATE_SPACE, feed_forward=FeedForward.NONE)
_STATE_SPACE_AND_MLP = LayerKind(mixer=Mixer.STATE_SPACE)
_STATE_SPACE_AND_EXPERTS = LayerKind(mixer=Mixer.STATE_SPACE, feed_forward=FeedForward.EXPERTS)


def _mamba(name: str, layers: int, hidden: int) -> LanguageModel:
    return LanguageModel(
        name=name,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=0,
        num_heads=0,
        key_value_size=0,
        vocab_size=50280,
        gated=True,
        tied=True,
        state_space=StateSpace(inner_size=2 * hidden, time_rank=-(-hidden // 16)),
        pattern=(_MAMBA_LAYER,),
    )


def _gemma2(
    name: str,
    layers: int,
    hidden: int,
    intermediate: int,
    heads: int,
    *,
    key_value_heads: int,
    head_size: int = 256,
) -> LanguageModel:
    return replace(
        _llama(name, layers, hidden, intermediate, heads, vocab=256000, tied=True),
        query_size=heads * head_size,
        key_value_size=key_value_heads * head_size,
        post_norms=True,
        window=4096,
        pattern=(_WINDOWED, LayerKind()),
    )


_MAMBA = (
    _mamba("mamba-130m", 24, 768),
    _mamba("mamba-370m", 48, 1024),
    _mamba("mamba-790m", 48, 1536),
    _mamba("mamba-1.4b", 48, 2048),
    _mamba("mamba-2.8b", 64, 2560),
)
"""Mamba (Gu and Dao 2023, table 12): no attention, a layer is one state space of twice the hidden
size; GPT-NeoX's vocabulary padded to 50,280.
"""

_WINDOWS = (
    replace(
        _llama("mistral-7b", 32, 4096, 14336, 32, key_value_heads=8),
        window=4096,
        pattern=(_WINDOWED,),
    ),
    _gemma2("gemma2-2b", 26, 2304, 9216, 8, key_value_heads=4),
    _gemma2("gemma2-9b", 42, 3584, 14336, 16, key_value_heads=8),
    _gemma2("gemma2-27b", 46, 4608, 36864, 32, key_value_heads=16, head_size=128),
)
"""Mistral 7B (Jiang et al. 2023, table 1) and Gemma 2 (Gemma Team 2024, table 1). Every other layer
of Gemma 2 has a window. GELU stands for the activation of its gate; the soft cap of its logits is
left out.
"""

_EXPERTS = (
    replace(
        _llama("mixtral-8x7b", 32, 4096, 14336, 32, key_value_heads=8),
        experts=Experts(number=8, per_token=2, intermediate_size=14336),
        pattern=(_OF_EXPERTS,),
    ),
    replace(
        _llama("qwen1.5-moe-a2.7b", 24, 2048, 5632, 16, vocab=151936),
        qkv_biases=True,
        experts=Experts(number=60, per_token=4, intermediate_size=1408, shared_size=5632),
        pattern=(_OF_EXPERTS,),
    ),
    replace(
        _llama("qwen3-30b-a3b", 48, 2048, 6144, 32, vocab=151936),
        query_size=32 * 128,
        key_value_size=4 * 128,
        query_key_norms=128,
        experts=Experts(number=128, per_token=8, intermediate_size=768),
        pattern=(_OF_EXPERTS,),
    ),
    replace(
        _llama("jamba-52b", 32, 4096, 14336, 32, key_value_heads=8, vocab=65536),
        experts=Experts(number=16, per_token=2, intermediate_size=14336),
        state_space=StateSpace(inner_size=8192, time_rank=256, inner_norms=True),
        pattern=(
            *(_STATE_SPACE_AND_MLP, _STATE_SPACE_AND_EXPERTS) * 2,
            *(LayerKind(), _STATE_SPACE_AND_EXPERTS),
            *(_STATE_SPACE_AND_MLP, _STATE_SPACE_AND_EXPERTS),
        ),
    ),
)
"""Mixtral (Jiang et al. 2024, table 1), Qwen1.5-MoE and Qwen3 (their published configurations), and
Jamba (Lieber et al. 2024). Jamba has layers of three kinds.
"""


def _bert(name: str, layers: int) -> LanguageModel:
    return LanguageModel(
        name=name,
        num_layers=layers,
        hidden_size=1024,
        intermediate_size=4096,
        num_heads=16,
        key_value_size=1024,
        vocab_size=_BERT_VOCAB,
        gated=False,
        causal=False,
        tied=True,
        max_positions=512,
    )


_OTHERS = (
    _gpt("megatron-8.3b", 72, 3072, 24),
    _gpt("gpt-10b", 50, 4096, 32),
    _gpt("gpt-neox-20b", 48, 6144, 64),
    _bert("bert-large", 24),
    _bert("bert-32", 32),
)
"""Deep Optimizer States, table 2 (its 7B and 13B are LLaMA-2's), and 2BP, section 3: BERT
large, and the BERT-like model of its figure 6 with 32 layers (its Transformer-7b is ``llama2-7b``
at sequence length 1024).
"""

MODELS: Mapping[str, LanguageModel] = MappingProxyType(
    {
        model.name: model
        for models in (
            *(_PUBLISHED, _MAMBA, _WINDOWS, _EXPERTS),
            *(_OBSCURA, _MARIO, _SPIPE, _OTHERS),
        )
        for model in models
    }
)
"""Every model by name."""


def model_named(name: str) -> LanguageModel:
    """Returns the model of a name as users write it.

    Raises:
        ConfigError: the catalogue lacks it; suggests those that are alike.
    """
    return _entry("model", name, MODELS)
