"""What ``cluster.device: emulated:…`` stands for: tables at two sizes, costs, limits, refusals."""

from __future__ import annotations

from dataclasses import fields, replace
from math import ceil, inf
from pathlib import Path
from typing import Any

import pytest

from bench.papers.obscura.testbed import SEQUENCE_LENGTH, PaperCase
from penstock.config.schema import Config, parse_config
from penstock.daemons.node.preparing.fitting.capacity import check_capacity
from penstock.daemons.node.preparing.tables import table_of
from penstock.host.errors import CapacityError, ConfigError
from penstock.planner.cost.cluster import ADVANCE, OptimizerStart, SweepBytes
from penstock.planner.cost.emulation import Emulation, SweepWork, stored_table
from penstock.planner.planning.configured import build_plan
from penstock.protocol.plan.profile import (
    KindProfile,
    LinearFit,
    MachineProfile,
    Profile,
    load_profile,
    to_json,
)
from tests.planner.conftest import planned


def config(
    device: str = "emulated:analytic:V100-32:spipe-10b", **sections: dict[str, Any]
) -> Config:
    base: dict[str, dict[str, Any]] = {
        "model": {"dtype": "fp16"},
        "data": {"path": "@stdlib", "sequence_length": 1024},
        "train": {"global_batch": 16, "micro_batch": 2},
        "optimizer": {"grad_dtype": "bf16"},
        "schedule": {"scheme": "spipe"},
        "cluster": {"workers": 4, "device": device},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in base | sections}
    return parse_config(merged)


def test_a_named_model_is_stored_at_a_thousandth_and_reckoned_in_full() -> None:
    emulation = Emulation.of(config())
    assert len(emulation.table.blocks) == len(emulation.stored.blocks) == 50
    assert emulation.table.num_parameters == 10_050_613_248
    assert emulation.stored.num_parameters == pytest.approx(10_050_613, rel=1e-4)
    layer, stored = emulation.table.blocks[1], emulation.stored.blocks[1]
    assert (layer.name, layer.kind, layer.layer_index) == ("layer.0", "layer", 0)
    assert (layer.trainable_elements, stored.trainable_elements) == (200_810_496, 200_816)
    assert stored.forward_flops == layer.forward_flops
    assert emulation.sweep_work("advance", 1) == SweepWork(
        num_bytes=200_810_496 * 30, limit=2e10 * 30, capacity=1.64e11
    )
    assert emulation.sweep_work("finish", 1) is None


def test_time_scale_shortens_sweeps_and_a_scale_of_one_stores_everything() -> None:
    whole = Emulation.of(config())
    slow = Emulation.of(config(emulation={"time_scale": 0.25, "scale": 1}))
    (before, after) = (e.sweep_work("preview", 3) for e in (whole, slow))
    assert before is not None and after is not None
    assert (after.num_bytes, after.capacity) == (before.num_bytes, before.capacity * 4)
    assert slow.stored.num_parameters == slow.table.num_parameters


def test_a_tied_head_borrows_in_both_tables() -> None:
    emulation = Emulation.of(config("emulated:analytic:V100-32:gpt3-125m"))
    for table in (emulation.table, emulation.stored):
        (borrowed,) = table.blocks[-1].borrows
        assert (borrowed.name, borrowed.owner, borrowed.contribution) == ("embedding.tokens", 0, 1)
        assert table.blocks[0].contributions == 2


def test_a_model_on_the_device_counts_there_and_moves_nothing() -> None:
    """As in the paper's tables: one cost model for both."""
    device = "emulated:analytic:A800-PCIE-80:llama2-13b"
    options = "half_layers=yes,offloaded=no,layers=8,activations=1.15"
    sections: dict[str, Any] = {
        "model": {"dtype": "bf16"},
        "data": {"sequence_length": SEQUENCE_LENGTH},
        "train": {"micro_batch": 1},
    }
    emulation = Emulation.of(config(f"{device}:{options}", **sections))
    case = PaperCase(
        family="llama2", layers=8, num_stages=4, num_microbatches=16, gpu="A800-PCIE-80"
    )
    assert emulation.costs == case.costs
    assert not emulation.offloaded
    assert emulation.table.num_parameters > 2.8e9, "tables know them all the same"
    work = emulation.sweep_work("advance", 1)
    assert work is not None and work.num_bytes == 0.0


@pytest.mark.parametrize("scale", [0.001, "1/1000", "1e-3", "2 / 2000"])
def test_a_share_is_a_number_or_a_fraction(scale: object) -> None:
    assert config(emulation={"scale": scale}).emulation.scale == 0.001


def test_tensors_keep_at_least_a_vector() -> None:
    table = stored_table(Emulation.of(config()).table, 1e-12)
    assert {block.trainable_elements for block in table.blocks} == {16}


