"""Checkpoints of transformers' Trainer: names for its numbers, and refusals of odd ones."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.config.adapter import AdapterConfig
from penstock.host.errors import ConfigError, StateError
from penstock.models.exchange.foreign import ForeignState
from penstock.models.exchange.pickles import load_torch
from penstock.models.exchange.readers import open_checkpoint
from penstock.models.surgery.skeleton import build_skeleton
from tests.models.exchange.trainers import Trained, new_model, saved_untrained, train
from tests.worker.test_composites import save_gemma

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory:UserWarning"),
]
REMEDY = "give --weights-only"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train(tmp_path_factory.mktemp("plain"), 2)


@pytest.fixture
def copied(plain: Trained, tmp_path: Path) -> Path:
    shutil.copytree(plain.path, tmp_path / "copy")
    return tmp_path / "copy"


def check(state: ForeignState, expected: Trained) -> None:
    """Compares the moments with the Trainer's own."""
    assert state.state_problems == ()
    moments = {(t.role, t.name): t for t in state.tensors if t.role != "weight"}
    assert moments.keys() == expected.moments.keys()
    for key, value in expected.moments.items():
        assert moments[key].dtype == str(value.dtype).removeprefix("torch.")
        assert torch.equal(moments[key].load(), value), key


def changed(path: Path, **fields: Any) -> ForeignState:
    """Opens a checkpoint with other settings in the groups of its optimizer."""
    file = path / "optimizer.pt"
    state = torch.load(file)
    for group in state["param_groups"]:
        group.update(fields)
    torch.save(state, file)
    return open_checkpoint(path)


def problem_of(state: ForeignState) -> str:
    """Returns the only problem, which the weights do not have."""
    assert {tensor.role for tensor in state.tensors} == {"weight"}
    assert state.problems == ()
    (problem,) = state.state_problems
    assert REMEDY in problem
    return problem


