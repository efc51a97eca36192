"""Events of a run as texts: from lines of metrics, and from the scheduler's status."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import PurePath

from penstock.client.views.display import named_set
from penstock.client.views.run_view import Metrics
from penstock.daemons.scheduler.machine.history import Kind
from penstock.protocol.generated import scheduler_pb2 as pb

KEPT = 200


class Tone(Enum):
    """Importance of an event."""

    PLAIN = "plain"
    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event. ``at_s`` is its Unix time, or None if only the step is known.

    A later event with the same ``key`` replaces the event. ``times`` counts repetitions; the first
    was at step ``since`` and at ``at_s``.
    """

    at_s: float | None
    step: int
    text: str
    tone: Tone = Tone.PLAIN
    key: str = ""
    times: int = 1
    since: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Settings that event texts mention. ``clip`` is the limit of the gradient norm, or None.

    ``arithmetic``: True with ``optimizer.rollback: arithmetic``.
    """

    clip: float | None = None
    arithmetic: bool = False


class Events:
    """The last :data:`KEPT` events of a run, oldest first; events without a time come first."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._kept: deque[RunEvent] = deque(maxlen=KEPT)
        self._scale: float | None = None
        self._scheduler = 0

    def __iter__(self) -> Iterator[RunEvent]:
        return iter(sorted(self._kept, key=lambda event: event.at_s or 0.0))

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, event: RunEvent) -> None:
        """Adds an event, or replaces the event with the same key."""
        if event.key:
            for index, known in enumerate(self._kept):
                if known.key == event.key:
                    self._kept[index] = replace(event, at_s=known.at_s)
                    return
        self._kept.append(event)

    def add_line(self, line: Metrics, now_s: float | None) -> None:
        """Adds the events of a line of metrics. ``now_s`` is None for an old line."""
        if line["phase"] == "eval":
            self.add(_evaluated(line, now_s))
            return
        before, self._scale = self._scale, _number(line.get("loss_scale"))
        decision = line.get("decision")
        if decision == "skip":
            self._repeat("skip", line, now_s, self._skipped(line))
        elif decision == "amend":
            self._repeat("amend", line, now_s, self._amended(line))
        if before is not None and self._scale is not None and self._scale > before:
            text = f"loss scale {before:g} -> {self._scale:g}: no overflow for many steps"
            self.add(RunEvent(at_s=now_s, step=line["step"], text=text))

    def add_status(self, status: pb.StatusReply, now_s: float) -> None:
        """Adds the events in a status of the scheduler."""
        mine = next((m.pid for m in status.members if m.member == "schedulerd"), 0)
        if self._scheduler and mine != self._scheduler:
            text = "another scheduler has taken over from the journal: nothing is lost"
            self.add(RunEvent(at_s=now_s, step=status.version, text=text, tone=Tone.NOTE))
        self._scheduler = mine or self._scheduler
        for happening in status.happenings:
            text, tone = _text_and_tone(happening)
            self.add(
                RunEvent(
                    at_s=now_s - happening.age_seconds,
                    step=happening.step,
                    text=text,
                    tone=tone,
                    key=f"{mine} {happening.number}",
                )
            )

    def _repeat(self, what: str, line: Metrics, now_s: float | None, text: str) -> None:
        """Adds an event, or counts it as a repetition of the last one."""
        last = self._kept[-1] if self._kept else None
        if last is not None and last.key == what:
            self._kept[-1] = replace(last, step=line["step"], times=last.times + 1, text=text)
            return
        if last is not None:  # earlier repetitions stay as a separate event
            self._close(what)
        exact = what == "amend" and not self._limits.arithmetic
        tone = Tone.GOOD if exact else Tone.BAD if what == "skip" else Tone.NOTE
        step = line["step"]
        event = RunEvent(at_s=now_s, step=step, text=text, tone=tone, key=what, since=step)
        self._kept.append(event)

    def _close(self, what: str) -> None:
        for index, known in enumerate(self._kept):
            if known.key == what:
                self._kept[index] = replace(known, key="")

    def _amended(self, line: Metrics) -> str:
        norm, limit = _number(line.get("grad_norm")), self._limits.clip
        clipped = f"gradients clipped: norm {_text(norm)}"
        clipped += "" if limit is None else f", limit {limit:g}"
        if self._limits.arithmetic:
            return f"{clipped}; the step was taken back and made again"
        return clipped

    def _skipped(self, line: Metrics) -> str:
        scale = _number(line.get("loss_scale"))
        lower = f"; the loss scale was {scale:g}" if scale not in (None, 1.0) else ""
        return f"gradients infinite or undefined: no step, the batch is left out{lower}"


def _evaluated(line: Metrics, now_s: float | None) -> RunEvent:
    loss, perplexity = _number(line.get("loss")), _number(line.get("perplexity"))
    accuracy, of_pairs = (_number(line.get(f"{kind}_accuracy")) for kind in ("token", "pair"))
    means = [
        *([] if perplexity is None else [f"perplexity {perplexity:,.1f}"]),
        *([] if accuracy is None else [f"token accuracy {accuracy:.1%}"]),
        *([] if of_pairs is None else [f"pair accuracy {of_pairs:.1%}"]),
    ]
    more = f" ({', '.join(means)})" if means else ""
    text = f"evaluation{named_set(line)} after step {line['step']}: loss {_text(loss, '.4f')}{more}"
    return RunEvent(at_s=now_s, step=line["step"], text=text, tone=Tone.GOOD)


def _text_and_tone(happening: pb.Happening) -> tuple[str, Tone]:
    """Returns text and tone of a happening."""
    took = f"; {happening.seconds:.1f} s" if happening.seconds else ""
    match happening.kind:
        case Kind.BEGAN:
            after = f"goes on after step {happening.step}" if happening.step else "begins"
            return f"all processes are there: training {after}", Tone.GOOD
        case Kind.BROKEN if happening.steps_lost:
            return (
                f"{happening.text}: memory was filled from the saved state of step"
                f" {happening.step}, {happening.steps_lost} steps are computed again{took}"
            ), Tone.BAD
        case Kind.BROKEN:
            lost = ", nothing is lost" if happening.seconds else " once all processes are ready"
            return f"{happening.text}: all go back to step {happening.step}{lost}{took}", Tone.BAD
        case Kind.SAVED:
            place = PurePath(happening.text).name or "the run's directory"
            return f"step {happening.step} is saved in {place}{took}", Tone.GOOD
        case Kind.SAVE_FAILED:
            text = f"saving step {happening.step} failed: {happening.text}; training goes on"
            return text, Tone.BAD
        case Kind.PAUSED:
            return "paused on request, after the step under way", Tone.NOTE
        case Kind.RESUMED:
            return "goes on after a pause", Tone.NOTE
        case Kind.STOPPING:
            return "stopping on request: the step ends, then the state is saved", Tone.NOTE
    return f"{happening.kind} {happening.text}".strip(), Tone.PLAIN


def texts_of(events: Iterable[RunEvent]) -> list[str]:
    """Returns the text of each event with its number of repetitions."""
    return [
        f"{event.text} ({event.times} times since step {event.since})"
        if event.times > 1
        else event.text
        for event in events
    ]


def _number(value: object) -> float | None:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if known else None  # type: ignore[arg-type]


def _text(value: float | None, form: str = ".3g") -> str:
    return "not finite" if value is None else format(value, form)
