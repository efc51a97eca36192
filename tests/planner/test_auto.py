"""``schedule: auto``: the winner trains, is the fastest there is, and keeps to what was asked."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.schema import Config, parse_config
from penstock.config.values import CHOSEN_LATER
from penstock.daemons.node.preparing.changes import keep_recomputation
from penstock.host.errors import CapacityError, ConfigError
from penstock.planner.cost.costs import Costs
from penstock.planner.planning.auto import BestPlan, choose, search_constraints
from penstock.planner.planning.configured import trainable_plan
from penstock.planner.planning.pipeline import try_plan
from penstock.planner.planning.pricing import config_context
from penstock.planner.render.units import SECONDS
from penstock.protocol.plan.plan import Plan
from tests.planner.conftest import AnyMachine, make_config, make_table

TABLE = make_table(8)


def chosen(**schedule: Any) -> BestPlan:
    return choose(make_config("auto", **schedule), TABLE, AnyMachine())


def seconds(config: Config) -> float:
    """What a configuration's step takes, simulated."""
    plan = trainable_plan(config, TABLE)
    return try_plan(plan, config_context(config, TABLE)).makespan_s


def limited(config: Config, device_bytes: int) -> Config:
    memory = config.memory.model_copy(update={"device_limit": device_bytes})
    return config.model_copy(update={"memory": memory})


def test_the_winner_is_a_schedule_that_train_takes_and_beats_every_plain_one() -> None:
    choice = chosen()
    schedule = choice.config.schedule
    assert parse_config(choice.config.model_dump(mode="json")) == choice.config
    assert schedule.scheme != "auto" and choice.constraints == {}
    assert seconds(choice.config) == pytest.approx(choice.step_s)
    plain = [seconds(make_config(scheme)) for scheme in ("spipe", "gpipe", "1f1b", "mobius")]
    assert choice.step_s <= min(plain)
    assert choice.config.train == make_config().train, "batches are the user's"
    assert str(choice).startswith(f"schedule: auto chose {schedule.scheme}, ")
    assert f"; spipe, the default, {SECONDS.format(plain[0])}. {choice.num_candidates} " in str(
        choice
    )


@pytest.mark.parametrize(
    "given",
    [
        {"recompute": "full"},
        {"recompute": "selective", "drop": ["mlp"]},
        {"replicas": 1},
        {"forward_stages": 2, "backward_stages": 6},
        {"passes": ["2bp"]},
        {"passes": []},
    ],
    ids=str,
)
def test_keys_that_are_given_restrict_the_search(given: dict[str, Any]) -> None:
    choice = chosen(**given)
    keys = choice.config.schedule.model_dump(mode="json")
    expected = {**given, **({"drop": keys["drop"]} if "drop" in given else {})}
    assert {key: keys[key] for key in given} == expected and choice.constraints == given