def test_decayed_parameters_come_first(plain: Trained) -> None:
    state = open_checkpoint(plain.path)
    check(state, plain)
    assert (state.kind, state.step, state.samples_seen) == ("trainer", 2, 8)
    assert set(state.steps.values()) == {2}
    decayed, others = state.groups
    assert (decayed.weight_decay, others.weight_decay) == (0.1, 0.0)
    assert (decayed.betas, decayed.eps) == ((0.9, 0.95), 1e-8)
    assert all("norm" in name for name in others.names) and len(others.names) == 5
    assert json.dumps(state.to_fields())


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [({"tie_word_embeddings": True}, torch.float32), ({}, torch.bfloat16)],
    ids=["tied", "bf16"],
)
def test_tied_weights_and_bf16(fields: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    trained = train(tmp_path, model=new_model(**fields).to(dtype))
    check(open_checkpoint(trained.path), trained)


def test_one_group_has_the_order_of_the_model(tmp_path: Path) -> None:
    trained = train(tmp_path, optimizer=lambda model: torch.optim.AdamW(model.parameters()))
    check(open_checkpoint(trained.path), trained)


def test_names_that_torch_saved_count(tmp_path: Path) -> None:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(reversed(list(model.named_parameters())))

    trained = train(tmp_path, optimizer=optimizer)
    check(open_checkpoint(trained.path), trained)


def test_groups_of_another_rule_are_refused(tmp_path: Path) -> None:
    def optimizer(model: Any) -> torch.optim.Optimizer:
        first, *others = model.parameters()
        return torch.optim.AdamW([{"params": others}, {"params": [first], "lr": 1e-4}])

    state = open_checkpoint(train(tmp_path, optimizer=optimizer).path)
    (problem,) = state.state_problems
    assert "has groups of 20 and 1 parameters without names" in problem and REMEDY in problem
    assert "parameter 20" in {tensor.name for tensor in state.tensors}


def test_shapes_of_another_order_are_refused(copied: Path) -> None:
    file = copied / "optimizer.pt"
    state = torch.load(file)
    numbers = state["param_groups"][0]["params"]
    numbers[0], numbers[1] = numbers[1], numbers[0]
    torch.save(state, file)
    (problem,) = open_checkpoint(copied).state_problems
    assert "without names" in problem


def test_a_parameter_of_two_places_is_refused(copied: Path) -> None:
    file = copied / "optimizer.pt"
    state = torch.load(file)
    decayed = state["param_groups"][0]["params"]
    del state["state"][decayed[-1]]
    decayed[-1] = decayed[0]  # lm_head has the shape of the embedding
    torch.save(state, file)
    assert "the parameters 0 more than once" in problem_of(open_checkpoint(copied))


def test_a_fifo_is_refused_at_once(copied: Path) -> None:
    (copied / "training_args.bin").unlink()
    os.mkfifo(copied / "training_args.bin")
    open_checkpoint(copied)
    (copied / "optimizer.pt").unlink()
    os.mkfifo(copied / "optimizer.pt")
    with pytest.raises(StateError, match="is a FIFO"):
        load_torch(copied / "optimizer.pt")


def test_frozen_parts_are_those_of_the_configuration(tmp_path: Path) -> None:
    model = new_model()
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    trained = train(tmp_path, model=model)
    state = open_checkpoint(trained.path)
    assert "train.freeze" in state.state_problems[0]
    skeleton = build_skeleton(model.config)
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    check(state.fitted(skeleton, names), trained)
    other = state.fitted(skeleton, names - {"lm_head.weight"})
    assert "without names" in other.state_problems[0]


def test_an_adapter_has_the_names_of_a_run(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = new_model()
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    trained = train(tmp_path, model=get_peft_model(base, LoraConfig(**settings)))
    mine = AdapterConfig(r=2, alpha=4, targets=["q_proj", "down_proj"], dropout=0.0)
    skeleton = build_skeleton(base.config, mine)
    names = {name for name, _ in skeleton.model.named_parameters() if ".lora_" in name}
    state = open_checkpoint(trained.path).fitted(skeleton, names)
    moments = {
        (array, name.removeprefix("base_model.model.").replace(".default", "")): value
        for (array, name), value in trained.moments.items()
    }
    check(state, Trained(trained.path, [], moments))
    assert {t.name for t in state.tensors if t.role == "weight"} == names


def test_another_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    state = open_checkpoint(train(tmp_path, optim="adafactor").path)
    assert "the optimizer adafactor keeps RMS, exp_avg_sq_col" in problem_of(state)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"amsgrad": True}, "amsgrad is on"),
        ({"maximize": True}, "maximize is on"),
        ({"rank": 8, "update_proj_gap": 200}, "has the settings rank, update_proj_gap"),
        ({"params": "abc"}, "params of a group is of type str"),
    ],
)
def test_odd_settings_are_refused(fields: dict[str, Any], words: str, copied: Path) -> None:
    assert words in problem_of(changed(copied, **fields))


def test_kernels_settings_do_not_matter(copied: Path, plain: Trained) -> None:
    check(changed(copied, fused=None, foreach=True, capturable=True), plain)


def test_an_optimizer_without_state_is_refused(copied: Path) -> None:
    file = copied / "optimizer.pt"
    torch.save({**torch.load(file), "state": {}}, file)
    assert "has no state, as before its first step" in problem_of(open_checkpoint(copied))
    file.unlink()
    assert "optimizer.pt: is missing" in problem_of(open_checkpoint(copied))


def test_a_state_without_a_group_is_refused(copied: Path) -> None:
    file = copied / "optimizer.pt"
    state = torch.load(file)
    state["state"][77] = state["state"][3]
    torch.save(state, file)
    assert "no group has the parameters 77 of its state" in problem_of(open_checkpoint(copied))


@pytest.mark.parametrize("value", [float("nan"), 10**400, "1e-3"])
def test_settings_that_are_no_numbers_are_unknown(value: Any, copied: Path, plain: Trained) -> None:
    state = changed(copied, lr=value, betas=(value, value), eps=value)
    check(state, plain)
    assert {(each.lr, each.betas, each.eps) for each in state.groups} == {(None, None, None)}
    assert "NaN" not in json.dumps(state.to_fields())
    schedule = copied / "scheduler.pt"
    torch.save({**torch.load(schedule), "_last_lr": [value, value]}, schedule)
    assert any("rates are not compared" in note for note in open_checkpoint(copied).notes)


def test_a_tensor_of_another_kind_is_named(copied: Path) -> None:
    file = copied / "optimizer.pt"
    state = torch.load(file)
    state["state"][0]["exp_avg"] = state["state"][0]["exp_avg"].to_sparse()
    torch.save(state, file)
    problem = problem_of(open_checkpoint(copied))
    assert "_rebuild_sparse_tensor, which Penstock does not run, in place of a tensor" in problem


