"""The sections of a page, each from :class:`~penstock.client.views.report.facts.RunFacts`."""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from statistics import quantiles
from typing import Any

import yaml

from penstock.client.views.report.blocks import (
    Block,
    Chapter,
    Code,
    Folded,
    Picture,
    Table,
    Unknown,
    Words,
)
from penstock.client.views.report.charts import Mark, Series, curves, short
from penstock.client.views.report.facts import RunFacts, changed_keys, flat_config
from penstock.client.views.report.incidents import IncidentKind
from penstock.client.views.report.readings import set_of
from penstock.config.evaluation import EVAL
from penstock.config.training import MAX_RUN_NAME
from penstock.config.values import human_bytes

SHOWN_INCIDENTS = 200
SHOWN_STEPS = 12


def trained(facts: RunFacts) -> Chapter:
    """Returns the section about model, data, batch, optimizer and devices."""
    config, model = facts.config, facts.model
    trainable, frozen = facts.parameters
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    shape = ", ".join(f"{name.replace('_', ' ')} {model[name]}" for name in sizes if name in model)
    rows = [
        ("model", f"{model.get('model_type', 'unknown')} ({shape})" if shape else "unknown"),
        ("parameters", f"{trainable:,} trained" + (f", {frozen:,} frozen" if frozen else "")),
        ("storage type", str(config.model.dtype.value)),
        ("data", str(config.data.path or config.data.tokens or "made up")),
        *_data_rows(facts),
        (
            "batch",
            f"{config.train.global_batch} sequences of {config.data.sequence_length} tokens a step,"
            f" in micro-batches of {config.train.micro_batch}",
        ),
        ("optimizer", _optimizer(facts)),
        ("schedule", facts.run.plan.scheme),
        (
            "devices",
            f"{config.num_workers} x {config.cluster.device} on"
            f" {len(config.cluster.nodes)} node{'s' * (len(config.cluster.nodes) > 1)}",
        ),
    ]
    blocks: list[Block] = [Table(headings=("", ""), rows=rows)]
    if config.cluster.platform.builtin_model:
        blocks.append(
            Words(
                "Devices were emulated: losses are made up, and a share of"
                f" {config.emulation.scale:g} of each block is stored. Times are those of the"
                f" modelled machines, times {config.emulation.time_scale:g}."
            )
        )
    return Chapter(name="trained", heading="What was trained", blocks=blocks)


def _data_rows(facts: RunFacts) -> Iterator[tuple[str, str]]:
    if passes := facts.epochs:
        yield "epochs (passes over the data)", passes
    for split, name in (("train", "tokens to train on"), ("eval", "tokens held out")):
        data = facts.data.get(split)
        if isinstance(data, dict) and "num_tokens" in data:
            yield (
                name,
                f"{data['num_tokens']:,} (fingerprint {str(data.get('fingerprint'))[:12]})",
            )


def _optimizer(facts: RunFacts) -> str:
    optimizer, limit = facts.config.optimizer, facts.config.train.clip_grad_norm
    clipped = f", gradient norm limited to {limit:g}" if limit else ", no limit of gradient norms"
    return f"{optimizer.name}, learning rate {optimizer.lr:g} ({optimizer.schedule}){clipped}"


def result(facts: RunFacts) -> Chapter:
    """Returns the section with loss, evaluations, gradient norm and learning rate."""
    readings, marks = facts.readings, list(restarts(facts))
    if not readings.steps:
        text = "No step is complete yet: metrics.jsonl has no line."
        return Chapter(name="result", heading="Result", blocks=[Unknown(text)])
    loss = [
        Series(name="loss", points=readings.points("loss")),
        *(
            Series(name=_set_words(name), points=points, dots=True)
            for name, points in readings.of_sets("loss").items()
        ),
    ]
    blocks: list[Block] = [Picture(image=curves(loss, "loss", marks), caption=_loss_words(facts))]
    if readings.evaluations:
        rows = [_evaluation(line) for line in _ends(readings.evaluations)]
        of_pairs = facts.config.trains_on_pairs
        accuracy = "pair accuracy" if of_pairs else "token accuracy"
        headings = ("set", "step", "loss", "perplexity", accuracy, "tokens", "seconds")
        table = Table(headings=headings, rows=rows, numbers=1)
        blocks.append(Folded(title=f"{len(readings.evaluations)} evaluations", blocks=[table]))
    else:
        blocks.append(
            Unknown(
                "No evaluation: train.eval_every sets the steps between two; eval.sets names data."
            )
        )
    others = [
        Picture(image=curves([Series(name=name, points=readings.points(key))], name, marks))
        for key, name in (("grad_norm", "gradient norm"), ("lr", "learning rate"))
    ]
    blocks.append(Folded(title="Gradient norm and learning rate", blocks=others))
    return Chapter(name="result", heading="Result", blocks=blocks)


def _set_words(name: str) -> str:
    return "loss on held-out data" if name == EVAL else f"loss on {name}"


