"""Stages of blocks against the Hugging Face model run whole: losses, every gradient, memory."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
import torch

from penstock.host.errors import ConfigError
from penstock.models.data.batch import MicroBatch
from penstock.models.runtime import ModelRuntime
from penstock.models.surgery import table as surgery_table

TESTED = ("llama", "gpt2", "qwen2", "mistral")
ALSO = ("qwen3", "gemma2", "gemma3_text", "phi3", "gpt_neox", "opt", "granite", "starcoder2")
LISTS = ("openai-gpt",)
"""Layers that return lists."""
EXPERTS = ("qwen3_moe", "mixtral", "qwen3_next", "olmoe", "phimoe")
OTHERS = ("mamba", "bert", "roberta", "modernbert")
"""A state space, and encoders, whose list of layers may be an encoder's inside the model."""


def assert_same_gradients(case, tolerance: float = 1e-6) -> None:
    parameters = dict(case.original.named_parameters())
    for name in case.trainable_names():
        wanted = parameters[name].grad
        wanted = torch.zeros_like(parameters[name]) if wanted is None else wanted
        difference = torch.linalg.norm(case.gradient(name) - wanted)
        assert difference <= tolerance * torch.linalg.norm(wanted) + 1e-12, name


@pytest.mark.parametrize("cuts", [(), (2,), (1, 2, 3, 4)])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", TESTED)
def test_recomputed_stages_match_the_model(
    model_type, tied, cuts, make_case, make_batch, original_loss
) -> None:
    case = make_case(model_type, tie_word_embeddings=tied)
    for seed in (1, 2):  # gradients add up over micro-batches
        batch = make_batch(seed=seed)
        loss = original_loss(case.original, batch)
        (loss * 0.25).backward()
        got = case.train(cuts, batch, loss_weight=0.25)
        torch.testing.assert_close(got, loss.detach(), rtol=1e-6, atol=0.0)
    assert_same_gradients(case)


@pytest.mark.parametrize("model_type", [*ALSO, *LISTS, *EXPERTS, *OTHERS])
def test_other_architectures_match_too(model_type, make_case, make_batch, original_loss) -> None:
    case = make_case(model_type)
    batch = make_batch()
    loss = original_loss(case.original, batch)
    loss.backward()
    torch.testing.assert_close(case.train((1, 3), batch), loss.detach(), rtol=1e-6, atol=0.0)
    assert_same_gradients(case)


def test_stage_with_graph_kept_matches_too(make_case, make_batch, original_loss) -> None:
    case = make_case("llama")
    batch = make_batch()
    original_loss(case.original, batch).backward()
    first = case.forward([0, 1], {}, batch)
    second = case.forward([2, 3, 4], first.tensors, batch)
    case.runtime.backward(first, case.runtime.backward(second, {}))
    assert_same_gradients(case)


def test_ignored_labels_do_not_count(make_case, make_batch) -> None:
    case = make_case("llama")
    batch = make_batch()
    nothing = MicroBatch(input_ids=batch.input_ids, labels=np.full_like(batch.labels, -100))
    assert case.train((2,), nothing).item() == 0.0
    assert all(not g.any() for contributions in case.grads for g in contributions)
    assert batch.counted_tokens == 2 * (12 - 3)


def test_two_contributions_of_a_tied_tensor(make_case, make_batch, original_loss) -> None:
    case = make_case("gpt2")
    batch = make_batch()
    original_loss(case.original, batch).backward()
    case.train((2,), batch)
    embedding_use, head_use = case.grads[0]
    wanted = case.original.transformer.wte.weight.grad.reshape(-1)
    size = wanted.numel()
    assert embedding_use[:size].any() and head_use[:size].any()
    torch.testing.assert_close((embedding_use + head_use)[:size], wanted, rtol=1e-5, atol=1e-6)
    assert not head_use[size:].any(), "the head has no use for the positions of the embedding"


@pytest.mark.parametrize("pattern", ["embed_tokens", r"layers\.1\.", "norm", "lm_head"])
def test_frozen_parameters(pattern, make_case, make_batch, original_loss) -> None:
    case = make_case("llama", freeze=(pattern,), tie_word_embeddings=True)
    names = set(case.trainable_names())
    for name, parameter in case.original.named_parameters():
        parameter.requires_grad_(name in names)
    batch = make_batch()
    before = [flat.clone() for flat in case.frozen]
    loss = original_loss(case.original, batch)
    loss.backward()
    torch.testing.assert_close(case.train((1, 2, 3), batch), loss.detach())
    assert_same_gradients(case)
    assert all(map(torch.equal, before, case.frozen))


def test_bottom_stage_without_trainable_weights_has_no_backward(make_case, make_batch) -> None:
    case = make_case("llama", freeze=("embed_tokens",))
    output = case.forward([0], {}, make_batch())
    assert not output.tensors["hidden"].requires_grad
    assert case.runtime.backward(output, {"hidden": torch.ones(2, 12, 32)}) == {}


