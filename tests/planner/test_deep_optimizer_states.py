"""Deep Optimizer States: equation 1, the order of figure 16, updates on devices."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import inf

import pytest

from bench.papers.deep_optimizer_states.rates import FIGURE_16, H100, H100_BUSY, V100
from penstock.config.execution import DeviceUpdates
from penstock.host.errors import ConfigError
from penstock.planner.cost.cluster import ADVANCE, PREVIEW_SETTLE, Cluster
from penstock.planner.cost.costs import BlockCost, Costs
from penstock.planner.cost.update_rates import (
    UpdateRates,
    cpu_subgroups_per_gpu,
    device_rate,
    flushing,
    preview_ratio,
    preview_stride,
    preview_throughput,
    resident_throughput,
    update_stride,
    update_throughput,
)
from penstock.planner.passes import PASSES, PassContext
from penstock.planner.passes.deep_optimizer_states import subgroups_on_gpu
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.simulate import simulate
from penstock.planner.validate.check import validate
from penstock.protocol.plan.instructions import Update
from penstock.protocol.plan.semantics import Lane

BLOCK = BlockCost(
    forward_s=1.0,
    recompute_s=1.0,
    backward_input_s=1.0,
    backward_weight_s=1.0,
    parameters=1e9,
    weight_bytes=2e9,
    gradient_bytes=2e9,
)
NODE = Cluster(
    devices_per_node=2,
    fetch_bandwidth=12e9,
    offload_bandwidth=12e9,
    dram_bandwidth=1e11,
    optimizer_rate=1e9,
    device_optimizer_rate=1e12,
)
"""Two GPUs, 1 G parameters/s each over PCIe, and cores that do 1 G/s."""


@pytest.mark.parametrize(("rates", "ratio"), [(V100, 2.29), (H100, 0.49), (H100_BUSY, 1.24)])
def test_equation_1_says_what_it_says(rates: UpdateRates, ratio: float) -> None:
    """Below 1 the GPU takes more subgroups than the CPU; nothing is rounded or limited."""
    assert cpu_subgroups_per_gpu(rates) == pytest.approx(ratio, abs=5e-3)
    assert update_stride(rates) == pytest.approx(1.0 + ratio, abs=5e-3)


@pytest.mark.parametrize("rates", [V100, H100, H100_BUSY])
def test_no_stride_beats_the_one_of_equation_1(rates: UpdateRates) -> None:
    best = update_throughput(rates, update_stride(rates))
    assert all(update_throughput(rates, tenths / 10) <= best for tenths in range(10, 60))


def test_equation_1_balances_both_sides() -> None:
    k = cpu_subgroups_per_gpu(V100)
    cpu_s = k * (1 / V100.host + 1 / V100.downscale)
    gpu_s = (3 + k / 2) / V100.transfer + 1 / V100.device
    assert cpu_s == pytest.approx(gpu_s)


def test_a_cpu_faster_than_the_link_leaves_nothing_to_the_gpu() -> None:
    rates = UpdateRates(transfer=1e9, device=1e10, host=4e9, downscale=1e12)
    assert update_stride(rates) == inf
    assert update_throughput(rates, inf) > update_throughput(rates, 100.0)


@pytest.mark.parametrize("rates", [H100, H100_BUSY])
def test_order_of_figure_16(rates: UpdateRates) -> None:
    throughputs = [update_throughput(rates, stride) for _, stride in FIGURE_16]
    assert throughputs == sorted(throughputs, reverse=True)
    assert len(set(throughputs)) == len(throughputs)


@pytest.mark.parametrize("resident", [0.0, 0.2, 0.5])
def test_static_residents_last_beat_twinflow(resident: float) -> None:
    """Section 5.4: at least 1.7 times faster updates."""
    first = resident_throughput(H100_BUSY, resident, None)
    assert resident_throughput(H100_BUSY, resident, 2) >= 1.7 * first


def test_subgroups_of_algorithm_1() -> None:
    assert subgroups_on_gpu(8, 2) == (1, 3, 5, 7)
    assert subgroups_on_gpu(8, 3, residents=(6, 7)) == (2, 5, 6, 7)
    assert subgroups_on_gpu(6, 1.5) == (1, 2, 4, 5)
    assert subgroups_on_gpu(8, 2, phase=Fraction(1, 2)) == (0, 2, 4, 6)


def test_counterpart_for_previews() -> None:
    """GPUs take 2 G parameters/s, cores 1, and memory has room for both: 28 + 16 of 100 GB/s."""
    assert preview_ratio(NODE, PREVIEW_SETTLE) == pytest.approx(0.5, rel=2e-3)
    assert preview_stride(NODE, PREVIEW_SETTLE) == pytest.approx(1.5, rel=2e-3)
    fast = replace(NODE, optimizer_rate=4e9)
    assert preview_ratio(fast, PREVIEW_SETTLE) == pytest.approx(2.0, rel=2e-3)
    assert preview_stride(fast, PREVIEW_SETTLE) == 3
    assert preview_throughput(fast, PREVIEW_SETTLE, 3) == pytest.approx(6e9, rel=2e-3)
    assert preview_throughput(fast, PREVIEW_SETTLE, None) == 4e9


def test_counterpart_where_memory_is_the_limit() -> None:
    narrow = replace(NODE, optimizer_rate=1e11, dram_bandwidth=28e9)
    assert preview_ratio(narrow, PREVIEW_SETTLE) == pytest.approx(0.0, abs=2e-3)
    assert preview_ratio(replace(NODE, optimizer_rate=inf, dram_bandwidth=inf), PREVIEW_SETTLE) == (
        inf
    )


def _spipe(context: PassContext) -> Schedule:
    request = ScheduleRequest(
        scheme="spipe",
        num_devices=2,
        num_microbatches=2,
        forward_stages=4,
        backward_stages=8,
        recompute="full",
    )
    return build_schedule(request, [block.forward_s for block in context.costs.blocks])


def _updated(schedule: Schedule) -> list[int]:
    return sorted(i.block for order in schedule.orders for i in order if isinstance(i, Update))


def _context(cluster: Cluster) -> PassContext:
    return PassContext(costs=Costs(blocks=(BLOCK,) * 8), cluster=cluster)


def test_interleave_updates_every_third_block() -> None:
    """Of what becomes final first on device 0: blocks 7, 5, 3, 1; device 1, with 6, 4, 2, 0, begins
    to count half a stride earlier.
    """
    context = _context(replace(NODE, optimizer_rate=4e9))
    schedule = PASSES["interleave-updates"].run(_spipe(context), context)
    assert _updated(schedule) == [3, 4]
    validate(lower(schedule))


@pytest.mark.parametrize("stride", [None, 1.5, 2.0, 3.0, 5.0])
@pytest.mark.parametrize("num_devices", [2, 4])
def test_devices_of_a_node_get_equal_shares(num_devices: int, stride: float | None) -> None:
    """Within one block each, and their sum is the node's share within one block a device."""
    node = replace(NODE, devices_per_node=num_devices)
    costs = Costs(blocks=(BLOCK,) * 24)
    context = PassContext(costs=costs, cluster=node, update_stride=stride)
    request = ScheduleRequest(
        scheme="spipe",
        num_devices=num_devices,
        num_microbatches=2,
        forward_stages=24,
        backward_stages=24,
        recompute="full",
    )
    schedule = build_schedule(request, [block.forward_s for block in costs.blocks])
    shared = PASSES["interleave-updates"].run(schedule, context)
    counts = [sum(isinstance(i, Update) for i in order) for order in shared.orders]
    assert min(counts) > 0 and max(counts) - min(counts) <= 1
    if stride is not None:
        assert sum(counts) == pytest.approx(24 / stride, abs=1.0)


