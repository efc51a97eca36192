"""The most memory that a device holds in an attempt: measured, beside what the plan reckons with
the costs of a profile of the same model; and what is said when there is no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.schema import Config
from penstock.host.errors import ExitCode
from penstock.models.profiling.blocks import BlockBench, measure_kinds
from penstock.models.profiling.storages import StorageLedger, StorageMode
from penstock.models.runtime import ModelRuntime
from penstock.models.surgery.hf import resolve_hf_config
from penstock.models.surgery.table import build_table
from penstock.planner.cost.emulation import Emulation
from penstock.planner.cost.profile import CPU_GUESS, table_costs
from penstock.planner.memory.footprint import device_peaks, footprints
from penstock.planner.planning.configured import build_plan
from penstock.planner.schedule.layout import OrderedInstruction
from penstock.planner.schedule.schedule import lower, schedule_of
from penstock.protocol.plan.instructions import (
    Backward,
    Forward,
    Instruction,
    Opcode,
    SwapIn,
    SwapOut,
)
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.profile import Profile
from penstock.workers.attempt import Attempt
from penstock.workers.handlers import HANDLERS
from penstock.workers.interpreter import InstructionError, run_job
from penstock.workers.platforms.emulated.device import EmulatedDevice
from penstock.workers.platforms.emulated.memory import EmulatedMeter
from penstock.workers.platforms.meters import StorageMeter
from penstock.workers.state.routing import TensorRouting
from tests.worker import test_emulated_plans as emulated
from tests.worker.cluster import SEQUENCE, Cluster, build_cluster, make_config

NEAR = 0.05
"""Of emulated devices, whose copies take time."""
TOO_HIGH = 0.03
"""Share by which a planned peak may be above what is measured; it is never below."""
MODEL = {"hidden_size": 64, "intermediate_size": 128}
NONE = {"recompute": "none"}
PLANS: dict[str, dict[str, Any]] = {
    "1f1b-selective": {
        "scheme": "1f1b",
        "schedule": {"recompute": "selective", "drop": ["cmb", "core", "qkv"]},
    },
    "zb-h1": {"scheme": "zb-h1"},
    "mobius": {"scheme": "mobius", "schedule": {"stages_per_device": 2}},
}
MORE: dict[str, dict[str, Any]] = {
    "gpipe": {"scheme": "gpipe", "schedule": NONE},
    "gpipe-2bp": {"scheme": "gpipe", "schedule": {**NONE, "passes": ["2bp"]}},
    "1f1b": {"scheme": "1f1b", "schedule": NONE},
    "1f1b-full": {"scheme": "1f1b", "schedule": {"recompute": "full"}},
    "1f1b-swapped": {"scheme": "1f1b", "schedule": NONE},
    "1f1b-2bp": {"scheme": "1f1b", "schedule": {**NONE, "passes": ["2bp"]}},
    "1f1b-bf16": {
        "scheme": "1f1b",
        "schedule": NONE,
        "model": {"dtype": "bf16"},
        "grad_dtype": "bf16",
    },
    "chimera": {"scheme": "chimera", "schedule": NONE},
    "interleaved": {"scheme": "interleaved", "schedule": NONE},
    "spipe": {"scheme": "spipe", "schedule": {"forward_stages": 4, "backward_stages": 6}},
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def profile_of(config: Config, budget_s: float = 0.0) -> Profile:
    """What ``penstock profile`` says of the model; the machine is of no interest."""
    micro_batch = config.train.micro_batch
    hf_config = resolve_hf_config(config, tokenizer_vocab_size=None, eos=None)
    table = build_table(config, hf_config)
    cpu = torch.device("cpu")
    bench = BlockBench(
        ModelRuntime(hf_config, table, device=cpu, compute_dtype=torch.float32, seed=0),
        device=cpu,
        compute_dtype=torch.float32,
        sequence_length=SEQUENCE,
        budget_s=budget_s,
    )
    return Profile(
        device="here",
        sequence_length=SEQUENCE,
        micro_batch=micro_batch,
        machine=CPU_GUESS.machine,
        kinds=measure_kinds(bench, table, (micro_batch // 2, micro_batch), lambda _: None).kinds,
        table=table,
    )


def use_plan(cluster: Cluster, plan: Plan) -> list[StorageMeter]:
    """Another order of the same stages, and a meter for each device."""
    cluster.plan = plan
    meters = [StorageMeter() for _ in cluster.workers]
    for worker, meter in zip(cluster.workers, meters, strict=True):
        worker.context = replace(
            worker.context, plan=plan, routing=TensorRouting.of(plan), meter=meter
        )
    cluster.begin(1)
    return meters


def swapped(plan: Plan) -> Plan:
    """Three quarters of what every forward keeps go to the host until its backward."""
    schedule = schedule_of(plan)

    def orders(order: tuple[OrderedInstruction, ...]) -> Iterator[OrderedInstruction]:
        for work in order:
            key = {"stage": getattr(work, "stage", 0), "fraction": 0.75}
            if isinstance(work, Backward):
                yield SwapIn(micro_batch=work.micro_batch, **key)
            yield work
            if isinstance(work, Forward):
                yield SwapOut(micro_batch=work.micro_batch, **key)

    return lower(replace(schedule, orders=tuple(tuple(orders(o)) for o in schedule.orders)))


def errors_of(stack: ExitStack, name: str, settings: dict[str, Any]) -> list[float]:
    """Planned over measured peak of each device, minus 1, in an attempt whose caches are filled."""
    cluster = build_cluster(stack, make_config(hf=MODEL, **settings))
    plan = swapped(cluster.plan) if name.endswith("swapped") else cluster.plan
    meters = use_plan(cluster, plan)
    for attempt in (1, 2):
        cluster.train(cluster.job(attempt=attempt))
    costs = table_costs(
        cluster.table, profile_of(cluster.config), tokens=2 * SEQUENCE, own_memory=False
    )
    errors = []
    for planned, meter in zip(device_peaks(plan, costs), meters, strict=True):
        assert meter.peak is not None
        errors.append(planned.total_bytes / meter.peak.num_bytes - 1.0)
    return errors


@pytest.mark.parametrize("name", PLANS)
def test_peaks_are_those_of_the_plan(stack: ExitStack, name: str) -> None:
    errors = errors_of(stack, name, PLANS[name])
    assert 0.0 <= min(errors) and max(errors) <= TOO_HIGH, errors


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_peaks_of_more_plans(stack: ExitStack, name: str) -> None:
    errors = errors_of(stack, name, MORE[name])
    assert 0.0 <= min(errors) and max(errors) <= TOO_HIGH, errors


def test_storages_count_once_while_they_live() -> None:
    weights = torch.ones(256)  # from elsewhere: neither it nor its views count
    ledger = StorageLedger()
    with StorageMode(ledger, "activations"):
        rows = weights.view(16, 16).exp()
        views = [rows[0], rows.t(), weights[:3]]
        assert (ledger.live_bytes, ledger.by_use) == (1024, {"activations": 1024})
        ledger.adopt(weights.untyped_storage(), "weights")
        del rows
        assert ledger.by_use == {"activations": 1024, "weights": 1024}
        del views
        ledger.release(weights.untyped_storage())
        assert (ledger.live_bytes, ledger.peak_bytes, ledger.by_use) == (0, 2048, {})


def test_an_allocator_without_memory_is_an_error_that_helps(stack: ExitStack) -> None:
    cluster = build_cluster(stack, make_config(scheme="naive", workers=1, schedule=NONE))
    use_plan(cluster, cluster.plan)

    def forward(instruction: Instruction, attempt: Attempt) -> None:
        HANDLERS[Opcode.FORWARD](instruction, attempt)
        if instruction.micro_batch == 1:  # type: ignore[attr-defined]  # a FORWARD
            torch.empty(1 << 55, dtype=torch.uint8)

    with pytest.raises(InstructionError) as caught:
        run_job(
            cluster.workers[0].context,
            cluster.job(),
            cluster.plan.programs[0],
            {**HANDLERS, Opcode.FORWARD: forward},
        )
    assert caught.value.exit_code is ExitCode.NO_MEMORY
    assert re.search(
        r"worker.0: .* train 1: 'F 0 1 keep=all' failed: DeviceMemoryError: device out of memory:"
        r" 32768.0 TiB more are needed; in use are .* \(.*weights .*activations .*\); what would"
        r" help: schedule.recompute = full, a smaller train.micro_batch",
        str(caught.value),
    )


@pytest.mark.parametrize("name", ["zero-bubble", "spipe", "swaps to peers"])
def test_emulated_devices_hold_what_is_planned_at_full_size(
    stack: ExitStack, tmp_path: Path, name: str
) -> None:
    devices, planned = emulated_devices(stack, tmp_path, name)
    meters = [meter_of(devices, index, limit_bytes=32e9) for index in range(len(planned))]
    devices.run(1)
    for meter, expected in zip(meters, planned, strict=True):
        assert meter.peak is not None
        assert expected == pytest.approx(meter.peak.num_bytes, rel=NEAR)


def test_an_emulated_device_holds_no_more_than_its_limit(stack: ExitStack, tmp_path: Path) -> None:
    """It stops at the forward whose activations do not fit beside those before it."""
    devices, _ = emulated_devices(stack, tmp_path, "1f1b")
    first = footprints(devices.plan, Emulation.of(emulated.config_of("1f1b", tmp_path)).costs)[0]
    names = [str(instruction) for instruction in devices.plan.programs[0]]
    meter_of(devices, 0, limit_bytes=first.total_bytes[names.index("F 0 2 keep=all")] - 1e6)
    with pytest.raises(InstructionError) as caught:
        devices.run_one(0, 1)
    assert caught.value.exit_code is ExitCode.NO_MEMORY
    assert re.search(
        r"'F 0 2 keep=all' failed: DeviceMemoryError: device out of memory: .* MiB more are needed;"
        r" in use are .* of .* \(.*weights .*activations .*\); what would help: ",
        str(caught.value),
    )


def emulated_devices(
    stack: ExitStack, run_dir: Path, name: str
) -> tuple[emulated.Devices, list[float]]:
    """Devices of a plan, and the planned peak of each."""
    config = emulated.config_of(name, run_dir)
    # Slow enough that sums leave, and swaps come, when they would.
    emulation = replace(Emulation.of(config), time_scale=0.05)
    plan = build_plan(config, emulation.table)
    devices = emulated.make_devices(stack, config, emulation, plan)
    return devices, [peak.total_bytes for peak in device_peaks(plan, emulation.costs)]


def meter_of(devices: emulated.Devices, index: int, *, limit_bytes: float) -> EmulatedMeter:
    context = devices.contexts[index]
    assert isinstance(context.device, EmulatedDevice)
    meter = EmulatedMeter(context.device, limit_bytes)
    devices.contexts[index] = replace(context, meter=meter)
    return meter
