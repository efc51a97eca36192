"""Measured costs as data: fits, what they give for a table, and the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from penstock.config.platforms import CPU, CUDA
from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import (
    BlockCost,
    Costs,
    OperatorCost,
    RecomputeSource,
    Workspaces,
)
from penstock.planner.cost.profile import (
    CPU_GUESS,
    GPU_GUESS,
    Guess,
    block_costs,
    cluster_of,
    guess_of,
    table_costs,
)
from penstock.planner.cost.sources import ProfileSource, parse_costs
from penstock.protocol.plan.profile import (
    KindProfile,
    LinearFit,
    MachineProfile,
    OperatorProfile,
    Profile,
    SourceProfile,
    from_json,
    to_json,
)
from penstock.shm.table import BlockTable

Tables = Callable[..., BlockTable]

_MACHINE = MachineProfile(
    instruction_s=0.5,
    fetch_bandwidth=inf,
    offload_bandwidth=20.0,
    peer_bandwidth=30.0,
    latency_s=0.25,
    advance_rate=4.0,
    preview_rate=5.0,
    settle_rate=6.0,
    in_place_rate=7.0,
    device_update_rate=8.0,
    host_memory_bytes=1e9,
)

_LAYER = KindProfile(
    forward_s=LinearFit(slope=2.0, intercept=1.0),
    recompute_s=LinearFit(slope=3.0),
    backward_input_s=LinearFit(slope=4.0),
    backward_weight_s=LinearFit(slope=5.0, intercept=-100.0),
    activation_bytes=LinearFit(slope=6.0),
    deferred_bytes=LinearFit(slope=4.0),
    output_bytes=LinearFit(slope=7.0),
    forward_workspace_bytes=LinearFit(slope=1.0),
    graph_workspace_bytes=LinearFit(slope=2.0),
    backward_workspace_bytes=LinearFit(slope=3.0, intercept=8.0),
    backward_input_workspace_bytes=LinearFit(slope=4.0),
    backward_weight_workspace_bytes=LinearFit(slope=0.0, intercept=9.0),
    constant_bytes=LinearFit(slope=0.5),
    operators=(
        OperatorProfile(
            name="norm", forward_s=LinearFit(slope=0.5), activation_bytes=LinearFit(slope=1.5)
        ),
    ),
    sources=(
        SourceProfile(operator="qkv", needed_by=(("norm",),), num_bytes=LinearFit(slope=0.5)),
        SourceProfile(operator="", needed_by=(("norm", "qkv"),), num_bytes=LinearFit(slope=1.0)),
    ),
)


@pytest.fixture(name="profile")
def _profile(make_table: Tables) -> Profile:
    return Profile(
        device="a laptop",
        sequence_length=8,
        micro_batch=2,
        machine=_MACHINE,
        kinds={"layer": _LAYER},
        table=make_table(2),
    )


def test_a_fit_goes_through_its_points() -> None:
    assert LinearFit.through([(10, 7.0), (20, 12.0), (40, 22.0)]) == LinearFit(
        slope=0.5, intercept=2.0
    )
    assert LinearFit.through([(10, 5.0)]) == LinearFit(slope=0.5)
    noisy = LinearFit.through([(1, 1.0), (2, 4.0), (3, 4.0)])
    assert (noisy.slope, noisy.at(2.0)) == (1.5, 3.0)
    assert LinearFit(slope=1.0, intercept=-5.0).at(3.0) == 0.0


def test_costs_of_a_table(profile: Profile) -> None:
    block = BlockCost(
        forward_s=21.0,
        recompute_s=30.0,
        backward_input_s=40.0,
        backward_weight_s=0.0,
        output_bytes=70.0,
        activation_bytes=60.0,
        deferred_bytes=40.0,
        workspace_bytes=40.0,
        constant_bytes=5.0 + 4096 + 5056,
        workspaces=Workspaces(
            forward=10.0, graph=20.0, backward=38.0, backward_input=40.0, backward_weight=9.0
        ),
        parameters=1024,
        weight_bytes=4096,
        device_gradient_bytes=4096,
        gradient_bytes=4096,
        operators=(OperatorCost(name="norm", forward_s=5.0, activation_bytes=15.0),),
        sources=(
            RecomputeSource(operator="qkv", needed_by=(("norm",),), num_bytes=5.0),
            RecomputeSource(operator="", needed_by=(("norm", "qkv"),), num_bytes=10.0),
        ),
    )
    assert block_costs(profile.table, profile, tokens=10) == Costs(
        blocks=(block,) * 2, instruction_s=0.5
    )


def test_the_cluster_of_a_profile(profile: Profile) -> None:
    assert cluster_of(profile, devices_per_node=4) == Cluster(
        devices_per_node=4,
        offload_bandwidth=20.0,
        peer_bandwidth=30.0,
        nic_bandwidth=30.0,
        latency_s=0.25,
        optimizer_rate=4.0,
        preview_speed=1.25,
        settle_speed=1.5,
        device_optimizer_rate=8.0,
        host_memory_bytes=1e9,
    )


def test_a_kind_that_was_not_measured(profile: Profile) -> None:
    block = replace(profile.table.blocks[1], kind="expert")
    table = replace(profile.table, blocks=(profile.table.blocks[0], block))
    message = "block 'block1' is of kind 'expert', measured were layer; run penstock profile"
    with pytest.raises(ConfigError, match=message):
        block_costs(table, profile, tokens=10)


def test_the_file_reads_back(profile: Profile, tmp_path: Path) -> None:
    text = to_json(profile)
    assert from_json(text) == profile
    assert from_json(text.encode()) == profile
    assert json.loads(text)["machine"]["fetch_bandwidth"] is None
    path = tmp_path / "p.json"
    path.write_text(text, encoding="utf-8")
    source = parse_costs(str(path))
    assert source == ProfileSource(profile=profile)
    prices = source.price(forward_stages=1, backward_stages=1, num_devices=3)
    assert prices.costs == table_costs(profile.table, profile, tokens=16, own_memory=False)
    assert prices.cluster == cluster_of(profile, devices_per_node=3)


def _changed(data: dict[str, Any], path: str, value: Any) -> str:
    *parents, last = path.split(".")
    place: Any = data
    for key in parents:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[last] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("format", 1, "profile: format is 1, this version reads 5; run penstock profile again"),
        ("extra", 1, "profile: profile: found keys format, device"),
        ("device", 5, "device is 5, expected a text up to 200 long"),
        ("micro_batch", 0, "micro_batch is 0, expected a count of 1 or more"),
        ("micro_batch", True, "micro_batch is True, expected a count of 1 or more"),
        ("machine.latency_s", -1, "machine.latency_s is -1, expected a number from 0 to 1e+18"),
        ("machine.latency_s", None, "machine.latency_s is None, expected a number"),
        ("machine.advance_rate", 0, "machine.advance_rate is 0.0, expected a positive rate"),
        ("machine.advance_rate", 1e19, "machine.advance_rate is 1e+19, expected a number"),
        ("machine", [], "machine: found no object; expected instruction_s, fetch_bandwidth"),
        ("kinds", [1], "kinds is [1], expected at most 1000 entries"),
        ("kinds.layer.forward_s", [1], "kinds.layer.forward_s is [1], expected [slope, intercept]"),
        ("kinds.layer.forward_s", [1, "2"], "kinds.layer.forward_s is '2', expected a number"),
        ("kinds.layer.operators.0.name", "Norm", "operators.name is 'Norm', expected a-z, 0-9"),
        ("kinds.layer.operators", [{}] * 65, "kinds.layer.operators is 65 entries"),
        ("kinds.layer.sources.0.operator", "Q", "sources.operator is 'Q', expected a-z, 0-9"),
        ("kinds.layer.sources.0.operator", [], "sources.operator is []"),
        ("kinds.layer.sources.0.needed_by", ["norm"], "sources.needed_by is 'norm', expected at"),
        ("kinds.layer.sources", [{}] * 257, "kinds.layer.sources is 257 entries"),
        ("table.blocks.1.output_bytes", "x", "table.blocks[1].output_bytes is 'x', expected a"),
        ("table.blocks.0.frozen_elements", [], "table: "),
        ("table.blocks", {"a": 1}, "table: not a block table"),
    ],
)
def test_bad_files_name_what_is_wrong(
    profile: Profile, path: str, value: Any, message: str
) -> None:
    text = _changed(json.loads(to_json(profile)), path, value)
    with pytest.raises(ConfigError) as caught:
        from_json(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "profile: not valid JSON"),
        ("[" * 100_000, "profile: not valid JSON"),
        ("[]", "profile: profile: found no object; expected format, device"),
        ("{}", "profile: format is None"),
        ('{"format": 5}', "profile: profile: found keys format; expected format, device"),
    ],
)
def test_what_is_no_profile(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        from_json(text)
    assert message in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"p\.json': cannot read it: .*No such file"):
        parse_costs(str(tmp_path / "p.json"))


def test_guesses_follow_the_table(make_table: Tables) -> None:
    guess = Guess(device_flops=500.0, backward_ratio=3.0, machine=_MACHINE)
    block = BlockCost(
        forward_s=20.0,
        recompute_s=20.0,
        backward_input_s=30.0,
        backward_weight_s=30.0,
        output_bytes=640.0,
        activation_bytes=2560.0,
        deferred_bytes=2560.0,
        parameters=1024,
        weight_bytes=4096,
        device_gradient_bytes=4096,
        gradient_bytes=4096,
    )
    assert block_costs(make_table(1), guess, tokens=10) == Costs(blocks=(block,), instruction_s=0.5)
    assert cluster_of(guess, devices_per_node=2).optimizer_rate == 4.0
    assert (guess_of(CPU), guess_of(CUDA)) == (CPU_GUESS, GPU_GUESS)
