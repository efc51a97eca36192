"""The panels of the screen, which draw the model as lines of text.

A panel has a least and a largest number of lines. It draws at most the number of lines and columns
that the layout assigns.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import MappingProxyType

from rich.text import Text

from penstock.client.views.display import duration, epochs_of_run
from penstock.client.views.run_view import ABSENCE_S, numbers
from penstock.client.views.screen.curve import draw
from penstock.client.views.screen.events import Tone, texts_of
from penstock.client.views.screen.model import Model
from penstock.client.views.screen.resources import Amount, fullest, short_bytes
from penstock.client.views.screen.words import GLOSSARY, PHASES, Doing


@dataclass(frozen=True, slots=True, kw_only=True)
class Glyphs:
    """Characters that a terminal may not have."""

    rule: str
    full: str
    empty: str
    doing: MappingProxyType[Doing, str]
    parts: str
    dot: str
    more: str
    ascii_only: bool


UNICODE = Glyphs(
    rule="─",
    full="█",
    empty="░",
    doing=MappingProxyType(
        {Doing.WORKING: "█", Doing.WAITING: "░", Doing.NOTHING: "·", Doing.AWAY: "✕"}
    ),
    parts="█▓▒░█▓▒░█",
    dot="·",
    more="…",
    ascii_only=False,
)
ASCII = Glyphs(
    rule="-",
    full="#",
    empty=".",
    doing=MappingProxyType(
        {Doing.WORKING: "#", Doing.WAITING: "-", Doing.NOTHING: ".", Doing.AWAY: "x"}
    ),
    parts="#=+-:o*%~",
    dot="-",
    more="~",
    ascii_only=True,
)

DOING_STYLES = MappingProxyType(
    {
        Doing.WORKING: "green",
        Doing.WAITING: "yellow",
        Doing.NOTHING: "dim",
        Doing.AWAY: "bold red",
    }
)
TONES = MappingProxyType(
    {Tone.PLAIN: "", Tone.GOOD: "green", Tone.NOTE: "yellow", Tone.BAD: "bold red"}
)
PART_STYLES = ("green", "yellow", "magenta", "blue", "cyan", "red", "green", "yellow", "magenta")
_PHASE_STYLES = MappingProxyType(
    {"running": "green", "deciding": "green", "done": "green", "failed": "bold red"}
)

Draw = Callable[[Model, Glyphs, int, int], list[Text]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel. ``title`` stands on the rule above; ``least`` and ``most`` are its numbers of lines.

    ``flexible`` is its weight for spare lines, 0 for none.
    """

    title: Callable[[Model, Glyphs], str]
    least: Callable[[Model], int]
    most: Callable[[Model, int], int]
    draw: Draw
    flexible: int = 0


def joined(*parts: tuple[str, str] | str) -> Text:
    """Returns a line of parts with a style each, without control characters."""
    text = Text(no_wrap=True, end="")
    for part in parts:
        words, style = part if isinstance(part, tuple) else (part, "")
        clean = words if words.isprintable() else _printable(words)
        text.append(clean, style=style)
    return text


def _printable(words: str) -> str:
    return "".join(c if c.isprintable() else " " for c in words)


def fitted(text: Text, width: int, glyphs: Glyphs) -> Text:
    """Returns the line, cut or padded to ``width`` cells."""
    if text.cell_len > width:
        text = text.copy()
        text.truncate(max(0, width - 1))
        text.append(glyphs.more)
    text = text.copy()
    text.pad_right(width - text.cell_len)
    return text


def wrapped(words: str, width: int, style: str = "") -> list[Text]:
    """Returns the words, wrapped to lines."""
    lines, line = [], ""
    for word in words.split():
        if line and len(line) + 1 + len(word) > width:
            lines.append(joined((line, style)))
            line = word
        else:
            line = f"{line} {word}".strip()
    return [*lines, joined((line, style))] if line else lines


# ---- head ----


def head(model: Model, glyphs: Glyphs, width: int) -> list[Text]:
    """Returns the first lines of every screen: name and phase, progress, figures of the step."""
    return [_name(model, width), _progress(model, glyphs, width), _figures(model, width)]


def _name(model: Model, width: int) -> Text:
    status, phase = model.status, model.phase
    words = PHASES.get(phase, phase)
    if status.pausing and phase in ("running", "deciding", "amending"):
        words = "pausing after this step"
    if phase == "no_answer" and model.view is not None:
        words += f" for {model.view.silent_s:.0f} s; what you see is older"
    elif status.phase_seconds >= ABSENCE_S and phase not in ("running", "deciding"):
        words += f" for {duration(status.phase_seconds)}"
    style = _PHASE_STYLES.get(phase, "yellow")
    left = joined((status.run_name or "penstock", "bold"), "  ", (words, f"bold {style}"))
    if status.message and phase != "no_answer":
        left.append_text(joined(": ", (status.message, "yellow")))
    right = _machinery(model)
    if left.cell_len + len(right) + 2 <= width:
        left.pad_right(width - left.cell_len - len(right))
        left.append_text(joined((right, "dim")))
    return left


