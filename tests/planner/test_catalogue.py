"""Costs from data sheets: counted by hand where that is possible, else the published sizes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from penstock.host.errors import ConfigError
from penstock.planner.cost.analytic import analytic_costs
from penstock.planner.cost.block_maker import ADAM_STATE_BYTES, LAUNCH_S
from penstock.planner.cost.catalogue import GPUS, MODELS
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.cost.frameworks import EAGER, IDEAL, Framework, tile_efficiency
from penstock.planner.cost.language_models import LanguageModel, LayerKind
from penstock.planner.cost.layer_kernels import Product, Shape
from penstock.planner.cost.operators import mixer_kernels
from penstock.planner.cost.sources import AnalyticSource, UnitCosts, parse_costs


def _billions(name: str) -> float:
    return round(MODELS[name].num_parameters / 1e9, 2)


def test_models_have_the_published_numbers_of_parameters() -> None:
    published = {
        "llama2-7b": 6.74,
        "llama2-13b": 13.02,
        "llama2-70b": 68.98,
        "llama3-8b": 8.03,
        "llama3-70b": 70.55,
        "llama3-405b": 405.85,
        "llama3-1b": 1.24,
        "gpt3-1.3b": 1.32,
        "gpt3-175b": 174.6,
        "mamba-1.4b": 1.37,
        "mamba-2.8b": 2.77,
        "mistral-7b": 7.24,
        "gemma2-9b": 9.24,
        "gemma2-27b": 27.23,
        "mixtral-8x7b": 46.7,
        "qwen1.5-moe-a2.7b": 14.32,
        "qwen3-30b-a3b": 30.53,
        "jamba-52b": 51.57,
        "bert-large": 0.34,
    }
    assert {name: _billions(name) for name in published} == published


@pytest.mark.parametrize(
    "name",
    [
        *(f"{family}-{size}b" for family in ("llama2", "gpt3") for size in (13, 18, 23, 28)),
        *(f"spipe-{size}b" for size in (10, 19, 30, 40, 52, 69, 88, 110)),
        "megatron-8.3b",
        "gpt-10b",
    ],
)
def test_models_of_the_papers_have_the_size_in_their_name(name: str) -> None:
    size = float(name.rpartition("-")[2].removesuffix("b"))
    assert _billions(name) == pytest.approx(size, rel=0.03)


def test_gpus() -> None:
    assert {gpu.name: (gpu.peak_flops / 1e12, gpu.memory_bytes / 1e9) for gpu in GPUS.values()} == {
        "V100-16": (125, 16),
        "V100-32": (125, 32),
        "V100-PCIE-32": (112, 32),
        "A100-40": (312, 40),
        "A100-80": (312, 80),
        "A800-PCIE-80": (312, 80),
        "RTX3090": (71, 24),
        "RTX4090": (165, 24),
        "RTX5090": (209.5, 32),
        "A6000": (154.8, 48),
        "L40S": (362, 48),
        "H100": (989, 80),
        "H200": (989, 141),
        "B200": (2250, 180),
    }


def _layer(model: str, *, gpu: str = "A100-80", sequence: int = 1024, **options: bool) -> BlockCost:
    found = analytic_costs(gpu, model, sequence_length=sequence, micro_batch=2, **options)
    return found.costs.blocks[1]


def test_activations_of_gpt_are_those_of_korthikanti() -> None:
    """34 s b h + 5 a s² b without flash attention (their equation 1)."""
    h, a, s, b = 4096, 32, 1024, 2
    layer = _layer("gpt3-6.7b", flash=False)
    assert layer.activation_bytes == 34 * s * b * h + 5 * a * s * s * b


def test_activations_of_llama() -> None:
    """16 h + 8 f a token with flash attention, and its fp32 number per head."""
    h, f, a, tokens = 4096, 11008, 32, 2048
    layer = _layer("llama2-7b")
    assert layer.activation_bytes == (16 * h + 8 * f + 4 * a) * tokens
    assert layer.deferred_bytes == (16 * h + 6 * f) * tokens


def test_operators_make_up_a_block() -> None:
    layer = _layer("llama2-7b")
    assert [op.name for op in layer.operators] == [
        *("norm", "qkv", "attention_core", "attention_output"),
        *("norm", "gate", "up", "silu", "mul", "down"),
    ]
    kept = sum(op.activation_bytes for op in layer.operators)
    assert kept + layer.output_bytes == layer.activation_bytes
    assert sum(op.forward_s for op in layer.operators) == pytest.approx(layer.forward_s)
    assert layer.recompute_s == layer.forward_s


def test_cost_effective_operators_are_cheap_and_large() -> None:
    """Obscura, section 8: about 40 % of the footprint for 2-3 % more time (unfused kernels)."""
    found = analytic_costs("A100-80", "llama2-13b", sequence_length=4096, micro_batch=1)
    cmb = found.operators("cmb")
    layer = found.costs.blocks[1]
    assert cmb == ("mul", "norm", "silu")
    assert layer.drop_bytes(cmb) / layer.activation_bytes == pytest.approx(0.393, abs=0.001)
    assert 0.005 < layer.drop_seconds(cmb) / (layer.forward_s + layer.backward_s) < 0.03


def test_operator_sets() -> None:
    gpt = analytic_costs("H100", "gpt3-13b", sequence_length=64, micro_batch=1)
    assert gpt.operators("cmb") == ("gelu", "norm")
    assert gpt.operators("mlp") == ("down", "dropout", "gelu", "up")
    with pytest.raises(ConfigError, match="'all' is unknown; accepted: cmb, mlp, attention, core"):
        gpt.operators("all")


def test_time_is_the_roofline() -> None:
    """Wide layers are limited by products, and those by the peak; 6 operations a weight."""
    found = analytic_costs(
        "H200", "llama3-405b", sequence_length=8192, micro_batch=1, efficiency=0.5
    )
    layer = found.costs.blocks[1]
    model = MODELS["llama3-405b"]
    weights = model.attention_parameters + model.mlp_parameters
    products_s = 6.0 * weights * 8192 / (989e12 * 0.5)
    assert layer.forward_s + layer.backward_s == pytest.approx(products_s, rel=0.1)
    assert layer.forward_s + layer.backward_s > products_s


def test_the_ratio_of_backward_to_forward_follows_from_the_operators() -> None:
    """Attention multiplies it by 2.5, products by 2, element-wise kernels by less."""
    short, long = (
        _layer("llama2-7b", sequence=256),
        _layer("llama2-7b", sequence=32768),
    )
    assert short.backward_s / short.forward_s == pytest.approx(1.96, abs=0.02)
    assert long.backward_s / long.forward_s == pytest.approx(2.15, abs=0.02)
    assert long.backward_input_s > long.forward_s > long.backward_weight_s


def test_half_layers_make_up_layers() -> None:
    whole = analytic_costs("A100-40", "llama2-7b", sequence_length=512, micro_batch=1)
    halves = analytic_costs(
        "A100-40", "llama2-7b", sequence_length=512, micro_batch=1, half_layers=True
    )
    assert (len(whole.costs.blocks), len(halves.costs.blocks)) == (34, 66)
    assert halves.block_names[:3] == ("embedding", "layer 0 attention", "layer 0 mlp")
    layer, both = whole.costs.blocks[1], halves.costs.of(range(1, 3))
    assert both.forward_s == pytest.approx(layer.forward_s)
    assert both.activation_bytes == layer.activation_bytes
    assert both.parameters == layer.parameters


def test_state_on_the_device() -> None:
    """16 bytes a parameter as in DeepSpeed; with offload 2 of weights and 4 of gradients."""
    resident = _layer("llama2-7b", offloaded=False)
    away = _layer("llama2-7b")
    assert resident.static_bytes == resident.parameters * ADAM_STATE_BYTES
    total = resident.static_bytes + resident.weight_bytes + resident.device_gradient_bytes
    assert total == 16 * resident.parameters
    assert (away.static_bytes, away.device_gradient_bytes) == (0.0, 4 * away.parameters)


def test_parameters_of_blocks_make_up_the_model() -> None:
    for name in ("llama2-7b", "gpt3-1.3b"):
        found = analytic_costs("V100-32", name, sequence_length=64, micro_batch=1)
        total = sum(block.parameters for block in found.costs.blocks)
        assert total == MODELS[name].num_parameters


def test_cluster() -> None:
    with_nvlink = analytic_costs(
        "A100-80", "gpt3-125m", sequence_length=64, micro_batch=1, devices_per_node=4
    ).cluster
    without = analytic_costs("RTX3090", "gpt3-125m", sequence_length=64, micro_batch=1).cluster
    assert (with_nvlink.devices_per_node, with_nvlink.peer_bandwidth) == (4, 300e9)
    assert not with_nvlink.peer_through_host
    assert (without.fetch_bandwidth, without.peer_through_host) == (25e9, True)
    assert without.device_memory_bytes == 24e9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("A1000", "llama2-7b", 8, 1), "GPU 'A1000' is not in the catalogue; did you mean A100"),
        (("H100", "llama", 8, 1), "model 'llama' is not in the catalogue; did you mean llama"),
        (("H100", "llama2-7b", 0, 1), "sequence_length = 0: expected 1 or more"),
        (("H100", "llama2-7b", 8, 0), "micro_batch = 0: expected 1 or more"),
    ],
)
def test_bad_requests(arguments: tuple[str, str, int, int], message: str) -> None:
    gpu, model, sequence_length, micro_batch = arguments
    with pytest.raises(ConfigError) as caught:
        analytic_costs(gpu, model, sequence_length=sequence_length, micro_batch=micro_batch)
    assert str(caught.value).startswith(message)


def test_every_model_can_be_priced() -> None:
    for model in MODELS.values():
        assert isinstance(model, LanguageModel)
        found = analytic_costs("H200", model.name, sequence_length=512, micro_batch=1)
        assert len(found.costs.blocks) == model.num_layers + 2
        assert all(block.forward_s > 0.0 < block.activation_bytes for block in found.costs.blocks)


def test_attention_of_a_window_computes_the_scores_of_the_window() -> None:
    """Counted pair by pair, to one token a row; another layer sees everything."""
    model = replace(MODELS["gemma2-2b"], window=1000)
    shape = Shape(sequence_length=4096, micro_batch=1)

    def core_flops(kind: LayerKind) -> float:
        kernels = mixer_kernels(model, shape, kind, residual_kept=True)
        return next(k.forward.flops for k in kernels if k.operator == "attention_core")

    window, everything = map(core_flops, model.pattern)
    pairs = sum(min(i, 1000) for i in range(4096))
    assert window == pytest.approx(2 * 2 * pairs * model.head_width, rel=1e-3)
    assert everything == 2 * 2 * 4096 * 2048 * model.head_width


def test_layers_of_different_kinds_cost_what_their_kinds_cost() -> None:
    """Jamba: attention in one of eight layers, experts in every other one."""
    found = analytic_costs("H100", "jamba-52b", sequence_length=1024, micro_batch=1)
    layers = found.costs.blocks[1:-1]
    sizes = sorted({block.parameters for block in layers})
    assert [[b.parameters for b in layers].count(size) for size in sizes] == [4, 12, 16]
    assert layers[:8] == layers[8:16]
    halves = analytic_costs(
        "H100", "jamba-52b", sequence_length=1024, micro_batch=1, half_layers=True
    )
    assert halves.block_names[1:4] == ("layer 0 state space", "layer 0 mlp", "layer 1 state space")
    assert halves.costs.of(range(1, 3)).parameters == layers[0].parameters


def test_experts_compute_for_the_chosen_and_store_all() -> None:
    mixtral = _layer("mixtral-8x7b")
    dense = _layer("mistral-7b")
    assert mixtral.parameters - dense.parameters == 4096 * 8 + 7 * 3 * 4096 * 14336
    assert 1.5 < mixtral.forward_s / dense.forward_s < 2.0


def test_a_state_space_without_its_kernels_waits_for_launches_and_keeps_all_states() -> None:
    fused = analytic_costs("A100-80", "mamba-1.4b", sequence_length=1024, micro_batch=2)
    steps = analytic_costs(
        "A100-80", "mamba-1.4b", sequence_length=1024, micro_batch=2, flash=False
    )
    one, other = fused.costs.blocks[1], steps.costs.blocks[1]
    assert other.forward_s > 3 * 1000 * LAUNCH_S > 5 * one.forward_s
    assert other.activation_bytes - one.activation_bytes > 3 * 4 * 2048 * 4096 * 16
    assert one.deferred_bytes == other.deferred_bytes > 0.0


def test_bert_predicts_masked_words() -> None:
    """A dense layer with GELU and norm before the vocabulary, whose matrix is the embedding's."""
    found = analytic_costs("A100-40", "bert-32", sequence_length=512, micro_batch=2)
    head = found.costs.blocks[-1]
    assert len(found.costs.blocks) == 32 + 2
    assert head.parameters == 1024 * 1024 + 3 * 1024 + 30522
    assert [op.name for op in head.operators] == ["dense", "gelu", "norm", "head", "loss"]


