"""The instruction set: the work of a device, as data.

Each :class:`Opcode` has one frozen dataclass and a text form that can be parsed. The text has the
opcode's code, then the fields in order: numbers first, the rest as ``name=value``::

    device 0:
      FW 0 phase=forward
      F 0 0 keep=input
      SA 0 0 peer=1

The docstrings define the meaning of an instruction for its device.
:mod:`penstock.planner.validate.check` decides which orders of instructions are valid. Transfers
only *start* when they are reached: a send returns at once, a receive is posted. The instruction
that consumes the tensor waits. ``stage`` of a transfer is the stage that **produced** the tensor: a
forward stage for activations, a backward stage for gradients. ``stage`` of a checkpoint is the
backward stage that **needs** it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from penstock.host.errors import ProtocolError

_T = TypeVar("_T")

MAX_INDEX = 10**9 - 1
"""Largest stage, micro-batch, device or block number that the text form admits."""


class Opcode(StrEnum):
    """Every instruction; the value is its code in the text form."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    BACKWARD_INPUT = "BI"
    BACKWARD_WEIGHT = "BW"
    SEND_ACTIVATION = "SA"
    RECV_ACTIVATION = "RA"
    SEND_GRADIENT = "SG"
    RECV_GRADIENT = "RG"
    SEND_CHECKPOINT = "SC"
    RECV_CHECKPOINT = "RC"
    FETCH_WEIGHTS = "FW"
    RELEASE_WEIGHTS = "RW"
    OFFLOAD_GRADIENTS = "OG"
    SWAP_OUT = "SO"
    SWAP_IN = "SI"
    UPDATE = "U"
    REDUCE_GRADIENTS = "RD"


class Keep(StrEnum):
    """Activations that a forward keeps on its device."""

    ALL = "all"
    """The autograd graph, for the BACKWARD of the same stage and micro-batch."""
    SELECTIVE = "selective"
    """The autograd graph without the outputs of some operators, which a RECOMPUTE makes again."""
    INPUT = "input"
    """No graph; the input checkpoint of every backward stage that starts inside the stage."""
    NONE = "none"
    """Nothing; evaluation programs only."""


class RecomputeAfter(StrEnum):
    """Event that a recomputation waits for."""

    CHECKPOINT = "checkpoint"
    """Its input only: it can run while the gradient of its output is still on its way."""
    GRADIENT = "gradient"
    """The gradient of its output as well: frameworks that recompute inside their backward."""


