"""Makes the checkpoints of this folder with DeepSpeed, on two ranks of the CPU.

``PYTHONPATH=. PYTHON -m tests.data.deepspeed.make FOLDER`` runs in an environment with DeepSpeed:
:mod:`tests.integration.trainers.environments`. ``digests.json`` has the SHA-256 of each tensor that
DeepSpeed's own ``ds_to_universal`` finds in a checkpoint.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
OPTIMIZER = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
KINDS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2": {"stage": 2, "dtype": "bf16", "groups": False, "frozen": ["model.norm"]},
    "zero3": {"stage": 3, "frozen": ["model.embed_tokens"]},
    "tied1": {"stage": 1, "model": "tied"},
    "parts3": {"stage": 3, "zero": {"sub_group_size": 40}},
    "empty1": {"stage": 1, "steps": [0, 0]},
    "robin2": {"stage": 2, "zero": {"round_robin_gradients": True}},
}
CONVERTED = ("zero3", "robin2")
"""Kinds that are stored in their converted form, too. DeepSpeed leaves frozen parameters of the
first in the files of ranks, and mixes parameters of the second.
"""
STEPS = 3


def make(kind: str, folder: Path, port: int) -> dict[str, str]:
    """Trains, packs the checkpoint, and returns digests of the converted one."""
    rows = [
        [[(step + 3 * row + 5 * n * n) % 12 for n in range(6)] for row in range(2)]
        for step in range(STEPS)
    ]
    settings = {
        **{"model": "plain", "rows": rows, "ranks": 2, "steps": [0, STEPS], "port": port},
        **{"save": str(folder / kind), "tag": "global_step3", "optimizer": OPTIMIZER},
        **KINDS[kind],
    }
    settings["model"] = str(folder / settings["model"])
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(settings))
    module = "tests.integration.trainers.deepspeed_training"
    variables = {**os.environ, "DS_ACCELERATOR": "cpu"}
    subprocess.run([sys.executable, "-m", module, str(path)], check=True, env=variables)
    source, out = folder / kind / "global_step3", folder / f"{kind}-universal"
    convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    convert += ["--input_folder", str(source), "--output_folder", str(out)]
    convert += ["--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"]
    subprocess.run(convert, check=True, env=variables)
    digests = {}
    for file in sorted((out / "zero").glob("*/*.pt")):
        value = torch.load(file, weights_only=False)
        tensor = value["param"] if isinstance(value, dict) else value
        if file.stem != "step":
            data = tensor.detach().contiguous().reshape(-1).numpy().tobytes()
            digests[f"{file.parent.name}/{file.stem}"] = hashlib.sha256(data).hexdigest()
    return digests


def packed(folder: Path, kind: str) -> bytes:
    """Returns the files of a checkpoint as an archive."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:xz") as archive:
        for path in sorted((folder / kind).rglob("*")):
            if path.suffix == ".pt" or path.name == "latest":
                info = tarfile.TarInfo(str(path.relative_to(folder)))
                info.size = path.stat().st_size
                archive.addfile(info, io.BytesIO(path.read_bytes()))
    return content.getvalue()


def main() -> None:
    """Writes an archive for each kind, and the digests."""
    out, digests = Path(sys.argv[1]), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for name, tied in (("plain", False), ("tied", True)):
            torch.manual_seed(1)
            config = LlamaConfig(**SIZES, tie_word_embeddings=tied)
            LlamaForCausalLM(config).save_pretrained(folder / name)
        for number, kind in enumerate(KINDS):
            digests[kind] = make(kind, folder, 29840 + number)
            (out / f"{kind}.tar.xz").write_bytes(packed(folder, kind))
        del digests["robin2"]  # of mixed parameters
        for converted in (f"{kind}-universal" for kind in CONVERTED):
            (out / f"{converted}.tar.xz").write_bytes(packed(folder, converted))
    (out / "digests.json").write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