def test_random_states_are_no_weights(copied: Path) -> None:
    (copied / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no other file of weights is read"):
        open_checkpoint(copied)


def test_a_truncated_optimizer_leaves_the_weights(copied: Path) -> None:
    file = copied / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-500])
    assert "optimizer.pt" in problem_of(open_checkpoint(copied))


class Hostile:
    """Makes a file when a pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_a_hostile_pickle_runs_nothing(copied: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    for name in ("optimizer.pt", "training_args.bin", "scheduler.pt", "rng_state.pth"):
        torch.save(Hostile(trap), copied / name)
    assert "which Penstock does not run" in problem_of(open_checkpoint(copied))
    assert not trap.exists()
    torch.load(copied / "optimizer.pt", weights_only=False)
    assert trap.exists(), "the trap is set"


def test_older_weights_are_read_from_pickles(copied: Path, plain: Trained) -> None:
    from safetensors.torch import load_file

    weights = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    names = list(weights)
    parts = {"a.bin": names[:9], "b.bin": names[9:]}
    for file, some in parts.items():
        torch.save({name: weights[name] for name in some}, copied / file)
    listed = {name: file for file, some in parts.items() for name in some}
    index = copied / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": listed}))
    state = open_checkpoint(copied)
    check(state, plain)
    loaded = {tensor.name: tensor.load() for tensor in state.tensors if tensor.role == "weight"}
    assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    (copied / "b.bin").unlink()
    with pytest.raises(StateError, match=r"b\.bin: is missing"):
        open_checkpoint(copied)


def test_the_schedules_rates_are_those_of_torch(plain: Trained, copied: Path) -> None:
    fields = torch.load(plain.path / "scheduler.pt")
    schedule = open_checkpoint(plain.path).schedule
    assert schedule is not None
    assert list(schedule.rates) == fields["_last_lr"]
    assert list(schedule.base_rates) == fields["base_lrs"] == 2 * [1e-2]
    assert schedule.steps == 2
    rates = [group["lr"] for group in torch.load(plain.path / "optimizer.pt")["param_groups"]]
    assert [group.lr for group in open_checkpoint(copied).groups] == rates


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"_last_lr": [1e-3]}, "_last_lr has 1 rates and base_lrs 2, the optimizer has 2 groups"),
        ({"_last_lr": "1e-3"}, "_last_lr is of type str"),
        ({"_last_lr": [1e-3, float("nan")]}, "_last_lr has a number that is not finite"),
        ({"last_epoch": None}, "last_epoch is of type NoneType"),
        ({"base_lrs": []}, "follows the losses"),  # as of torch's ReduceLROnPlateau
        (None, "scheduler.pt"),
    ],
)
def test_odd_schedules_are_notes(fields: dict[str, Any] | None, words: str, copied: Path) -> None:
    path = copied / "scheduler.pt"
    if fields is None:
        path.write_bytes(path.read_bytes()[:-500])
    else:
        torch.save({**torch.load(path), **fields}, path)
    state = open_checkpoint(copied)
    assert state.problems == state.state_problems == ()
    assert any(words in note for note in state.notes), state.notes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged"),
        ("[1]", "its content is of type list"),
        ('{"global_step": "2"}', "global_step is '2', in place of a whole number of at least 0"),
        ('{"global_step": 2.5}', "global_step is 2.5"),
        ('{"global_step": true}', "global_step is True"),
        ('{"global_step": -2}', "global_step is -2"),
        ("{}", "global_step is None"),
        ('{"global_step": 2, "train_batch_size": 0}', "train_batch_size is 0, in place of"),
    ],
)
def test_damaged_progress_is_named(text: str, words: str, copied: Path) -> None:
    (copied / "trainer_state.json").write_text(text)
    with pytest.raises(StateError, match=r"trainer_state\.json: .*") as caught:
        open_checkpoint(copied)
    assert words in str(caught.value)


def test_progress_is_not_needed(copied: Path) -> None:
    path = copied / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "global_step": 7}))
    state = open_checkpoint(copied)
    assert state.step == 2
    assert any("global_step is 7, the optimizer has 2 steps" in note for note in state.notes)
    path.unlink()
    state = open_checkpoint(copied)
    assert (state.step, state.samples_seen) == (2, None)
    assert any("trainer_state.json: is missing" in note for note in state.notes)


@pytest.mark.parametrize("step", [float("nan"), -5.0, 2.5])
def test_a_step_that_is_no_count_is_refused(step: float, copied: Path) -> None:
    file = copied / "optimizer.pt"
    state = torch.load(file)
    state["state"][3]["step"] = torch.tensor(step)
    torch.save(state, file)
    problem = problem_of(open_checkpoint(copied))
    assert f"step of parameter 3 is {step}, in place of a count" in problem


def test_an_optimizer_of_8_bits_is_refused(copied: Path) -> None:
    """The names are those of bitsandbytes."""
    file = copied / "optimizer.pt"
    state = torch.load(file)
    for entry in state["state"].values():
        moments = entry.pop("exp_avg"), entry.pop("exp_avg_sq")
        entry |= {"state1": moments[0].to(torch.int8), "state2": moments[1].to(torch.int8)}
    torch.save(state, file)
    assert "keeps state1, state2; only AdamW's state is read" in problem_of(open_checkpoint(copied))


@pytest.mark.parametrize("change", [-1, 1])
def test_another_number_of_parameters_is_refused(change: int, copied: Path) -> None:
    file = copied / "optimizer.pt"
    state = torch.load(file)
    numbers = state["param_groups"][0]["params"]
    if change < 0:
        del state["state"][numbers.pop()]
    else:
        numbers.append(99)
    torch.save(state, file)
    (problem,) = open_checkpoint(copied).state_problems
    assert f"has groups of {16 + change} and 5 parameters" in problem and REMEDY in problem


def test_no_weight_decay_and_biases(tmp_path: Path) -> None:
    """The Trainer makes two groups in any case; gpt2 has biases and transposed weights."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes))
    trained = train(tmp_path, model=model, weight_decay=0.0)
    state = open_checkpoint(trained.path)
    check(state, trained)
    assert [group.weight_decay for group in state.groups] == [0.0, 0.0]


