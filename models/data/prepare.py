"""``python -m penstock.models.data.prepare RUN_DIR``: everything about a run that follows from its
inputs.

Writes ``model/config.json``, ``table.json``, ``data/*.bin``, ``data/meta.json`` and
``tokenizer/``, each atomically, and skips what was made from the same inputs before. torch is
imported only when the model has to be looked at.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from penstock.models.checkpoints.carried import keep_carried
from penstock.models.data.chunks import ChunkHasher, Progress, write_sums
from penstock.models.data.corpus import documents, source_files, token_dtype, write_tokens
from penstock.models.data.tokenizer import Tokenizer, open_tokenizer
from penstock.protocol.config.schema import Config
from penstock.protocol.config.values import MASKED
from penstock.protocol.errors import ConfigError
from penstock.protocol.run.files import DAMAGED, parse_json, write_atomically
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory

_SPLITS = ("train", "eval")
_SCAN_TOKENS = 1 << 24
_NOT_IN_FILES = {"shuffle", "document_masks", "objective", "mask_fraction", "mask_token"}
"""Keys of ``data`` that say what becomes of tokens, not which they are."""


def prepare(
    config: Config,
    run_dir: Path,
    *,
    table_only: bool = False,
    progress: Progress = lambda message: None,
) -> None:
    """Make the files of a run directory. ``table_only`` leaves the data out; ``progress`` is told
    about what takes long.

    Where the platform brings its model, only the data is made here.

    Raises:
        ConfigError: the configuration, the model or the data cannot be used; names key and value.
        StateError: files of a local model directory are damaged.
    """
    tokenizer = open_tokenizer(config)
    if not config.cluster.platform.brings_model:
        _prepare_model(config, run_dir, tokenizer, table_only=table_only)
    if not table_only:
        _prepare_data(config, run_dir, tokenizer, progress)
        keep_carried(config, run_dir, tokenizer)


def _prepare_model(
    config: Config, run_dir: Path, tokenizer: Tokenizer | None, *, table_only: bool
) -> None:
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    eos = None if tokenizer is None else tokenizer.eos
    fingerprint = _fingerprint(
        config.model.model_dump(mode="json", exclude={"imports"}),
        _file_stamps([config.model.path / "config.json"]) if config.model.path else None,
        [config.data.sequence_length, list(config.train.freeze), vocab_size, eos],
        config.optimizer.model_dump(mode="json", include={"name", "grad_dtype"}),
        [version(package) for package in ("torch", "transformers")],
    )
    directory = run_dir / "model"
    made = (directory / "config.json", run_dir / "table.json")
    if _recorded(directory / "meta.json") == fingerprint and all(p.is_file() for p in made):
        return
    # Imported here: torch takes seconds, and a run that goes on needs none of it.
    from penstock.models.checkpoints.initial import check_weights
    from penstock.models.surgery.hf import resolve_hf_config
    from penstock.models.surgery.table import build_table

    hf_config = resolve_hf_config(config, tokenizer_vocab_size=vocab_size, eos=eos)
    table = build_table(config, hf_config)
    # A plan needs no weights; a run is to be refused for them now, before it takes memory.
    path = config.model.path
    if not table_only or (path is not None and any(path.glob("*.safetensors"))):
        check_weights(config, hf_config, table)
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / "config.json", hf_config.to_json_string(use_diff=False))
    write_atomically(run_dir / "table.json", table.to_json())
    write_atomically(directory / "meta.json", json.dumps({"fingerprint": fingerprint}))


def _prepare_data(
    config: Config, run_dir: Path, tokenizer: Tokenizer | None, progress: Progress
) -> None:
    directory = run_dir / "data"
    directory.mkdir(parents=True, exist_ok=True)
    meta = directory / "meta.json"
    sources = _Sources(config, tokenizer, run_dir, progress)
    if _recorded(meta) != sources.fingerprint or not _complete(meta):
        meta.unlink(missing_ok=True)  # first: it would describe files that are being replaced
        splits = sources.write(directory)
        write_atomically(meta, json.dumps({"fingerprint": sources.fingerprint, **splits}, indent=1))
    _check_batches(config, json.loads(meta.read_text(encoding="utf-8")))


class _Sources:
    """Where the tokens of a run come from, and the fingerprint of all that decides them."""

    def __init__(
        self, config: Config, tokenizer: Tokenizer | None, run_dir: Path, progress: Progress
    ) -> None:
        self._config, self._tokenizer, self._progress = config, tokenizer, progress
        self._vocab_size = RunDirectory(run_dir).table.vocab_size
        model = json.loads((run_dir / "model" / "config.json").read_text(encoding="utf-8"))
        eos = model.get("eos_token_id")
        self._eos = eos if isinstance(eos, int) else None
        data = config.data
        if tokenizer is None:
            assert data.tokens is not None
            self._files = [data.tokens]
            if not data.tokens.is_file():
                raise ConfigError(f"data.tokens = {str(data.tokens)!r}: no such file")
        else:
            assert data.path is not None
            self._files = source_files(data.path)
        self._mask = self._find_mask()
        self._holds_out = config.train.eval_every > 0
        self._eval_files: list[Path] = []
        if self._holds_out and data.eval_path is not None:
            if tokenizer is None:
                raise ConfigError(
                    f"data.eval_path = {data.eval_path!r}: goes with data.path; with data.tokens"
                    " the last sequences are held out (data.eval_fraction)"
                )
            self._eval_files = source_files(data.eval_path, key="data.eval_path")
        self.fingerprint = _fingerprint(
            data.model_dump(mode="json", exclude=_NOT_IN_FILES),
            [self._holds_out, self._vocab_size, self._eos],
            _file_stamps(self._files),
            _file_stamps(self._eval_files),
            None if tokenizer is None else hashlib.sha256(_tokenizer_bytes(tokenizer)).hexdigest(),
        )

    def _find_mask(self) -> int | None:
        """Returns the token that stands for masked ones; None where none are masked.

        Raises:
            ConfigError: nobody says which, or the model has no such token.
        """
        data = self._config.data
        if data.objective != MASKED:
            return None
        own = None if self._tokenizer is None else self._tokenizer.mask
        mask = own if data.mask_token is None else data.mask_token
        if mask is None:
            raise ConfigError(
                f"data.objective = {MASKED!r}: the tokenizer has no mask token; give its number as"
                " data.mask_token"
            )
        if mask >= self._vocab_size:
            raise ConfigError(
                f"data.mask_token = {mask}: the model has a vocabulary of {self._vocab_size}; check"
                " model.hf.vocab_size"
            )
        return mask

    def write(self, directory: Path) -> dict[str, dict[str, Any]]:
        """Make the token files; returns the entry of each split in ``meta.json``."""
        if self._tokenizer is None:
            whole = self._given_tokens(directory / "train.sums")
        else:
            whole = self._tokenized(self._files, directory / "train.bin", self._tokenizer)
        if not self._holds_out:
            return {"train": whole}
        if self._eval_files:
            assert self._tokenizer is not None
            held = self._tokenized(self._eval_files, directory / "eval.bin", self._tokenizer)
            return {"train": whole, "eval": held}
        return self._split(whole)

    def _tokenized(self, files: list[Path], path: Path, tokenizer: Tokenizer) -> dict[str, Any]:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            # The file is on disk before it gets its name; meta.json, last, says that all is there.
            hasher = ChunkHasher()
            num_tokens = write_tokens(documents(files), tokenizer, temporary, hasher)
            temporary.rename(path)
            sums = hasher.write(path.with_suffix(".sums"))
        finally:
            temporary.unlink(missing_ok=True)
        dtype = token_dtype(tokenizer.vocab_size)
        return {**self._entry(path.name, num_tokens, dtype, tokenizer.eos), "sums": sums}

    def _given_tokens(self, sums: Path) -> dict[str, Any]:
        """Returns the entry of a token file, which stays where it is; checks every id once against
        the vocabulary, and makes checksums.
        """
        path, dtype = self._files[0].absolute(), np.dtype(self._config.data.token_dtype)
        size = path.stat().st_size
        if size % dtype.itemsize:
            raise ConfigError(
                f"data.tokens = {str(path)!r}: {size} bytes are no whole number of"
                f" {self._config.data.token_dtype}; set data.token_dtype"
            )
        tokens = np.memmap(path, dtype=dtype.newbyteorder("<"), mode="r") if size else np.empty(0)
        for start in range(0, len(tokens), _SCAN_TOKENS):
            largest = int(tokens[start : start + _SCAN_TOKENS].max())
            if largest >= self._vocab_size:
                raise ConfigError(
                    f"data.tokens = {str(path)!r}: holds token {largest}, the model has"
                    f" a vocabulary of {self._vocab_size}; check model.hf.vocab_size and"
                    " data.token_dtype"
                )
        entry = self._entry(str(path), len(tokens), self._config.data.token_dtype, self._eos)
        return {**entry, "sums": write_sums(path, sums, self._progress)}

    def _entry(self, path: str, num_tokens: int, dtype: str, eos: int | None) -> dict[str, Any]:
        return {
            "path": path,
            "first_token": 0,
            "num_tokens": num_tokens,
            "token_dtype": dtype,
            "vocab_size": self._vocab_size,
            "eos": eos,
            "mask": self._mask,
            "fingerprint": self.fingerprint,
        }

    def _split(self, whole: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Returns both splits' entries, with the last sequences held out; they lie in one file."""
        length = self._config.data.sequence_length
        sequences = max(0, whole["num_tokens"] - 1) // length
        held = max(1, round(sequences * self._config.data.eval_fraction))
        kept = max(0, sequences - held)
        return {
            "train": {**whole, "num_tokens": kept * length + 1},
            "eval": {**whole, "first_token": kept * length, "num_tokens": held * length + 1},
        }


