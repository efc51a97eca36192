"""Attention by name: switches of the process, graphs of each choice, and the operator that joins
cuDNN's forward with the backward of FlashAttention-2.

No CPU has the operator's kernels. Here its kernels are the textbook's formulas, in the layouts of
the real kernels; the tests marked ``gpu`` run the real kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

from penstock.config.schema import parse_config
from penstock.daemons.node.preparing.layers import with_attention
from penstock.host.errors import ConfigError
from penstock.host.files import write_atomically
from penstock.models import kernels as kernels_module
from penstock.models.attention import (
    CUDNN_FLASH,
    OPERATOR,
    attend,
    choose_attention,
    graphs_folder,
)
from penstock.models.compiled import CompiledLayer, Compiler
from penstock.models.kernels import observe_kernels
from penstock.models.prepare import prepare
from penstock.models.torch_internals import TorchDispatchMode
from penstock.protocol.run.numerics import Attention, Kernels
from penstock.protocol.run.rundir import RunDirectory
from tests.compiler import QUIET, fresh_compiler

__all__ = ["fresh_compiler"]
pytestmark = QUIET

LLAMA = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}
Tensors = tuple[torch.Tensor, ...]


class Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes fused attention operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func.name())
        self.names += [name] if "_attention" in name else []
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Gives the process back to torch's choice and to transformers' function."""
    function = AttentionInterface._global_mapping["sdpa"]
    yield
    AttentionInterface.register("sdpa", function)
    choose_attention("sdpa")


@pytest.fixture
def textbook() -> Iterator[None]:
    """Gives the operator kernels for CPUs: the formulas of attention and of its gradients."""
    library = torch.library.Library("penstock", "FRAGMENT")
    library.impl(OPERATOR, _forward, "CPU")
    library.impl(f"{OPERATOR}_backward", _backward, "CPU")
    yield
    library._destroy()


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _scores(query: torch.Tensor, key: torch.Tensor, is_causal: bool, scale: float) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * scale
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")) if is_causal else scores


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float
) -> Tensors:
    scores = _scores(query, key, is_causal, scale)
    values = value.repeat_interleave(query.shape[1] // value.shape[1], 1)
    return _by_rows(scores.softmax(-1) @ values), scores.logsumexp(-1)


def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    is_causal: bool,
    scale: float,
) -> Tensors:
    """Returns gradients from output and log-sum-exps, as FlashAttention does."""
    groups = query.shape[1] // key.shape[1]
    shares = (_scores(query, key, is_causal, scale) - sums[..., None]).exp()
    of_values = (shares.mT @ gradient).unflatten(1, (-1, groups)).sum(2)
    of_shares = gradient @ value.repeat_interleave(groups, 1).mT
    of_scores = shares * (of_shares - (gradient * output).sum(-1, keepdim=True)) * scale
    of_keys = (of_scores.mT @ query).unflatten(1, (-1, groups)).sum(2)
    of_queries = of_scores @ key.repeat_interleave(groups, 1)
    of_queries, of_keys, of_values = map(_by_rows, (of_queries, of_keys, of_values))
    return of_queries, of_keys, of_values


