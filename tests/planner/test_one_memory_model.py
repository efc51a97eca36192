"""One model of device memory: what passes reckon with is what plans are held against, and what
tables print; with a profile it is the profile's. A limit that no plan meets is refused with the
smallest one that can be met.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest

from penstock.config.schema import Config
from penstock.host.errors import CapacityError, ExitCode
from penstock.planner.cost.profile import CPU_GUESS, GPU_GUESS, table_costs
from penstock.planner.memory.footprint import device_peaks, early_arrivals, inbox_peaks
from penstock.planner.memory.table import MemoryKind
from penstock.planner.planning.configured import trainable_plan
from penstock.planner.planning.pipeline import try_plan
from penstock.planner.planning.pricing import config_context, config_prices
from penstock.planner.schedule.tensors import Tensor, TensorKind
from penstock.protocol.plan.instructions import parse_program
from penstock.protocol.plan.profile import KindProfile, LinearFit, OperatorProfile, Profile, to_json
from penstock.shm.table import BlockTable, BorrowedTensor, DType
from tests.planner.conftest import planned

Tables = Callable[..., BlockTable]
Configs = Callable[..., Config]

NOTHING = LinearFit(slope=0.0)


def fit(slope: float) -> LinearFit:
    return LinearFit(slope=slope)


def write_profile(path: Path, table: BlockTable) -> Path:
    """Blocks that keep 100 bytes a token, 60 of them outputs of a norm; the guess is 256."""
    kind = KindProfile(
        forward_s=fit(1e-4),
        recompute_s=fit(1e-4),
        backward_input_s=fit(1e-4),
        backward_weight_s=fit(1e-4),
        activation_bytes=fit(100.0),
        deferred_bytes=fit(50.0),
        output_bytes=fit(1.0),
        forward_workspace_bytes=NOTHING,
        graph_workspace_bytes=fit(1.0),
        backward_workspace_bytes=fit(2.0),
        backward_input_workspace_bytes=fit(2.0),
        backward_weight_workspace_bytes=NOTHING,
        constant_bytes=fit(1.0),
        operators=(OperatorProfile(name="norm", forward_s=fit(1e-6), activation_bytes=fit(60.0)),),
    )
    profile = Profile(
        device="here",
        sequence_length=8,
        micro_batch=1,
        machine=CPU_GUESS.machine,
        kinds={"layer": kind},
        table=table,
    )
    path.write_text(to_json(profile))
    return path


@pytest.fixture(name="measured")
def _measured(tmp_path: Path, make_table: Tables, make_config: Configs) -> Callable[..., Config]:
    """A configuration of 8 blocks on 4 workers with a profile, long sequences, and a limit."""
    profile = write_profile(tmp_path / "p.json", make_table(8))

    def configured(limit: int | None = None, **schedule: object) -> Config:
        config = make_config("1f1b", workers=4, micro_batches=8, profile=str(profile), **schedule)
        data = config.data.model_copy(update={"sequence_length": 1000})
        memory = config.memory.model_copy(update={"device_limit": limit})
        return config.model_copy(update={"data": data, "memory": memory})

    return configured


def peak_bytes(config: Config, table: BlockTable) -> int:
    """Of the fullest device, as the memory table has it."""
    rows = planned(config, table).rows
    places = {row.place for row in rows if row.place.startswith("device")}
    return max(sum(r.num_bytes for r in rows if r.place == place) for place in places)


def test_selective_recomputation_fits_where_its_own_peak_does(
    measured: Callable[..., Config], make_table: Tables
) -> None:
    """By the guess it would not: neither what a block keeps nor what a drop saves is its."""
    table, keys = make_table(8), {"recompute": "selective", "drop": ["cmb"]}
    peak = peak_bytes(measured(**keys), table)
    assert peak < peak_bytes(measured(recompute="none"), table) < 4 * 2 * 256 * 1000
    limited = measured(peak, **keys)
    run = planned(limited, table)
    needs = [need for need in run.demands if need.what == "memory.device_limit"]
    assert len(needs) == 4 and not any(need.short for need in run.demands if need in needs)
    assert max(need.needed for need in needs) == peak
    simulated = try_plan(run.plan, config_context(limited, table)).peaks
    assert (
        ceil(max(p.total_bytes for p in simulated))
        <= peak
        <= ceil(max(p.total_bytes for p in simulated)) + 4
    ), "rows are rounded up one by one"


@pytest.mark.parametrize(
    ("name", "shares"), [("obscura", (0.75, 0.5, 0.3)), ("keep-what-fits", (0.9, 0.75, 0.55))]
)
def test_what_passes_make_within_a_limit_is_within_it(
    measured: Callable[..., Config], make_table: Tables, name: str, shares: tuple[float, ...]
) -> None:
    table = make_table(8)
    most = peak_bytes(measured(recompute="none"), table)
    least = peak_bytes(measured(recompute="full"), table)
    for share in shares:
        limit = int(least + share * (most - least))
        config = measured(limit, recompute="none", passes=[name])
        assert peak_bytes(config, table) <= limit


@pytest.mark.parametrize(
    "keys", [{"recompute": "none"}, {"recompute": "none", "passes": ["obscura"]}]
)
def test_a_limit_that_cannot_be_met_is_refused_with_one_that_can(
    measured: Callable[..., Config], make_table: Tables, keys: dict[str, object]
) -> None:
    table = make_table(8)
    with pytest.raises(
        CapacityError, match=r"smallest limit .* memory\.device_limit = (\d+)$"
    ) as e:
        planned(measured(100_000, **keys), table)
    assert e.value.exit_code is ExitCode.NO_MEMORY
    smallest = int(str(e.value).split()[-1])
    assert peak_bytes(measured(smallest, **keys), table) <= smallest
    with pytest.raises(CapacityError, match="smallest limit"):
        planned(measured(int(smallest / 1.01), **keys), table)


def test_auto_finds_by_the_profile_what_fits(
    measured: Callable[..., Config], make_table: Tables
) -> None:
    table = make_table(8)
    least = peak_bytes(measured(recompute="full"), table)
    config = measured(int(1.2 * least), recompute="full")
    plan = trainable_plan(config, table)
    costs = config_prices(config, table).costs
    assert max(p.total_bytes for p in device_peaks(plan, costs)) <= 1.2 * least


def test_a_borrowed_tensor_takes_the_whole_array_that_it_is_in(make_table: Tables) -> None:
    """Block 3 borrows one of block 0's two tensors: fetched, and summed for, is the array."""
    table = make_table(4)
    blocks = list(table.blocks)
    blocks[0] = replace(blocks[0], contributions=2, trainable_elements=3000)
    tied = BorrowedTensor(name="block0.weight", local_name="tied", owner=0, contribution=1)
    blocks[3] = replace(blocks[3], borrows=(tied,))
    table = replace(table, blocks=tuple(blocks), weight_dtype=DType.BF16)
    on_gpu = table_costs(table, GPU_GUESS, tokens=8, own_memory=True)
    on_cpu = table_costs(table, GPU_GUESS, tokens=8, own_memory=False)
    own, last = on_gpu.of(range(2, 3)), on_gpu.of(range(3, 4))
    assert last.weight_bytes - own.weight_bytes == 3000 * 2
    assert last.device_gradient_bytes - own.device_gradient_bytes == 3000 * 4
    assert on_cpu.of(range(3, 4)).weight_bytes == 2 * last.weight_bytes, "computed in fp32"
    whole = on_gpu.of(range(4))
    assert whole.weight_bytes == sum(b.weight_bytes for b in on_gpu.blocks), "is there already"
    assert whole.device_gradient_bytes == (3000 + 3 * 1024 + 3000) * 4, "a sum of its own"