def test_settings_of_the_schedule_stay() -> None:
    assert chosen(reduce_gradients=True).config.schedule.reduce_gradients is True


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        ({"file": "plan.json"}, ("schedule.file = 'plan.json'", "schedule.scheme = auto")),
        ({"stages_per_device": 2}, ("schedule.stages_per_device = '2'", "forward_stages")),
        ({"drop": ["mlp"]}, ("schedule.drop = ['mlp']", "selective")),
        ({"recompute": "selective"}, ("selective", "drop")),
        ({"passes": ["nonsense"]}, ("passes = ['nonsense']", "2bp")),
        ({"forward_stages": 50}, ("schedule.forward_stages = 50",)),
        ({"replicas": 3}, ("schedule.replicas = 3",)),
        ({"profile": "absent.json"}, ("absent.json",)),
    ],
)
def test_keys_that_do_not_go_with_it_are_named(
    schedule: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        chosen(**schedule)
    assert [word for word in words if word not in str(caught.value)] == []


def test_memory_of_devices_decides() -> None:
    """Weights of the model and of one stage; 4 KiB a block, and twice that for gradients."""
    free, config = chosen(), make_config("auto")
    needed = 40_000
    choice = choose(limited(config, needed), TABLE, AnyMachine())
    assert choice.step_s > free.step_s
    trainable_plan(choice.config, TABLE)
    with pytest.raises(ConfigError, match="memory"):
        trainable_plan(limited(free.config, needed), TABLE)


def test_nothing_fits_says_what_was_in_the_way() -> None:
    with pytest.raises(CapacityError) as caught:
        choose(limited(make_config("auto"), 100), TABLE, AnyMachine())
    message = str(caught.value)
    for words in ("none of", "device memory", "devices have 100 B", "raise memory.device_limit"):
        assert words in message

    class Full:
        def check(self, config: Config, plan: Plan, costs: Costs) -> None:
            raise CapacityError("node n0: 3 GiB needed, 1 GiB there")

    with pytest.raises(CapacityError, match="3 GiB needed, 1 GiB there") as caught:
        choose(make_config("auto"), TABLE, Full())
    assert "memory of the machine" in str(caught.value)


def test_plans_that_do_not_fit_are_not_chosen() -> None:
    free = chosen().config.schedule

    class WithoutWinner:
        def check(self, config: Config, plan: Plan, costs: Costs) -> None:
            if config.schedule.scheme in (free.scheme, "spipe"):
                raise CapacityError("too large")

    choice = choose(make_config("auto"), TABLE, WithoutWinner())
    assert choice.config.schedule.scheme != free.scheme
    assert "spipe, the default, is not possible here (too large)" in str(choice)


def test_what_was_asked_is_what_was_given() -> None:
    given = make_config("auto", recompute=None, replicas=1, passes=[], profile="/p.json").schedule
    assert search_constraints(given) == {"replicas": 1, "passes": [], "profile": "/p.json"}
    assert search_constraints(make_config("auto").schedule) == {}


def test_auto_chooses_the_micro_batch_with_the_schedule() -> None:
    config = make_config("auto", micro_batches=8)
    fixed = choose(config, TABLE, AnyMachine())
    choice = choose(config.with_micro_batch(CHOSEN_LATER), TABLE, AnyMachine())
    assert 8 % choice.config.train.micro_batch == 0 and choice.step_s <= fixed.step_s
    assert f"micro-batches of {choice.config.train.micro_batch}: " in str(choice)
    assert seconds(choice.config) == pytest.approx(choice.step_s)


def test_auto_chooses_the_micro_batch_of_a_schedule_that_is_given() -> None:
    config = make_config("1f1b", micro_batches=8).with_micro_batch(CHOSEN_LATER)
    choice = choose(config, TABLE, AnyMachine())
    assert choice.config.schedule == config.schedule
    possible = [seconds(config.with_micro_batch(size)) for size in (1, 2, 4, 8)]
    assert choice.step_s == pytest.approx(min(possible))
    assert str(choice).startswith("train.micro_batch: auto chose 1f1b, ")


def test_one_gpu_has_auto_where_nothing_is_set() -> None:
    """On other devices, and for keys that are set, the defaults and the keys stay."""
    data = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}}
    one = {**data, "cluster": {"device": "cuda", "workers": 1}}
    config = parse_config(one).with_defaults()
    assert config.schedule.scheme == "auto" and config.train.micro_batch == CHOSEN_LATER
    assert "micro_batch: auto" in config.to_yaml()
    assert parse_config(config.model_dump(mode="json")) == config
    for other in ({**data, "cluster": {"device": "cuda", "workers": 2}}, data):
        assert parse_config(other).with_defaults() == parse_config(other)
    given = {**one, "train": {"micro_batch": 2}, "schedule": "gpipe"}
    assert parse_config(given).with_defaults() == parse_config(given)
    resolved = parse_config(parse_config(one).model_dump(mode="json"))
    assert resolved.with_defaults() == resolved, "as resolved.yaml of an older run has it"


def test_gpus_recompute_what_they_have_no_room_for() -> None:
    """Unless the user sets recomputation, or passes, which choose by themselves."""
    data = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}}
    two = {**data, "cluster": {"device": "cuda", "workers": 2}}
    schedules: list[Any] = ["1f1b", {}, {"scheme": "mobius", "forward_stages": 4}]
    for schedule in schedules:
        config = parse_config({**two, "schedule": schedule}).with_recomputation()
        assert config.schedule.recompute == "auto"
        assert config.schedule.scheme == parse_config({**two, "schedule": schedule}).schedule.scheme
    others: list[Any] = [
        {"scheme": "1f1b", "recompute": "none"},
        {"scheme": "1f1b", "recompute": None},
        {"scheme": "1f1b", "passes": ["mario"]},
        "auto",
    ]
    for schedule in others:
        config = parse_config({**two, "schedule": schedule})
        assert config.with_recomputation() == config
    emulated = {**data, "cluster": {"device": "emulated:analytic:H100:llama2-7b"}}
    for other in (data, emulated):
        config = parse_config({**other, "schedule": "1f1b"})
        assert config.with_recomputation() == config


def test_a_run_keeps_its_recomputation_on_gpus() -> None:
    """A run that was started without ``auto`` goes on without; a new scheme brings its own."""
    data = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}}
    gpus = {**data, "cluster": {"device": "cuda", "workers": 2}}
    config = parse_config({**gpus, "schedule": "1f1b"})
    old = parse_config(config.model_dump(mode="json"))
    assert keep_recomputation(config, old, None).with_recomputation().schedule.recompute is None
    new = parse_config(config.with_recomputation().model_dump(mode="json"))
    assert keep_recomputation(config, new, None).with_recomputation() == new
    other = parse_config({**gpus, "schedule": "gpipe"})
    assert keep_recomputation(other, old, None).with_recomputation().schedule.recompute == "auto"


def test_a_micro_batch_of_no_sequences_is_refused() -> None:
    data = {"model": {"hf": {"model_type": "llama"}}, "data": {"path": "@stdlib"}}
    with pytest.raises(ConfigError, match=r"train\.micro_batch"):
        parse_config({**data, "train": {"micro_batch": 0}})