def inputs(
    heads: int, groups: int, size: int, rows: int = 16, device: str = "cpu", **how: Any
) -> Tensors:
    """Returns random query, key and value, which lie in memory as layers make them."""
    torch.manual_seed(heads * 100 + size)
    return tuple(
        torch.randn(2, rows, count, size, **how).to(device).transpose(1, 2).requires_grad_()
        for count in (heads, heads // groups, heads // groups)
    )


def with_gradients(function: Any, tensors: Tensors, **how: Any) -> Tensors:
    """Returns the output of attention and the gradients of its inputs."""
    output = function(*tensors, **how)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
    gradients = torch.autograd.grad((output.float() * weights).sum(), tensors)
    return output.detach(), *gradients


CASES = [(4, 1, 16, True), (4, 2, 16, True), (6, 3, 8, False), (2, 1, 7, True), (4, 4, 13, False)]


@pytest.mark.parametrize(("heads", "groups", "size", "causal"), CASES)
def test_the_operator_is_attention(
    textbook: None, heads: int, groups: int, size: int, causal: bool
) -> None:
    """Heads of 7 and 13 are padded, grouped heads reach the kernels as they are."""
    tensors = inputs(heads, groups, size)
    how = {"is_causal": causal, "enable_gqa": groups > 1}
    results = with_gradients(attend, tensors, **how)
    expected = with_gradients(F.scaled_dot_product_attention, tensors, **how)
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("heads", "groups", "size", "causal"), CASES[1:4])
def test_the_operator_is_one_call_of_a_graph(
    textbook: None, heads: int, groups: int, size: int, causal: bool
) -> None:
    tensors = inputs(heads, groups, size)
    operator = getattr(torch.ops.penstock, OPERATOR).default
    padded = [F.pad(one, (0, -size % 8)).detach().requires_grad_() for one in tensors]
    torch.library.opcheck(operator, (*padded, causal, size**-0.5))
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(attend, fullgraph=True, dynamic=False, backend=backend)
    how = {"is_causal": causal, "enable_gqa": groups > 1}
    results = with_gradients(compiled, tensors, **how)
    for result, other in zip(results, with_gradients(attend, tensors, **how), strict=True):
        assert torch.equal(result, other)
    [graph] = graphs
    assert [node.target for node in graph.graph.nodes].count(operator) == 1


def test_layers_of_transformers_call_the_operator(textbook: None) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**LLAMA))
    ids = torch.arange(24).view(2, 12)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        [gradient] = torch.autograd.grad(loss, model.model.layers[0].self_attn.k_proj.weight)
        return loss.detach(), gradient

    expected = step()
    choose_attention(CUDNN_FLASH)
    with Operators() as seen:
        results = step()
    assert seen.names == [f"penstock::{OPERATOR}"] * 2 + [f"penstock::{OPERATOR}_backward"] * 2
    for result, other in zip(results, expected, strict=True):
        torch.testing.assert_close(result, other, rtol=1e-4, atol=1e-5)


def test_preparation_observes_the_operator_and_refuses_masks(
    textbook: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels_module, "repeat_bits", lambda: None)  # it is for a whole process
    (tmp_path / "text.txt").write_text("hello world " * 100)
    data = {"path": str(tmp_path / "text.txt"), "sequence_length": 16}
    config = parse_config({"model": {"hf": LLAMA}, "data": data, "train": {"global_batch": 2}})
    run = RunDirectory.create(tmp_path / "run")
    write_atomically(run.path / "resolved.yaml", config.to_yaml())
    prepare(config, run.path)
    asked = with_attention(config, CUDNN_FLASH)  # the configuration of a CPU would refuse the name
    observe_kernels(asked, run.path)
    text = (run.path / "model" / "kernels.json").read_text()
    [layer] = Kernels.from_json(text, "kernels.json").attention.values()
    backward = f"{OPERATOR}_backward"
    assert layer == Attention(forward=OPERATOR, backward=backward, evaluation=OPERATOR)
    masked = asked.model_copy(
        update={"data": asked.data.model_copy(update={"document_masks": True})}
    )
    with pytest.raises(ConfigError, match="'LlamaDecoderLayer' cannot use cudnn-flash: a mask"):
        observe_kernels(masked, run.path)


def test_auto_falls_back_for_the_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without cuDNN's kernel: this CPU, as if it were of the Hopper kind."""
    monkeypatch.setattr(kernels_module, "_candidates", lambda config, device: ("cudnn", "sdpa"))
    (tmp_path / "text.txt").write_text("hello world " * 100)
    data = {"path": str(tmp_path / "text.txt"), "sequence_length": 16}
    model = {"hf": LLAMA, "deterministic": False}
    config = parse_config({"model": model, "data": data, "train": {"global_batch": 2}})
    run = RunDirectory.create(tmp_path / "run")
    write_atomically(run.path / "resolved.yaml", config.to_yaml())
    prepare(config, run.path)
    words: list[str] = []
    observe_kernels(config, run.path, words.append)
    text = (run.path / "model" / "kernels.json").read_text()
    kernels = Kernels.from_json(text, "kernels.json")
    [layer] = kernels.attention.values()
    assert (kernels.asked, kernels.choice) == ("auto", "sdpa")
    assert layer.forward == "flash_attention_for_cpu"
    [word] = words
    assert word.startswith(
        "warning: model.attention: auto takes sdpa, not cudnn: layers of kind 'LlamaDecoderLayer'"
        " cannot use cudnn: "
    )


