"""Initial weights: drawn per block, read from directories, written as directories."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from penstock.host.errors import ConfigError, StateError
from penstock.models.checkpoints.export import export_hf, saved_blocks
from penstock.models.checkpoints.initial import initial_blocks, pack, unpack
from penstock.models.data.tokenizer import ByteTokenizer
from penstock.models.surgery.table import build_table
from penstock.shm.table import DType

TESTED = ("llama", "gpt2", "qwen2", "mistral")


def drawn(config, hf_config, blocks=None) -> dict[int, dict[str, torch.Tensor]]:
    table = build_table(config, hf_config)
    wanted = range(len(table.blocks)) if blocks is None else blocks
    return dict(initial_blocks(config, hf_config, table, wanted))


@pytest.mark.parametrize("model_type", [*TESTED, "gemma3_text", "opt", "granite"])
def test_distributions_are_the_model_authors(model_type, make_config, make_hf_config) -> None:
    config = make_config(model_type)
    hf_config = make_hf_config(config)
    torch.manual_seed(0)
    original = dict(AutoModelForCausalLM.from_config(hf_config).named_parameters())
    tensors = {n: v for block in drawn(config, hf_config).values() for n, v in block.items()}
    assert tensors.keys() == original.keys()
    for name, value in tensors.items():
        assert value.dtype is torch.float32
        if value.std() == 0:
            assert torch.equal(value, original[name]), name
        else:
            spread = value.std().item() / original[name].std().item()
            assert spread == pytest.approx(1.0, abs=0.15), name


def test_residual_projections_of_gpt2_are_scaled(make_config, make_hf_config) -> None:
    config = make_config("gpt2", num_hidden_layers=8)
    layer = drawn(config, make_hf_config(config), [3])[3]
    scaled, plain = (layer[f"transformer.h.2.mlp.{n}.weight"].std() for n in ("c_proj", "c_fc"))
    assert plain / scaled == pytest.approx((2 * 8) ** 0.5, rel=0.05)


def test_any_subset_of_blocks_gets_the_same_values(make_config, make_hf_config) -> None:
    config = make_config("llama")
    hf_config = make_hf_config(config)
    state = torch.get_rng_state()
    whole = drawn(config, hf_config)
    assert torch.equal(torch.get_rng_state(), state), "others' random numbers are not touched"
    torch.manual_seed(99)
    some = drawn(config, hf_config, [4, 1])
    assert list(some) == [4, 1]
    assert all(torch.equal(some[b][n], whole[b][n]) for b in some for n in some[b])
    name = "self_attn.q_proj.weight"
    first, second = (whole[b][f"model.layers.{b - 1}.{name}"] for b in (1, 2))
    assert not torch.equal(first, second)
    other = config.model_copy(update={"run": config.run.model_copy(update={"seed": 4321})})
    assert not torch.equal(drawn(other, hf_config, [1])[1][f"model.layers.0.{name}"], first)


def test_frozen_tensors_are_drawn_too(make_config, make_hf_config) -> None:
    config = make_config("llama", freeze=("embed_tokens",))
    hf_config = make_hf_config(config)
    table = build_table(config, hf_config)
    (_, tensors), *_ = initial_blocks(config, hf_config, table, [0])
    trainable, frozen = pack(table.blocks[0], tensors)
    assert len(trainable) == 0 and frozen.std() > 0.01


def test_pack_and_unpack_are_inverse(make_config, make_hf_config) -> None:
    config = make_config("opt", freeze=("fc1",))
    hf_config = make_hf_config(config)
    table = build_table(config, hf_config)
    for block, tensors in initial_blocks(config, hf_config, table, range(len(table.blocks))):
        flats = pack(table.blocks[block], tensors)
        back = unpack(table.blocks[block], *flats)
        assert back.keys() == tensors.keys()
        assert all(np.array_equal(back[n], tensors[n].numpy()) for n in tensors)
        assert sum(map(len, flats)) >= sum(t.numel() for t in tensors.values())
    assert unpack(table.blocks[1], None, None) == {}


def test_pack_names_what_is_wrong(make_config, make_hf_config) -> None:
    config = make_config("llama")
    block = build_table(config, make_hf_config(config)).blocks[0]
    with pytest.raises(ValueError, match=r"'model.embed_tokens.weight' is missing"):
        pack(block, {})
    with pytest.raises(ValueError, match=r"has shape \(3,\), expected \(61, 32\)"):
        pack(block, {"model.embed_tokens.weight": np.zeros(3)})


def from_directory(config, path: Path):
    return config.model_copy(
        update={"model": config.model.model_copy(update={"hf": None, "path": path})}
    )


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", TESTED)
def test_reading_a_directory(
    model_type, dtype, sharded, tmp_path, make_config, make_hf_config
) -> None:
    config = make_config(model_type)
    hf_config = make_hf_config(config)
    original = AutoModelForCausalLM.from_config(hf_config).to(dtype)
    original.save_pretrained(tmp_path, max_shard_size="20KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == sharded
    parameters = dict(original.named_parameters())
    tensors = drawn(from_directory(config, tmp_path), hf_config)
    names = [n for block in tensors.values() for n in block]
    assert sorted(names) == sorted(parameters)
    for block in tensors.values():
        for name, value in block.items():
            assert value.dtype is torch.float32
            assert torch.equal(value, parameters[name].float()), name


def test_reading_a_base_model_without_prefix(tmp_path, make_config, make_hf_config) -> None:
    config = make_config("gpt2")
    hf_config = make_hf_config(config)
    original = AutoModelForCausalLM.from_config(hf_config)
    original.transformer.save_pretrained(tmp_path)
    tensors = drawn(from_directory(config, tmp_path), hf_config, [0])[0]
    assert torch.equal(tensors["transformer.wte.weight"], original.transformer.wte.weight)


def test_damaged_directories_are_named(tmp_path, make_config, make_hf_config) -> None:
    config = from_directory(make_config("llama"), tmp_path)
    hf_config = make_hf_config(make_config("llama"))
    with pytest.raises(ConfigError, match=r"has no model.safetensors"):
        drawn(config, hf_config, [0])
    AutoModelForCausalLM.from_config(hf_config).save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.embed_tokens.weight"
    whole = load_file(file)
    save_file({k: v for k, v in whole.items() if k != name}, file)
    with pytest.raises(StateError, match=r"no tensor model.embed_tokens.weight \(embedding\)"):
        drawn(config, hf_config, [0])
    save_file({**whole, name: torch.zeros(60, 32)}, file)
    with pytest.raises(StateError, match=r"embed_tokens.weight has shape \(60, 32\).*\(61, 32\)"):
        drawn(config, hf_config, [0])
    save_file({**whole, name: torch.zeros(61, 32, dtype=torch.int8)}, file)
    with pytest.raises(StateError, match="quantized weights cannot be trained"):
        drawn(config, hf_config, [0])
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(StateError, match=r"model.safetensors"):
        drawn(config, hf_config, [0])
    file.unlink()
    index = {"weight_map": {"model.embed_tokens.weight": "gone.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StateError, match=r"names gone.safetensors, which is missing"):
        drawn(config, hf_config, [0])


@pytest.mark.parametrize("shard_bytes", [1, 2**30])
@pytest.mark.parametrize("model_type", [*TESTED, "gemma2", "opt"])
def test_export_loads_in_transformers(
    model_type, shard_bytes, tmp_path, make_case, make_batch, original_loss
) -> None:
    case = make_case(model_type)
    out = tmp_path / "exported"
    out.mkdir()  # an empty directory is no obstacle

    def read_block(block: int) -> dict[str, np.ndarray]:
        return unpack(
            case.table.blocks[block], case.weights[block].numpy(), case.frozen[block].numpy()
        )

    export_hf(
        case.hf_config,
        case.table,
        read_block,
        out,
        dtype=DType.FP32,
        carried=ByteTokenizer().files(),
        shard_bytes=shard_bytes,
    )
    assert (out / "model.safetensors.index.json").exists() == (shard_bytes == 1)
    eager = {"attn_implementation": "eager"} if model_type == "gemma2" else {}
    loaded = AutoModelForCausalLM.from_pretrained(out, **eager)
    assert type(loaded) is type(case.original) and loaded.dtype is torch.float32
    batch = make_batch()
    ours = case.forward(range(len(case.table.blocks)), {}, batch, train=False, training=False)
    torch.testing.assert_close(
        ours.loss_sum, original_loss(loaded.eval(), batch), rtol=1e-6, atol=0
    )
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer("hä")["input_ids"] == [104, 195, 164] and tokenizer.eos_token_id == 256
    assert list(tmp_path.iterdir()) == [out]


def test_export_of_bf16_bits(tmp_path, make_case) -> None:
    case = make_case("llama")

    def read_block(block: int) -> dict[str, np.ndarray]:
        bits = case.weights[block].to(torch.bfloat16).view(torch.uint16).numpy()
        return unpack(case.table.blocks[block], bits, None)

    export_hf(
        case.hf_config,
        case.table,
        read_block,
        tmp_path / "out",
        dtype=DType.BF16,
        carried={},
    )
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype is torch.bfloat16
    wanted = case.original.lm_head.weight.to(torch.bfloat16)
    assert torch.equal(loaded.lm_head.weight, wanted)


def test_export_refuses_and_cleans_up(tmp_path, make_case) -> None:
    case = make_case("llama")
    arguments = {"dtype": DType.FP32, "carried": {}}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(ConfigError, match=r"full exists and is not empty"):
        export_hf(case.hf_config, case.table, lambda _: {}, tmp_path / "full", **arguments)
    with pytest.raises(StateError, match=r"embed_tokens.weight: expected shape .* found nothing"):
        export_hf(case.hf_config, case.table, lambda _: {}, tmp_path / "new", **arguments)
    assert [p.name for p in tmp_path.iterdir()] == ["full"]


def test_export_of_a_saved_state(tmp_path, make_case) -> None:
    case = make_case("llama", freeze=("embed_tokens",))
    for block in case.table.blocks:
        views = unpack(block, case.weights[block.index].numpy(), case.frozen[block.index].numpy())
        named = {
            t.name if t.trainable else f"frozen.{t.name}": torch.from_numpy(views[t.name]).clone()
            for t in block.tensors
        }
        save_file(named, tmp_path / f"block-{block.index:04d}.safetensors")
    read_block = saved_blocks(tmp_path, case.table)
    embedding = read_block(0)["model.embed_tokens.weight"]
    assert np.array_equal(embedding, case.original.model.embed_tokens.weight.detach().numpy())
    (tmp_path / "block-0001.safetensors").unlink()
    with pytest.raises(StateError, match=r"block-0001.safetensors"):
        read_block(1)
