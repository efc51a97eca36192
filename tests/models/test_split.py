"""Split backward against the unsplit one, bit for bit: models, odd modules, memory, bad use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import (
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    ResNetConfig,
)
from transformers.utils import logging

from penstock.models.loss import LossHead, Targets, chunked_cross_entropy
from penstock.models.split_backward.split import (
    DeferredWeights,
    Unsplit,
    backward_input,
    run_together,
    split_backward,
)

_SIZES = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2}
_ATTENTION = {"intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 16}
_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS = {
    "llama": LlamaConfig(**_SIZES, **_ATTENTION, num_key_value_heads=2, tie_word_embeddings=False),
    "gpt2": GPT2Config(
        vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=16, **_TOKENS
    ),  # tied, with dropout
    "bert": BertConfig(**_SIZES, **_ATTENTION),  # tied, with dropout
    "mamba": MambaConfig(**_SIZES, state_size=4, **_TOKENS),  # tied
    "resnet": ResNetConfig(
        embedding_size=8, hidden_sizes=[16, 24, 32, 40], depths=[1, 2, 2, 1], num_labels=5
    ),
}
HEADS = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "mamba": "MambaForCausalLM",
    "resnet": "ResNetForImageClassification",
}

Forward = Callable[[nn.Module, int], torch.Tensor]


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """No remarks of slow paths; one thread, since tiny products only wait for a second one."""
    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    yield
    logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


def make_model(kind: str) -> nn.Module:
    torch.manual_seed(7)
    return getattr(transformers, HEADS[kind])(copy.deepcopy(CONFIGS[kind])).train()


def loss_of(model: nn.Module, micro_batch: int) -> torch.Tensor:
    """A loss whose dropout and data follow from the number of the micro-batch."""
    torch.manual_seed(micro_batch)
    if model.config.model_type == "resnet":
        pictures, labels = torch.randn(2, 3, 32, 32), torch.randint(0, 5, (2,))
        return model(pixel_values=pictures, labels=labels).loss
    ids = torch.randint(0, 61, (2, 12))
    return model(input_ids=ids, labels=ids).loss


def split_step(
    model: nn.Module, forward: Forward, micro_batch: int, **options: bool
) -> tuple[torch.Tensor, DeferredWeights]:
    store = DeferredWeights()
    with split_backward(store, model.parameters(), **options):
        output = forward(model, micro_batch)
    backward_input(store, [output], [None])
    return output.detach(), store


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {
        name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }


def differing(left: nn.Module, right: nn.Module) -> list[str]:
    """Names of parameters whose gradients are not the same bits."""
    others = gradients(right)
    return [
        name
        for name, grad in gradients(left).items()
        if (grad is None) != (others[name] is None)
        or (grad is not None and not torch.equal(grad, others[name]))
    ]


def check_same(model: nn.Module, forward: Forward, **options: bool) -> DeferredWeights:
    """Two micro-batches, split and not; the store of the last one, run."""
    other = copy.deepcopy(model)
    for micro_batch in range(2):
        wanted = forward(model, micro_batch)
        wanted.backward()
        got, store = split_step(other, forward, micro_batch, **options)
        store.run()
        assert torch.equal(got, wanted.detach())
    assert differing(model, other) == []
    assert all(map(torch.equal, model.buffers(), other.buffers()))
    return store


def check_weights_may_be_gone(model: nn.Module, forward: Forward) -> None:
    """All weights are overwritten between the halves."""
    other = copy.deepcopy(model)
    forward(model, 0).backward()
    _, store = split_step(other, forward, 0, reductions=True)
    assert all(grad is None for grad in gradients(other).values())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(torch.nan)
    store.run()
    assert differing(model, other) == []
    model.zero_grad()


@pytest.mark.parametrize("reductions", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_gradients_are_those_of_an_unsplit_backward(kind: str, reductions: bool) -> None:
    store = check_same(make_model(kind), loss_of, reductions=reductions)
    assert store.unsplit == {}


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_may_be_gone_before_their_gradients_are_computed(kind: str) -> None:
    check_weights_may_be_gone(make_model(kind), loss_of)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_stage_recomputed_in_full_is_split_too(kind: str) -> None:
    def checkpointed(model: nn.Module, micro_batch: int) -> torch.Tensor:
        with torch.no_grad():
            first = loss_of(model, micro_batch)
        again = loss_of(model, micro_batch)
        assert torch.equal(first, again)
        return again

    store = check_same(make_model(kind), checkpointed)
    assert store.unsplit == {}


def test_a_stage_recomputed_in_part_is_split_too() -> None:
    saved = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)

    def policy(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        save = operator in saved
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    def forward(model: nn.Module, micro_batch: int) -> torch.Tensor:
        torch.manual_seed(micro_batch)
        first, again = create_selective_checkpoint_contexts(policy)
        rows = torch.randn(3, 4, 8)
        with torch.no_grad(), first:
            model(rows)
        with again:
            output = model(rows)
        return output.sum()

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
            self.scale = nn.Parameter(torch.rand(8))

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return self.layers(rows) @ self.scale.pow(2)

    assert check_same(Scaled(), forward).unsplit == {}


def test_inputs_get_their_gradients_at_once() -> None:
    model = make_model("llama").model
    found = []
    for split in (False, True):
        hidden = torch.randn(2, 5, 32, generator=torch.manual_seed(3)).requires_grad_()
        store = DeferredWeights()
        with split_backward(store, model.parameters()) if split else nullcontext():
            output = model(inputs_embeds=hidden, use_cache=False).last_hidden_state
        backward_input(store, [output], [torch.ones_like(output)])
        found.append(hidden.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("reductions", [False, True])
def test_frozen_parameters_stay_out(reductions: bool) -> None:
    model = make_model("bert")
    for name, parameter in model.named_parameters():
        frozen = ("layer.0", "key", "query.bias", "LayerNorm.weight", "intermediate.dense.weight")
        parameter.requires_grad_(not any(part in name for part in frozen))
    check_same(model, loss_of, reductions=reductions)


def test_gradients_of_another_type_are_added_in_it() -> None:
    """bf16 weights, fp32 sums: as the runtime binds them on a GPU."""
    model = make_model("llama").to(torch.bfloat16)
    other = copy.deepcopy(model)
    for parameter in (*model.parameters(), *other.parameters()):
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros(parameter.shape)
    for micro_batch in range(2):
        loss_of(model, micro_batch).backward()
        split_step(other, loss_of, micro_batch)[1].run()
    assert differing(model, other) == []


class Odd(nn.Module):
    """Parameters used in unusual ways, all of which can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(8, 6))
        self.token = nn.Parameter(torch.randn(6))
        self.left = nn.Parameter(torch.randn(4, 5))
        self.scale = nn.Parameter(torch.rand(6))
        self.convolution = nn.Conv1d(6, 6, 3, padding=1, groups=2)
        self.normalized = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
        self.norm = nn.GroupNorm(2, 6)
        self.bag = nn.EmbeddingBag(8, 6, mode="sum")
        self.unused = nn.Linear(6, 6)
        self.frozen = nn.Parameter(torch.rand(6, 6), requires_grad=False)

    def forward(self, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = rows + self.table[ids] + self.bag(ids.flatten()[:, None]).view_as(rows)
        rows = torch.cat([self.token.expand(2, 1, 6), rows], dim=1).to(self.token)
        rows = torch.matmul(self.left, rows)
        rows = rows - torch.stack([self.scale.exp(), self.scale.exp()]).mean(0)
        low, high = rows.mul(other=self.scale).chunk(2, dim=-1)
        rows = torch.where(low.mean() > 0, torch.cat((high, low), -1), self.token * self.scale)
        rows = self.norm(self.convolution(rows.transpose(1, 2)) @ self.left.T[:4, :4])
        self.unused(rows.transpose(1, 2))  # gets no gradient
        return self.normalized(F.dropout(rows, 0.2).transpose(1, 2)) @ (
            self.table.mT @ self.table @ self.frozen
        )


@pytest.mark.parametrize("reductions", [False, True])
def test_views_of_parameters_and_sums_of_uses(reductions: bool) -> None:
    def forward(model: nn.Module, micro_batch: int) -> torch.Tensor:
        torch.manual_seed(micro_batch)
        return model(torch.randn(2, 4, 6), torch.randint(0, 8, (2, 4))).square().sum()

    torch.manual_seed(1)
    model = Odd()
    check_weights_may_be_gone(model, forward)
    store = check_same(model, forward, reductions=reductions)
    assert store.unsplit == {}


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.token, self.scale = nn.Parameter(torch.randn(6)), nn.Parameter(torch.rand(6))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        rows = self.first(rows).add_(1.0)
        rows.mul_(self.scale)
        rows = F.relu_(self.first(rows))
        scale = self.scale * 2.0
        scale += rows.mean()
        rows = self.second(rows * scale)
        rows[:, 0] = self.token
        return rows.square().add(1.0).pow(self.token)


def test_functions_that_are_not_split_say_why() -> None:
    def forward(model: nn.Module, micro_batch: int) -> torch.Tensor:
        torch.manual_seed(micro_batch)
        return model(torch.rand(2, 4, 6)).sum()

    store = check_same(InPlace(), forward)
    assert store.unsplit == {
        Unsplit(function="mul_", reason="in place"): 1,
        Unsplit(function="add_", reason="in place"): 1,
        Unsplit(function="__setitem__", reason="in place"): 1,
        Unsplit(function="pow", reason="not known to be linear in its parameters"): 1,
    }


def test_fused_attention_stays_whole_and_the_rest_is_split() -> None:
    def forward(model: nn.Module, micro_batch: int) -> torch.Tensor:
        torch.manual_seed(micro_batch)
        return model(torch.randn(2, 4, 8)).square().sum()

    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    store = check_same(layer, forward)
    (unsplit,) = store.unsplit
    assert unsplit.function == "multi_head_attention_forward"


class TiedHead(nn.Module):
    """An embedding that is also the head; ``loss_of`` computes the loss of chunks of five rows."""

    def __init__(self, loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.middle = nn.Linear(8, 8)
        self._loss_of = loss_of

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.embedding(ids)).flatten(0, 1)
        return self._loss_of(self, hidden, ids.flatten())


def loss_by_checkpoints(model: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    def loss_of(rows: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(rows @ model.embedding.weight.t(), wanted, reduction="sum")

    parts = zip(hidden.split(5), labels.split(5), strict=True)
    return sum(checkpoint(loss_of, *part, use_reentrant=False) for part in parts)


def loss_in_backward(model: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    def logits_of(rows: Tensor) -> Tensor:
        return rows @ model.embedding.weight.t()

    head = LossHead(logits_of=logits_of, in_backward=lambda: nullcontext(logits_of))
    return chunked_cross_entropy(head, hidden, Targets(labels=labels), chunk_rows=5)


@pytest.mark.parametrize("loss_of", [loss_by_checkpoints, loss_in_backward])
def test_chunks_stay_unsplit_and_the_sum_of_both_uses_is_exact(loss_of: Any) -> None:
    def forward(model: nn.Module, micro_batch: int) -> torch.Tensor:
        torch.manual_seed(micro_batch)
        return model(torch.randint(0, 61, (2, 12)))

    store = check_same(TiedHead(loss_of), forward)
    inside = {Unsplit(function="t", reason="inside torch.utils.checkpoint"): 5}
    assert store.unsplit == (inside if loss_of is loss_by_checkpoints else {})


def test_hooks_of_parameters_see_the_sum() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    seen: list[torch.Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    _, store = split_step(model, lambda m, _: m(torch.randn(3, 4)).sum(), 0)
    assert [t is p for t, p in zip(seen, [model[1].weight, model[1].bias], strict=True)] == [
        True,
        True,
    ]
    store.run()
    assert {id(t) for t in seen} == {id(p) for p in model.parameters()}
    assert len(seen) == 6


class Alive(TorchDispatchMode):
    """Memory that operations made and that still exists, that of some tensors apart."""

    def __init__(self, apart: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self._apart = {tensor.untyped_storage().data_ptr() for tensor in apart}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._made[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        return result

    @property
    def bytes(self) -> int:
        return sum(
            size
            for address, (ref, size) in self._made.items()
            if address not in self._apart and not ref.expired()
        )


def hidden_states(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    if model.config.model_type == "resnet":
        return model(pixel_values=inputs).last_hidden_state
    return model(inputs_embeds=inputs).last_hidden_state


def held_by(store: DeferredWeights, tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of those of the tensors that the store keeps alive too."""
    found = {t.untyped_storage().data_ptr() for t in store.held()}
    return sum(t.nbytes for t in tensors if t.untyped_storage().data_ptr() in found)


def kept_bytes(kind: str, *, reductions: bool) -> tuple[int, int]:
    """What exists after the forward and after BACKWARD_INPUT; checks what the store says."""
    whole = make_model(kind)
    model = getattr(whole, whole.base_model_prefix)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    shape = (2, 3, 32, 32) if kind == "resnet" else (2, 12, 32)
    inputs = torch.randn(shape, requires_grad=True)
    inputs.grad, gradient = torch.zeros(shape), torch.ones(())
    apart = (inputs, inputs.grad, gradient, *model.parameters(), *model.buffers())
    store = DeferredWeights()
    with Alive((*apart, *(p.grad for p in model.parameters()), store.anchor)) as alive:
        with split_backward(store, model.parameters(), reductions=reductions):
            output = hidden_states(model, inputs * 1.0).square().sum()
        before = alive.bytes
        backward_input(store, [output], [gradient])
        del output
        after = alive.bytes
        assert after == store.bytes - held_by(store, apart)
        store.run()
        assert (alive.bytes, store.bytes) == (0, 0)
    return before, after


@pytest.mark.parametrize("kind", CONFIGS)
def test_only_what_weight_gradients_need_is_kept(kind: str) -> None:
    forward, least = kept_bytes(kind, reductions=False)
    _, most = kept_bytes(kind, reductions=True)
    assert least < most
    assert least < forward


@pytest.mark.parametrize("discard", [True, False])
def test_micro_batches_given_up_leave_nothing(discard: bool) -> None:
    def forward(model: nn.Module, _: int) -> torch.Tensor:
        inputs = torch.randn(2, 4, 6), torch.randint(0, 8, (2, 4))
        return model(*inputs).square().sum()

    model = Odd()
    with Alive((*model.parameters(), *model.buffers())) as alive:
        store = split_step(model, forward, 0, reductions=True)[1]
        # Copies of weights that are kept are hidden from modes.
        assert 2000 < alive.bytes <= store.bytes + store.anchor.nbytes
        if discard:
            store.discard()
            assert (alive.bytes, store.bytes) == (store.anchor.nbytes, 0)
        else:
            del store
            assert alive.bytes == 0


def test_outer_hooks_pack_what_is_kept() -> None:
    """A swap of activations takes those that wait for their weight gradients along."""
    model = make_model("bert")
    other = copy.deepcopy(model)
    loss_of(model, 0).backward()
    _, resident = split_step(other, loss_of, 0, reductions=True)
    with saved_tensors_hooks(lambda t: t.tolist(), lambda packed: torch.tensor(packed)):
        _, swapped = split_step(other, loss_of, 0, reductions=True)
    assert swapped.bytes < 0.7 * resident.bytes
    swapped.run()
    assert differing(model, other) == []


def stores_of(model: nn.Module, micro_batches: Sequence[int]) -> list[DeferredWeights]:
    return [split_step(model, loss_of, m)[1] for m in micro_batches]


def test_several_micro_batches_in_a_loop_are_the_same_bits() -> None:
    model = make_model("gpt2")
    other = copy.deepcopy(model)
    for micro_batch in (0, 1, 2):
        loss_of(model, micro_batch).backward()
    run_together(stores_of(other, (0, 1, 2)))
    assert differing(model, other) == []


def test_several_micro_batches_concatenated_are_the_same_sums() -> None:
    model = make_model("gpt2")
    other = copy.deepcopy(model)
    for micro_batch in (0, 1, 2):
        loss_of(model, micro_batch).backward()
    stores = stores_of(other, (0, 1, 2))
    run_together(stores, concatenate=True)
    assert [store.bytes for store in stores] == [0, 0, 0]
    products = differing(model, other)
    assert products != [] and not any("ln" in name or "wpe" in name for name in products)
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(
            parameter.grad, model.get_parameter(name).grad, rtol=1e-4, atol=1e-6
        )


def test_weights_before_inputs_are_refused() -> None:
    model, store = nn.Linear(2, 2), DeferredWeights()
    with split_backward(store, model.parameters()):
        model(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="BACKWARD_WEIGHT before BACKWARD_INPUT"):
        store.run()


def test_a_kept_tensor_changed_in_place_is_noticed() -> None:
    model, store = nn.Linear(2, 2), DeferredWeights()
    rows = torch.ones(1, 2, requires_grad=True)
    with split_backward(store, model.parameters()):
        output = model(rows)
    backward_input(store, [output], [torch.ones(1, 2)])
    with torch.no_grad():
        rows.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"changed in place: shape \(1, 2\), version 1"):
        store.run()


def test_a_forward_without_gradients_leaves_nothing() -> None:
    model, store = make_model("llama"), DeferredWeights()
    with torch.no_grad(), split_backward(store, model.parameters()):
        loss_of(model, 0)
    model.requires_grad_(False)
    with split_backward(store, model.parameters()):
        loss_of(model, 0)
    store.run()
    assert (store.bytes, store.unsplit) == (0, {})


def test_the_runtime_s_stages_can_be_split(make_case, make_batch) -> None:  # type: ignore[no-untyped-def]
    plain, split = make_case("qwen3"), make_case("qwen3")
    plain.train((2,), make_batch())
    batch = make_batch()
    everything = range(len(split.table.blocks))
    first = split.forward(everything, {}, batch, autograd=False, checkpoints_at=(2,))
    gradient: dict[str, torch.Tensor] = {}
    stores = []
    for stage, inputs in ((range(2, everything.stop), first.checkpoints[2]), (range(2), {})):
        bound = split.bind(stage)
        store = DeferredWeights()
        leaves = [leaf for block in bound for leaf in block.leaves.values()]
        with split_backward(store, leaves):
            output = split.runtime.forward(
                bound,
                inputs,
                batch,
                data_position=0,
                micro_batch_index=0,
                training=True,
                loss_weight=1.0,
                autograd=True,
            )
        gradient = split.runtime.backward(output, gradient)
        stores.append(store)
        del bound, leaves
    for store in stores:
        store.run()
    assert all(torch.equal(p[0], s[0]) for p, s in zip(plain.grads, split.grads, strict=True))