def _loss_words(facts: RunFacts) -> str:
    readings = facts.readings
    words = []
    if not readings.exact:
        words.append(f"Every {readings.every}th of {readings.attempts:,} lines was read.")
    if len(readings.steps) > 320:
        words.append(
            "Lines are means of neighbouring steps; bands reach from the least to the greatest"
            " value."
        )
    if readings.intervals[1:]:
        words.append("Dashed lines: training continued after an interruption.")
    return " ".join(words)


def _evaluation(line: Any) -> tuple[str, ...]:
    forms = {
        "loss": ".4f",
        "perplexity": ",.2f",
        "token_accuracy": ".2%",
        "tokens": ",",
        "seconds": ".2f",
    }
    fields = {**line, "token_accuracy": line.get("pair_accuracy", line.get("token_accuracy"))}
    texts = (number(fields.get(key), form) for key, form in forms.items())
    return (set_of(line), f"{line['step']:,}", *texts)


def speed(facts: RunFacts) -> Chapter:
    """Returns the section with tokens per second, seconds per step, FLOP/s."""
    readings = facts.readings
    rates, seconds = readings.points("tokens_per_second"), readings.values("seconds")
    if not rates:
        return Chapter(name="speed", heading="Speed", blocks=[Unknown("No step is decided yet.")])
    rate = readings.median("tokens_per_second") or 0.0
    rows = [
        ("tokens a second, median of all steps", f"{rate:,.0f}"),
        ("seconds a step, median of all steps", f"{readings.median('seconds'):.4g}"),
    ]
    if len(seconds) >= 20:
        rows.append(("seconds a step, 95 % are faster than", f"{quantiles(seconds, n=20)[18]:.4g}"))
    per_device = rate * facts.flops_per_token / facts.config.num_workers
    if facts.config.cluster.platform.simulated_clock:  # seconds of the emulated cluster
        per_device *= facts.config.emulation.time_scale
    rows += [
        ("tokens in all", f"{'' if readings.exact else 'about '}{readings.total('tokens'):,.0f}"),
        ("model FLOP/s a device (without recomputation)", short(per_device)),
    ]
    series = [Series(name="tokens a second", points=rates)]
    picture = Picture(image=curves(series, "tokens/s", list(restarts(facts)), from_zero=True))
    blocks: list[Block] = [picture, Table(headings=("", ""), rows=rows, numbers=1)]
    blocks.append(
        Unknown(
            "Model FLOPs utilization is this rate divided by the peak of the device. Files of the"
            " run lack the peak; Prometheus has the peak of known devices"
            " (penstock_device_peak_flops_per_second)."
        )
    )
    return Chapter(name="speed", heading="Speed", blocks=blocks)


def memory(facts: RunFacts) -> Chapter:
    """Returns the section with measured and planned peaks of devices, and shared memory."""
    blocks: list[Block] = []
    traced, planned = facts.traced, facts.planned_memory
    peak = max(facts.readings.values("peak_device_bytes"), default=None)
    if not isinstance(traced, str) and traced.memory:
        rows = [
            (
                f"device {device.device}",
                human_bytes(device.measured.num_bytes),
                human_bytes(device.planned_bytes),
                f"{device.error:+.1%}",
                device.measured.during,
            )
            for device in traced.memory
        ]
        headings = ("peak of", "measured", "planned", "plan over measured", "during")
        blocks.append(Table(headings=headings, rows=rows, numbers=1))
    elif peak is not None:
        blocks.append(Words(f"The largest peak of a device was {human_bytes(peak)}."))
    else:
        blocks.append(
            Unknown(
                "Memory of devices was not measured: on CPUs, observability.memory: true measures"
                " it; a trace names the instruction of each peak."
            )
        )
    if isinstance(planned, str):
        blocks.append(Unknown(planned))
    else:
        sums: dict[tuple[str, str, str], int] = defaultdict(int)
        for row in planned:
            sums[row.place, row.resource.value, row.use] += row.num_bytes
        needs = [(*key, human_bytes(num_bytes)) for key, num_bytes in sums.items()]
        table = Table(headings=("where", "kind", "for", "bytes"), rows=needs[:400], numbers=3)
        blocks.append(Folded(title="What the plan needs", blocks=[table]))
    return Chapter(name="memory", heading="Memory", blocks=blocks)


def faults(facts: RunFacts) -> Chapter:
    """Returns the section with interruptions, special decisions and saves, and events of logs."""
    history, readings = facts.history, facts.readings
    amended, skipped = (readings.decisions.get(name, 0) for name in ("amend", "skip"))
    counts = [
        ("processes that died and were started again", f"{history.count(IncidentKind.FAULT):,}"),
        ("interruptions after which training continued", f"{len(history.recoveries):,}"),
        ("steps with clipped gradients (norm over train.clip_grad_norm)", f"{amended:,}"),
        ("steps without finite gradients (skipped)", f"{skipped:,}"),
        ("saves", f"{history.count(IncidentKind.SAVE):,}"),
        ("warnings", f"{history.count(IncidentKind.WARNING):,}"),
    ]
    blocks: list[Block] = [Table(headings=("what", "how often"), rows=counts, numbers=1)]
    if history.recoveries:
        rows = [
            (_moment(r.time_s), r.cause, f"{r.step:,}", f"{r.seconds:.1f} s")
            for r in _ends(history.recoveries)
        ]
        headings = ("when", "cause", "continued at step", "seconds until then")
        blocks.append(Table(headings=headings, rows=rows, numbers=2))
        blocks.append(
            Words("Such interruptions lose no committed step: see the numbers of the steps.")
        )
    if amended:
        blocks.append(
            Words(
                "Clipping is exact: a clipped step has the weights of a step with scaled-down"
                " gradients."
            )
        )
    blocks += _log_blocks(facts)
    return Chapter(name="faults", heading="Faults and recoveries", blocks=blocks)


