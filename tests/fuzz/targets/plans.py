"""What users write, or have others write: configurations, plans, profiles, models, texts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tokenizers import Tokenizer, models

from penstock.client.planning.outputs import read_plan
from penstock.client.planning.plan_command import _read_actions as _lab_actions
from penstock.client.views.trace.comparison import parse_attempts
from penstock.config.schema import load_config
from penstock.config.words import apply_overrides
from penstock.daemons.node.joining.launchers import find_place
from penstock.host.limits.cgroup import parse_mounts
from penstock.host.topology import parse_cpus
from penstock.models.data.cache import TokenCache
from penstock.models.data.tokenizer import JsonTokenizer
from penstock.models.data.tokenizer_folder import _model_ends
from penstock.models.inference.generate import _conversation
from penstock.models.surgery.hf import read_hf_config
from penstock.planner.cost.sources import parse_costs
from penstock.planner.planning.configured import _read_actions as _configured_actions
from penstock.planner.planning.torch_actions import parse_actions
from penstock.protocol.plan.instructions import parse_program
from penstock.protocol.plan.plan import Plan
from penstock.protocol.plan.profile import Profile, from_json, to_json
from penstock.protocol.run.rundir import RunDirectory
from penstock.shm.table import BlockTable
from tests.fuzz.census import ROOT
from tests.fuzz.target import Decoder, Form, Target, from_file, plainly
from tests.fuzz.targets.material import config, plan, table
from tests.fuzz.targets.run_files import dumped, in_run
from tests.planner.test_profile import _LAYER, _MACHINE

VALUES: tuple[type[Exception], ...] = (ValueError,)
"""Of functions whose callers say which file it was."""


def _texts(*texts: str) -> list[bytes]:
    return [text.encode() for text in texts]


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _plan(data: bytes) -> None:
    found = Plan.from_json(data)
    assert Plan.from_json(found.to_json()) == found


def _table(data: bytes) -> None:
    found = BlockTable.from_json(_text(data))
    assert BlockTable.from_json(found.to_json()) == found


def _actions(folder: Path) -> None:
    _lab_actions(folder / "a.csv", parse_costs("unit"))
    _configured_actions(folder / "a.csv", config(), [1.0] * 3)


def _some_profile() -> Profile:
    return Profile(
        device="a laptop",
        sequence_length=8,
        micro_batch=2,
        machine=_MACHINE,
        kinds={"layer": _LAYER},
        table=table(),
    )


def _profile(data: bytes) -> None:
    to_json(from_json(data))


def _config(folder: Path) -> None:
    found = load_config(folder / "run.yaml")
    (folder / "again.yaml").write_text(found.to_yaml())
    assert load_config(folder / "again.yaml") == found


def _configs() -> list[bytes]:
    examples = sorted((ROOT / "examples").glob("*.yaml"))
    return [config().to_yaml().encode(), *(path.read_bytes() for path in examples[:3])]


def _environment(data: bytes) -> object:
    """Variables of whatever engine, a line each."""
    pairs = (line.partition("=") for line in _text(data).replace("\0", "").split("\n"))
    return find_place({name: value for name, _, value in pairs}, lambda: "pod-0.svc")


def _engines() -> list[bytes]:
    return _texts(
        "SLURM_JOB_ID=7\nSLURM_NODEID=1\nSLURM_NNODES=3\nSLURM_NTASKS=3\nSLURM_PROCID=1\n"
        "SLURM_JOB_NODELIST=c[001-003]\nSLURM_STEP_NODELIST=c[001-003]\nSLURM_STEP_NUM_NODES=3\n"
        "SLURM_STEP_NUM_TASKS=3\nSLURM_STEP_ID=0\nSLURM_JOB_NUM_NODES=3",
        "JOB_COMPLETION_INDEX=1\nJOBSET_NAME=run\nREPLICATED_JOB_NAME=node\nREPLICAS=2",
        "GROUP_RANK=1\nGROUP_WORLD_SIZE=2\nMASTER_ADDR=host\nMASTER_PORT=29500\nLOCAL_RANK=0",
        "NODE_RANK=0\nNNODES=2\nMASTER_ADDR=host\nMASTER_PORT=29500",
    )


@contextmanager
def _hf(folder: Path) -> Iterator[Decoder]:
    def read(data: bytes) -> object:
        (folder / "config.json").write_bytes(data)
        _model_ends(folder)
        return read_hf_config(folder)

    yield read


LLAMA = {
    "model_type": "llama",
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "eos_token_id": 2,
}


def _tokenizers() -> list[bytes]:
    vocabulary = {"a": 0, "b": 1, "<|endoftext|>": 2}
    made: Any = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    return [made.to_str().encode()]


@contextmanager
def _tokenizer_config(folder: Path) -> Iterator[Decoder]:
    (folder / "tokenizer.json").write_bytes(_tokenizers()[0])

    def read(data: bytes) -> object:
        (folder / "tokenizer_config.json").write_bytes(data)
        return JsonTokenizer(folder / "tokenizer.json").chat_parts()

    yield read


_KEPT = {
    "format": 1,
    "num_tokens": 2,
    "sums": {
        "path": "train.sums",
        "chunk_bytes": 1 << 16,
        "file_bytes": 4,
        "sha256": sha256(sha256(b"abcd").digest()[:16]).hexdigest(),
    },
}


@contextmanager
def _kept_tokens(folder: Path) -> Iterator[Decoder]:
    """An entry of the cache of tokens, whose files but ``entry.json`` are whole."""
    cache = folder / "penstock"
    entry = cache / "key"
    cache.mkdir(mode=0o700)

    def fetch(data: bytes) -> object:
        entry.mkdir(mode=0o700, exist_ok=True)
        contents = {"tokens.bin": b"abcd", "tokens.sums": sha256(b"abcd").digest()[:16]}
        for name, content in {**contents, "entry.json": data}.items():
            (entry / name).write_bytes(content)
            (entry / name).chmod(0o600)
        return TokenCache(1 << 20, lambda line: None).fetch(
            "key", folder / "train.bin", folder / "train.sums"
        )

    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(folder)}):
        assert fetch(dumped(_KEPT)[0]) is not None
        yield fetch


def _attempts(data: bytes) -> object:
    return parse_attempts(None, _text(data))


PROGRAM = (
    "device 0:\n  FW 0 phase=forward; F 0 0 keep=all; SA 0 0 peer=1; RG 1 0 peer=1; B 0 0; OG 0\n"
    "device 1:\n  RA 0 0 peer=0; F 1 0 keep=input; R 1 0; B 1 0; SG 1 0 peer=0; OG 1\n"
)

PLANS = (
    Target(
        name="plan",
        open=plainly(_plan),
        covers=(
            "protocol.plan.plan.Plan.from_json",
            "protocol.plan.instructions.parse_instruction",
        ),
        seeds=lambda: _texts(plan().to_json(), make_plan_text()),
        form=Form.JSON,
        examples=200,
    ),
    Target(
        name="plan-file",
        open=from_file("plan.json", lambda folder: read_plan(folder / "plan.json")),
        covers=("client.planning.outputs.read_plan", "host.inputs.read_bytes"),
        seeds=lambda: _texts(plan().to_json()),
        form=Form.JSON,
        examples=20,
    ),
    Target(
        name="table",
        open=plainly(_table),
        covers=("shm.table.BlockTable.from_json",),
        seeds=lambda: _texts(table().to_json()),
        form=Form.JSON,
        allowed=VALUES,
        examples=300,
    ),
    Target(
        name="table-of-a-run",
        open=in_run("table.json", lambda folder: RunDirectory(folder).table),
        covers=("shm.table.BlockTable.from_json",),
        seeds=lambda: _texts(table().to_json()),
        form=Form.JSON,
    ),
    Target(
        name="profile",
        open=plainly(_profile),
        covers=("protocol.plan.profile.from_json", "protocol.plan.profile.to_json"),
        seeds=lambda: _texts(to_json(_some_profile())),
        form=Form.JSON,
        examples=200,
    ),
    Target(
        name="configuration",
        open=from_file("run.yaml", _config),
        covers=(
            "config.reading.parse_yaml",
            "config.reading.read_mapping",
            "config.schema.load_config",
            "config.schema.parse_config",
            "host.inputs.read_text",
            "config.values.parse_micro_batch",
            "config.values.parse_size",
            "config.values.parse_steps",
            "config.values.parse_share",
            "config.values.parse_cores",
            "config.values.parse_end_tokens",
            "config.values.parse_leave",
        ),
        seeds=_configs,
        form=Form.TEXT,
    ),
    Target(
        name="settings",
        open=plainly(lambda data: apply_overrides({"train": {"steps": 3}}, (_text(data),))),
        covers=("config.words._apply_override",),
        seeds=lambda: _texts("train.steps=100", "run.name=[1, {a: b}]", "a.b.c="),
        form=Form.TEXT,
    ),
    Target(
        name="program",
        open=plainly(lambda data: parse_program(_text(data))),
        covers=(
            "protocol.plan.instructions.parse_program",
            "protocol.plan.instructions._parse_index",
            "protocol.plan.instructions._parse_keep",
            "protocol.plan.instructions._parse_phase",
            "protocol.plan.instructions._parse_flag",
            "protocol.plan.instructions._parse_fraction",
            "protocol.plan.instructions._parse_indices",
            "protocol.plan.instructions._parse_operators",
            "protocol.plan.instructions._parse_after",
        ),
        seeds=lambda: _texts(
            PROGRAM,
            "device 0:\n  F 0 0 keep=selective drop=mlp,attention; R 0 0 after=gradient\n"
            "  SO 0 0 fraction=0.5; SI 0 0 fraction=0.5; BW 0 0,1; U 0 flush=yes",
        ),
        form=Form.TEXT,
        examples=200,
    ),
    Target(
        name="torch-actions",
        open=plainly(lambda data: parse_actions(_text(data))),
        covers=(
            "planner.planning.torch_actions.parse_actions",
            "planner.planning.torch_actions._parse_cell",
            "planner.planning.torch_actions._parse_action",
        ),
        seeds=lambda: _texts("0F0,0F1,,0B0\n,1F0,1F1,1I0,1W0\n", '0F0,"(0F1;0B0)OVERLAP_F_B"\n'),
        form=Form.TEXT,
        examples=200,
    ),
    Target(
        name="actions-file",
        open=from_file("a.csv", _actions),
        covers=(
            "client.planning.plan_command._read_actions",
            "planner.planning.configured._read_actions",
        ),
        seeds=lambda: _texts("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n"),
        form=Form.TEXT,
    ),
    Target(
        name="costs",
        open=plainly(lambda data: parse_costs(_text(data).replace("\0", ""))),
        covers=("planner.cost.sources.parse_costs",),
        seeds=lambda: _texts("unit:f=1,b=2", "unit", "unit:p1=1,p2=0.5,r=1,o=3", "x.json"),
        form=Form.TEXT,
    ),
    Target(
        name="attempts",
        open=plainly(_attempts),
        covers=("client.views.trace.comparison.parse_attempts",),
        seeds=lambda: _texts("10:20", ":20", "10:"),
        form=Form.TEXT,
    ),
    Target(
        name="engines",
        open=plainly(_environment),
        covers=(
            "daemons.node.joining.launchers.find_place",
            "daemons.node.joining.launchers.expand_hosts",
        ),
        seeds=_engines,
        form=Form.TEXT,
        examples=300,
    ),
    Target(
        name="mounts",
        open=plainly(lambda data: parse_mounts(_text(data).split("\n"))),
        covers=("host.limits.cgroup.parse_mounts",),
        seeds=lambda: [
            b"29 23 0:26 /a\\040b /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,huge=advise\n"
        ],
        form=Form.TEXT,
        allowed=(),
    ),
    Target(
        name="cpus",
        open=plainly(lambda data: parse_cpus(_text(data))),
        covers=("host.topology.parse_cpus",),
        seeds=lambda: _texts("0-3,8", "0", ""),
        form=Form.TEXT,
        allowed=VALUES,
    ),
    Target(
        name="hf-config",
        open=_hf,
        covers=(
            "models.surgery.hf.read_hf_config",
            "models.data.tokenizer_folder._model_ends",
        ),
        seeds=lambda: dumped(LLAMA, LLAMA | {"model_type": "gpt2"}),
        form=Form.JSON,
        examples=40,
    ),
    Target(
        name="messages-file",
        open=from_file("m.json", lambda folder: _conversation(folder / "m.json")),
        covers=("models.inference.generate._conversation",),
        seeds=lambda: dumped(
            [{"role": "user", "content": "hi"}],
            {"messages": [{"role": "user", "content": "hi"}], "tools": []},
        ),
        form=Form.JSON,
    ),
    Target(
        name="tokenizer",
        open=from_file("a.json", lambda folder: JsonTokenizer(folder / "a.json")),
        covers=("models.data.tokenizer.JsonTokenizer.__init__",),
        seeds=_tokenizers,
        form=Form.JSON,
        examples=40,
    ),
    Target(
        name="tokenizer-config",
        open=_tokenizer_config,
        covers=("models.data.tokenizer.JsonTokenizer._setting",),
        seeds=lambda: dumped({"eos_token": "a"}, {"eos_token": {"content": "b"}}),
        form=Form.JSON,
        examples=40,
    ),
    Target(
        name="kept-tokens",
        open=_kept_tokens,
        covers=("models.data.cache.TokenCache.fetch", "models.data.cache._read_own"),
        seeds=lambda: dumped(_KEPT),
        form=Form.JSON,
        allowed=(),
    ),
)


def make_plan_text() -> str:
    """A plan with instructions."""
    fields = json.loads(plan().to_json())
    fields["programs"] = [["F 0 0 keep=all", "B 0 0", "OG 0"], ["F 1 0 keep=all", "B 1 0", "OG 1"]]
    return json.dumps(fields)