def _residents(schedule: Schedule) -> list[int]:
    orders = (i for order in schedule.orders for i in order)
    return sorted(i.block for i in orders if isinstance(i, Update) and i.resident)


def test_interleave_updates_with_a_stride_and_residents_of_ones_own() -> None:
    """Each device has four blocks, so a quarter is one: the one whose gradients come last."""
    context = replace(_context(NODE), update_stride=4, resident_share=0.25)
    schedule = PASSES["interleave-updates"].run(_spipe(context), context)
    assert (_updated(schedule), _residents(schedule)) == ([0, 1, 4], [0, 1])
    validate(lower(schedule))


def test_a_stride_is_chosen_by_what_the_cpu_does_with_its_blocks() -> None:
    """Beside the devices' 2 updates a second memory has room for 3 previews, or 1.6 advances."""
    context = _context(replace(NODE, optimizer_rate=1e12, dram_bandwidth=76e9))
    assert _updated(PASSES["interleave-updates"].run(_spipe(context), context)) == [3, 4]
    advancing = replace(context, optimizer=ADVANCE)
    assert _updated(PASSES["interleave-updates"].run(_spipe(context), advancing)) == [1, 2, 5, 6]


def test_twinflow_keeps_the_first_blocks_of_each_device() -> None:
    """A share is rounded down to blocks: 0.6 of four are two."""
    context = replace(_context(NODE), resident_share=0.6)
    schedule = PASSES["twinflow"].run(_spipe(context), context)
    assert _updated(schedule) == _residents(schedule) == [4, 5, 6, 7]
    with pytest.raises(ConfigError, match=r"twinflow: schedule\.resident_share = 0: .* above 0"):
        PASSES["twinflow"].run(_spipe(context), _context(NODE))


