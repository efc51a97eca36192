"""The action text of torch.distributed.pipelining: ours against torch's own orders and checks.

No process group is needed: GPipe's and 1F1B's loops run on a stage that only writes down what is
asked of it, the other orders are made by functions that are called with the numbers that they read
from their schedule object. Empty cells, where torch lets a rank wait, are left out of comparisons:
they picture the time line and are not part of the order. Where the definitions differ:

- 1F1B is compared with what torch runs, not with the picture that it prints
  (``Schedule1F1B._get_pipeline_order``): there the last rank's forwards are numbered from 1, and
  the warm-up has forwards that do not exist where micro-batches are fewer than p - 1.
- DualPipeV runs some forwards and backwards at the same time (OVERLAP_F_B). Ours has the forward,
  then the backward; reading torch's text does the same to it.
- torch's interleaved 1F1B with one stage per rank has a lead of two forwards per rank, ours is then
  plain 1F1B; compared with two stages and more.
- torch has neither Chimera nor Hanayo nor BPipe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch.distributed.pipelining.schedules as torch_schedules
from hypothesis import given
from hypothesis import strategies as st

from penstock.host.errors import ConfigError, PenstockError, ProtocolError
from penstock.planner.planning.build import ScheduleRequest, build_schedule
from penstock.planner.planning.torch_actions import (
    Action,
    ActionKind,
    Actions,
    actions_of_plan,
    actions_of_schedule,
    format_actions,
    parse_actions,
    schedule_of_actions,
)
from penstock.planner.schedule.layout import Residency
from penstock.planner.schedule.schedule import Schedule, lower
from penstock.planner.schemes import Recomputation
from penstock.planner.validate.check import validate
from penstock.protocol.plan.instructions import BackwardWeight


def build(scheme: str, devices: int, micro_batches: int, v: int | None = None) -> Schedule:
    request = ScheduleRequest(
        scheme=scheme,
        num_devices=devices,
        num_microbatches=micro_batches,
        stages_per_device=v,
    )
    return build_schedule(request, [1.0] * (devices * (v or 1)))


def executed(kind: Any, p: int, m: int) -> Actions:
    """What the loop of a schedule with one stage per rank asks of its stage, on every rank."""
    return tuple(_executed(kind, p, m, rank) for rank in range(p))


def _executed(kind: Any, p: int, m: int, rank: int) -> tuple[Action, ...]:
    asked: list[Action] = []

    def forward_one_chunk(micro_batch: int, *_: object, **__: object) -> None:
        asked.append(Action(stage=rank, kind=ActionKind.FORWARD, micro_batch=micro_batch))

    def backward_one_chunk(micro_batch: int, **_: object) -> None:
        asked.append(Action(stage=rank, kind=ActionKind.BACKWARD, micro_batch=micro_batch))

    no_transfers = dict.fromkeys(
        ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"),
        lambda micro_batch: [],
    )
    schedule = MagicMock(_n_microbatches=m, _num_stages=p)
    schedule._check_inputs.return_value = ([()] * m, [{}] * m)
    schedule._stage = MagicMock(
        stage_index=rank,
        forward_one_chunk=forward_one_chunk,
        backward_one_chunk=backward_one_chunk,
        **no_transfers,
    )
    kind._step_microbatches(schedule)
    return tuple(asked)


def torch_order(kind: Any, p: int, m: int, v: int) -> Actions:
    """What torch makes of ``v`` stages on each of ``p`` ranks and ``m`` micro-batches."""
    rounds = max(1, m // p)
    numbers = SimpleNamespace(
        pp_group_size=p,
        n_local_stages=v,
        num_stages=p * v,
        _n_microbatches=m,
        microbatches_per_round=m // rounds,
    )
    ranks = [kind._calculate_single_rank_operations(numbers, rank) for rank in range(p)]
    lines = (",".join("" if cell is None else str(cell) for cell in rank) for rank in ranks)
    return parse_actions("\n".join(lines))


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 1), (4, 2), (3, 7), (4, 4), (4, 9), (8, 16)])
def test_gpipe_and_1f1b_are_what_torch_runs(p: int, m: int) -> None:
    gpipe = executed(torch_schedules.ScheduleGPipe, p, m)
    assert actions_of_schedule(build("gpipe", p, m)) == gpipe
    one_f_one_b = executed(torch_schedules.Schedule1F1B, p, m)
    assert actions_of_schedule(build("1f1b", p, m)) == one_f_one_b


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 6), (4, 3), (4, 4), (4, 10), (4, 16), (8, 8)])
@pytest.mark.parametrize("v", [2, 3])
def test_interleaved_is_torchs(p: int, m: int, v: int) -> None:
    theirs = torch_order(torch_schedules.ScheduleInterleaved1F1B, p, m, v)
    assert actions_of_schedule(build("interleaved", p, m, v)) == theirs


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 6), (4, 3), (4, 4), (4, 10), (4, 16), (8, 8)])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_zb_h1_is_torchs_interleaved_zero_bubble(p: int, m: int, v: int) -> None:
    theirs = torch_order(torch_schedules.ScheduleInterleavedZeroBubble, p, m, v)
    assert actions_of_schedule(build("zb-h1", p, m, v)) == theirs


@pytest.mark.parametrize(("p", "m"), [(1, 3), (2, 1), (3, 4), (4, 4), (4, 8), (4, 13), (8, 16)])
def test_zb_v_is_torchs(p: int, m: int) -> None:
    theirs = torch_order(torch_schedules.ScheduleZBVZeroBubble, p, m, 2)
    assert actions_of_schedule(build("zb-v", p, m, 2)) == theirs


@pytest.mark.parametrize(("p", "m"), [(1, 2), (2, 4), (3, 6), (4, 8), (4, 13), (8, 16)])
def test_dualpipe_v_is_torchs_with_the_forward_of_a_pair_first(p: int, m: int) -> None:
    theirs = torch_order(torch_schedules.ScheduleDualPipeV, p, m, 2)
    assert actions_of_schedule(build("dualpipe-v", p, m, 2)) == theirs


EXPRESSIBLE = [
    ("naive", 3, 2, 1),
    ("gpipe", 3, 4, 1),
    ("1f1b", 4, 6, 1),
    ("1f1b-2", 2, 4, 1),
    ("interleaved", 4, 8, 2),
    ("hanayo", 3, 6, 4),
    ("zb-h1", 4, 6, 1),
    ("zb-v", 3, 6, 2),
    ("dualpipe-v", 3, 7, 2),
    ("mobius", 2, 4, 3),
    ("megatron-offload", 2, 4, 3),
]


@pytest.mark.parametrize(("scheme", "p", "m", "v"), EXPRESSIBLE)
def test_torch_accepts_what_we_write(scheme: str, p: int, m: int, v: int) -> None:
    """Its validator takes the compute-only form, its simulator the form with communication."""
    schedule = build(scheme, p, m, v)
    devices = [stage.device for stage in schedule.layout.forward]
    compute = in_torch(format_actions(actions_of_schedule(schedule)))
    torch_schedules._validate_schedule(compute, p, len(devices), m)
    lowered = in_torch(format_actions(actions_of_plan(lower(schedule))))
    no_weights = {
        rank: [a for a in actions if "SHARD" not in a.computation_type.value]
        for rank, actions in lowered.items()
    }
    torch_schedules._simulate_comms_compute(no_weights, lambda s: devices[s], len(devices))


def in_torch(text: str) -> dict[int, list[Any]]:
    """As ``_load_csv`` reads it."""
    return {
        rank: [torch_schedules._Action.from_str(cell) for cell in line.split(",")]
        for rank, line in enumerate(text.splitlines())
    }


@pytest.mark.parametrize(("scheme", "p", "m", "v"), EXPRESSIBLE)
def test_what_is_written_reads_back(scheme: str, p: int, m: int, v: int) -> None:
    schedule = build(scheme, p, m, v)
    for actions in (actions_of_schedule(schedule), actions_of_plan(lower(schedule))):
        assert parse_actions(format_actions(actions)) == actions
        mode = "full" if schedule.residency is Residency.STREAMED else "none"
        again = schedule_of_actions(actions, recompute=Recomputation(mode=mode))
        assert again.orders == schedule.orders
        assert again.layout == schedule.layout
        validate(lower(again))
    lowered = actions_of_plan(lower(schedule))
    streams = scheme in ("mobius", "megatron-offload")
    read = schedule_of_actions(lowered)
    assert (read.residency is Residency.STREAMED, read.rebinds_weights) == (streams, streams)


def test_the_form_with_communication() -> None:
    assert format_actions(actions_of_plan(lower(build("1f1b", 2, 1)))) == (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD\n"
    )


def test_a_text_of_torch() -> None:
    """Empty cells, spaces, quotes, an overlapped pair, weight halves, reductions."""
    text = (
        '0F0, 0F1 ,,(0F2;0B0)OVERLAP_F_B,0I1,"0W1",,0B2,0REDUCE_GRAD\r\n'
        ",1F0,1B0,1F1,1I1,1W1,1F2,1B2\r\n\r\n"
    )
    actions = parse_actions(text)
    assert format_actions(actions) == (
        "0F0,0F1,0F2,0B0,0I1,0W1,0B2,0REDUCE_GRAD\n1F0,1B0,1F1,1I1,1W1,1F2,1B2\n"
    )
    schedule = schedule_of_actions(actions, block_work=[1.0, 1.0, 1.0, 3.0])
    assert [(s.start, s.stop, s.device) for s in schedule.layout.forward] == [(0, 3, 0), (3, 4, 1)]
    assert schedule.reduces_gradients
    assert [str(i) for i in schedule.orders[1]] == [
        "F 1 0 keep=all",
        "B 1 0",
        "F 1 1 keep=all",
        "BI 1 1",
        "BW 1 1",
        "F 1 2 keep=all",
        "B 1 2",
    ]
    validate(lower(schedule))


def test_recomputation_comes_with_reading() -> None:
    actions = parse_actions("0F0,0B0")
    full = schedule_of_actions(actions, recompute=Recomputation(mode="full"))
    assert [str(i) for i in full.orders[0]] == ["F 0 0 keep=input", "R 0 0", "B 0 0"]
    assert actions_of_schedule(full) == actions


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "^no actions; expected one line per rank, such as 0F0,0B0"),
        ("0F0,0B0\n,,\n1F0", "^line 2: no actions; every rank needs a line"),
        ("0F0,0B0\n\n1F0", "^line 2: no actions"),
        ("0F0,0X0", "^line 1, cell 2: '0X0': expected stage, kind and micro-batch, such as 2F0"),
        ("0F0\n0F0x", "^line 2, cell 1: '0F0x': expected"),
        ("F0", "^line 1, cell 1: 'F0': expected"),
        ("0F1234567890", "^line 1, cell 1: '0F1234567890': expected"),
        ("0F", "^line 1, cell 1: '0F': F needs a micro-batch; expected"),
        ("0UNSHARD3", "^line 1, cell 1: '0UNSHARD3': UNSHARD takes no micro-batch; expected"),
        ("0F0,(0F1;0B)OVERLAP_F_B", "^line 1, cell 2: '0B': B needs a micro-batch"),
        ("0F0,(0F1)TWICE", r"^line 1, cell 2: '\(0F1\)TWICE': expected"),
        ('0F0,"0B0', "^line 1: "),
        ("0F0,0B0,0F0", "^line 1, cell 3: 0F0: the same is at line 1, cell 1; once is enough"),
        ("0F0,0B0\n0F1,0B1", "^line 2, cell 1: 0F1: stage 0 is on rank 0 already; all actions of"),
        ("0F0,0B0\n2F0,2B0", "^stage 1 has no actions, stage 2 has; stages are numbered from 0"),
        ("0F0,0B0,0F2,0B2", "^stage 0, micro-batch 1: there is nothing; expected 0F1 and 0B1, or"),
        ("0F0", "^stage 0, micro-batch 0: there is 0F0; expected 0F0 and 0B0, or 0F0, 0I0 and"),
        ("0F0,0B0,0W0", "^stage 0, micro-batch 0: there is 0B0, 0F0, 0W0; expected"),
        ("0F999999999,0B999999999", "^stage 0, micro-batch 0: there is nothing"),
        ("0UNSHARD", "^no compute actions; expected F and B, or F, I and W"),
    ],
)
def test_bad_texts_name_the_place_and_what_would_do(text: str, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        schedule_of_actions(parse_actions(text))


@given(text=st.text('0123FIWB_SENDRCVUAHG();,\n" x', max_size=40))
def test_any_text_gives_a_schedule_or_an_error_of_ours(text: str) -> None:
    try:
        actions = parse_actions(text)
        schedule_of_actions(actions)
    except PenstockError:
        return
    assert parse_actions(format_actions(actions)) == actions


def test_more_stages_than_blocks() -> None:
    with pytest.raises(ConfigError, match="has 2 stages, the model 1 blocks; at most one stage"):
        schedule_of_actions(parse_actions("0F0,0B0\n1F0,1B0"), block_work=[1.0])


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (lambda: build("chimera", 2, 2), "has one pipeline; this schedule has 2 routes"),
        (lambda: build("bpipe", 4, 8), "has no word for SO 0 2 fraction=1.0 peer=3"),
        (
            lambda: build_schedule(
                ScheduleRequest(
                    scheme="spipe", num_devices=2, num_microbatches=2, backward_stages=4
                ),
                [1.0] * 4,
            ),
            "one list of stages; this schedule's forward and backward stages differ",
        ),
    ],
)
def test_what_the_text_cannot_say_is_refused(
    schedule: Callable[[], Schedule], message: str
) -> None:
    for write in (
        lambda made: actions_of_schedule(made),
        lambda made: actions_of_plan(lower(made)),
    ):
        with pytest.raises(ConfigError, match=message):
            write(schedule())


def test_concatenated_weight_halves_are_written_one_by_one() -> None:
    text = "0F0,0F1,0I0,0I1,0W0,0W1"
    schedule = schedule_of_actions(parse_actions(text))
    assert format_actions([_one_by_one(schedule)]) == text + "\n"


def _one_by_one(schedule: Schedule) -> Sequence[Action]:
    order = (*schedule.orders[0][:-2], BackwardWeight(stage=0, micro_batches=(0, 1)))
    return actions_of_schedule(replace(schedule, orders=(order,)))[0]
