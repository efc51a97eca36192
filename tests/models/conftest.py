"""Tiny models beside their Hugging Face originals, with flat arrays as a worker has them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PretrainedConfig
from transformers.utils import logging

from penstock.config.adapter import AdapterConfig
from penstock.config.schema import Config, parse_config
from penstock.models.binding import pack
from penstock.models.data.batch import MicroBatch
from penstock.models.runtime import BoundBlock, ModelRuntime, StageOutput
from penstock.models.surgery.hf import resolve_hf_config
from penstock.models.surgery.table import build_table
from penstock.shm.table import BlockTable

VOCAB = 61
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_GROUPED = {**_COMMON, "intermediate_size": 48, "num_key_value_heads": 2}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_NO_ENCODER_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS = ("bert", "roberta", "modernbert")
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "gpt2": {**_COMMON, **_NO_DROPOUT},
    "qwen2": _GROUPED,
    "mistral": {**_GROUPED, "sliding_window": 4},
    "qwen3": {**_GROUPED, "head_dim": 8},
    "gemma2": {**_GROUPED, "head_dim": 8, "sliding_window": 4},
    "gemma3_text": {**_GROUPED, "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 7},
    "phi3": _GROUPED,
    "gpt_neox": {**_COMMON, "intermediate_size": 48},
    "opt": {**_COMMON, "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "granite": {**_GROUPED, "logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "starcoder2": {**_GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    "openai-gpt": {**_COMMON, **_NO_DROPOUT},
    "qwen3_moe": {**_EXPERTS, "num_experts": 4, "head_dim": 8},
    "mixtral": {**_GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {
        **_EXPERTS,
        "num_experts": 4,
        "num_hidden_layers": 4,
        "head_dim": 8,
        "shared_expert_intermediate_size": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "olmoe": {**_GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    "mamba": {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 4},
    "bert": {**_COMMON, "intermediate_size": 48, **_NO_ENCODER_DROPOUT},
    "roberta": {
        **_COMMON,
        "intermediate_size": 48,
        "pad_token_id": 1,
        **_NO_ENCODER_DROPOUT,
    },
    "modernbert": {**_COMMON, "intermediate_size": 48, "local_attention": 4},
    "phimoe": {
        **_GROUPED,
        "num_local_experts": 4,
        "router_jitter_noise": 0.0,
        "input_jitter_noise": 0.0,
    },
}


def make_config(model_type: str, *, freeze: Sequence[str] = (), **changes: Any) -> Config:
    """A configuration of one of the architectures above; ``changes`` go to ``model.hf``."""
    return parse_config(
        {
            "model": {"hf": {"model_type": model_type, **ARCHITECTURES[model_type], **changes}},
            "data": {
                "path": "@stdlib",
                "sequence_length": 16,
                "objective": "masked" if model_type in ENCODERS else "next-token",
            },
            "train": {"freeze": list(freeze)},
        }
    )


def make_hf_config(config: Config) -> PretrainedConfig:
    """The configuration of the model, with a tokenizer of the tiny vocabulary."""
    return resolve_hf_config(config, tokenizer_vocab_size=VOCAB, eos=VOCAB - 1)


@dataclass
class Case:
    """A table and runtime, the original model, and flat arrays with the original's weights."""

    config: Config
    hf_config: PretrainedConfig
    table: BlockTable
    runtime: ModelRuntime
    original: Any
    weights: list[torch.Tensor] = field(default_factory=list)
    frozen: list[torch.Tensor] = field(default_factory=list)
    grads: list[list[torch.Tensor]] = field(default_factory=list)

    def bind(self, blocks: Sequence[int], *, train: bool = True) -> list[BoundBlock]:
        """The blocks over the flat arrays."""
        bound = []
        for index in blocks:
            block = self.table.blocks[index]
            borrowed = {}
            for tied in block.borrows:
                trainable = tied.contribution > 0
                arrays = self.weights if trainable else self.frozen
                grads = self.grads[tied.owner][tied.contribution] if train and trainable else None
                borrowed[tied.local_name] = (arrays[tied.owner], grads)
            bound.append(
                self.runtime.bind(
                    index,
                    weights=self.weights[index],
                    frozen=self.frozen[index],
                    grads=self.grads[index][0] if train else None,
                    borrowed=borrowed,
                )
            )
        return bound

    def forward(
        self,
        blocks: Sequence[int],
        inputs: dict[str, torch.Tensor],
        batch: MicroBatch,
        **options: Any,
    ) -> StageOutput:
        """One stage; options override the defaults of the call."""
        train = options.pop("train", True)
        defaults = {
            "data_position": 0,
            "micro_batch_index": 0,
            "training": True,
            "loss_weight": 1.0,
        }
        return self.runtime.forward(
            self.bind(blocks, train=train), inputs, batch, **{**defaults, **options}
        )

    def train(self, cuts: Sequence[int], batch: MicroBatch, **options: Any) -> torch.Tensor:
        """A forward without graph, then each stage recomputed and run backward; the loss sum.

        ``cuts`` are the first blocks of all backward stages but the first.
        """
        bounds = [0, *cuts, len(self.table.blocks)]
        everything = range(len(self.table.blocks))
        first = self.forward(everything, {}, batch, autograd=False, checkpoints_at=cuts, **options)
        gradients: dict[str, torch.Tensor] = {}
        loss_sum = first.loss_sum
        for start, stop in reversed(list(itertools.pairwise(bounds))):
            output = self.forward(
                range(start, stop),
                first.checkpoints.get(start, {}),
                batch,
                autograd=True,
                **options,
            )
            gradients = self.runtime.backward(output, gradients)
            if output.loss_sum is not None:
                assert torch.equal(output.loss_sum, first.loss_sum)
        assert not gradients
        return loss_sum

    def gradient(self, name: str) -> torch.Tensor:
        """A tensor's gradient: the sum of its contributions."""
        for block, contributions in zip(self.table.blocks, self.grads, strict=True):
            for spec in block.tensors:
                if spec.name == name:
                    total = sum(contributions[1:], contributions[0])
                    end = spec.offset + spec.num_elements
                    return total[spec.offset : end].reshape(spec.shape)
        raise KeyError(name)

    def trainable_names(self) -> list[str]:
        """Names of all trainable tensors."""
        return [t.name for block in self.table.blocks for t in block.tensors if t.trainable]