def test_shards_are_read_and_missing_ones_named(plain: Trained, copied: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(copied)
    (copied / "model.safetensors").unlink()
    model.save_pretrained(copied, max_shard_size="8KB")
    shards = sorted(copied.glob("model-*.safetensors"))
    assert len(shards) > 1
    check(open_checkpoint(copied), plain)
    shards[-1].write_bytes(shards[-1].read_bytes()[:-100])
    with pytest.raises(StateError, match=shards[-1].name):
        open_checkpoint(copied)
    shards[-1].unlink()
    with pytest.raises(StateError, match=f"{shards[-1].name}.* missing"):
        open_checkpoint(copied)


def test_the_folder_of_several_checkpoints_names_the_last(plain: Trained, tmp_path: Path) -> None:
    for number in (2, 10):
        shutil.copytree(plain.path, tmp_path / f"checkpoint-{number}")
    with pytest.raises(ConfigError, match=r"give .*checkpoint-10"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("folder", "words"),
    [("global_step2", "DeepSpeed saved the optimizer; give"), ("optimizer_0", "FULL_STATE_DICT")],
)
def test_distributed_checkpoints_name_the_remedy(folder: str, words: str, copied: Path) -> None:
    (copied / folder).mkdir()
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(copied)


def test_processes_and_accumulation_count_samples(copied: Path) -> None:
    for rank in range(2):
        (copied / f"rng_state_{rank}.pth").touch()
    assert open_checkpoint(copied).samples_seen == 16
    (copied / "training_args.bin").unlink()
    assert open_checkpoint(copied).samples_seen is None


def test_a_model_of_several_parts_gives_its_text_weights(tmp_path: Path) -> None:
    from transformers import Gemma3ForConditionalGeneration

    save_gemma(tmp_path / "model")
    model = Gemma3ForConditionalGeneration.from_pretrained(tmp_path / "model", dtype=torch.float32)
    state = open_checkpoint(saved_untrained(tmp_path / "checkpoint-1", model))
    assert "model of several parts is not read" in problem_of(state)
    text = dict(model.model.language_model.named_parameters(prefix="model"))
    weights = {each.name: each.load() for each in state.tensors}
    assert weights.keys() - text.keys() <= {"lm_head.weight"} and weights.keys() >= text.keys()
    assert all(torch.equal(weights[name], value) for name, value in text.items())
    assert any("tensors of other parts than the text model" in note for note in state.notes)