def _machinery(model: Model) -> str:
    """Returns scheme, devices and membership of the run."""
    workers = sum(m.member.startswith("worker.") for m in model.status.members)
    if not workers:
        return ""
    devices = f"{workers} device{'s' if workers > 1 else ''}"
    return f"{model.status.plan_scheme} on {devices}, membership {model.status.epoch}"


def _progress(model: Model, glyphs: Glyphs, width: int) -> Text:
    status, steps = model.status, max(1, model.view.steps if model.view else 1)
    step = min(status.version, steps)
    passes = epochs_of_run(status)
    left = f"step {status.version}/{steps} " + (f" epoch {passes} " if passes else "")
    eta = f"done in {duration(status.eta_seconds)}" if status.eta_seconds >= 0 else "done in ?"
    if step >= steps:
        eta = "all steps done"
    right = f" {100 * step // steps}%  {eta}"
    room = max(0, width - len(left) - len(right))
    full = room * step // steps
    return joined(
        (left, "bold"), (glyphs.full * full, "cyan"), (glyphs.empty * (room - full), "dim"), right
    )


def _figures(model: Model, width: int) -> Text:
    last = model.last
    if last is None:
        return joined(("no step has ended yet", "dim"))
    clip = model.facts.limits.clip
    limit = "" if clip is None else f" (limit {clip:g})"
    pairs = [
        ("loss", _number(last.get("loss"), ".4f")),
        ("smoothed", _number(model.smoothed.value, ".4f")),
        ("", f"{_number(last.get('tokens_per_second'), ',.0f')} tokens/s"),
        ("norm", f"{_number(last.get('grad_norm'), '.3g')}{limit}"),
        ("learning rate", _number(last.get("lr"), ".2e")),
        ("step takes", _milliseconds(last.get("seconds"))),
        ("loss scale", _number(last.get("loss_scale"), "g")),
    ]
    if last.get("loss_scale") in (None, 1, 1.0):
        pairs.pop()
    line = Text(no_wrap=True, end="")
    for name, value in pairs:
        part = joined(("  " if line else ""), (f"{name} " if name else "", "dim"), value)
        if line.cell_len + part.cell_len > width:
            break
        line.append_text(part)
    return line


# ---- loss ----


def _loss(model: Model, glyphs: Glyphs, width: int, rows: int) -> list[Text]:
    if not model.losses.points:
        return [joined(("the curve begins with the first step", "dim"))]
    marks = model.evaluations.points
    cells = draw(model.losses.points, marks, width, rows, ascii_only=glyphs.ascii_only)
    styles = {"curve": "cyan", "mark": "bold yellow", "axis": "dim"}
    runs = (groupby(line, key=lambda cell: cell.role) for line in cells)
    return [
        joined(*(("".join(cell.text for cell in same), styles[role]) for role, same in line))
        for line in runs
    ]


def _loss_title(model: Model, glyphs: Glyphs) -> str:
    mark = "o" if glyphs.ascii_only else "●"
    return f"loss ({mark} on held-out data)" if model.evaluations.points else "loss"


# ---- where a step goes ----


def _division(model: Model, glyphs: Glyphs, width: int, rows: int) -> list[Text]:
    division = model.division
    if division is None or division.seconds <= 0:
        return [joined(("known when a step has ended", "dim"))]
    named = [(name, part / division.seconds) for name, part in division.parts.items()]
    named = [(name, share) for name, share in named if share >= 0.005]
    bar, legend = Text(no_wrap=True, end=""), list[Text]()
    left = width
    for index, (name, share) in enumerate(named):
        style, glyph = PART_STYLES[index], glyphs.parts[index]
        cells = left if index == len(named) - 1 else min(left, round(share * width))
        bar.append(glyph * cells, style=style)
        left -= cells
        entry = joined((glyph, style), f" {name} ", (f"{share:.0%}", "bold"))
        legend.append(entry)
    return [bar, *_flow(legend, width), *_hints(model, width)][:rows]


