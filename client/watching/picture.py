"""What a training looks like: one line of figures, the live picture, the table of processes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.client.watching.snapshots import Metrics, RunView, numbers
from penstock.daemons.node.preparing.capacity import human_bytes
from penstock.protocol.run.names import SCHEDULERD

_STATE_STYLE = {"ready": "green", "joining": "yellow", "missing": "red", "fencing": "red"}
_DECISIONS = {
    "amend": "clipped (amend)",
    "skip": "skipped: gradients are not finite",
    "hold": "waited for the norm (hold)",
}
"""Decisions beside the ordinary one, in words."""

_PHASES = {"no_answer": "no answer from the scheduler"}
_KEPT = 0.95
"""Share of a smoothed loss that one more step leaves as it was: a memory of some 20 steps."""


@dataclass(slots=True)
class Smoothed:
    """A running mean in which older values fade; from the first value on unbiased, as Adam's."""

    _sum: float = 0.0
    _weight: float = 0.0

    def add(self, value: object) -> None:
        """One more value; None (a skipped step) and what is no finite number change nothing."""
        for number in numbers([value]):
            self._sum = _KEPT * self._sum + (1.0 - _KEPT) * number
            self._weight = _KEPT * self._weight + (1.0 - _KEPT)

    @property
    def value(self) -> float | None:
        """The mean; None before the first value."""
        return self._sum / self._weight if self._weight else None


def describe(entry: Metrics, view: RunView | None) -> str:
    """One line of metrics for people."""
    if entry["phase"] == "eval":
        return f"step {entry['step']}  evaluation loss {_number(entry.get('loss'), '.4f')}"
    steps = f"/{view.steps}" if view is not None else ""
    parts = [
        f"step {entry['step']}{steps}",
        f"loss {_number(entry.get('loss'), '.4f')}",
        f"{_number(entry.get('tokens_per_second'), ',.0f')} tokens/s",
        f"bubble {_number(entry.get('bubble_ratio'), '.0%')}",
        f"optimizer tail {_milliseconds(entry.get('optimizer_tail_seconds'))}",
    ]
    parts += _decision(entry)
    if view is not None and view.status is not None and view.status.eta_seconds >= 0:
        parts.append(f"ETA {duration(view.status.eta_seconds)}")
    return "  ".join(parts)


def render(view: RunView, last: Metrics | None, smoothed_loss: float | None) -> RenderableType:
    """The live picture: progress, figures of the last step, processes in short."""
    status = view.status
    step = status.version if status is not None else (last["step"] if last else 0)
    head = Table.grid(padding=(0, 2))
    eta = duration(status.eta_seconds) if status is not None and status.eta_seconds >= 0 else "-"
    head.add_row(
        Text(f"step {step}/{view.steps}", style="bold"),
        ProgressBar(total=max(1, view.steps), completed=step, width=40),
        f"ETA {eta}",
        Text(_PHASES.get(view.phase, view.phase), style="cyan"),
    )
    parts: list[RenderableType] = [head]
    if last is not None:
        parts += [Text(_learning(last, smoothed_loss)), Text(_speed(last, view))]
    if status is not None:
        parts.append(processes(status))
        if status.message:
            parts.append(Text(status.message, style="yellow"))
    return Group(*parts)


def processes(status: Any) -> Text:
    """How many processes there are, and which need a look; pids and ports: ``penstock status``."""
    states = Counter(member.state for member in status.members)
    text = Text(f"{len(status.members)} processes")
    for state, count in states.items():
        style = _STATE_STYLE.get(state, "")
        names = [member.member for member in status.members if member.state == state]
        which = "" if state == "ready" else f" ({', '.join(names)})"
        text.append(f"  {count} {state}{which}", style=style)
    again = [f"{m.member} {m.restarts}x" for m in status.members if m.restarts]
    return text.append(f"  restarted: {', '.join(again)}", style="yellow") if again else text


def _learning(entry: Metrics, smoothed_loss: float | None) -> str:
    """What the last step learned."""
    parts = [
        f"loss {_number(entry.get('loss'), '.4f')}",
        f"smoothed {_number(smoothed_loss, '.4f')}",
        f"learning rate {_number(entry.get('lr'), '.2e')}",
        f"gradient norm {_number(entry.get('grad_norm'), '.3g')}",
        *_decision(entry),
    ]
    return "  ".join(parts)


def _speed(entry: Metrics, view: RunView) -> str:
    """How fast it went, and the memory it took."""
    parts = [
        f"{_number(entry.get('tokens_per_second'), ',.0f')} tokens/s",
        f"bubble {_number(entry.get('bubble_ratio'), '.0%')}",
        f"optimizer tail {_milliseconds(entry.get('optimizer_tail_seconds'))}",
    ]
    if view.shared_bytes is not None:
        parts.append(f"shared memory {human_bytes(view.shared_bytes)}")
    for peak in numbers([entry.get("peak_device_bytes")]):
        parts.append(f"device at most {human_bytes(peak)}")
    return "  ".join(parts)


def member_table(status: Any) -> Table:
    """One row a process: state, pid, restarts, silence, metrics port."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for title in ("process", "state", "pid", "restarts", "silent", "metrics"):
        table.add_column(title, style=None, header_style="dim")
    for member in status.members:
        table.add_row(
            member.member,
            Text(member.state, style=_STATE_STYLE.get(member.state, "")),
            str(member.pid or "-"),
            "-" if member.member == SCHEDULERD else str(member.restarts),  # its node counts them
            f"{member.silent_seconds:.1f} s",
            f":{member.metrics_port}" if member.metrics_port else "-",
        )
    return table


def duration(seconds: float) -> str:
    """``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, (int, float)) else "-"


def _milliseconds(value: Any) -> str:
    return f"{1000 * value:.0f} ms" if isinstance(value, (int, float)) else "-"


def _decision(entry: Metrics) -> list[str]:
    """What became of the step, where it was not simply committed."""
    decision = entry.get("decision")
    return [] if decision in (None, "commit") else [_DECISIONS.get(str(decision), str(decision))]
