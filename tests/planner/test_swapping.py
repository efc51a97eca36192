"""keep-or-swap: what devices cannot keep goes to the host, within its memory, and comes in time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import Cluster
from penstock.planner.cost.costs import BlockCost, Costs, OperatorCost
from penstock.planner.memory.footprint import footprints
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.passes.offload_or_recompute import STATE_BYTES
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.simulate import simulate
from penstock.planner.validate.check import validate
from penstock.protocol.plan.instructions import Forward, Recompute, SwapIn, SwapOut

BLOCK = BlockCost(
    forward_s=1.0,
    recompute_s=1.0,
    backward_input_s=1.0,
    backward_weight_s=1.0,
    output_bytes=1.0,
    activation_bytes=6.0,
    deferred_bytes=2.0,
    weight_bytes=1.0,
    gradient_bytes=1.0,
    parameters=1.0,
    operators=(
        OperatorCost(name="norm", forward_s=0.01, activation_bytes=2.0),
        OperatorCost(name="qkv", forward_s=0.5, activation_bytes=3.0),
        OperatorCost(name="down", forward_s=0.49, activation_bytes=0.0),
    ),
)
COSTS = Costs(blocks=(BLOCK,) * 16)
SCHEMES = ("mobius", "megatron-offload", "1f1b", "interleaved", "zb-v", "hanayo")


def schedule_of(scheme: str, *passes: str) -> Schedule:
    request = ScheduleRequest(
        scheme=scheme,
        num_devices=4,
        num_microbatches=8,
        recompute="full" if scheme in ("mobius", "megatron-offload") else "none",
    )
    schedule = build_schedule(request, [1.0] * 16)
    for name in passes:
        schedule = PASSES[name].run(schedule, context_of(1e9))
    return schedule


def context_of(limit: float, *, link: float = 1e3, host: float = 1e9) -> PassContext:
    cluster = Cluster(
        devices_per_node=4, fetch_bandwidth=link, offload_bandwidth=link, host_memory_bytes=host
    )
    return PassContext(costs=COSTS, cluster=cluster, memory_limit_bytes=limit)


def swapped(schedule: Schedule, context: PassContext) -> Schedule:
    """Applies the pass; the result must be a valid plan within the limit."""
    made = PASSES["keep-or-swap"].run(schedule, context)
    plan = lower(made)
    validate(plan)
    limit = context.memory_limit_bytes
    assert limit is not None
    assert max(max(one.total_bytes) for one in footprints(plan, COSTS)) <= limit
    return made


def instructions(schedule: Schedule, *kinds: type) -> list[object]:
    return [i for order in schedule.orders for i in order if isinstance(i, kinds)]


def peak(schedule: Schedule) -> float:
    return max(max(one.total_bytes) for one in footprints(lower(schedule), COSTS))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_moves_where_everything_fits(scheme: str) -> None:
    made = swapped(schedule_of(scheme), context_of(1e6))
    assert instructions(made, SwapOut, SwapIn, Recompute) == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("share", [0.8, 0.65])
def test_what_does_not_fit_goes_to_the_host_and_comes_back(scheme: str, share: float) -> None:
    """Links are fast: nothing dear is made again, and every copy out has one in."""
    schedule = schedule_of(scheme)
    everything = PASSES["keep-what-fits"].run(schedule, context_of(1e6))
    context = context_of(share * peak(everything))
    made = swapped(schedule, context)
    outs, ins = instructions(made, SwapOut), instructions(made, SwapIn)
    assert outs and len(outs) == len(ins)
    assert {i.drop for i in instructions(made, Forward) if isinstance(i, Forward)} <= {
        (),
        ("norm",),
    }


@pytest.mark.parametrize("scheme", ["mobius", "1f1b", "megatron-offload"])
def test_it_is_no_slower_than_recomputing(scheme: str) -> None:
    schedule = schedule_of(scheme)
    everything = PASSES["keep-what-fits"].run(schedule, context_of(1e6))
    context = context_of(0.6 * peak(everything))
    made, again = swapped(schedule, context), PASSES["keep-what-fits"].run(schedule, context)
    seconds = [simulate(lower(s), COSTS, context.cluster).makespan_s for s in (made, again)]
    assert seconds[0] <= seconds[1]


def test_slow_links_and_small_hosts_leave_recomputation() -> None:
    schedule = schedule_of("mobius")
    everything = PASSES["keep-what-fits"].run(schedule, context_of(1e6))
    limit = 0.6 * peak(everything)
    fast, slow = context_of(limit), context_of(limit, link=0.1)
    state = STATE_BYTES * 16
    full = context_of(limit, host=state + 1.0)

    def moved(context: PassContext) -> int:
        return len(instructions(swapped(schedule, context), SwapOut))

    assert moved(slow) < moved(fast)
    assert moved(full) == 0
    assert instructions(swapped(schedule, full), Recompute)


def test_split_backwards_are_swapped_as_well() -> None:
    schedule = schedule_of("1f1b", "split-backward")
    made = swapped(schedule, context_of(0.7 * peak(schedule)))
    assert instructions(made, SwapOut)


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="fits neither the devices nor the hosts"):
        PASSES["keep-or-swap"].run(schedule_of("mobius"), context_of(10.0))
    costs = Costs(blocks=(replace(BLOCK, operators=()),) * 16)
    context = PassContext(costs=costs, cluster=Cluster(devices_per_node=4))
    with pytest.raises(ConfigError, match="keep-or-swap: mobius: costs name no operators"):
        PASSES["keep-or-swap"].run(schedule_of("mobius"), context)


def test_every_other_stage_of_a_device_may_drop_more() -> None:
    """A host lacks room for the swaps of one choice, and has more than the next choice needs. So
    half of each device's stages take the first, half the next.
    """
    schedule, seconds = schedule_of("mobius"), []
    whole = peak(PASSES["keep-what-fits"].run(schedule, context_of(1e6)))
    chosen = []
    for host in (330.0, 450.0, 650.0):
        context = context_of(0.5 * whole, host=host)
        made = swapped(schedule, context)
        drops = {i.stage: i.drop for i in instructions(made, Forward) if isinstance(i, Forward)}
        of_devices = [
            tuple(drops[stage] for stage in made.layout.forward_stages_on(device))
            for device in range(4)
        ]
        assert len(set(of_devices)) == 1, "devices stay equally busy"
        chosen.append(of_devices[0])
        seconds.append(simulate(lower(made), COSTS, context.cluster).makespan_s)
    dear, cheap = ("norm", "qkv"), ("norm",)
    assert chosen == [(dear, dear), (cheap, dear), (cheap, cheap)]
    assert seconds[0] > seconds[1] > seconds[2]