def _hints(model: Model, width: int) -> list[Text]:
    """Returns explanations of the division, or the largest savings."""
    division = model.division
    assert division is not None
    if division.critical:
        best = sorted(division.savings.items(), key=lambda item: -item[1])[:2]
        savings = [f"{_milliseconds(seconds)} without '{name}'" for name, seconds in best]
        text = (
            f"resources that attempt {division.attempt} waited for, one after the other (its"
            f" critical path). Simulated, a step would be shorter by {' and by '.join(savings)}."
        )
        if not savings:
            text = text.partition(" Simulated")[0]
        return wrapped(text, width, "dim")
    words = [w for w in ("bubble", "optimizer tail") if w in division.parts]
    lines: list[Text] = []
    for word in words:
        lines += wrapped(f"{word}: {GLOSSARY[word]}", width, "dim")
    return lines


def _division_title(model: Model, glyphs: Glyphs) -> str:
    division = model.division
    if division is None:
        return "where a step goes"
    means = "" if division.critical else " on average"
    return f"where a step goes ({_milliseconds(division.seconds)}{means})"


# ---- lanes ----


def _lanes(model: Model, glyphs: Glyphs, width: int, rows: int) -> list[Text]:
    names = list(model.lanes)
    if not names:
        return [joined(("no process has joined yet", "dim"))]
    if len(names) > rows:
        names.sort(key=lambda name: _urgency(model, name))
        shown = names[: rows - 1]
        return [
            *(
                _lane(model, name, glyphs, width)
                for name in sorted(shown, key=list(model.lanes).index)
            ),
            _others(model, names[rows - 1 :]),
        ]
    return [_lane(model, name, glyphs, width) for name in names]


def _urgency(model: Model, name: str) -> tuple[bool, int]:
    """Orders members: lost, then waiting; devices before optimizers."""
    order = (Doing.AWAY, Doing.WAITING, Doing.WORKING, Doing.NOTHING)
    doing = model.lanes[name].doing
    return doing is not Doing.AWAY and name.startswith("optimizerd"), order.index(doing)


def _others(model: Model, names: Sequence[str]) -> Text:
    count = Counter(model.lanes[name].doing for name in names)
    counts = ", ".join(f"{number} {doing.value}" for doing, number in count.items())
    return joined((f"and {len(names)} others: {counts}", "dim"))