def test_devices_that_are_the_optimizers_cores_are_left_alone() -> None:
    context = _context(replace(NODE, optimizer_rate=0.25e9))
    on_cores = replace(context, costs=replace(context.costs, separate_memory=False))
    schedule = _spipe(on_cores)
    assert PASSES["interleave-updates"].run(schedule, on_cores) is schedule
    wanted = replace(on_cores, update_stride=2)
    assert len(_updated(PASSES["interleave-updates"].run(schedule, wanted))) == 4


def test_interleaved_updates_end_earlier() -> None:
    """Cores need 4 s a block, more than the backwards give them."""
    context = _context(replace(NODE, optimizer_rate=0.25e9))
    plain = _spipe(context)
    shared = PASSES["interleave-updates"].run(plain, context)
    before, after = (
        simulate(lower(one), context.costs, context.cluster, optimizer=PREVIEW_SETTLE)
        for one in (plain, shared)
    )
    assert after.makespan_s < 0.8 * before.makespan_s
    assert after.pipeline_s < 1.05 * before.pipeline_s


def test_device_update_ends_cpu_and_gpus_together() -> None:
    """Two blocks are left at the end: 1 s each on the CPU, or on their own GPUs."""
    context = _context(NODE)
    schedule = PASSES["device-update"].run(_spipe(context), context)
    assert _updated(schedule) == [1]
    simulation = simulate(lower(schedule), context.costs, context.cluster, optimizer=PREVIEW_SETTLE)
    last = {
        span.label: span.end_s
        for span in simulation.spans
        if span.lane in (Lane.OPTIMIZER, Lane.UPDATE) and span.label in ("U 0", "U 1")
    }
    assert last["U 1"] < last["U 0"]


@pytest.mark.parametrize("name", ["interleave-updates", "device-update"])
def test_free_cpu_optimizer_keeps_its_blocks(name: str) -> None:
    context = _context(Cluster(devices_per_node=2))
    schedule = _spipe(context)
    assert PASSES[name].run(schedule, context) is schedule


def test_updates_are_inserted_once() -> None:
    context = _context(NODE)
    schedule = PASSES["device-update"].run(_spipe(context), context)
    with pytest.raises(ConfigError, match="interleave-updates: spipe has updates on devices"):
        PASSES["interleave-updates"].run(schedule, context)


# ---- flushing ----


def _flushing(cluster: Cluster, form: DeviceUpdates = DeviceUpdates.FLUSH) -> PassContext:
    return replace(_context(cluster), device_updates=form)