def _check_batches(config: Config, meta: dict[str, Any]) -> None:
    """Refuse data of which a global batch would need a sequence twice, or too short for
    evaluation.
    """
    length = config.data.sequence_length
    sequences = max(0, meta["train"]["num_tokens"] - 1) // length
    if sequences < config.train.global_batch:
        source = config.data.path or config.data.tokens
        raise ConfigError(
            f"train.global_batch = {config.train.global_batch}: {str(source)!r} has {sequences}"
            f" sequences of data.sequence_length = {length} to train on; give more text, a"
            " smaller batch or shorter sequences"
        )
    if "eval" in meta and meta["eval"]["num_tokens"] <= length:
        raise ConfigError(
            f"data.eval_path = {config.data.eval_path!r}: has {meta['eval']['num_tokens']} tokens;"
            f" one sequence of data.sequence_length = {length} takes {length + 1}"
        )


def _complete(meta: Path) -> bool:
    """Whether the files that ``meta.json`` lists are there in full; false where it is damaged."""
    try:
        splits = parse_json(meta.read_bytes())
        return all(_is_whole(meta.parent, splits[name]) for name in _SPLITS if name in splits)
    except (OSError, *DAMAGED):
        return False


def _is_whole(directory: Path, entry: dict[str, Any]) -> bool:
    path = directory / entry["path"]
    end = entry["first_token"] + entry["num_tokens"]
    size = end * np.dtype(entry["token_dtype"]).itemsize
    return path.is_file() and bool(path.stat().st_size >= size)


def _recorded(meta: Path) -> str | None:
    """Returns the fingerprint in an earlier file; None where it cannot be read."""
    try:
        return str(parse_json(meta.read_bytes())["fingerprint"])
    except (OSError, *DAMAGED):
        return None


def _file_stamps(files: Sequence[Path]) -> list[list[Any]]:
    stamps = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        stamps.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
    return stamps


def _tokenizer_bytes(tokenizer: Tokenizer) -> bytes:
    return b"".join(content for _, content in sorted(tokenizer.files().items()))


def _fingerprint(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _say(message: str) -> None:
    """Write a line for whoever started this process."""
    sys.stdout.write(f"{message}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.models.data.prepare", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="directory with resolved.yaml")
    parser.add_argument("--table-only", action="store_true", help="leave the data out")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)
    run_dir: Path = options.run_dir

    def work() -> None:
        config = RunDirectory(run_dir).config
        prepare(config, run_dir, table_only=options.table_only, progress=_say)

    return tool_main(work, run_dir, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