def _lane(model: Model, name: str, glyphs: Glyphs, width: int) -> Text:
    """Returns the line of a member: name, busy share of the last step, last samples, activity."""
    now = model.lanes[name]
    role, _, number = name.partition(".")
    label = f"device {number}" if role == "worker" else f"optimizer {number}"
    member = next((m for m in model.status.members if m.member == name), None)
    busy = ""
    if role == "worker" and member is not None and member.report.wall_seconds > 0:
        share = min(1.0, member.report.busy_seconds / member.report.wall_seconds)
        busy = f"{share:.0%}"
    room = max(6, min(60, (width - 68) // 2 + 10))
    samples = list(model.samples.get(name, ()))[-room:]
    text = joined(f"{label[:14]:<12} ", (f"{busy:>4} ", "dim"))
    for doing, same in groupby(samples):
        text.append(glyphs.doing[doing] * len(list(same)), style=DOING_STYLES[doing])
    text.append(" " * (room - len(samples) + 1))
    return text.append_text(joined((now.text, DOING_STYLES[now.doing])))


def _lanes_title(model: Model, glyphs: Glyphs) -> str:
    marks = glyphs.doing
    return (
        f"work of each member: busy in the last step, lately ({marks[Doing.WORKING]} works"
        f" {marks[Doing.WAITING]} waits), now"
    )


# ---- memory ----


def _memory(model: Model, glyphs: Glyphs, width: int, rows: int) -> list[Text]:
    amounts = model.amounts
    if not amounts:
        return [joined(("unknown for a run on another machine", "dim"))]
    columns = max(1, width // 38)
    if -(-len(amounts) // columns) > rows:
        amounts = fullest(amounts)
    if -(-len(amounts) // columns) > rows:
        return _flow([_share(amount) for amount in amounts], width)[:rows]
    columns = -(-len(amounts) // min(rows, len(amounts)))
    each = width // columns
    lines = []
    for start in range(0, len(amounts), columns):
        line = Text(no_wrap=True, end="")
        for amount in amounts[start : start + columns]:
            line.append_text(fitted(_amount(amount, glyphs, each - 2), each, glyphs))
        lines.append(line)
    return lines


def _full_style(amount: Amount) -> str:
    share = amount.share or 0.0
    return "bold red" if share >= 0.95 else "yellow" if share >= 0.85 else "green"


def _share(amount: Amount) -> Text:
    """Returns the used share as text, without a bar."""
    share = "" if amount.share is None else f"{amount.share:.0%}"
    return joined(f"{amount.name} ", (share or amount.words, _full_style(amount)))


def _amount(amount: Amount, glyphs: Glyphs, width: int) -> Text:
    share, amount_text = amount.share, amount.words
    room = min(30, width - 12 - len(amount_text))
    text = joined(f"{amount.name[:11]:<11} ")
    if share is not None and room >= 4:
        full = min(room, max(1, round(share * room)))
        text.append(glyphs.full * full, style=_full_style(amount))
        text.append(glyphs.empty * (room - full) + " ", style="dim")
    text.append(amount_text)
    note = "" if amount.ours is None else f", {short_bytes(amount.ours)} are this run's"
    if text.cell_len + len(note) <= width:
        text.append(note, style="dim")
    return text


# ---- events, words ----


def _events(model: Model, glyphs: Glyphs, width: int, rows: int) -> list[Text]:
    """Returns the last events that fit; the newest comes last and is complete."""
    events = list(model.events)
    lines: list[Text] = []
    for event, words in zip(reversed(events), reversed(texts_of(events)), strict=True):
        when = f"step {event.step}"
        if event.at_s is not None:
            when = time.strftime("%H:%M:%S", time.localtime(event.at_s))
        text_lines = wrapped(words, width - 10, TONES[event.tone])
        whole = [joined((f"{when[:9]:<10}", "dim")).append_text(text_lines[0])]
        whole += [joined(" " * 10).append_text(line) for line in text_lines[1:]]
        if lines and len(lines) + len(whole) > rows:
            break
        lines = whole + lines
    return lines[:rows] or [joined(("nothing yet", "dim"))]


def _words(model: Model, glyphs: Glyphs, width: int, rows: int) -> list[Text]:
    lines: list[Text] = []
    for word in words_shown(model):
        text_lines = wrapped(f"{word}: {GLOSSARY[word]}", width)
        if len(lines) + len(text_lines) > rows:
            break
        text_lines[0].stylize("bold", 0, len(word) + 1)
        lines += text_lines
    return lines


_SIGNS = MappingProxyType(
    {
        "gradients clipped": "clipped",
        "infinite or undefined": "skip",
        "worker.": "processes",
        "memoryd.": "processes",
        "optimizerd.": "processes",
    }
)
"""Parts of event texts that call for a term of the glossary."""


def words_shown(model: Model) -> list[str]:
    """Returns terms of the glossary, first those on the screen, rare ones before common ones."""
    shown = " ".join([*texts_of(model.events), *(seen.text for seen in model.lanes.values())])
    first = [word for sign, word in _SIGNS.items() if sign in shown]
    others = [word for word in GLOSSARY if word in shown]
    return list(dict.fromkeys([*first, *others, "micro-batch", "stage", "step", *GLOSSARY]))


def _number(value: object, form: str) -> str:
    return "".join(format(number, form) for number in numbers([value])) or "-"


def _milliseconds(value: object) -> str:
    for number in numbers([value]):
        return f"{number:.2f} s" if number >= 1 else f"{1000 * number:.3g} ms"
    return "-"


def _flow(entries: Sequence[Text], width: int) -> list[Text]:
    """Returns entries in a row, wrapped to lines."""
    lines: list[Text] = []
    for entry in entries:
        if lines and lines[-1].cell_len + 3 + entry.cell_len <= width:
            lines[-1].append("   ").append_text(entry)
        else:
            lines.append(entry.copy())
    return lines


def _division_lines(model: Model, width: int) -> int:
    if model.division is None:
        return 1
    return len(_division(model, UNICODE, width, 99))


LOSS = Panel(title=_loss_title, least=lambda m: 4, most=lambda m, width: 6, draw=_loss, flexible=3)
DIVISION = Panel(
    title=_division_title,
    least=lambda m: 2,
    most=_division_lines,
    draw=_division,
)
LANES = Panel(
    title=_lanes_title,
    least=lambda m: min(3, max(1, len(m.lanes))),
    most=lambda m, width: max(1, len(m.lanes)),
    draw=_lanes,
)
MEMORY = Panel(
    title=lambda m, glyphs: "memory",
    least=lambda m: 1,
    most=lambda m, width: max(1, -(-len(fullest(m.amounts)) // max(1, width // 60))),
    draw=_memory,
)
EVENTS = Panel(
    title=lambda m, glyphs: "what happened",
    least=lambda m: 3,
    most=lambda m, width: 6,
    draw=_events,
    flexible=2,
)
WORDS = Panel(
    title=lambda m, glyphs: "words",
    least=lambda m: 4,
    most=lambda m, width: 8,
    draw=_words,
)
