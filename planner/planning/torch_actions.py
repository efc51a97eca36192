"""The action text of ``torch.distributed.pipelining``: reads it, writes it.

The text has one line per rank, cells separated by commas, and one action a cell: stage, kind,
micro-batch, as in ``0F0,0F1,1B0``. It has two forms. *Compute only* has the actions F (forward), B
(whole backward), I and W (its input and weight halves). Torch lets a rank wait in empty cells.
*With communication* also has SEND_F, RECV_F, SEND_B, RECV_B and, without a micro-batch, UNSHARD,
RESHARD and REDUCE_GRAD. ``(1F4;2B0)OVERLAP_F_B`` is a forward and a backward at the same time; a
schedule here has one after the other.

The text has no words for some parts of a plan:

- refused: routes, backward stages other than the forward stages, swaps, and updates on the device;
- left out: recomputations (torch's stage module decides about them) and offloads to the host;
- written one by one: weight halves that are computed at once.

Receives name the stage that *receives* in torch, and the stage that produced the tensor in our
instructions.

A schedule that is read gets transfers and weights from :mod:`penstock.planner.schedule.lowering`
like any other. Its communication actions only say two things: whether weights are in host memory
(resharded and unsharded again), and whether gradients are reduced.
:mod:`penstock.planner.validate.check` decides whether an order can run. The module does not import
torch.
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from penstock.host.errors import ConfigError, ProtocolError
from penstock.planner.schedule.layout import OrderedInstruction, Residency, StageLayout, partition
from penstock.planner.schedule.schedule import Schedule
from penstock.planner.schemes.base import Recomputation, backward_weight
from penstock.protocol.plan.instructions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    FetchWeights,
    Forward,
    Instruction,
    OffloadGradients,
    Program,
    Recompute,
    RecvActivation,
    RecvGradient,
    ReduceGradients,
    ReleaseWeights,
    SendActivation,
    SendGradient,
)
from penstock.protocol.plan.plan import Plan, StageRange


class ActionKind(StrEnum):
    """Kinds of actions; the value is the text."""

    FORWARD = "F"
    INPUT = "I"
    WEIGHT = "W"
    BACKWARD = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    REDUCE_GRAD = "REDUCE_GRAD"


_COMPUTE = {ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT, ActionKind.BACKWARD}
_OF_STAGE = {ActionKind.UNSHARD, ActionKind.RESHARD, ActionKind.REDUCE_GRAD}
_ACTION = re.compile(
    "([0-9]{1,9})(" + "|".join(sorted(ActionKind, key=len, reverse=True)) + ")([0-9]{0,9})"
)
_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_USAGE = (
    "expected stage, kind and micro-batch, such as 2F0 or 1SEND_B3 (kinds F, B, I, W, SEND_F,"
    " RECV_F, SEND_B, RECV_B), stage and kind, such as 1UNSHARD (UNSHARD, RESHARD, REDUCE_GRAD),"
    " or (2F1;0B0)OVERLAP_F_B"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One action; ``micro_batch`` is ``None`` for actions of a whole stage.

    ``place`` says where it stood, for messages; it takes no part in comparisons.
    """

    stage: int
    kind: ActionKind
    micro_batch: int | None = None
    place: str = field(default="", compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{'' if self.micro_batch is None else self.micro_batch}"


Actions = tuple[tuple[Action, ...], ...]
"""The actions of all ranks."""


def parse_actions(text: str) -> Actions:
    """Reads either form of the text; skips empty cells, and empty lines at the end.

    Raises:
        ProtocolError: names line and cell, and what would do.
    """
    reader = csv.reader(io.StringIO(text.rstrip()), strict=True)
    ranks: list[tuple[Action, ...]] = []
    try:
        for row in reader:
            line = reader.line_num
            ranks.append(
                tuple(
                    action
                    for number, cell in enumerate(row, start=1)
                    for action in _parse_cell(cell.strip(), f"line {line}, cell {number}")
                )
            )
            if not ranks[-1]:
                raise ProtocolError(f"line {line}: no actions; every rank needs a line with some")
    except csv.Error as error:
        raise ProtocolError(f"line {reader.line_num}: {error}") from error
    if not ranks:
        raise ProtocolError("no actions; expected one line per rank, such as 0F0,0B0")
    return tuple(ranks)


def _parse_cell(cell: str, place: str) -> Iterator[Action]:
    overlap = _OVERLAP.fullmatch(cell)
    if overlap is not None:
        for part in overlap[1].split(";"):
            yield _parse_action(part.strip(), place)
    elif cell:
        yield _parse_action(cell, place)


def _parse_action(text: str, place: str) -> Action:
    match = _ACTION.fullmatch(text)
    shown = repr(text if len(text) <= 60 else text[:57] + "…")
    if match is None:
        raise ProtocolError(f"{place}: {shown}: {_USAGE}")
    kind = ActionKind(match[2])
    if (kind in _OF_STAGE) != (match[3] == ""):
        wrong = "takes no micro-batch" if kind in _OF_STAGE else "needs a micro-batch"
        raise ProtocolError(f"{place}: {shown}: {kind} {wrong}; {_USAGE}")
    micro_batch = int(match[3]) if match[3] else None
    return Action(stage=int(match[1]), kind=kind, micro_batch=micro_batch, place=place)


def format_actions(actions: Iterable[Sequence[Action]]) -> str:
    """Returns text with one line per rank; :func:`parse_actions` and torch's ``_load_csv`` read it
    back.
    """
    return "".join(",".join(map(str, rank)) + "\n" for rank in actions)


def actions_of_schedule(schedule: Schedule) -> Actions:
    """Returns the compute-only form of a schedule.

    Raises:
        ConfigError: the text has no word for something in it; says for what.
    """
    _check_expressible(schedule.layout)
    return tuple(tuple(_actions(order)) for order in schedule.orders)


def actions_of_plan(plan: Plan) -> Actions:
    """Returns the form with communication of a plan's programs (not of its evaluation).

    A receive of torch holds up what comes after it, ours only its consumer. So receives are written
    as late as the consumers and the order of the sends allow.

    Raises:
        ConfigError: the text has no word for something in it; says for what.
    """
    _check_expressible(StageLayout.of(plan))
    return tuple(tuple(_actions(_late_receives(program))) for program in plan.programs)


def _late_receives(program: Program) -> Iterator[Instruction]:
    """Receives right before what consumes them, behind those that the same peer sent earlier."""
    posted: dict[int, deque[RecvActivation | RecvGradient]] = defaultdict(deque)
    for instruction in program:
        if isinstance(instruction, RecvActivation | RecvGradient):
            posted[instruction.peer].append(instruction)
            continue
        for waiting in posted.values():
            while any(_consumes(instruction, receive) for receive in waiting):
                yield waiting.popleft()
        yield instruction


def _consumes(instruction: Instruction, receive: RecvActivation | RecvGradient) -> bool:
    match instruction:
        case Forward(stage=s, micro_batch=m):
            return receive == RecvActivation(stage=s - 1, micro_batch=m, peer=receive.peer)
        case Backward(stage=s, micro_batch=m) | BackwardInput(stage=s, micro_batch=m):
            return receive == RecvGradient(stage=s + 1, micro_batch=m, peer=receive.peer)
        case _:
            return False


def _check_expressible(layout: StageLayout) -> None:
    if layout.num_routes > 1:
        raise ConfigError(
            f"the action text has one pipeline; this schedule has {layout.num_routes} routes"
        )
    if layout.forward != layout.backward:
        raise ConfigError(
            "the action text has one list of stages; this schedule's forward and backward stages"
            " differ"
        )


def _actions(instructions: Iterable[Instruction]) -> Iterator[Action]:
    for instruction in instructions:
        match instruction:
            case Forward(stage=s, micro_batch=m):
                yield Action(stage=s, kind=ActionKind.FORWARD, micro_batch=m)
            case Backward(stage=s, micro_batch=m):
                yield Action(stage=s, kind=ActionKind.BACKWARD, micro_batch=m)
            case BackwardInput(stage=s, micro_batch=m):
                yield Action(stage=s, kind=ActionKind.INPUT, micro_batch=m)
            case BackwardWeight(stage=s, micro_batches=several):
                for m in several:
                    yield Action(stage=s, kind=ActionKind.WEIGHT, micro_batch=m)
            case Recompute() | OffloadGradients():
                pass
            case _:
                yield _communication(instruction)


def _communication(instruction: Instruction) -> Action:
    match instruction:
        case SendActivation(stage=s, micro_batch=m):
            return Action(stage=s, kind=ActionKind.SEND_F, micro_batch=m)
        case RecvActivation(stage=s, micro_batch=m):
            return Action(stage=s + 1, kind=ActionKind.RECV_F, micro_batch=m)
        case SendGradient(stage=s, micro_batch=m):
            return Action(stage=s, kind=ActionKind.SEND_B, micro_batch=m)
        case RecvGradient(stage=s, micro_batch=m):
            return Action(stage=s - 1, kind=ActionKind.RECV_B, micro_batch=m)
        case FetchWeights(stage=s):
            return Action(stage=s, kind=ActionKind.UNSHARD)
        case ReleaseWeights(stage=s):
            return Action(stage=s, kind=ActionKind.RESHARD)
        case ReduceGradients(stage=s):
            return Action(stage=s, kind=ActionKind.REDUCE_GRAD)
        case _:
            raise ConfigError(f"the action text has no word for {instruction}")


def schedule_of_actions(
    actions: Actions,
    *,
    block_work: Sequence[float] | None = None,
    recompute: Recomputation | None = None,
) -> Schedule:
    """Returns the schedule of either form, one device per rank; its scheme is called ``torch``.

    ``block_work``: forward work of every block of the model, cut into as many stages as the text
    has; without it a stage is one block. ``recompute``: what forwards keep (everything).

    Raises:
        ProtocolError: work is missing or done twice; names the action and where it stands.
        ConfigError: more stages than blocks.
    """
    recompute = recompute or Recomputation(mode="none")
    compute = [action for rank in actions for action in rank if action.kind in _COMPUTE]
    if not compute:
        raise ProtocolError("no compute actions; expected F and B, or F, I and W")
    devices = _devices_of_stages(actions)
    num_microbatches = 1 + max(action.micro_batch or 0 for action in compute)
    _check_complete(compute, len(devices), num_microbatches)
    cut = _cut(block_work or [1.0] * len(devices), devices)
    orders = tuple(tuple(_order(rank, recompute)) for rank in actions)
    streamed = _streams_weights(actions)
    return Schedule(
        scheme="torch",
        layout=StageLayout(
            num_devices=len(actions),
            num_microbatches=num_microbatches,
            forward=cut,
            backward=cut,
        ),
        orders=orders,
        residency=Residency.STREAMED if streamed else Residency.RESIDENT,
        rebinds_weights=streamed and recompute.mode != "full",
        reduces_gradients=any(a.kind is ActionKind.REDUCE_GRAD for rank in actions for a in rank),
    )


def _order(rank: Sequence[Action], recompute: Recomputation) -> Iterator[OrderedInstruction]:
    for action in rank:
        stage, m = action.stage, action.micro_batch or 0
        match action.kind:
            case ActionKind.FORWARD:
                yield recompute.forward(stage, m)
            case ActionKind.BACKWARD:
                yield from recompute.backward(stage, m)
            case ActionKind.INPUT:
                yield from recompute.backward_input(stage, m)
            case ActionKind.WEIGHT:
                yield backward_weight(stage, m)
            case _:
                pass


def _devices_of_stages(actions: Actions) -> tuple[int, ...]:
    ranks: dict[int, int] = {}
    for rank, line in enumerate(actions):
        for action in line:
            if ranks.setdefault(action.stage, rank) != rank:
                raise ProtocolError(
                    f"{_at(action)}: stage {action.stage} is on rank {ranks[action.stage]} already;"
                    " all actions of a stage belong on one line"
                )
    for stage in range(len(ranks)):
        if stage not in ranks:
            raise ProtocolError(
                f"stage {stage} has no actions, stage {max(ranks)} has; stages are numbered from 0"
                " without gaps"
            )
    return tuple(ranks[stage] for stage in range(len(ranks)))


def _check_complete(compute: Sequence[Action], num_stages: int, num_microbatches: int) -> None:
    seen: dict[tuple[int, ActionKind, int | None], Action] = {}
    for action in compute:
        first = seen.setdefault((action.stage, action.kind, action.micro_batch), action)
        if first is not action:
            raise ProtocolError(f"{_at(action)}: the same is at {first.place}; once is enough")
    for stage in range(num_stages):
        for m in range(num_microbatches):
            has = {kind for kind in _COMPUTE if (stage, kind, m) in seen}
            backward = has - {ActionKind.FORWARD}
            if ActionKind.FORWARD not in has or backward not in _BACKWARDS:
                present = ", ".join(sorted(f"{stage}{kind}{m}" for kind in has)) or "nothing"
                raise ProtocolError(
                    f"stage {stage}, micro-batch {m}: there is {present}; expected {stage}F{m} and"
                    f" {stage}B{m}, or {stage}F{m}, {stage}I{m} and {stage}W{m}"
                )


_BACKWARDS = ({ActionKind.BACKWARD}, {ActionKind.INPUT, ActionKind.WEIGHT})


def _at(action: Action) -> str:
    return f"{action.place}: {action}" if action.place else str(action)


def _cut(block_work: Sequence[float], devices: tuple[int, ...]) -> tuple[StageRange, ...]:
    if len(devices) > len(block_work):
        raise ConfigError(
            f"the action text has {len(devices)} stages, the model {len(block_work)} blocks; at"
            " most one stage per block"
        )
    return tuple(
        StageRange(start=blocks.start, stop=blocks.stop, device=device)
        for blocks, device in zip(partition(block_work, len(devices)), devices, strict=True)
    )


def _streams_weights(actions: Actions) -> bool:
    """Returns whether a stage is unsharded twice."""
    unshards = [a.stage for rank in actions for a in rank if a.kind is ActionKind.UNSHARD]
    return len(unshards) > len(set(unshards))
