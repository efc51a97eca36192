"""The faults: what is done, and the one alert that people are to be told of."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.integration.diagnosis import strikes
from tests.integration.diagnosis.runs import REAL, STEP_S, Settings
from tests.integration.diagnosis.strikes import Strike


@dataclass(frozen=True, kw_only=True)
class Fault:
    """``text``: for the table. ``step``: it is struck after this one; 0: from the start on.
    ``grace_s``: the alert is to wait so long by what it means, before its delay.
    """

    name: str
    text: str
    alert: str
    strike: Strike = strikes.nothing
    settings: Settings = field(default_factory=Settings)
    step: int = 12
    grace_s: float = 0.0


def _real(**changes: Any) -> Settings:
    return Settings(base=REAL, changes=changes)


def _emulated(**changes: Any) -> Settings:
    return Settings(changes=changes)


def _lost(kind: str, name: str) -> tuple[Fault, ...]:
    return (
        Fault(
            name=f"{kind}-killed",
            text=f"{kind} gets SIGKILL",
            alert="PenstockMemberLost",
            strike=strikes.killed(name),
        ),
        Fault(
            name=f"{kind}-stopped",
            text=f"{kind} gets SIGSTOP",
            alert="PenstockMemberLost",
            strike=strikes.stopped(name),
            settings=_emulated(cluster={"heartbeat_timeout_s": 8.0}),
        ),
        Fault(
            name=f"{kind}-killed-again",
            text=f"{kind} gets SIGKILL four times",
            alert="PenstockRestartsInARow",
            strike=strikes.killed(name, times=4),
        ),
    )


TWO_NODES = {
    "cluster": {"workers": 1, "nodes": [{"name": "a"}, {"name": "b"}], "heartbeat_timeout_s": 5.0}
}
SLOW_NODES = {
    "cluster": {
        "workers": 1,
        "nodes": [{"name": "a", "host": "127.7.0.1"}, {"name": "b", "host": "127.7.0.2"}],
    }
}
FP16 = {"model": {"dtype": "fp16"}, "train": {"clip_grad_norm": 1.0}}

FAULTS = (
    *_lost("worker", "worker.1"),
    *_lost("optimizerd", "optimizerd.a"),
    *_lost("memoryd", "memoryd.a"),
    *_lost("schedulerd", "schedulerd"),
    Fault(
        name="node-killed",
        text="penstock node gets SIGKILL, and all its processes end with it",
        alert="PenstockMemberLost",
        strike=strikes.killed("node.a"),
    ),
    Fault(
        name="node-gone",
        text="one of two nodes dies with all its processes, and nobody starts it again",
        alert="PenstockMemberLost",
        strike=strikes.killed_node("b"),
        settings=Settings(base=REAL, changes=TWO_NODES, by_hand=True),
    ),
    Fault(
        name="link-dead",
        text="an emulated link to the device moves a byte a second",
        alert="PenstockStuck",
        settings=_emulated(emulation={"machine": {"fetch_bandwidth": 1.0}}),
        step=0,
    ),
    Fault(
        name="data-stuck",
        text="reading the first batch takes for ever",
        alert="PenstockDataStuck",
        strike=strikes.tokens_stuck,
        settings=_real(),
        step=0,
    ),
    Fault(
        name="data-used-up",
        text="a text of a few pages",
        alert="PenstockDataExhausted",
        strike=strikes.reached(12),
        settings=_real(data={"path": str(Path(__file__).with_name("watching.py"))}),
        step=0,
    ),
    Fault(
        name="device-slow",
        text="a worker runs 40 % of the time",
        alert="PenstockSlowWorker",
        strike=strikes.slowed("worker.1"),
        settings=_real(),
        step=60,
    ),
    Fault(
        name="all-slow",
        text="both workers run a third of the time",
        alert="PenstockStepSlow",
        strike=strikes.slowed("worker.0", "worker.1", work_s=0.015, rest_s=0.03),
        settings=_real(),
        step=60,
    ),
    Fault(
        name="cores-taken",
        text="others compute on the optimizer's cores",
        alert="PenstockOptimizerStarved",
        strike=strikes.cores_taken,
        settings=Settings(
            base=REAL,
            changes={
                "model": {"hf": {"hidden_size": 512, "intermediate_size": 1408}},
                "data": {"sequence_length": 16},
                "train": {"global_batch": 2, "micro_batch": 1},
                "optimizer": {"threads": 0, "cores": [1]},
            },
            shm_mib=2048,
        ),
        step=40,
    ),
    Fault(
        name="memory-channels",
        text="emulated memory channels a twentieth as fast as the machine's",
        alert="PenstockMemoryBandwidthSaturated",
        settings=_emulated(emulation={"machine": {"dram_bandwidth": 2.0e10}}),
        step=0,
    ),
    Fault(
        name="disk-full",
        text="the run directory's disk is filled up",
        alert="PenstockDiskNearlyFull",
        strike=strikes.full_disk,
        settings=Settings(disk_mib=400),
    ),
    Fault(
        name="shm-full",
        text="another file fills /dev/shm",
        alert="PenstockShmNearlyFull",
        strike=strikes.full_shm,
    ),
    Fault(
        name="memory-full",
        text="the memory limit of the control group is lowered to what is used and 3 %",
        alert="PenstockMemoryNearlyFull",
        strike=strikes.memory_lowered,
        settings=Settings(memory_mib=6000),
    ),
    Fault(
        name="clipping",
        text="train.clip_grad_norm far below all norms",
        alert="PenstockRollbackStorm",
        settings=_real(train={"clip_grad_norm": 1.0e-4}),
        step=0,
    ),
    Fault(
        name="overflow",
        text="an fp16 model whose loss scale doubles after each step that does not overflow",
        alert="PenstockOverflowStorm",
        settings=_real(**FP16, optimizer={"grad_dtype": "fp16", "loss_scale_growth_interval": 1}),
        step=0,
    ),
    Fault(
        name="loss-scale",
        text="an fp16 model that overflows at the lowest loss scale that is allowed",
        alert="PenstockLossScaleAtFloor",
        settings=_real(
            model={"dtype": "fp16"},
            train={"clip_grad_norm": 1.0, "max_skips": 10_000_000},
            optimizer={
                "grad_dtype": "fp16",
                "initial_loss_scale": 2.0**32,
                "loss_scale_min": 2.0**30,
            },
        ),
        step=0,
    ),
    Fault(
        name="state-unwritable",
        text="there is a file where saved states should go",
        alert="PenstockSaveFailing",
        strike=strikes.states_in_the_way,
        step=25,
    ),
    Fault(
        name="state-hangs",
        text="the file system of saved states hangs",
        alert="PenstockSaveTooOld",
        strike=strikes.state_frozen,
        step=25,
        grace_s=2 * 20 * STEP_S + 60.0,
    ),
    Fault(
        name="network-slow",
        text="the network between two nodes has 5 Mbit/s",
        alert="PenstockNetworkSlow",
        strike=strikes.slow_network("5mbit"),
        settings=Settings(base=REAL, changes=SLOW_NODES),
        step=60,
    ),
    Fault(
        name="metricsd-killed-again",
        text="metricsd gets SIGKILL four times",
        alert="PenstockRestartsInARow",
        strike=strikes.killed("metricsd.a", times=4),
    ),
    Fault(
        name="all-killed",
        text="the whole run gets SIGKILL",
        alert="PenstockMetricsMissing",
        strike=strikes.killed_node("train"),
    ),
)