def test_a_plan_that_fits_here_but_not_there_is_refused_with_its_needs() -> None:
    """One worker cannot hold the 10 billion parameters that 1F1B keeps on the device."""
    wanted = config(
        schedule={"scheme": "1f1b"},
        cluster={"workers": 1, "device": "emulated:analytic:V100-32:spipe-10b"},
    )
    run = planned(wanted, table_of(wanted))
    short = [(need.place, need.what) for need in run.demands if need.short]
    assert short == [("device 0", "emulated V100-32 memory")]
    with pytest.raises(CapacityError, match=r"device 0 +emulated V100-32 memory .*<-- short"):
        check_capacity(run.demands)


def test_configured_limits_stand_for_the_emulated_machines() -> None:
    wanted = config(memory={"host_limit": "100G"})
    run = planned(wanted, table_of(wanted))
    by_what = {need.what: need for need in run.demands}
    host = by_what["emulated host memory"]
    assert host.available == 100 * 2**30
    # 16-bit weights twice, three fp32 arrays, 16-bit gradients twice: 20 bytes a parameter.
    assert host.needed == pytest.approx(20 * 10_050_613_248, rel=1e-3)
    assert host.short
    assert by_what["/dev/shm"].needed < host.needed / 900


def test_machines_and_systems_can_differ_from_the_named_ones() -> None:
    wanted = {
        "machine": {"dram_bandwidth": 128e9, "devices_per_switch": 2},
        "instruction_s": 0.0065,
        "optimizer_bytes": 64,
        "optimizer_start": "flush",
    }
    emulation = Emulation.of(config(emulation=wanted))
    assert emulation.cluster.dram_bandwidth == 128e9
    assert emulation.cluster.devices_per_switch == 2
    assert emulation.costs.instruction_s == 0.0065
    way = replace(ADVANCE, start=OptimizerStart.FLUSH, tail_bytes=64)
    assert emulation.optimizer == way
    work = emulation.sweep_work("advance", 1)
    assert work is not None
    assert (work.num_bytes, work.capacity) == (200_810_496 * 64, 128e9)


def test_a_split_master_is_read_whole_and_written_by_its_lower_halves() -> None:
    """Read: 4 bytes of master, 8 of moments, 2 of each gradient; written: 2 less of the master."""
    wanted = {"model": {"dtype": "bf16"}, "cluster": {"workers": 4}}
    whole = Emulation.of(config(**wanted))
    split = Emulation.of(config(**wanted, optimizer={"master": "split"}))
    moved = {
        name: [e.sweep_work(name, 1).num_bytes / 200_810_496 for e in (whole, split)]  # type: ignore[union-attr]
        for name in ("preview", "settle", "advance", "hold")
    }
    assert moved == {"preview": [16, 16], "settle": [26, 24], "advance": [30, 28], "hold": [28, 26]}
    assert (whole.optimizer, split.optimizer) == (ADVANCE, SweepBytes.of(split=True).advancing)
    momentum = Emulation.of(config(**wanted, optimizer={"name": "sgd"}))
    assert momentum.optimizer.tail_bytes == 30 - 2 * 4, "one array of state: read and written"
    assert momentum.cluster.update_fetch_bytes == whole.cluster.update_fetch_bytes - 4
    assert (whole.sweep_work("cast", 1) is None, split.sweep_work("cast", 1)) == (False, None)


@pytest.mark.parametrize(
    ("settle", "each"),
    [pytest.param("advance", 18, id="advance"), pytest.param("early", 16, id="early")],
)
def test_a_split_master_needs_two_bytes_less_and_two_less_again_where_settled_early(
    settle: str, each: int
) -> None:
    """Two slots of weights, lower halves, two moments, two copies of gradients or one."""
    wanted = config(model={"dtype": "bf16"}, optimizer={"master": "split", "settle": settle})
    run = planned(wanted, table_of(wanted))
    (host,) = (need for need in run.demands if need.what == "emulated host memory")
    assert host.needed == pytest.approx(each * 10_050_613_248, rel=1e-3)


FIT = LinearFit(slope=1e-5)


def profile_file(path: Path) -> Path:
    table = Emulation.of(config("emulated:analytic:V100-32:gpt3-125m")).table
    kind = KindProfile(
        **{f.name: FIT for f in fields(KindProfile) if f.name not in ("operators", "sources")}
    )
    machine = MachineProfile(
        instruction_s=1e-4,
        fetch_bandwidth=1e10,
        offload_bandwidth=1e10,
        peer_bandwidth=1e10,
        latency_s=1e-5,
        advance_rate=1e9,
        preview_rate=2e9,
        settle_rate=3e9,
        in_place_rate=1e9,
        device_update_rate=4e9,
        device_memory_bytes=8e9,
    )
    profile = Profile(
        device="a small GPU",
        sequence_length=1024,
        micro_batch=1,
        machine=machine,
        kinds={block.kind: kind for block in table.blocks},
        table=table,
    )
    path.write_text(to_json(profile))
    return path


def test_a_profile_brings_model_times_and_machine(tmp_path: Path) -> None:
    path = profile_file(tmp_path / "p.json")
    emulation = Emulation.of(config(f"emulated:{path}"))
    assert emulation.name == "a small GPU"
    assert emulation.costs.blocks[3].forward_s == pytest.approx(1e-5 * 2048)
    parameters = emulation.table.blocks[3].trainable_elements
    assert emulation.sweep_work("settle", 3) == SweepWork(
        num_bytes=parameters, limit=3e9, capacity=inf
    )
    assert emulation.cluster.device_memory_bytes == 8e9