def make_case(
    model_type: str,
    *,
    freeze: Sequence[str] = (),
    adapter: AdapterConfig | None = None,
    adapt: Callable[[Any, AdapterConfig], Any] | None = None,
    **changes: Any,
) -> Case:
    """Build everything; the original gets weights that make every parameter matter. ``adapt`` gives
    the original the adapters, under our names.
    """
    config = make_config(model_type, freeze=freeze, **changes)
    config = config.model_copy(update={"adapter": adapter})
    hf_config = make_hf_config(config)
    table = build_table(config, hf_config)
    eager = {"attn_implementation": "eager"} if model_type == "gemma2" else {}
    torch.manual_seed(7)
    kind = AutoModelForMaskedLM if model_type in ENCODERS else AutoModelForCausalLM
    original = kind.from_config(hf_config, **eager)
    if adapt is not None:
        assert adapter is not None
        original = adapt(original, adapter)
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.mul_(3.0).add_(torch.randn_like(parameter), alpha=0.05)
    case = Case(
        config=config,
        hf_config=hf_config,
        table=table,
        runtime=ModelRuntime(
            hf_config, table, device="cpu", compute_dtype=torch.float32, seed=5, adapter=adapter
        ),
        original=original.train(),
    )
    named = original.named_parameters(remove_duplicate=False)
    values = {our_name(name): value.detach() for name, value in named}
    for block in table.blocks:
        trainable, frozen = pack(block, values)
        case.weights.append(torch.from_numpy(trainable))
        case.frozen.append(torch.from_numpy(frozen))
        case.grads.append(
            [torch.zeros(block.trainable_elements) for _ in range(block.contributions)]
        )
    return case


def our_name(name: str) -> str:
    """The name in a block table of a parameter of transformers or PEFT."""
    for part in ("base_model.model.", ".default", ".modules_to_save", ".base_layer"):
        name = name.replace(part, "")
    return name


def make_batch(rows: int = 2, length: int = 12, seed: int = 3) -> MicroBatch:
    """Random tokens; every fifth label is ignored."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, VOCAB, (rows, length))
    labels[:, ::5] = -100
    return MicroBatch(input_ids=random.integers(0, VOCAB, (rows, length)), labels=labels)


def original_loss(model: Any, batch: MicroBatch) -> torch.Tensor:
    """The summed cross-entropy of the Hugging Face model itself."""
    logits = model(input_ids=torch.from_numpy(batch.input_ids)).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(),
        torch.from_numpy(batch.labels).flatten(),
        ignore_index=-100,
        reduction="sum",
    )


@pytest.fixture(scope="session", autouse=True)
def _no_progress_bars() -> None:
    """Bars start a monitor thread that outlives the test."""
    logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _kernels_of_torch() -> Iterator[None]:
    """References choose kernels that repeat their bits, for the whole process."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(name="make_config")
def _make_config() -> Callable[..., Config]:
    return make_config


@pytest.fixture(name="make_hf_config")
def _make_hf_config() -> Callable[[Config], PretrainedConfig]:
    return make_hf_config


@pytest.fixture(name="make_case")
def _make_case() -> Callable[..., Case]:
    return make_case


@pytest.fixture(name="make_batch")
def _make_batch() -> Callable[..., MicroBatch]:
    return make_batch


@pytest.fixture(name="original_loss")
def _original_loss() -> Callable[[Any, MicroBatch], torch.Tensor]:
    return original_loss


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny kernels: threads cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