def test_gradients_stay_in_the_given_memory(make_case, make_batch) -> None:
    case = make_case("llama")
    bound = case.bind(range(5))
    places = {
        (block.index, name): leaf.grad.data_ptr()
        for block in bound
        for name, leaf in block.leaves.items()
    }
    for block in bound:
        for leaf in block.leaves.values():
            start = case.grads[block.index][0].data_ptr()
            assert start <= leaf.grad.data_ptr() < start + case.grads[block.index][0].nbytes
            start = case.weights[block.index].data_ptr()
            assert start <= leaf.data_ptr() < start + case.weights[block.index].nbytes
    options = {"data_position": 0, "micro_batch_index": 0, "training": True, "loss_weight": 1.0}
    sums = []
    for seed in range(3):
        output = case.runtime.forward(bound, {}, make_batch(seed=seed), **options)
        case.runtime.backward(output, {})
        sums.append(case.grads[2][0].clone())
    assert not torch.equal(sums[0], sums[1])
    for block in bound:
        for name, leaf in block.leaves.items():
            assert leaf.grad.data_ptr() == places[block.index, name]


def test_weights_are_read_where_they_lie(make_case, make_batch) -> None:
    case = make_case("llama")
    array = case.weights[2].numpy()  # as over shared memory
    batch = make_batch()
    before = case.forward(range(5), {}, batch, train=False).loss_sum
    array *= 0.5
    after = case.forward(range(5), {}, batch, train=False).loss_sum
    assert before != after


def test_nothing_keeps_the_memory_after_a_step(make_case, make_batch) -> None:
    case = make_case("llama")
    weights = np.array(case.weights[4].numpy())
    references = sys.getrefcount(weights)
    case.weights[4] = torch.from_numpy(weights)
    case.train((2,), make_batch())
    assert sys.getrefcount(weights) > references
    del case.weights[4]
    gc.collect()
    assert sys.getrefcount(weights) == references


def test_bf16_weights_sum_gradients_in_fp32(make_case, make_batch) -> None:
    case = make_case("llama")
    runtime = ModelRuntime(
        case.hf_config, case.table, device="cpu", compute_dtype=torch.bfloat16, seed=5
    )
    grads = [torch.zeros(b.trainable_elements) for b in case.table.blocks]
    bound = [
        runtime.bind(i, weights=case.weights[i].to(torch.bfloat16), grads=grads[i])
        for i in range(len(case.table.blocks))
    ]
    options = {"data_position": 0, "micro_batch_index": 0, "training": True, "loss_weight": 1.0}
    batch = make_batch()
    output = runtime.forward(bound, {}, batch, **options)
    runtime.backward(output, {})
    leaf = bound[2].leaves["model.layers.1.mlp.up_proj.weight"]
    assert leaf.dtype is torch.bfloat16 and leaf.grad.dtype is torch.float32
    assert leaf.grad.data_ptr() >= grads[2].data_ptr()
    once = grads[2].clone()
    for _ in range(2):
        runtime.backward(runtime.forward(bound, {}, batch, **options), {})
    # Sums of three in bf16 would have lost the last bit of most of them.
    assert torch.equal(grads[2], once + once + once)
    case.train((), batch)
    close = torch.nn.functional.cosine_similarity(once, case.grads[2][0], dim=0)
    assert close > 0.99


@pytest.mark.parametrize("model_type", ["gpt2", "starcoder2", "gpt_neox"])
def test_dropout_is_a_function_of_position(model_type, make_case, make_batch) -> None:
    rates = {
        "gpt2": {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2},
        "starcoder2": {"residual_dropout": 0.2, "embedding_dropout": 0.2},
        "gpt_neox": {"hidden_dropout": 0.2},
    }[model_type]
    batch = make_batch()

    def trained(cuts: tuple[int, ...], **options: int) -> tuple[float, list[torch.Tensor]]:
        case = make_case(model_type, **rates)
        torch.manual_seed(len(cuts))  # must not matter
        loss = case.train(cuts, batch, **options).item()
        return loss, [g for contributions in case.grads for g in contributions]

    loss, grads = trained(())
    again, same = trained((1, 2, 3, 4))
    assert loss == again

    assert all(map(torch.equal, grads, same))
    assert trained((2,), micro_batch_index=1)[0] != loss
    assert trained((2,), data_position=8)[0] != loss
    case = make_case(model_type, **rates)
    hidden = [
        case.forward([0], {}, batch, training=t, micro_batch_index=m).tensors["hidden"]
        for t, m in ((True, 0), (True, 1), (False, 0), (False, 1))
    ]
    assert not torch.equal(hidden[0], hidden[1]), "the embedding's own dropout must act"
    assert torch.equal(hidden[2], hidden[3])


