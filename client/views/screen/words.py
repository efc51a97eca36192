"""Texts of the screen: phases of a run, activities of members, and a glossary."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from penstock.client.views.run_view import ENDED_PHASES
from penstock.host.errors import ProtocolError
from penstock.protocol.generated import scheduler_pb2 as pb
from penstock.protocol.plan.instructions import Opcode, by_opcode, parse_instruction

PHASES = MappingProxyType(
    {
        "starting": "starting its processes",
        "gathering": "waiting for its processes",
        "fencing": "making sure that lost processes are dead",
        "draining": "dropping old work",
        "restoring": "filling shared memory",
        "beginning": "getting ready",
        "running": "training",
        "deciding": "training",
        "amending": "training: clipping gradients",
        "mirroring": "training: waiting for replicas",
        "settling": "saving: taking in the last step",
        "saving": "saving",
        "evaluating": "evaluating on held-out data",
        "paused": "paused",
        "stopping": "stopping",
        "done": "done",
        "failed": "failed",
        "ending": "ending",
        "no_answer": "no answer from the scheduler",
    }
)
"""Texts of phases."""

GLOSSARY = MappingProxyType(
    {
        "step": "one update of the model from one global batch. A step counts from its commit on.",
        "clipped": "the norm of the gradients was over train.clip_grad_norm, so the step was scaled"
        " down to that norm.",
        "skip": "gradients were infinite or undefined: no step is taken, the batch is left out.",
        "commit": "the moment a step counts: it is in the journal, and no crash undoes it.",
        "optimizer tail": "time from the last gradient to the commit: the part of the optimizer's"
        " work that nothing hides.",
        "bubble": "time in which a device has nothing to compute, because what it needs is not"
        " there yet.",
        "processes": "worker.0 is the process that computes on device 0. memoryd.a has the model's"
        " state in shared memory on node a, optimizerd.a updates the state, node.a starts both.",
        "settle": "to take a committed step into the optimizer's state, while others compute.",
        "preview": "to compute the next weights without touching the optimizer's state.",
        "advance": "to settle the last step and preview the next one in one sweep over memory.",
        "stage": "a range of the model's layers that one device computes.",
        "micro-batch": "a part of the global batch that goes through the pipeline as one.",
        "membership": "a time with the same processes. A new membership begins after each"
        " recovery.",
        "epoch": "a pass over the training data.",
        "recompute": "activations were dropped to save memory, and are computed again.",
        "loss scale": "gradients are multiplied by it so that 16 bits hold them; halved when they"
        " overflow.",
    }
)
"""Terms of Penstock, each with an explanation."""


class Doing(Enum):
    """Kinds of activities of a member."""

    WORKING = "working"
    WAITING = "waiting"
    NOTHING = "nothing"
    AWAY = "away"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The activity of a member, with a text."""

    doing: Doing
    text: str


_INSTRUCTIONS = by_opcode(
    "words",
    {
        Opcode.FORWARD: "computes forward of stage {stage}",
        Opcode.RECOMPUTE: "recomputes stage {stage}",
        Opcode.BACKWARD: "computes backward of stage {stage}",
        Opcode.BACKWARD_INPUT: "computes backward of stage {stage} (inputs)",
        Opcode.BACKWARD_WEIGHT: "computes backward of stage {stage} (weights)",
        Opcode.SEND_ACTIVATION: "sends activations of stage {stage} to device {peer}",
        Opcode.RECV_ACTIVATION: "receives activations of stage {stage} from device {peer}",
        Opcode.SEND_GRADIENT: "sends gradients of stage {stage} to device {peer}",
        Opcode.RECV_GRADIENT: "receives gradients of stage {stage} from device {peer}",
        Opcode.SEND_CHECKPOINT: "sends the input of stage {stage} to device {peer}",
        Opcode.RECV_CHECKPOINT: "receives the input of stage {stage} from device {peer}",
        Opcode.FETCH_WEIGHTS: "loads weights of stage {stage}",
        Opcode.RELEASE_WEIGHTS: "frees weights of stage {stage}",
        Opcode.OFFLOAD_GRADIENTS: "hands gradients of stage {stage} to the optimizer",
        Opcode.SWAP_OUT: "moves activations of stage {stage} to the host",
        Opcode.SWAP_IN: "brings activations of stage {stage} back",
        Opcode.UPDATE: "updates block {block} on the device",
        Opcode.REDUCE_GRADIENTS: "adds up gradients of stage {stage}",
    },
)
_MICRO_BATCH = ", micro-batch {micro_batch}"

