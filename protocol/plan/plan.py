"""The plan: stages, their devices, and the instruction list of every device for one attempt.

A pure value that travels as JSON (``plan.json``, and inside scheduler messages). Built by
:func:`penstock.planner.planning.configured.build_plan`; whether its programs make sense is decided
by
:mod:`penstock.planner.validate.check`; here only shapes and numbers are checked.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from penstock.host.errors import ConfigError, ProtocolError
from penstock.host.inputs import unique_keys
from penstock.protocol.plan.instructions import (
    MAX_INDEX,
    Instruction,
    Program,
    Update,
    format_instruction,
    parse_instruction,
)

PLAN_FORMAT = 1

MAX_PLAN_BYTES = 64 << 20
"""Most bytes of a plan, or of a text of actions, that a user names."""
"""Written to and required in plan JSON."""

_FLAGS = ("rebinds_weights", "shards_weights", "concatenates_gradients")


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRange:
    """Blocks ``[start, stop)`` and the device that computes them."""

    start: int
    stop: int
    device: int

    @property
    def blocks(self) -> range:
        """The blocks of the stage, in order."""
        return range(self.start, self.stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One attempt, and one evaluation, of all devices.

    ``forward_stages`` and ``backward_stages`` are lists of **routes**, one after the other. A route
    covers all blocks, contiguously and in order, so a stage that starts at block 0 begins the next
    route. Most plans have one route. Chimera's up and down pipelines are two, each with its own
    copy of the weights, and so are data-parallel replicas. Micro-batch ``m`` takes route
    ``routes[m]``, or route 0 if ``routes`` is empty. Device ``d`` runs ``programs[d]`` for one
    attempt, and ``evaluation[d]`` for one forward-only pass over as many micro-batches.

    ``weight_buffers``: stage-sized weight buffers of each device. ``rebinds_weights``: a kept graph
    finds its weights again after they were released and fetched again. Without it, no weights may
    be released between a forward that keeps its graph and its backward. ``shards_weights``: every
    FETCH_WEIGHTS is an all-gather over all devices, every REDUCE_GRADIENTS a reduce-scatter
    (ZeRO-3). ``concatenates_gradients``: BACKWARD_WEIGHT of several micro-batches is one product
    per Linear over all their rows, with other rounding.

    ``settled_early``: numbers of blocks, ascending. A separate sweep during the next forward takes
    a committed step into their state, before the preview of their new gradients. The CPU advances
    all other blocks; blocks with an UPDATE always settle early.
    """

    scheme: str
    num_devices: int
    num_microbatches: int
    forward_stages: tuple[StageRange, ...]
    backward_stages: tuple[StageRange, ...]
    programs: tuple[Program, ...]
    evaluation: tuple[Program, ...]
    routes: tuple[int, ...] = ()
    weight_buffers: int = 2
    rebinds_weights: bool = False
    shards_weights: bool = False
    concatenates_gradients: bool = False
    settled_early: tuple[int, ...] = ()

    @property
    def num_routes(self) -> int:
        """Routes that micro-batches can take."""
        return sum(stage.start == 0 for stage in self.forward_stages)

    @property
    def num_blocks(self) -> int:
        """Blocks of the model."""
        return self.forward_stages[-1].stop

    @property
    def updates(self) -> dict[int, int]:
        """Blocks that devices update (UPDATE), and the device of each."""
        return {
            instruction.block: device
            for device, program in enumerate(self.programs)
            for instruction in program
            if isinstance(instruction, Update)
        }

    @property
    def flushed(self) -> tuple[int, ...]:
        """Numbers of the blocks with a next state that devices write back, ascending: UPDATE with
        ``flush``.
        """
        return tuple(
            sorted(
                instruction.block
                for program in self.programs
                for instruction in program
                if isinstance(instruction, Update) and instruction.flush
            )
        )

    def forward_stage_of(self, block: int) -> int:
        """Returns the index of the first route's forward stage that contains ``block``."""
        return _stage_of(self.forward_stages, block)

    def backward_stage_of(self, block: int) -> int:
        """Returns the index of the first route's backward stage that contains ``block``."""
        return _stage_of(self.backward_stages, block)

    def validate_shape(self) -> None:
        """Checks numbers: ranges cover all blocks, devices exist, one program per device.

        Raises:
            ConfigError: names the field and its value.
        """
        for name, value in (
            ("devices", self.num_devices),
            ("micro-batches", self.num_microbatches),
        ):
            if not 1 <= value <= MAX_INDEX:
                raise ConfigError(f"plan: number of {name} is {value}, expected at least 1")
        for name, stages in (("forward", self.forward_stages), ("backward", self.backward_stages)):
            _check_ranges(name, stages, self.num_devices)
        if self.forward_stages[-1].stop != self.backward_stages[-1].stop:
            raise ConfigError(
                f"plan: forward stages end at block {self.forward_stages[-1].stop}, backward stages"
                f" at {self.backward_stages[-1].stop}; both must cover all blocks"
            )
        self._check_routes()
        if not 1 <= self.weight_buffers <= MAX_INDEX:
            raise ConfigError(f"plan: weight_buffers is {self.weight_buffers}, expected 1 or more")
        for name, programs in (("programs", self.programs), ("evaluation", self.evaluation)):
            if len(programs) != self.num_devices:
                raise ConfigError(
                    f"plan: {name} has {len(programs)} programs for {self.num_devices} devices"
                )
        self._check_settled_early()

    def _check_settled_early(self) -> None:
        updates, before = self.updates, -1
        for position, block in enumerate(self.settled_early):
            place = f"plan: settled_early[{position}] is {block}"
            if not before < block < self.num_blocks:
                raise ConfigError(
                    f"{place}; expected ascending numbers of blocks, there are {self.num_blocks}"
                )
            if block in updates:
                raise ConfigError(
                    f"{place}, a block that device {updates[block]} updates and that is settled"
                    " early for it; leave it out"
                )
            before = block

    def _check_routes(self) -> None:
        backward_routes = sum(stage.start == 0 for stage in self.backward_stages)
        if backward_routes != self.num_routes:
            raise ConfigError(
                f"plan: forward stages have {self.num_routes} routes, backward stages"
                f" {backward_routes}; both need the same number"
            )
        if self.routes and len(self.routes) != self.num_microbatches:
            raise ConfigError(
                f"plan: routes has {len(self.routes)} entries for {self.num_microbatches}"
                " micro-batches"
            )
        for micro_batch, route in enumerate(self.routes):
            if not 0 <= route < self.num_routes:
                raise ConfigError(
                    f"plan: routes[{micro_batch}] is {route}; there are {self.num_routes} routes"
                )

    def to_json(self) -> str:
        """Serializes the plan; :meth:`from_json` returns an equal plan. Instructions are in their
        text form.
        """
        data: dict[str, Any] = {
            "format": PLAN_FORMAT,
            "scheme": self.scheme,
            "num_devices": self.num_devices,
            "num_microbatches": self.num_microbatches,
            "forward_stages": [[s.start, s.stop, s.device] for s in self.forward_stages],
            "backward_stages": [[s.start, s.stop, s.device] for s in self.backward_stages],
            "programs": [[format_instruction(i) for i in program] for program in self.programs],
            "evaluation": [[format_instruction(i) for i in program] for program in self.evaluation],
        }
        defaults = (
            ("routes", ()),
            ("settled_early", ()),
            ("weight_buffers", 2),
            *((name, False) for name in _FLAGS),
        )
        for name, default in defaults:
            if getattr(self, name) != default:
                data[name] = getattr(self, name)
        return json.dumps(data, sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Parses a plan and checks its shape.

        Raises:
            ProtocolError: the text is no plan of this format; names the place.
        """
        try:
            data = json.loads(text, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"plan: not valid JSON: {error}") from error
        if not isinstance(data, dict):
            raise ProtocolError(f"plan: expected a JSON object, got {type(data).__name__}")
        if data.get("format") != PLAN_FORMAT:
            raise ProtocolError(
                f"plan: format is {data.get('format')!r}, this version reads {PLAN_FORMAT}"
            )
        plan = cls(
            scheme=_string(data, "scheme"),
            num_devices=_index(data.get("num_devices"), "num_devices"),
            num_microbatches=_index(data.get("num_microbatches"), "num_microbatches"),
            forward_stages=_stages(data, "forward_stages"),
            backward_stages=_stages(data, "backward_stages"),
            programs=_programs(data, "programs"),
            evaluation=_programs(data, "evaluation"),
            weight_buffers=_index(data.get("weight_buffers", 2), "weight_buffers"),
            routes=_indices(data, "routes"),
            settled_early=_indices(data, "settled_early"),
            **{name: _flag(data, name) for name in _FLAGS},
        )
        plan.validate_shape()
        return plan

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the serialized plan."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _stage_of(stages: tuple[StageRange, ...], block: int) -> int:
    for index, stage in enumerate(stages):
        if block in stage.blocks:
            return index
    raise IndexError(f"no stage contains block {block}")


def _check_ranges(name: str, stages: tuple[StageRange, ...], num_devices: int) -> None:
    if not stages:
        raise ConfigError(f"plan: {name} stages: there are none")
    num_blocks = stages[-1].stop
    expected = 0
    for index, stage in enumerate(stages):
        if stage.start != expected or stage.stop <= stage.start:
            raise ConfigError(
                f"plan: {name} stage {index} covers blocks [{stage.start}, {stage.stop});"
                f" expected a non-empty range that starts at {expected}"
            )
        if not 0 <= stage.device < num_devices:
            raise ConfigError(
                f"plan: {name} stage {index} is on device {stage.device};"
                f" there are {num_devices} devices"
            )
        expected = 0 if stage.stop == num_blocks else stage.stop


def _string(data: dict[str, Any], key: str) -> str:
    value = data.get(key)
    if not isinstance(value, str):
        raise ProtocolError(f"plan: {key} is {_clip(value)}, expected a string")
    return value


def _flag(data: dict[str, Any], key: str) -> bool:
    value = data.get(key, False)
    if not isinstance(value, bool):
        raise ProtocolError(f"plan: {key} is {_clip(value)}, expected true or false")
    return value


def _index(value: Any, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_INDEX:
        raise ProtocolError(
            f"plan: {place} is {_clip(value)}, expected a number from 0 to {MAX_INDEX}"
        )
    return value


def _indices(data: dict[str, Any], key: str) -> tuple[int, ...]:
    return tuple(_index(value, key) for value in _list(data.get(key, []), key))


def _list(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProtocolError(f"plan: {place} is {_clip(value)}, expected a list")
    return value


def _stages(data: dict[str, Any], key: str) -> tuple[StageRange, ...]:
    stages: list[StageRange] = []
    for position, entry in enumerate(_list(data.get(key), key)):
        place = f"{key}[{position}]"
        numbers = [_index(number, place) for number in _list(entry, place)]
        if len(numbers) != 3:
            raise ProtocolError(f"plan: {place} is {_clip(entry)}, expected [start, stop, device]")
        stages.append(StageRange(start=numbers[0], stop=numbers[1], device=numbers[2]))
    return tuple(stages)


def _programs(data: dict[str, Any], key: str) -> tuple[Program, ...]:
    programs = enumerate(_list(data.get(key), key))
    return tuple(_program(entry, f"{key}[{device}]") for device, entry in programs)


def _program(value: Any, place: str) -> Program:
    instructions: list[Instruction] = []
    for position, text in enumerate(_list(value, place)):
        if not isinstance(text, str):
            raise ProtocolError(f"plan: {place}[{position}] is {_clip(text)}, expected a string")
        try:
            instructions.append(parse_instruction(text))
        except ProtocolError as error:
            raise ProtocolError(f"plan: {place}[{position}]: {error}") from error
    return tuple(instructions)


def _clip(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
