"""From a configuration and a block table to a validated plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.planner.cost.operators import OPERATOR_SETS
from penstock.planner.cost.prices import config_prices, optimizer_of
from penstock.planner.cost.sources import Prices
from penstock.planner.layout import Residency, StageLayout
from penstock.planner.partition import partition
from penstock.planner.passes import PASSES, Pass, PassContext
from penstock.planner.replicas import replicate, with_reduction
from penstock.planner.schedule import Schedule, lower
from penstock.planner.schemes import SCHEMES, Recomputation, RecomputeMode, Scheme
from penstock.planner.settling import settle_as_configured
from penstock.planner.torch_actions import parse_actions, schedule_of_actions
from penstock.planner.validate.check import PlanError, validate
from penstock.protocol.config.schema import Config
from penstock.protocol.errors import ConfigError, ProtocolError, reason
from penstock.protocol.plan.instructions import RecomputeAfter
from penstock.protocol.plan.plan import Plan, StageRange
from penstock.shm.table import BlockTable


def build_plan(config: Config, table: BlockTable, prices: Prices | None = None) -> Plan:
    """The plan that a configuration asks for: its scheme, or what is in ``schedule.file``.

    ``prices``: what passes decide by and memory is counted with; the configuration's own unless
    given (:func:`~penstock.planner.cost.prices.config_prices`).

    Raises:
        ConfigError: impossible combination; names key, value, and what would be accepted. A
            :class:`~penstock.planner.validate.check.PlanError` for a plan file that makes no sense.
    """
    file, prices = config.schedule.file, prices or config_prices(config, table)
    _check_used(config)
    if file is not None and file.suffix.lower() != ".csv":
        plan = _load(file, config)
    else:
        schedule = _build(config, table) if file is None else _read_actions(file, config, table)
        schedule = replicate(_after_passes(schedule, config, prices), config.schedule.replicas)
        wanted = config.schedule.reduce_gradients
        concatenates = config.schedule.weight_gradients == "concatenated"
        schedule = replace(schedule, concatenates_gradients=concatenates)
        plan = _lowered(with_reduction(schedule, wanted, config.cluster.workers))
    _check_fits(plan, config, table)
    plan = settle_as_configured(config, table, plan)
    try:
        validate(
            plan,
            table,
            costs=prices.costs,
            memory_limit=config.memory.device_limit,
            devices_per_node=config.cluster.workers,
        )
    except PlanError as error:
        error.source = _source(file) if file is not None else ""
        raise
    return plan


def _build(config: Config, table: BlockTable) -> Schedule:
    """One replica of the configured scheme."""
    replicas = config.schedule.replicas
    for name, value, keys in (
        ("workers", config.num_workers, "cluster.workers x nodes"),
        ("micro-batches", config.train.num_microbatches, "train.global_batch / train.micro_batch"),
    ):
        if value % replicas:
            raise ConfigError(
                f"schedule.replicas = {replicas}: {value} {name} ({keys}) cannot be shared out"
                f" evenly; accepted: a divisor of {value}"
            )
    return build_schedule(
        ScheduleRequest(
            scheme=config.schedule.scheme,
            num_devices=config.num_workers // replicas,
            num_microbatches=config.train.num_microbatches // replicas,
            forward_stages=config.schedule.forward_stages,
            backward_stages=config.schedule.backward_stages,
            stages_per_device=config.schedule.stages_per_device,
            recompute=config.schedule.recompute,
            drop=dropped_operators(config.schedule.drop),
        ),
        _block_work(table),
    )


def _lowered(schedule: Schedule) -> Plan:
    try:
        return lower(schedule)
    except ValueError as error:
        raise ConfigError(
            f"schedule: the order of {schedule.scheme} cannot run: {error}"
        ) from error


def dropped_operators(words: Sequence[str]) -> tuple[str, ...]:
    """The operators that names of operators and of sets stand for; the model may lack some.

    Raises:
        ConfigError: an unknown name.
    """
    known = dict.fromkeys(name for members in OPERATOR_SETS.values() for name in members)
    found: dict[str, None] = {}
    for word in words:
        if word not in OPERATOR_SETS and word not in known:
            raise ConfigError(
                f"schedule.drop = {list(words)}: unknown operator {word!r}; accepted:"
                f" {', '.join(known)}, or the sets {', '.join(OPERATOR_SETS)}"
            )
        found |= dict.fromkeys(OPERATOR_SETS.get(word, (word,)))
    return tuple(sorted(found))


def _block_work(table: BlockTable) -> list[float]:
    """What stages are balanced by."""
    return [block.forward_flops for block in table.blocks]


def _after_passes(schedule: Schedule, config: Config, prices: Prices) -> Schedule:
    """With the configured passes applied."""
    passes = [_pass(name, config) for name in config.schedule.passes]
    if not passes:
        return schedule
    context = _context(config, prices)
    for one in passes:
        schedule = one.run(schedule, context)
    return schedule


def _pass(name: str, config: Config) -> Pass:
    if name not in PASSES:
        raise ConfigError(
            f"schedule.passes = {list(config.schedule.passes)}: unknown pass {name!r}; accepted:"
            f" {', '.join(PASSES)}"
        )
    return PASSES[name]


def _check_used(config: Config) -> None:
    """Keys for passes have a pass that looks at them."""
    wish = config.schedule
    for key, value, users in (
        ("update_stride", wish.update_stride, ("interleave-updates",)),
        ("resident_share", wish.resident_share, ("interleave-updates", "twinflow")),
    ):
        if value and not set(users) & set(wish.passes):
            raise ConfigError(
                f"schedule.{key} = {value}: no pass looks at it; leave it out, or have"
                f" {' or '.join(users)} in schedule.passes"
            )


def _context(config: Config, prices: Prices) -> PassContext:
    """A hop carries the largest output of a block."""
    costs, cluster = prices.costs, prices.cluster
    largest = max(block.output_bytes for block in costs.blocks)
    optimizer = optimizer_of(config)
    if config.optimizer.settle == "early":
        optimizer = optimizer.early or optimizer
    return PassContext(
        costs=costs,
        cluster=cluster,
        memory_limit_bytes=config.memory.device_limit,
        hop_s=largest / cluster.peer_bandwidth + cluster.latency_s,
        optimizer=optimizer,
        update_stride=config.schedule.update_stride,
        resident_share=config.schedule.resident_share,
    )


def _load(path: Path, config: Config) -> Plan:
    """Read a plan file. It says everything, so nothing else may be asked for."""
    wish = config.schedule
    sums = (wish.reduce_gradients, wish.weight_gradients)
    if wish.replicas != 1 or wish.passes or sums != ("auto", "looped"):
        raise ConfigError(
            f"{_source(path)}: a plan is complete; schedule.replicas must be 1,"
            " schedule.passes empty, schedule.reduce_gradients auto and schedule.weight_gradients"
            " looped"
        )
    try:
        return Plan.from_json(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{_source(path)}: cannot read it: {reason(error)}") from error
    except (ProtocolError, ConfigError) as error:
        raise ConfigError(f"{_source(path)}: {error}") from error


def _read_actions(path: Path, config: Config, table: BlockTable) -> Schedule:
    """Read torch's action text: one replica.

    It does not say what forwards keep; ``schedule.recompute`` does. Nor does its REDUCE_GRAD count:
    ``schedule.reduce_gradients`` says where replicas are summed.
    """
    recompute = Recomputation(
        mode=config.schedule.recompute or "none", drop=dropped_operators(config.schedule.drop)
    )
    try:
        actions = parse_actions(path.read_text(encoding="utf-8"))
        return schedule_of_actions(actions, block_work=_block_work(table), recompute=recompute)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{_source(path)}: cannot read it: {reason(error)}") from error
    except (ProtocolError, ConfigError) as error:
        raise ConfigError(f"{_source(path)}: {error}") from error


def _source(file: Path) -> str:
    return f"schedule.file = {str(file)!r}"


def _check_fits(plan: Plan, config: Config, table: BlockTable) -> None:
    """Hold the numbers of a plan from a file against configuration and model."""
    file = config.schedule.file
    if file is None:
        return
    microbatches = config.train.num_microbatches
    expected = (
        ("devices", plan.num_devices, config.num_workers, "cluster.workers x nodes"),
        ("micro-batches", plan.num_microbatches, microbatches, "train.global_batch / micro_batch"),
        ("blocks", plan.num_blocks, len(table.blocks), "the model; it was made for another"),
    )
    for name, planned, configured, meaning in expected:
        if planned != configured:
            remedy = f"change these to {planned}, or m" if name != "blocks" else "m"
            raise ConfigError(
                f"{_source(file)}: the plan is for {planned} {name}, the configuration has"
                f" {configured} ({meaning}); {remedy}ake a plan for this configuration (schedule:"
                " auto, or penstock plan CONFIG --out FILE)"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest:
    """What someone wants scheduled; numbers of stages (of one route) default to the scheme's.

    ``stages_per_device``: forward stages of a route on each of its devices, instead of
    ``forward_stages``. ``drop`` names the operators that ``recompute="selective"`` makes again,
    ``recompute_after`` what recomputations wait for.
    """

    scheme: str
    num_devices: int
    num_microbatches: int
    forward_stages: int | None = None
    backward_stages: int | None = None
    stages_per_device: int | None = None
    recompute: RecomputeMode | None = None
    drop: tuple[str, ...] = ()
    recompute_after: RecomputeAfter = RecomputeAfter.CHECKPOINT


def build_schedule(request: ScheduleRequest, block_work: Sequence[float]) -> Schedule:
    """The schedule of a scheme, for blocks with these amounts of forward work.

    Stages are balanced by forward work; backward work is taken to be proportional to it.

    Raises:
        ConfigError: impossible combination; names key, value, and what would be accepted.
    """
    _check_numbers(request)
    scheme = SCHEMES.get(request.scheme)
    if scheme is None:
        raise ConfigError(
            f"schedule.scheme = {request.scheme!r}: expected one of {', '.join(SCHEMES)}"
        )
    recompute = _recompute(request, scheme)
    _check_devices(request, scheme, len(block_work))
    num_forward, num_backward = _numbers_of_stages(request, scheme, len(block_work))
    accepted = scheme.check_microbatches(request.num_microbatches, request.num_devices, num_forward)
    if accepted is not None:
        raise ConfigError(
            f"train.global_batch / train.micro_batch = {request.num_microbatches} micro-batches:"
            f" {scheme.name} with {request.num_devices} workers accepts {accepted}"
        )
    placement = scheme.place(num_forward, num_backward, request.num_devices)
    layout = StageLayout(
        num_devices=request.num_devices,
        num_microbatches=request.num_microbatches,
        forward=_cut(block_work, num_forward, placement.forward),
        backward=_cut(block_work, num_backward, placement.backward),
        routes=scheme.routes(request.num_microbatches, request.num_devices),
    )
    return Schedule(
        scheme=scheme.name,
        layout=layout,
        orders=scheme.order(layout, recompute),
        residency=scheme.residency,
        rebinds_weights=scheme.residency is Residency.STREAMED and recompute.mode != "full",
        shards_weights=scheme.shards_weights,
        reduces_gradients=scheme.reduces_gradients,
    )


def _check_numbers(request: ScheduleRequest) -> None:
    for name in (
        "num_devices",
        "num_microbatches",
        "forward_stages",
        "backward_stages",
        "stages_per_device",
    ):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} = {value}: expected 1 or more")


def _recompute(request: ScheduleRequest, scheme: Scheme) -> Recomputation:
    mode = request.recompute or scheme.recompute_modes[0]
    if mode not in scheme.recompute_modes:
        why = (
            "runs forward and backward of a block on different devices, so it keeps no activations"
            if scheme.residency is Residency.STREAMED
            else "does not recompute this way"
        )
        raise ConfigError(
            f"schedule.recompute = {mode!r}: {scheme.name} {why}; accepted:"
            f" {', '.join(scheme.recompute_modes)}"
        )
    if mode == "selective" and not request.drop:
        raise ConfigError(
            "schedule.recompute = 'selective': needs operators to drop, such as those that a"
            " profile lists"
        )
    if mode != "selective" and request.drop:
        raise ConfigError(
            f"schedule.recompute = {mode!r}: operators to drop ({', '.join(request.drop)}) need"
            " 'selective'"
        )
    return Recomputation(mode=mode, drop=request.drop, after=request.recompute_after)


def _check_devices(request: ScheduleRequest, scheme: Scheme, num_blocks: int) -> None:
    num_devices = request.num_devices
    if num_devices > num_blocks and not scheme.whole_model_per_device:
        raise ConfigError(
            f"cluster.workers: {num_devices} workers in all for {num_blocks} blocks; at most"
            f" {num_blocks} workers can be used"
        )
    accepted = scheme.check_devices(num_devices)
    if accepted is not None:
        raise ConfigError(
            f"cluster.workers: {num_devices} workers in all; {scheme.name} accepts {accepted}"
        )


def _numbers_of_stages(
    request: ScheduleRequest, scheme: Scheme, num_blocks: int
) -> tuple[int, int]:
    asked = _forward_stages(request, scheme)
    note = f" ({request.stages_per_device} per worker)" if request.stages_per_device else ""
    if asked is not None:
        _check_maximum("forward_stages", asked, num_blocks, note)
    num_forward, num_backward = scheme.default_stages(request.num_devices, num_blocks, asked)
    if request.backward_stages is not None:
        _check_maximum("backward_stages", request.backward_stages, num_blocks)
        num_backward = request.backward_stages
    complaint = scheme.check_stages(num_forward, num_backward, request.num_devices)
    if complaint is not None:
        key, accepted = complaint
        value = f"{num_forward}{note}" if key == "forward_stages" else str(num_backward)
        raise ConfigError(
            f"schedule.{key} = {value}: {scheme.name} with {request.num_devices} workers accepts"
            f" {accepted}"
        )
    _check_maximum("forward_stages", num_forward, num_blocks)
    return num_forward, num_backward


def _forward_stages(request: ScheduleRequest, scheme: Scheme) -> int | None:
    """The number of forward stages that was asked for, in one of two ways."""
    if request.stages_per_device is None:
        return request.forward_stages
    devices_of_a_route = 1 if scheme.whole_model_per_device else request.num_devices
    forward_stages = request.stages_per_device * devices_of_a_route
    if request.forward_stages not in (None, forward_stages):
        raise ConfigError(
            f"stages_per_device = {request.stages_per_device}: gives {forward_stages} forward"
            f" stages, but schedule.forward_stages = {request.forward_stages}; give one of them"
        )
    return forward_stages


def _check_maximum(key: str, value: int, num_blocks: int, note: str = "") -> None:
    if value > num_blocks:
        raise ConfigError(
            f"schedule.{key} = {value}{note}: more stages than blocks; the model has {num_blocks}"
            f" blocks, so at most {num_blocks}"
        )


def _cut(
    block_work: Sequence[float], num_stages: int, devices: tuple[int, ...]
) -> tuple[StageRange, ...]:
    """One balanced cut, repeated for every route; ``devices`` of the stages of all routes."""
    cut = partition(block_work, num_stages)
    return tuple(
        StageRange(start=blocks.start, stop=blocks.stop, device=device)
        for blocks, device in zip(cut * (len(devices) // num_stages), devices, strict=True)
    )