def test_tensors_arrive_as_soon_as_their_senders_can_have_made_them() -> None:
    """The first device's second forward waits for nobody; its backward's gradient comes back only
    after the other device has taken the activation.
    """
    first = "F 0 0 keep=all; SA 0 0 peer=1; F 0 1 keep=all; SA 0 1 peer=1; RG 1 0 peer=1; B 0 0"
    second = "RA 0 0 peer=0; F 1 0 keep=all; B 1 0; SG 1 0 peer=0; RA 0 1 peer=0; F 1 1 keep=all"
    programs = parse_program(f"device 0:\n{first}\ndevice 1:\n{second}".replace("; ", "\n"))
    assert list(early_arrivals(programs)) == [
        (0, Tensor(kind=TensorKind.GRADIENT, stage=1, micro_batch=0), 1, 4),
        (1, Tensor(kind=TensorKind.ACTIVATION, stage=0, micro_batch=1), 0, 4),
    ]


def test_messages_wait_in_the_hosts_memory_until_they_are_received(
    measured: Callable[..., Config], make_table: Tables
) -> None:
    """Device 0 can send all its outputs of the warm-up, and of what follows, before device 1 asks;
    two receives are posted ahead.
    """
    config, table = measured(recompute="full"), make_table(8)
    plan = trainable_plan(config, table)
    waiting = inbox_peaks(plan, config_prices(config, table).costs)
    message_bytes = config_prices(config, table).costs.input_bytes(1)
    assert all(num_bytes % message_bytes == 0.0 for num_bytes in waiting)
    assert waiting[1] > 0.0
    rows = planned(config, table).rows
    (row,) = [row for row in rows if row.use == "early messages"]
    assert (row.place, row.resource) == ("node n0", MemoryKind.HOST)
    assert row.num_bytes == sum(waiting)