def test_dropout_of_opt_beside_none(make_case, make_batch) -> None:
    """Its configurations have 0.1 by default: draws differ and lie around the loss without; where
    nothing is trained there is none.
    """
    batch, blocks = make_batch(), range(5)
    with_dropout, without = make_case("opt", dropout=0.1), make_case("opt", dropout=0.0)

    def loss(case, index: int, training: bool) -> float:
        options = {"micro_batch_index": index, "training": training, "autograd": False}
        return case.forward(blocks, {}, batch, **options).loss_sum.item()

    plain = loss(without, 0, True)
    assert loss(with_dropout, 0, False) == loss(without, 0, False) == plain
    draws = [loss(with_dropout, index, True) for index in range(64)]
    assert len(set(draws)) == 64
    error = np.std(draws) / len(draws) ** 0.5
    assert 0 < error < 0.01 * plain and abs(np.mean(draws) - plain) < 0.05 * plain


def packed(lengths: tuple[int, ...], seed: int = 0) -> tuple[MicroBatch, list[MicroBatch]]:
    """One row of several documents, and each document by itself."""
    random = np.random.default_rng(seed)
    singles = []
    for length in lengths:
        labels = random.integers(0, 61, (1, length))
        labels[0, -1] = -100
        singles.append(MicroBatch(input_ids=random.integers(0, 61, (1, length)), labels=labels))
    whole = MicroBatch(
        input_ids=np.concatenate([s.input_ids for s in singles], axis=1),
        labels=np.concatenate([s.labels for s in singles], axis=1),
        position_ids=np.concatenate([np.arange(n) for n in lengths])[None],
        document_ids=np.repeat(np.arange(len(lengths)), lengths)[None],
    )
    return whole, singles


@pytest.mark.parametrize("model_type", [*TESTED, "gemma2", "gemma3_text", "gpt_neox"])
def test_packed_documents_do_not_see_each_other(model_type, make_case) -> None:
    whole, singles = packed((7, 3, 6))
    together, apart = make_case(model_type), make_case(model_type)
    loss = together.train((2,), whole)
    separate = sum(apart.train((2,), single) for single in singles)
    torch.testing.assert_close(loss, separate, rtol=1e-5, atol=0.0)
    for name in together.trainable_names():
        torch.testing.assert_close(
            together.gradient(name), apart.gradient(name), rtol=1e-4, atol=1e-4
        )


def test_a_decoder_without_positions_says_so(make_case) -> None:
    with pytest.raises(ConfigError, match=r"decoder of type 'mamba' takes no position ids"):
        make_case("mamba").train((2,), packed((5, 4))[0])


def test_padding_masks_reach_the_layers(make_case) -> None:
    case = make_case("llama")
    (whole,) = packed((9,))[1]
    labels = whole.labels.copy()
    labels[0, 6:] = -100
    mask = np.arange(9)[None] < 6
    noise = whole.input_ids.copy()
    noise[0, 6:] = 1
    losses = [
        case.train((2,), MicroBatch(input_ids=ids, labels=labels, attention_mask=mask)).item()
        for ids in (whole.input_ids, noise)
    ]
    short = MicroBatch(input_ids=whole.input_ids[:, :6].copy(), labels=labels[:, :6].copy())
    assert losses == pytest.approx([case.train((2,), short).item()] * 2, rel=1e-6)


def test_chunked_head_matches_whole_head(make_case, make_batch, monkeypatch) -> None:
    whole = make_case("gpt2")
    monkeypatch.setattr(surgery_table, "loss_rows", lambda _: 5)
    chunked = make_case("gpt2")
    batch = make_batch()
    loss = whole.train((2,), batch)
    torch.testing.assert_close(chunked.train((2,), batch), loss, rtol=1e-6, atol=0.0)
    for name in whole.trainable_names():
        torch.testing.assert_close(whole.gradient(name), chunked.gradient(name))


def test_wrong_arrays_are_refused(make_case) -> None:
    runtime = make_case("llama").runtime
    with pytest.raises(ValueError, match=r"'layer.0' needs weights of 7744 elements, got none"):
        runtime.bind(1, weights=None)
    with pytest.raises(
        ValueError, match=r"grads must be flat with 7744 elements, got shape \(3,\)"
    ):
        runtime.bind(1, weights=torch.zeros(7744), grads=torch.zeros(3))
    with pytest.raises(ValueError, match=r"needs borrowed 'lm_head.weight'"):
        make_case("gpt2").runtime.bind(4, weights=torch.zeros(64))


def test_table_of_another_model_is_refused(make_case) -> None:
    llama, qwen = make_case("llama"), make_case("qwen2")
    with pytest.raises(ConfigError, match=r"table.json does not describe the model"):
        ModelRuntime(llama.hf_config, qwen.table, device="cpu", compute_dtype=torch.float32, seed=0)