def _log_blocks(facts: RunFacts) -> Iterator[Block]:
    history = facts.history
    if history.first_s is None:
        yield Unknown("No logs: RUN_DIR/logs is empty or cannot be read.")
        return
    shown = _ends(history.incidents, SHOWN_INCIDENTS)
    rows = [(_moment(i.time_s), i.process, i.kind.value, i.text[:600]) for i in shown]
    table = Table(headings=("when (UTC)", "process", "kind", "what"), rows=rows)
    some = f", {len(shown)} of them" if len(shown) < len(history.incidents) else ""
    yield Folded(title=f"{len(history.incidents):,} events{some}", blocks=[table])
    if history.cut:
        yield Unknown("Only the end of long logs was read, so these counts are too small.")


def configuration(facts: RunFacts) -> Chapter:
    """Returns the section with changed keys, and all keys."""
    values, changed = flat_config(facts.config), changed_keys(facts.config)
    blocks: list[Block] = [
        Words("Keys that differ from their defaults; penstock config KEY explains each."),
        Table(headings=("key", "value"), rows=[(key, as_text(values[key])) for key in changed]),
        Folded(
            title=f"All {len(values)} keys",
            blocks=[
                Table(headings=("key", "value"), rows=[(k, as_text(v)) for k, v in values.items()])
            ],
        ),
    ]
    return Chapter(name="configuration", heading="Configuration", blocks=blocks)


def reproduction(facts: RunFacts) -> Chapter:
    """Returns the section with versions, machine, and a configuration that repeats the run."""
    blocks: list[Block] = []
    if facts.software is None:
        text = "Versions are unknown: an older Penstock prepared this run."
        blocks.append(Unknown(text))
    else:
        software = facts.software
        rows = [
            *software.packages.items(),
            ("system", software.system),
            ("processor", software.processor),
        ]
        rows.append(("CPUs", str(software.cpus)))
        rows.append(("memory", human_bytes(software.memory_bytes)))
        blocks.append(Table(headings=("with what it was prepared", ""), rows=rows))
    values = flat_config(facts.config)
    kept = {key: values[key] for key in changed_keys(facts.config) if key != "run.dir"}
    # A new name gives a new run directory: the same command would resume the old run.
    kept["run.name"] = another_name(facts.config.run.name)
    blocks += [
        Words(
            "The same configuration, data and versions give the same run: on CPUs with fixed thread"
            " counts bit for bit. Save these lines as again.yaml, then: penstock train again.yaml"
        ),
        Code(_as_yaml(kept)),
    ]
    return Chapter(name="again", heading="Versions, and how to run it again", blocks=blocks)


def another_name(name: str) -> str:
    """Returns the name of a repetition: ``x-again`` for x, then ``x-again2``, and so on."""
    repetition = _REPETITION.fullmatch(name)
    base, number = (name, 1) if repetition is None else (repetition[1], int(repetition[2] or 1) + 1)
    suffix = "-again" if number == 1 else f"-again{number}"
    return f"{base[: MAX_RUN_NAME - len(suffix)]}{suffix}"


_REPETITION = re.compile(r"(.*)-again([1-9]\d{0,3})?")


def _as_yaml(values: Mapping[str, Any]) -> str:
    """Returns the YAML of a configuration with these keys."""
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *path, name = key.split(".")
        place = nested
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    return yaml.safe_dump(nested, sort_keys=False, allow_unicode=True)


def restarts(facts: RunFacts) -> Iterator[Mark]:
    """Yields a mark at the first step of each membership after the first."""
    causes = {recovery.epoch: recovery.cause for recovery in facts.history.recoveries}
    for interval in islice(facts.readings.intervals, 1, 101):
        cause = causes.get(interval.epoch, "training continued")
        yield Mark(step=interval.first_step, text=f"step {interval.first_step}: {cause}")


def as_text(value: Any) -> str:
    """Returns a value of the configuration for a table."""
    return value if isinstance(value, str) else json.dumps(value)


def number(value: Any, form: str) -> str:
    """Returns a number, or a dash for another value."""
    return format(value, form) if isinstance(value, (int, float)) else "-"


def _moment(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(time_s))


def _ends(items: Sequence[Any], at_most: int = 2 * SHOWN_STEPS) -> Sequence[Any]:
    """Returns the first and the last items, at most ``at_most``."""
    half = at_most // 2
    return items if len(items) <= at_most else [*items[:half], *items[-half:]]