def test_calls_without_common_ground_are_refused() -> None:
    query, key, value = inputs(2, 1, 8)
    mask = torch.ones(16, 16, dtype=torch.bool)
    cases: list[tuple[str, Tensors, dict[str, Any]]] = [
        ("a mask", (query, key, value), {"attn_mask": mask}),
        ("dropout", (query, key, value), {"dropout_p": 0.1}),
        ("query heads have 8 elements, value heads 4", (query, key, value[..., :4]), {}),
        ("differ in number", (query[:, :, 8:], key, value), {"is_causal": True}),
    ]
    for words, tensors, how in cases:
        with pytest.raises(ValueError, match=words):
            attend(*tensors, **how)
    with pytest.raises(NotImplementedError, match=OPERATOR):
        attend(query, key, value)  # no CPU has the kernels


def test_switches_hold_in_all_threads() -> None:
    query, key, value = inputs(2, 1, 8)
    names: dict[str, list[str]] = {}

    def run(name: str) -> None:
        with Operators() as seen:
            F.scaled_dot_product_attention(query, key, value, is_causal=True)
        names[name] = seen.names

    for name in ("math", "flash", "sdpa"):
        choose_attention(name)
        thread = threading.Thread(target=run, args=(name,))
        thread.start()
        thread.join()
    flash = ["aten::_scaled_dot_product_flash_attention_for_cpu"]
    assert names == {"math": [], "flash": flash, "sdpa": flash}
    choose_attention("efficient")
    with pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(query, key, value, is_causal=True)


class Core(torch.nn.Module):
    """A layer that is attention alone."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_compiled_layers_have_the_attention_of_their_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's cache of graphs would give a process with one attention the graph of another."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    names = {}
    for choice in ("flash", "math"):
        choose_attention(choice)
        Compiler(cache=graphs_folder(tmp_path, choice)).set_up_process()
        torch._dynamo.reset()
        layer = CompiledLayer(Core(), Compiler())
        tensors = inputs(2, 1, 8)
        torch.autograd.backward(layer(*tensors).sum())
        with torch.profiler.profile() as profile:
            layer(*tensors)
        names[choice] = any("flash_attention_for_cpu" in event.key for event in profile.events())
    torch._dynamo.reset()
    assert names == {"flash": True, "math": False}
    assert graphs_folder(tmp_path, "auto") == graphs_folder(tmp_path, "sdpa")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("heads", "groups", "size", "causal"),
    [(8, 1, 64, True), (8, 4, 128, True), (6, 3, 72, False), (4, 1, 60, True), (8, 2, 44, False)],
)
def test_a_gpu_computes_attention_and_repeats_its_bits(
    heads: int, groups: int, size: int, causal: bool
) -> None:
    """Compared with the math kernel in fp32, and repeated a hundred times."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        tensors = inputs(heads, groups, size, rows=512, device="cuda")
        halves = tuple(one.detach().bfloat16().requires_grad_() for one in tensors)
        exact = tuple(one.detach().float().requires_grad_() for one in halves)
        how = {"is_causal": causal, "enable_gqa": groups > 1}
        results = with_gradients(attend, halves, **how)
        choose_attention("math")
        expected = with_gradients(F.scaled_dot_product_attention, exact, **how)
        for result, other in zip(results, expected, strict=True):
            error = (result.float() - other).norm() / other.norm()
            assert error < 2e-2, error
        for _ in range(100):
            repeated = with_gradients(attend, halves, **how)
            assert all(map(torch.equal, results, repeated))
    finally:
        torch.use_deterministic_algorithms(before)