@pytest.mark.parametrize("name", ["llama2-7b", "gpt3-1.3b", "mixtral-8x7b", "mamba-1.4b"])
def test_shards_make_up_the_model(name: str) -> None:
    """What is everywhere are norms, biases of the sums, positions, and the router."""
    model = MODELS[name]
    twice = 2 * model.shard(2).num_parameters
    assert model.shard(1).num_parameters == model.num_parameters
    assert 0 <= twice - model.num_parameters < 0.01 * model.num_parameters


def test_tensor_parallelism_halves_products_and_adds_sums() -> None:
    def layer(group: int, per_node: int = 8) -> BlockCost:
        found = analytic_costs(
            "A100-80",
            "llama2-13b",
            sequence_length=2048,
            micro_batch=1,
            devices_per_node=per_node,
            tensor_parallel=group,
        )
        assert found.cluster.devices_per_node == max(1, per_node // group)
        return found.costs.blocks[1]

    one, two = layer(1), layer(2)
    hidden_bytes = 2 * 2048 * 5120
    sums_s = 2 * 2 * (hidden_bytes / 2 / 300e9 + 1e-5)
    assert one.forward_s / 2 + sums_s < two.forward_s < 1.1 * (one.forward_s / 2 + sums_s)
    assert two.weight_bytes == pytest.approx(one.weight_bytes / 2, rel=1e-4)
    assert two.output_bytes == one.output_bytes
    shared = 4 * hidden_bytes  # input, two norms, the sum between the halves
    assert two.activation_bytes - shared == pytest.approx((one.activation_bytes - shared) / 2)
    assert layer(4, per_node=2).forward_s > 3 * layer(4).forward_s, "sums over the NICs"


@pytest.mark.parametrize(
    ("group", "message"),
    [
        (3, "tensor_parallel = 3: nodes have 8 devices; give a divisor or a multiple"),
        (16, "tensor_parallel = 16: spipe-19b has 44 heads, which does not divide"),
    ],
)
def test_groups_that_do_not_divide_are_refused(group: int, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        analytic_costs(
            "V100-32", "spipe-19b", sequence_length=64, micro_batch=1, tensor_parallel=group
        )


def test_products_take_whole_waves_of_tiles() -> None:
    """108 multiprocessors: 108 tiles of 256 x 128 are one wave, one more row of tiles is a second;
    small products use smaller tiles, which read more.
    """

    def efficiency(rows: int, columns: int) -> float:
        return tile_efficiency(Product(rows=rows, columns=columns, depth=1024), 108)

    assert efficiency(256 * 9, 128 * 12) == 1.0
    assert efficiency(256 * 9 + 1, 128 * 12) == pytest.approx(0.75, abs=0.05)
    assert efficiency(64, 64 * 108) == pytest.approx(32 / 43)
    assert efficiency(64, 64) < 0.01


def test_frameworks_take_longer_the_smaller_micro_batches_are() -> None:
    def seconds(framework: Framework, micro_batch: int) -> float:
        found = analytic_costs(
            "A100-40",
            "llama2-7b",
            sequence_length=512,
            micro_batch=micro_batch,
            framework=framework,
        )
        layer = found.costs.blocks[1]
        return (layer.forward_s + layer.backward_s) / micro_batch

    assert seconds(IDEAL, 1) == pytest.approx(seconds(IDEAL, 8), rel=0.1)
    small, large = seconds(EAGER, 1), seconds(EAGER, 8)
    assert small > 1.15 * large > 1.15 * seconds(IDEAL, 8)
    waiting = replace(EAGER, launch_s=1e-3)
    assert seconds(waiting, 1) > 1.8 * seconds(waiting, 2) > 0.07, "about a hundred launches"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("unit", UnitCosts()),
        ("unit:f=2", UnitCosts(forward=2.0, recompute=2.0)),
        (
            "unit:f=1,b=1,r=1",
            UnitCosts(backward_input=0.5, backward_weight=0.5),
        ),
        ("unit:p1=1,p2=3", UnitCosts(backward_input=1.0, backward_weight=3.0)),
        ("unit:b=3,p2=1", UnitCosts(backward_input=2.0, backward_weight=1.0)),
        ("unit:o=0.5,r=0", UnitCosts(recompute=0.0, optimizer=0.5)),
        ("analytic:H100:llama2-7b", AnalyticSource(gpu="H100", model="llama2-7b")),
        (
            "analytic:V100-32:gpt3-1.3b:micro_batch=4,sequence_length=512,flash=no,efficiency=0.4",
            AnalyticSource(
                gpu="V100-32",
                model="gpt3-1.3b",
                micro_batch=4,
                sequence_length=512,
                flash=False,
                efficiency=0.4,
            ),
        ),
        (
            "analytic:V100-32:gpt3-1.3b:tensor_parallel=4,framework=eager",
            AnalyticSource(gpu="V100-32", model="gpt3-1.3b", tensor_parallel=4, framework="eager"),
        ),
    ],
)
def test_costs_on_the_command_line(text: str, expected: UnitCosts | AnalyticSource) -> None:
    assert parse_costs(text) == expected


