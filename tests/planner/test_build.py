"""Plans from configurations: defaults, impossible combinations, plan files, any size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config.execution import ScheduleConfig
from penstock.config.schema import Config
from penstock.host.errors import ConfigError
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.planning.configured import build_plan
from penstock.planner.schedule.schedule import lower
from penstock.planner.schemes import SCHEMES
from penstock.planner.validate.check import PlanError, validate
from penstock.protocol.plan.instructions import Backward, Forward, Opcode, Recompute, Update
from penstock.protocol.plan.plan import Plan
from penstock.protocol.run.executable import check_executable, check_updates
from penstock.shm.table import BlockTable, BorrowedTensor

Tables = Callable[..., BlockTable]
Configs = Callable[..., Config]


@pytest.mark.parametrize(
    ("scheme", "workers", "num_blocks", "stages"),
    [
        ("gpipe", 2, 10, (2, 2)),
        ("1f1b", 4, 10, (4, 4)),
        ("mobius", 2, 10, (4, 4)),
        ("mobius", 4, 5, (4, 4)),
        ("spipe", 2, 10, (4, 8)),
        ("spipe", 2, 26, (4, 12)),
        ("spipe", 4, 5, (5, 5)),
        ("spipe", 1, 4, (2, 4)),
    ],
)
def test_default_stages(
    scheme: str,
    workers: int,
    num_blocks: int,
    stages: tuple[int, int],
    make_table: Tables,
    make_config: Configs,
) -> None:
    plan = build_plan(make_config(scheme, workers=workers), make_table(num_blocks))
    assert (len(plan.forward_stages), len(plan.backward_stages)) == stages


def test_the_configuration_knows_every_scheme() -> None:
    """All but what only a paper calls by a name of its own; old run directories may have it."""
    known = [name for name in SCHEMES if name != "1f1b-2"]
    assert get_args(ScheduleConfig.model_fields["scheme"].annotation) == ("auto", *known)


def test_a_run_with_the_papers_name_of_1f1b_goes_on(
    make_table: Tables, make_config: Configs
) -> None:
    """Its ``resolved.yaml`` says 1f1b-2, and its plan, which orders the same, is called so."""
    config, old = make_config("1f1b-2"), {"scheme": "1f1b-2"}
    assert config == make_config("1f1b") and ScheduleConfig.model_validate("1f1b-2") == (
        ScheduleConfig.model_validate(old)
    )
    plan = build_plan(config, make_table(4))
    named = dataclasses.replace(plan, scheme="1f1b-2")
    assert Plan.from_json(named.to_json()) == named
    request = ScheduleRequest(scheme="1f1b-2", num_devices=2, num_microbatches=4)
    assert lower(build_schedule(request, [1.0] * 4)).programs == plan.programs


@pytest.mark.parametrize(("workers", "nodes"), [(4, 1), (2, 2)])
def test_swaps_stay_within_a_node(
    workers: int, nodes: int, make_table: Tables, make_config: Configs
) -> None:
    """The first device of BPipe swaps to the last one."""
    plan = build_plan(make_config("bpipe", workers=workers, nodes=nodes), make_table(8))
    if nodes == 1:
        check_executable(plan, devices_per_node=workers)
        return
    message = (
        r"device 0, instruction \d+ is 'SO .* peer=3', and workers do not swap to devices of other"
        r" nodes \(device 0 is on node 0, its peer on node 1"
    )
    with pytest.raises(ConfigError, match=message):
        check_executable(plan, devices_per_node=workers)


def test_updates_are_of_blocks_whose_gradients_are_all_made_on_their_node(
    make_table: Tables, make_config: Configs
) -> None:
    """The last block borrows from the first one; on two nodes, from the other node."""
    table = make_table(4)
    borrowed = BorrowedTensor(name="block0.weight", local_name="tied", owner=0, contribution=1)
    first = dataclasses.replace(table.blocks[0], contributions=2)
    last = dataclasses.replace(table.blocks[3], borrows=(borrowed,))
    tied = dataclasses.replace(table, blocks=(first, *table.blocks[1:3], last))
    for nodes in (1, 2):
        config = make_config("gpipe", workers=2 // nodes, nodes=nodes)
        plan = build_plan(config, tied)
        check_updates(config, tied, plan)
        programs = ((*plan.programs[0], Update(block=0)), plan.programs[1])
        updating = dataclasses.replace(plan, programs=programs)
        if nodes == 1:
            check_updates(config, tied, updating)
            split = config.optimizer.model_copy(update={"master": "split"})
            with pytest.raises(ConfigError, match=r"UPDATE of block 0, and optimizer\.master is"):
                check_updates(config.model_copy(update={"optimizer": split}), tied, updating)
            in_place = config.optimizer.model_copy(update={"rollback": "arithmetic"})
            with pytest.raises(
                ConfigError, match=r"optimizer\.rollback = arithmetic: .*\(block 0\)"
            ):
                check_updates(config.model_copy(update={"optimizer": in_place}), tied, updating)
            continue
        message = r"UPDATE of block 0 \(block0\): node n1 computes a part of its gradients"
        with pytest.raises(ConfigError, match=message):
            check_updates(config, tied, updating)
    frozen = dataclasses.replace(table.blocks[0], tensors=(), trainable_elements=0)
    with pytest.raises(ConfigError, match=r"UPDATE of block 0 \(block0\), which has nothing to"):
        check_updates(
            config, dataclasses.replace(table, blocks=(frozen, *table.blocks[1:])), updating
        )


@pytest.mark.parametrize(
    ("scheme", "nodes", "schedule", "reduces"),
    [
        ("1f1b", 1, {"replicas": 2}, False),
        ("1f1b", 1, {"replicas": 2, "reduce_gradients": True}, True),
        ("1f1b", 2, {"replicas": 2}, True),
        ("1f1b", 2, {"replicas": 2, "reduce_gradients": False}, False),
        ("chimera", 1, {}, False),
        ("chimera", 2, {}, True),
        ("1f1b", 2, {"reduce_gradients": True}, False),
        ("zero3-offload", 1, {}, True),
    ],
)
def test_where_routes_are_summed(
    scheme: str,
    nodes: int,
    schedule: dict[str, Any],
    reduces: bool,
    make_table: Tables,
    make_config: Configs,
) -> None:
    """Without a wish by devices where routes of a stage are on several nodes."""
    config = make_config(scheme, workers=4 // nodes, nodes=nodes, **schedule)
    plan = build_plan(config, make_table(8))
    assert any(i.opcode is Opcode.REDUCE_GRADIENTS for p in plan.programs for i in p) == reduces


def test_shared_out_weights_are_reduced(make_table: Tables, make_config: Configs) -> None:
    with pytest.raises(ConfigError, match=r"schedule\.reduce_gradients = false: zero3-offload sha"):
        build_plan(make_config("zero3-offload", reduce_gradients=False), make_table(4))


def test_stages_are_balanced_by_forward_work(make_table: Tables, make_config: Configs) -> None:
    """A free embedding and a head as heavy as two layers."""
    table = make_table(10, costs=[0.0] + [1.0] * 8 + [2.0])
    plan = build_plan(make_config("gpipe", workers=2), table)
    assert [(s.start, s.stop) for s in plan.forward_stages] == [(0, 6), (6, 10)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"scheme": "spipe", "forward_stages": 9},
            r"schedule\.forward_stages = 9: more stages than blocks; .* at most 8",
        ),
        (
            {"scheme": "spipe", "backward_stages": 9},
            r"schedule\.backward_stages = 9: more stages than blocks; .* at most 8",
        ),
        (
            {"scheme": "spipe", "forward_stages": 4, "backward_stages": 3},
            r"schedule\.backward_stages = 3: spipe .* accepts 4 \(forward_stages\) or more",
        ),
        (
            {"scheme": "gpipe", "forward_stages": 4},
            r"schedule\.forward_stages = 4: gpipe with 2 workers accepts 2 \(one per worker\)",
        ),
        (
            {"scheme": "1f1b", "backward_stages": 4},
            r"schedule\.backward_stages = 4: 1f1b .* accepts 2 \(the same as forward_stages\)",
        ),
        (
            {"scheme": "mobius", "forward_stages": 5},
            r"schedule\.forward_stages = 5: mobius .* accepts a multiple of 2",
        ),
        (
            {"scheme": "mobius", "backward_stages": 8},
            r"schedule\.backward_stages = 8: mobius .* accepts 4 \(the same as forward_stages\)",
        ),
        (
            {"scheme": "spipe", "recompute": "none"},
            r"schedule\.recompute = 'none': spipe .* accepted: full",
        ),
        (
            {"scheme": "spipe", "passes": ["shuffle"]},
            r"schedule\.passes = \['shuffle'\]: unknown pass 'shuffle'; accepted: apply-checkpoint",
        ),
        (
            {"scheme": "interleaved", "stages_per_device": 2, "forward_stages": 6},
            r"stages_per_device = 2: gives 4 forward stages, but schedule\.forward_stages = 6",
        ),
        ({"scheme": "chimera", "workers": 3}, r"3 workers in all; chimera accepts an even number"),
        ({"scheme": "gpipe", "workers": 9}, r"cluster\.workers: 9 workers in all for 8 blocks"),
        ({"scheme": "spipe", "nodes": 5}, r"cluster\.workers: 10 workers in all for 8 blocks"),
        ({"scheme": "spipe", "file": "none.json"}, r"schedule\.file = 'none.json': cannot read it"),
    ],
)
def test_impossible_configurations_name_key_value_and_what_is_accepted(
    config: dict[str, Any], message: str, make_table: Tables, make_config: Configs
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_plan(make_config(**config), make_table(8))


def test_passes_are_applied_in_order(
    make_table: Tables, make_config: Configs, execute: Callable[[Plan], None]
) -> None:
    """Mario recomputes what 1F1B keeps."""
    kept, recomputed = (
        build_plan(make_config("1f1b", passes=passes), make_table(8)) for passes in ([], ["mario"])
    )
    assert [sum(isinstance(i, Recompute) for i in kept.programs[d]) for d in range(2)] == [0, 0]
    assert sum(isinstance(i, Recompute) for i in recomputed.programs[0]) > 0
    execute(recomputed)


def test_a_plan_file_replaces_the_scheme(
    tmp_path: Path, make_table: Tables, make_config: Configs
) -> None:
    plan = build_plan(make_config("1f1b"), make_table(8))
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    assert build_plan(make_config("spipe", file=str(path)), make_table(8)) == plan


@pytest.mark.parametrize(
    ("config", "num_blocks", "words"),
    [
        (
            {"workers": 4},
            8,
            "for 2 devices, the configuration has 4 (cluster.workers x nodes); change these to 2,",
        ),
        (
            {"micro_batches": 3},
            8,
            "for 4 micro-batches, the configuration has 3 (train.global_batch / micro_batch);"
            " change these to 4, or make a plan",
        ),
        (
            {},
            9,
            "for 8 blocks, the configuration has 9 (the model; it was made for another); make a"
            " plan for this configuration (schedule: auto, or penstock plan CONFIG --out FILE)",
        ),
    ],
    ids=["devices", "micro-batches", "blocks"],
)
def test_a_plan_file_must_fit(
    config: dict[str, Any],
    num_blocks: int,
    words: str,
    tmp_path: Path,
    make_table: Tables,
    make_config: Configs,
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(build_plan(make_config("1f1b"), make_table(8)).to_json(), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        build_plan(make_config("spipe", file=str(path), **config), make_table(num_blocks))
    assert str(caught.value).startswith(f"schedule.file = {str(path)!r}: the plan is {words}")


def test_a_damaged_plan_file_is_refused(
    tmp_path: Path, make_table: Tables, make_config: Configs
) -> None:
    path = tmp_path / "plan.json"
    plan = build_plan(make_config("1f1b"), make_table(8))
    text = plan.to_json()
    path.write_text(text[: len(text) // 2], encoding="utf-8")
    with pytest.raises(ConfigError, match=r"schedule\.file = .*: plan: not valid JSON"):
        build_plan(make_config(file=str(path)), make_table(8))
    hanging = dataclasses.replace(plan, programs=(plan.programs[0][:-3], plan.programs[1]))
    path.write_text(hanging.to_json(), encoding="utf-8")
    with pytest.raises(PlanError, match="is never used"):
        build_plan(make_config(file=str(path)), make_table(8))


def test_a_stage_that_is_missing_in_a_plan_file_is_marked(
    tmp_path: Path, make_table: Tables, make_config: Configs
) -> None:
    path = tmp_path / "plan.json"
    plan = build_plan(make_config("1f1b"), make_table(8))

    def complaint(**changes: Any) -> str:
        path.write_text(dataclasses.replace(plan, **changes).to_json(), encoding="utf-8")
        with pytest.raises(ConfigError) as caught:
            build_plan(make_config(file=str(path)), make_table(8))
        return str(caught.value)

    first, second = plan.programs
    idle = tuple(i for i in second if not isinstance(i, (Forward, Backward)))
    lines = complaint(programs=(first, idle)).splitlines()
    assert lines[0] == (
        f"schedule.file = {str(path)!r}: plan: device 0, instruction 2 (SA 0 0 peer=1): no device"
        " uses the activation of stage 0, micro-batch 0: FORWARD 1 0 is missing"
    )
    [marked] = [line for line in lines if ">>" in line]
    assert marked.split() == ["2", ">>SA", "0", "0", "peer=1<<", "RA", "0", "1", "peer=0"]
    twice = tuple(i for i in second if str(i) != "B 1 2")
    assert ">>SG 1 2 peer=0<<" in complaint(programs=(first, twice))
    assert "evaluation: device 0, instruction 2" in complaint(evaluation=(plan.evaluation[0], ()))
    text = complaint(forward_stages=plan.forward_stages[:1])
    assert f"{path}': plan: forward stages end at block 4, backward stages at 8" in text
    text = complaint(forward_stages=plan.forward_stages[1:])
    assert (
        "forward stage 0 covers blocks [4, 8); expected a non-empty range that starts at 0" in text
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0F0,0B0\n2F0,2B0", "stage 1 has no actions, stage 2 has"),
        ("0F0,0B0\n1F0", "stage 1, micro-batch 0: there is 1F0; expected 1F0 and 1B0"),
        ("", "no actions; expected one line per rank"),
        ("0F" + "9" * 5000, "line 1, cell 1: '0F999"),
        (bytes(range(256)), "cannot read it"),
    ],
    ids=["stage", "backward", "empty", "huge", "binary"],
)
def test_action_text_with_a_part_missing(
    text: str | bytes, words: str, tmp_path: Path, make_table: Tables, make_config: Configs
) -> None:
    path = tmp_path / "actions.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        build_plan(make_config(file=str(path), micro_batches=1), make_table(8))
    assert str(caught.value).startswith(f"schedule.file = {str(path)!r}: {words}")
    assert len(str(caught.value)) < 500


ACTIONS = "0F0,0F1,0F2,0F3,0B0,0B1,0B2,0B3,0REDUCE_GRAD\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
"""GPipe's first device, 1F1B's second."""


@pytest.mark.parametrize("replicas", [1, 2])
def test_torch_action_text_is_a_schedule(
    tmp_path: Path,
    replicas: int,
    make_table: Tables,
    make_config: Configs,
    execute: Callable[[Plan], None],
) -> None:
    path = tmp_path / "actions.csv"
    path.write_text(ACTIONS, encoding="utf-8")
    config = make_config(
        file=str(path),
        workers=2 * replicas,
        micro_batches=4 * replicas,
        replicas=replicas,
        recompute="full",
    )
    plan = build_plan(config, make_table(8))
    assert (plan.scheme, plan.num_routes) == ("torch", replicas)
    assert [(s.start, s.stop) for s in plan.backward_stages] == [(0, 4), (4, 8)] * replicas
    opcodes = {type(i).__name__ for program in plan.programs for i in program}
    assert "Recompute" in opcodes and "ReduceGradients" not in opcodes
    execute(plan)


@pytest.mark.parametrize(
    ("text", "config", "message"),
    [
        ("0F0,0X0", {}, r"schedule\.file = .*actions\.csv': line 1, cell 2: '0X0'"),
        ("0F0,0B0", {}, r"the plan is for 1 devices, the configuration has 2"),
        ("0B0,0F0\n1F0,1B0", {"micro_batches": 1}, r"schedule: the order of torch cannot run: "),
    ],
)
def test_action_text_that_is_refused(
    text: str,
    config: dict[str, Any],
    message: str,
    tmp_path: Path,
    make_table: Tables,
    make_config: Configs,
) -> None:
    path = tmp_path / "actions.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        build_plan(make_config(file=str(path), **config), make_table(8))


def test_a_plan_file_says_everything(
    tmp_path: Path, make_table: Tables, make_config: Configs
) -> None:
    path = tmp_path / "plan.json"
    for config in ({"replicas": 2}, {"passes": ["mario"]}):
        with pytest.raises(ConfigError, match=r"a plan is complete; schedule\.replicas must be 1"):
            build_plan(make_config(file=str(path), **config), make_table(8))


def test_device_limit_is_checked(make_table: Tables, make_config: Configs) -> None:
    config = make_config("spipe")
    limited = config.model_copy(
        update={"memory": config.memory.model_copy(update={"device_limit": 1024})}
    )
    with pytest.raises(ConfigError, match=r"memory\.device_limit = 1\.0 KiB: device"):
        build_plan(limited, make_table(8))


@given(data=st.data())
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_configuration_in_range_gives_a_plan_that_computes(
    data: st.DataObject,
    make_table: Tables,
    make_config: Configs,
    execute: Callable[[Plan], None],
) -> None:
    """1-4 devices, 1-16 micro-batches, 4-40 blocks of uneven cost, stages as the scheme admits."""
    scheme = data.draw(st.sampled_from(["gpipe", "1f1b", "mobius", "spipe"]))
    workers = data.draw(st.sampled_from([1, 2, 4]))
    num_blocks = data.draw(st.integers(4, 40))
    costs = data.draw(st.lists(st.floats(0.0, 9.0), min_size=num_blocks, max_size=num_blocks))
    schedule: dict[str, Any] = {}
    if scheme in ("gpipe", "1f1b"):
        schedule["recompute"] = data.draw(st.sampled_from([None, "none", "full"]))
    if scheme == "mobius":
        schedule["forward_stages"] = workers * data.draw(st.integers(1, num_blocks // workers))
    if scheme == "spipe" and data.draw(st.booleans()):
        schedule["forward_stages"] = data.draw(st.integers(1, num_blocks))
        schedule["backward_stages"] = data.draw(st.integers(schedule["forward_stages"], num_blocks))
    config = make_config(
        scheme, workers=workers, micro_batches=data.draw(st.integers(1, 16)), **schedule
    )
    table = make_table(num_blocks, costs=costs)
    plan = build_plan(config, table)
    assert Plan.from_json(plan.to_json()) == plan
    assert build_plan(config, table) == plan
    validate(plan, table)
    execute(plan)