_SWEEPS = MappingProxyType(
    {
        "preview": "next weights of block {block} (preview)",
        "settle": "last step into the state of block {block} (settle)",
        "advance": "state and next weights of block {block} (advance)",
        "hold": "updates block {block}",
        "finish": "repairs block {block} after a crash",
        "invert": "takes the step back from block {block}",
        "gradient_status": "checks gradients of block {block}",
        "cast": "writes weights of block {block}",
    }
)
_ATTEMPT = re.compile(r"(?P<what>.+) of (?:train|eval) \d+")
_SWEEP = re.compile(r"(?P<name>\w+) of block (?P<block>\d+)")
_KEY = re.compile(r".*?(?P<kind>activation|gradient|checkpoint) of stage (?P<stage>\d+).*", re.I)
_FROM = re.compile(r".* from worker\.(?P<peer>\d+)")


def lane(member: pb.MemberStatus, phase: str, epoch: int) -> Lane:
    """Returns the activity of a member. ``epoch`` is 0 until all processes were ready once."""
    if member.state in ("missing", "fencing"):
        if phase in ENDED_PHASES:
            return Lane(doing=Doing.NOTHING, text="has ended")
        if not epoch and not member.restarts:
            return Lane(doing=Doing.NOTHING, text="starting")
        return Lane(doing=Doing.AWAY, text="is lost: another process takes its place")
    doing, role = member.doing, member.member.partition(".")[0]
    if not doing.activity:
        return Lane(doing=Doing.NOTHING, text=_idle(role, phase))
    words = optimizer_words if role == "optimizerd" else worker_words
    kind = Doing.WAITING if doing.waiting else Doing.WORKING
    if doing.activity == "waiting for gradients":
        return Lane(doing=kind, text="waits for gradients" if phase == "running" else "waits")
    return Lane(doing=kind, text=words(doing.activity))


def _idle(role: str, phase: str) -> str:
    if role == "worker" and phase in ("running", "deciding", "amending"):
        return "has done its part of the step; waits for the others and the optimizer"
    return {"paused": "waits: the run is paused", "saving": "waits for the save"}.get(
        phase, "nothing to do now"
    )


def worker_words(activity: str) -> str:
    """Returns the text of a worker's activity from its heartbeat; unknown ones unchanged."""
    what, _, awaited = activity.partition(", waiting for ")
    match = _ATTEMPT.fullmatch(what)
    what = match["what"] if match else what
    try:
        instruction = parse_instruction(what)
    except ProtocolError:
        return f"waits for {awaited}" if awaited else what
    fields: dict[str, object] = {
        field.name: getattr(instruction, field.name) for field in dataclasses.fields(instruction)
    }
    text = _INSTRUCTIONS[instruction.opcode].format_map(_Known(fields))
    if awaited:
        return _waits(awaited, text)
    return text + (_MICRO_BATCH.format_map(fields) if "micro_batch" in fields else "")


class _Known(dict[str, object]):
    """Values by name, with a question mark for missing names."""

    def __missing__(self, key: str) -> str:
        return "?"


def _waits(awaited: str, text: str) -> str:
    """Returns the text of a wait for ``awaited``; ``text`` describes the waiting instruction."""
    peer = _FROM.fullmatch(awaited)
    source = f" from device {peer['peer']}" if peer else ""
    key = _KEY.fullmatch(awaited)
    if key:
        what = {"activation": "activations", "gradient": "gradients"}.get(
            key["kind"].lower(), "the input"
        )
        return f"waits for {what} of stage {key['stage']}{source}"
    if awaited.startswith("weights of version"):
        return f"waits for weights of {text.partition(' of ')[2] or 'its stage'}"
    return f"waits for {awaited}"


def optimizer_words(activity: str) -> str:
    """Returns the text of an optimizerd's activity from its heartbeat."""
    sweep = _SWEEP.fullmatch(activity)
    if sweep and sweep["name"] in _SWEEPS:
        return _SWEEPS[sweep["name"]].format(block=sweep["block"])
    return activity