def test_units_are_those_of_a_forward_stage() -> None:
    """Eight forward and sixteen backward stages: sixteen blocks of half a unit each."""
    prices = parse_costs("unit:f=1,b=1,r=1,o=2").price(
        forward_stages=8, backward_stages=16, num_devices=4
    )
    block = BlockCost(
        forward_s=0.5,
        recompute_s=0.5,
        backward_input_s=0.25,
        backward_weight_s=0.25,
        activation_bytes=0.5,
        deferred_bytes=0.5,
        parameters=1.0,
    )
    assert prices.costs == Costs(blocks=(block,) * 16)
    assert prices.cluster == Cluster(
        devices_per_node=4, optimizer_rate=1.0, device_optimizer_rate=1.0
    )
    assert prices.block_work == (0.5,) * 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unit:g=1", "token 'g=1': 'g' is unknown; accepted: f=…, b=…, p1=…, p2=…, r=…, o=…"),
        ("unit:f=1,f=2", "token 'f=2': 'f' is given twice"),
        ("unit:f=-1", "token 'f=-1': expected a number of 0 or more"),
        ("unit:f=nan", "token 'f=nan': expected a number of 0 or more"),
        ("unit:b=2,p1=1,p2=2", "b = 2 is not p1 + p2; leave one of them out"),
        ("unit:b=1,p1=2", "b = 1 is not p1 + p2; leave one of them out"),
        ("analytic:H100", "expected analytic:GPU:MODEL"),
        ("analytic:H100:llama2-7b:micro_batch=0", "expected a whole number of 1 or more"),
        ("analytic:H100:llama2-7b:flash=1", "token 'flash=1': expected yes or no"),
        ("analytic:H100:llama2-7b:framework=jax", "expected one of ideal, eager,"),
        ("analytic:TPU:llama2-7b", "GPU 'TPU' is not in the catalogue"),
    ],
)
def test_bad_costs_on_the_command_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_costs(text)
    assert message in str(caught.value)