@pytest.mark.parametrize(
    ("device", "sections", "message"),
    [
        ("emulated:analytic:V1000:spipe-10b", {}, "V1000.*known: .*V100-32"),
        ("emulated:unit", {}, "accepted are emulated:analytic:GPU:MODEL"),
        (
            "emulated:analytic:V100-32:spipe-10b:tensor_parallel=2",
            {},
            "tensor_parallel = 2: workers run whole layers; plans with it can be simulated only",
        ),
        ("emulated:nothing", {}, "'emulated:nothing': accepted are emulated:analytic"),
        ("emulated:analytic:V100-32:spipe-10b:micro_batch=4", {}, "is set by train.micro_batch"),
        ("emulated:missing.json", {}, "missing.json"),
        (
            "emulated:analytic:V100-32:spipe-10b",
            {"model": {"hf": {"model_type": "llama", "num_hidden_layers": 4}}},
            "model.hf: has 4 layers, .* has 48",
        ),
        ("emulated:analytic:V100-32:spipe-10b", {"model": {"path": "/x"}}, "model.path"),
        ("emulated:analytic:V100-32:spipe-10b", {"train": {"freeze": ["norm"]}}, "train.freeze"),
        ("emulated:analytic:V100-32:spipe-10b", {"train": {"only": ["norm"]}}, "train.only"),
        ("emulated:analytic:V100-32:spipe-10b", {"adapter": {}}, "adapter: parameters of emul"),
        (
            "emulated:analytic:V100-32:spipe-10b",
            {"optimizer": {"groups": [{"match": "norm", "rate": 2.0}]}},
            "optimizer.groups: parameters of emulated devices have no names",
        ),
        ("cpu", {"model": {"path": "/x"}}, "is no emulated device"),
        (
            "emulated:analytic:V100-32:spipe-10b",
            {"emulation": {"machine": {"dram": 1e9}}},
            "emulation.machine: dram = .*dram_bandwidth",
        ),
        (
            "emulated:analytic:V100-32:spipe-10b",
            {"emulation": {"machine": {"nic_bandwidth": 0}}},
            "nic_bandwidth = 0.0: must be above 0",
        ),
    ],
)
def test_what_cannot_be_emulated_is_named(
    device: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Emulation.of(config(device, **sections))


def test_a_profile_of_another_length_is_refused(tmp_path: Path) -> None:
    path = profile_file(tmp_path / "p.json")
    with pytest.raises(ConfigError, match=r"sequences of 1024 tokens, data.sequence_length is 512"):
        Emulation.of(config(f"emulated:{path}", data={"sequence_length": 512}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"cluster": {"device": "cpu"}}, "exactly one of model.hf and model.path"),
        (
            {
                "cluster": {"device": "cpu"},
                "model": {"path": "/x"},
                "emulation": {"time_scale": 0.5},
            },
            "emulation: is for cluster.device: emulated",
        ),
        ({"emulation": {"scale": "1/0"}}, "emulation.scale = '1/0'"),
        ({"emulation": {"scale": 2}}, "emulation.scale = 2"),
        ({"emulation": {"scale": True}}, "scale = True: accepted is a share above 0"),
        (
            {"cluster": {"nodes": [{"name": "a"}, {"name": "b", "host": "10.0.0.2"}]}},
            "run on one machine",
        ),
    ],
)
def test_impossible_configurations_are_named(
    sections: dict[str, dict[str, Any]], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**{"cluster": {"device": "emulated:p.json"}, **sections})


@pytest.mark.parametrize("device", ["emulated", "cuda"])
def test_the_stride_of_updates_follows_from_measured_rates(tmp_path: Path, device: str) -> None:
    """A GPU does 0.69 G updates/s (12 bytes over 10 GB/s, and 4 G/s), and cores 1 G advances/s or,
    with early settles, 2 G previews/s.
    """
    path = profile_file(tmp_path / "p.json")
    emulated = device == "emulated"
    data: dict[str, Any] = {
        "model": {} if emulated else {"hf": {"model_type": "gpt2"}},
        "schedule": {"scheme": "1f1b", "passes": ["interleave-updates"]},
        "cluster": {"workers": 1, "device": f"emulated:{path}" if emulated else "cuda"},
        "data": {"path": "@stdlib", "sequence_length": 1024},
    }
    if not emulated:
        data["schedule"]["profile"] = str(path)
    table = load_profile(path).table
    device_rate = 1.0 / (12.0 / 10.0 + 1.0 / 4.0)
    for settle, host_rate in (("advance", 1.0), ("early", 2.0)):
        plan = build_plan(parse_config({**data, "optimizer": {"settle": settle}}), table)
        stride = (device_rate + host_rate) / device_rate
        due = [ceil(stride * count) - 1 for count in range(1, len(table.blocks))]
        assert sorted(plan.updates) == [block for block in due if block < len(table.blocks)]