def test_a_flush_goes_both_ways() -> None:
    """26 bytes over PCIe and of the host's memory: 14/12 of a second a GPU and 1 G parameters."""
    both = flushing(NODE)
    assert device_rate(both) == pytest.approx(12 / 14 * 1e9, rel=2e-3)
    assert preview_throughput(both, PREVIEW_SETTLE, 2) == pytest.approx(2e9, rel=2e-3)
    narrow = replace(both, dram_bandwidth=26e9)
    assert preview_throughput(narrow, PREVIEW_SETTLE, 1) == pytest.approx(1e9, rel=2e-3)


@pytest.mark.parametrize("name", ["interleave-updates", "device-update"])
def test_updates_are_flushed_where_that_is_asked_for(name: str) -> None:
    context = _flushing(NODE)
    plan = lower(PASSES[name].run(_spipe(context), context))
    validate(plan)
    assert plan.updates and plan.flushed == tuple(sorted(plan.updates))


def test_residents_are_not_flushed() -> None:
    context = replace(_flushing(NODE), update_stride=2, resident_share=0.25)
    schedule = PASSES["interleave-updates"].run(_spipe(context), context)
    assert _residents(schedule) == [0, 1]
    assert not {0, 1}.intersection(lower(schedule).flushed) and lower(schedule).flushed
    flushed = lower(schedule)
    broken = [replace(i, flush=True) if isinstance(i, Update) else i for i in flushed.programs[0]]
    with pytest.raises(ConfigError, match=r"state that stays on the device .* is not flushed"):
        validate(replace(flushed, programs=(tuple(broken), *flushed.programs[1:])))


def test_nobody_settles_what_is_flushed() -> None:
    context = replace(_flushing(NODE), update_stride=1)
    schedule = PASSES["interleave-updates"].run(_spipe(context), context)
    simulation = simulate(lower(schedule), context.costs, context.cluster, optimizer=PREVIEW_SETTLE)
    assert not [span for span in simulation.spans if span.lane is Lane.OPTIMIZER]
    previewed = PASSES["interleave-updates"].run(
        _spipe(context), replace(context, device_updates=DeviceUpdates.PREVIEW)
    )
    settling = simulate(lower(previewed), context.costs, context.cluster, optimizer=PREVIEW_SETTLE)
    assert [span for span in settling.spans if span.lane is Lane.OPTIMIZER]


@pytest.mark.parametrize(
    ("node", "flushes"),
    [
        pytest.param(replace(NODE, optimizer_rate=0.1e9), True, id="slow cores"),
        pytest.param(replace(NODE, optimizer_rate=0.5e9), False, id="settles are hidden"),
    ],
)
def test_auto_takes_the_form_with_the_shorter_step(node: Cluster, flushes: bool) -> None:
    """Cores that cannot settle during the next forward gain; else less has to go back."""
    chosen = _flushing(node, DeviceUpdates.AUTO)
    schedule = PASSES["interleave-updates"].run(_spipe(chosen), chosen)
    assert bool(lower(schedule).flushed) is flushes and lower(schedule).updates
    steps = {}
    for form in (DeviceUpdates.PREVIEW, DeviceUpdates.FLUSH):
        context = _flushing(node, form)
        plan = lower(PASSES["interleave-updates"].run(_spipe(context), context))
        simulation = simulate(plan, context.costs, node, optimizer=PREVIEW_SETTLE)
        steps[form] = simulation.makespan_s
    assert (steps[DeviceUpdates.FLUSH] < steps[DeviceUpdates.PREVIEW]) is flushes


def test_auto_leaves_blocks_to_a_cpu_that_is_faster_unless_a_stride_is_given() -> None:
    """A slow way to the host, and cores that are done when the last gradient comes."""
    node = replace(NODE, optimizer_rate=8e9, offload_bandwidth=1e9, dram_bandwidth=1e13)
    context = _flushing(node, DeviceUpdates.AUTO)
    schedule = _spipe(context)
    assert PASSES["interleave-updates"].run(schedule, context) is schedule
    given = replace(context, update_stride=2.0)
    assert lower(PASSES["interleave-updates"].run(schedule, given)).updates