class Phase(StrEnum):
    """One of the two lists of stages; both number their stages from 0."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """Base of all instructions. ``str(instruction)`` is the text form."""

    opcode: ClassVar[Opcode]

    def __str__(self) -> str:
        return format_instruction(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(Instruction):
    """Computes forward stage ``stage`` on ``micro_batch``.

    The input is the batch (stage 0), the output of the previous stage on the same device, or the
    tensor of ``RecvActivation(stage - 1, micro_batch)``. The Forward waits for that tensor.
    ``keep`` names the kept activations. With ``keep=selective``, ``drop`` names the operators with
    outputs that are not kept (as in :class:`penstock.planner.cost.costs.OperatorCost`). The last
    stage computes the loss, and counts it unless a Recompute will (``keep=input``).

    A plan may leave out a Forward if no instruction needs its output. Then the next Forward is left
    out too, and no backward stage starts strictly inside the stage. A backward stage with the same
    start takes the output of the previous stage as its checkpoint, which that stage leaves for any
    ``keep``.
    """

    opcode: ClassVar[Opcode] = Opcode.FORWARD
    stage: int
    micro_batch: int
    keep: Keep
    drop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute(Instruction):
    """Forward of *backward* stage ``stage`` again, with autograd, from its checkpoint.

    After a Forward with ``keep=selective`` only the dropped operators of that Forward, from what it
    kept; there is no checkpoint then. Otherwise it waits for ``RecvCheckpoint(stage, micro_batch)``
    if the forward ran elsewhere. Backward stage 0 starts from the batch, which every device can
    read, so it needs no checkpoint. The last stage counts the loss here. With ``after=gradient`` it
    waits for the gradient that its backward needs, too (no difference to the last stage).
    """

    opcode: ClassVar[Opcode] = Opcode.RECOMPUTE
    stage: int
    micro_batch: int
    after: RecomputeAfter = RecomputeAfter.CHECKPOINT


@dataclass(frozen=True, slots=True, kw_only=True)
class Backward(Instruction):
    """Computes gradients of input and weights of backward stage ``stage``.

    Weight gradients accumulate on the device. Needs the graph of ``Recompute(stage, micro_batch)``
    or of a ``Forward`` with ``keep=all``, and the gradient of its output. The gradient comes from
    its own loss (last stage), from backward stage ``stage + 1`` on this device, or from
    ``RecvGradient(stage + 1, micro_batch)``.
    """

    opcode: ClassVar[Opcode] = Opcode.BACKWARD
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardInput(Instruction):
    """First half of a split backward: the gradient of the input only (p1 of 2BP).

    Needs what :class:`Backward` needs, and produces the same input gradient. What the weight
    gradients need stays on the device until a :class:`BackwardWeight` names the micro-batch.
    """

    opcode: ClassVar[Opcode] = Opcode.BACKWARD_INPUT
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardWeight(Instruction):
    """Second half of a split backward: weight gradients of several micro-batches (p2 of 2BP).

    Each must have had its :class:`BackwardInput`. One instruction may take them concatenated. Reads
    no weights, so they may have been released.
    """

    opcode: ClassVar[Opcode] = Opcode.BACKWARD_WEIGHT
    stage: int
    micro_batches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SendActivation(Instruction):
    """Send the output of forward stage ``stage``, just computed here, to ``peer``.

    Pair: ``RecvActivation(stage, micro_batch)`` on ``peer``, with this device as its peer; consumed
    there by ``Forward(stage + 1, micro_batch)``. Does not wait.
    """

    opcode: ClassVar[Opcode] = Opcode.SEND_ACTIVATION
    stage: int
    micro_batch: int
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecvActivation(Instruction):
    """Post the receive of forward stage ``stage``'s output; pair: :class:`SendActivation`.

    Does not wait: ``Forward(stage + 1, micro_batch)`` does.
    """

    opcode: ClassVar[Opcode] = Opcode.RECV_ACTIVATION
    stage: int
    micro_batch: int
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendGradient(Instruction):
    """Send the gradient of backward stage ``stage``'s *input*, just computed here, to ``peer``.

    Pair: ``RecvGradient(stage, micro_batch)`` on ``peer``; consumed there by ``Backward(stage - 1,
    micro_batch)``. Does not wait.
    """

    opcode: ClassVar[Opcode] = Opcode.SEND_GRADIENT
    stage: int
    micro_batch: int
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecvGradient(Instruction):
    """Post the receive of the input gradient of backward stage ``stage``.

    Pair: :class:`SendGradient` on ``peer``.

    Does not wait: ``Backward(stage - 1, micro_batch)`` does.
    """

    opcode: ClassVar[Opcode] = Opcode.RECV_GRADIENT
    stage: int
    micro_batch: int
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCheckpoint(Instruction):
    """Send the input checkpoint of backward stage ``stage`` to ``peer``.

    It is sent from where a Forward passed its block, or, where that Forward is left out, ended
    before it. Pair: ``RecvCheckpoint(stage, micro_batch)`` on ``peer``; consumed there by
    ``Recompute(stage, micro_batch)``. Does not wait; the checkpoint is forgotten here once it is
    sent.
    """

    opcode: ClassVar[Opcode] = Opcode.SEND_CHECKPOINT
    stage: int
    micro_batch: int
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RecvCheckpoint(Instruction):
    """Post the receive of the input checkpoint of backward stage ``stage``.

    Pair: :class:`SendCheckpoint` on ``peer``.

    Does not wait: ``Recompute(stage, micro_batch)`` does. Posted well ahead, so that the transfer
    overlaps.
    """

    opcode: ClassVar[Opcode] = Opcode.RECV_CHECKPOINT
    stage: int
    micro_batch: int
    peer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchWeights(Instruction):
    """Starts copying the weights of a stage into a free buffer; the first use waits for them.

    Ends with ``ReleaseWeights(stage, phase)`` on the same device. A device has two buffers: one in
    use, one arriving. Recompute and Backward use the buffer ``(stage, backward)``. If it is not
    fetched, and forward and backward stage ``stage`` are the same blocks on the same device, they
    use ``(stage, forward)``.
    """

    opcode: ClassVar[Opcode] = Opcode.FETCH_WEIGHTS
    stage: int
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseWeights(Instruction):
    """The buffer of ``FetchWeights(stage, phase)`` is free once all work before this is done."""

    opcode: ClassVar[Opcode] = Opcode.RELEASE_WEIGHTS
    stage: int
    phase: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadGradients(Instruction):
    """Copy the final gradients of backward stage ``stage`` to host memory.

    Then "gradients ready" goes to the optimizers of the nodes that own its blocks.
    """

    opcode: ClassVar[Opcode] = Opcode.OFFLOAD_GRADIENTS
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapOut(Instruction):
    """Move ``fraction`` of what a forward kept elsewhere till the matching :class:`SwapIn`.

    Elsewhere is host memory, or the memory of device ``peer`` (BPipe). Does not wait.
    """

    opcode: ClassVar[Opcode] = Opcode.SWAP_OUT
    stage: int
    micro_batch: int
    fraction: float
    peer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapIn(Instruction):
    """Bring back what the matching :class:`SwapOut` (same fields) moved.

    Does not wait; the Backward, or the Recompute of dropped operators, does.
    """

    opcode: ClassVar[Opcode] = Opcode.SWAP_IN
    stage: int
    micro_batch: int
    fraction: float
    peer: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update(Instruction):
    """Sweeps block ``block`` with the optimizer on this device instead of its node's CPU cores.

    Waits for the OffloadGradients of every backward stage that contains the block (one of each
    route). Reads its state from host memory, writes its next weights there; the CPU takes the step
    into the state after the commit.

    ``flush``: the device writes the next state back, too, into a second copy. The commit makes that
    copy valid, and the CPU has no work on the block (Deep Optimizer States, algorithm 1).

    ``resident``: the device keeps the state that it read, and the gradients, and steps its copy to
    each commit. So it reads no state in later attempts (a static resident, section 4.1). The state
    in host memory stays authoritative. Residents are not flushed.
    """

    opcode: ClassVar[Opcode] = Opcode.UPDATE
    block: int
    resident: bool = False
    flush: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceGradients(Instruction):
    """Sums the gradients of backward stage ``stage`` over the routes of the plan.

    One of them is the root (:mod:`penstock.protocol.plan.reduction`). The others send it their sums
    and do not wait. The root's OffloadGradients waits for their ReduceGradients, and publishes for
    all.
    """

    opcode: ClassVar[Opcode] = Opcode.REDUCE_GRADIENTS
    stage: int


Program = tuple[Instruction, ...]
"""Instructions of one device, in order."""

INSTRUCTIONS: tuple[type[Instruction], ...] = (
    Forward,
    Recompute,
    Backward,
    BackwardInput,
    BackwardWeight,
    SendActivation,
    RecvActivation,
    SendGradient,
    RecvGradient,
    SendCheckpoint,
    RecvCheckpoint,
    FetchWeights,
    ReleaseWeights,
    OffloadGradients,
    SwapOut,
    SwapIn,
    Update,
    ReduceGradients,
)
"""One class per opcode, in the order of :class:`Opcode`."""


def by_opcode(what: str, table: Mapping[Opcode, _T]) -> Mapping[Opcode, _T]:
    """Returns a table that cannot change; ``what`` names its values.

    Raises:
        NotImplementedError: an opcode has no entry. Tables are made when their modules are
            imported.
    """
    missing = ", ".join(opcode.name for opcode in Opcode if opcode not in table)
    if missing:
        raise NotImplementedError(f"no {what} for {missing}")
    return MappingProxyType(dict(table))


_CLASS_OF_CODE = {cls.opcode.value: cls for cls in INSTRUCTIONS}
_FIELDS_OF_CODE = {
    cls.opcode.value: tuple(f.name for f in dataclasses.fields(cls)) for cls in INSTRUCTIONS
}
_DEFAULTS_OF_CODE = {
    cls.opcode.value: {
        f.name: f.default for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING
    }
    for cls in INSTRUCTIONS
}
_POSITIONAL = ("stage", "micro_batch", "micro_batches", "block")


def _parse_index(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise ValueError(f"expected a number from 0 to {MAX_INDEX}")
    return int(text)


def _parse_indices(text: str) -> tuple[int, ...]:
    return tuple(_parse_index(part) for part in text.split(","))


def _parse_fraction(text: str) -> float:
    if not re.fullmatch(r"[0-9.e-]{1,32}", text) or not 0.0 < float(text) <= 1.0:
        raise ValueError("expected a fraction above 0 and at most 1")
    return float(text)


def _parse_keep(text: str) -> Keep:
    if text not in {keep.value for keep in Keep}:
        raise ValueError("expected all, selective, input or none")
    return Keep(text)


def _parse_operators(text: str) -> tuple[str, ...]:
    if not re.fullmatch(r"[a-z0-9_]{1,32}(,[a-z0-9_]{1,32}){0,63}", text):
        raise ValueError("expected names of operators (a-z, 0-9, _) separated by commas")
    return tuple(text.split(","))


def _parse_phase(text: str) -> Phase:
    if text not in {phase.value for phase in Phase}:
        raise ValueError("expected forward or backward")
    return Phase(text)


def _parse_flag(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError("expected yes or no")
    return text == "yes"


def _parse_after(text: str) -> RecomputeAfter:
    if text not in {after.value for after in RecomputeAfter}:
        raise ValueError("expected checkpoint or gradient")
    return RecomputeAfter(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    "stage": _parse_index,
    "micro_batch": _parse_index,
    "micro_batches": _parse_indices,
    "block": _parse_index,
    "peer": _parse_index,
    "fraction": _parse_fraction,
    "keep": _parse_keep,
    "drop": _parse_operators,
    "phase": _parse_phase,
    "after": _parse_after,
    "resident": _parse_flag,
    "flush": _parse_flag,
}


def _format_value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple):
        return ",".join(str(item) for item in value)
    return repr(value)


def format_instruction(instruction: Instruction) -> str:
    """Returns the text form, such as ``F 3 0 keep=all``; :func:`parse_instruction` parses it.

    Optional fields (``drop``, ``after``, ``resident``, ``peer`` of swaps) are left out where they
    have their default.
    """
    code = instruction.opcode.value
    defaults = _DEFAULTS_OF_CODE[code]
    words = [code]
    for name in _FIELDS_OF_CODE[code]:
        value = getattr(instruction, name)
        if name not in defaults or value != defaults[name]:
            text = _format_value(value)
            words.append(text if name in _POSITIONAL else f"{name}={text}")
    return " ".join(words)


def parse_instruction(text: str, *, line: int | None = None) -> Instruction:
    """Reads the text form of one instruction. ``line`` is used in error messages.

    Raises:
        ProtocolError: unknown opcode, missing, surplus or impossible field; names line and token.
    """
    where = f"line {line}: " if line is not None else ""
    code, *words = text.split() or [""]
    cls = _CLASS_OF_CODE.get(code)
    if cls is None:
        known = " ".join(_CLASS_OF_CODE)
        raise ProtocolError(f"{where}unknown instruction {_clip(code)}; known are {known}")
    names, defaults = _FIELDS_OF_CODE[code], _DEFAULTS_OF_CODE[code]
    required = len(names) - len(defaults)
    if not required <= len(words) <= len(names):
        usage = " ".join([code, *(_usage(name, name in defaults) for name in names)])
        raise ProtocolError(f"{where}{_clip(text.strip())}: expected {usage}")
    values: dict[str, Any] = {}
    remaining = list(names)
    for word in words:
        name = remaining.pop(0)
        while name in defaults and not word.startswith(f"{name}=") and remaining:
            name = remaining.pop(0)
        value = word if name in _POSITIONAL else word.removeprefix(f"{name}=")
        if value is word and name not in _POSITIONAL:
            raise ProtocolError(f"{where}token {_clip(word)}: expected {name}=…")
        try:
            values[name] = _PARSERS[name](value)
        except ValueError as error:
            raise ProtocolError(f"{where}token {_clip(word)}: {name}: {error}") from error
    return cls(**values)


def format_program(programs: Iterable[Sequence[Instruction]]) -> str:
    """Returns the text of all devices: a line ``device d:``, then one instruction a line; ends with
    a newline.
    """
    lines: list[str] = []
    for device, program in enumerate(programs):
        lines.append(f"device {device}:")
        lines.extend(f"  {format_instruction(instruction)}" for instruction in program)
    return "".join(line + "\n" for line in lines)


def _usage(name: str, optional: bool) -> str:
    field = name if name in _POSITIONAL else f"{name}=…"
    return f"[{field}]" if optional else field


def parse_program(text: str) -> tuple[Program, ...]:
    """Parses the text of :func:`format_program` or of a person.

    ``;`` separates instructions on a line, ``#`` starts a comment.

    Raises:
        ProtocolError: names line and token. Devices must be 0, 1, 2, … in order.
    """
    programs: list[list[Instruction]] = []
    for number, raw in enumerate(text.split("\n"), start=1):
        content = raw.partition("#")[0].strip()
        header = re.fullmatch(r"device\s+([0-9]{1,9})\s*:(.*)", content)
        if header is not None:
            if int(header[1]) != len(programs):
                raise ProtocolError(
                    f"line {number}: token {_clip(header[1])}: expected device {len(programs)}"
                )
            programs.append([])
            content = header[2]
        for part in filter(str.strip, content.split(";")):
            if not programs:
                raise ProtocolError(
                    f"line {number}: token {_clip(part.strip())}: expected a line 'device 0:' first"
                )
            programs[-1].append(parse_instruction(part, line=number))
    return tuple(tuple(program) for program in programs)


def _clip(token: str) -> str:
    return repr(token if len(token) <= 60 else token[:57] + "…")
