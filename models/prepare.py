"""``python -m penstock.models.prepare RUN_DIR``: makes all files of a run that follow from its
inputs.

The files are ``model/config.json``, ``table.json``, ``data/*.bin``, ``data/meta.json`` and
``tokenizer/``. Each is written atomically, and kept if it was made from the same inputs before.
torch is imported only when the model must be examined.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config.adapter import AdapterConfig
from penstock.config.evaluation import EVAL
from penstock.config.schema import Config
from penstock.config.values import AUTO
from penstock.host.errors import ConfigError, StateError
from penstock.host.files import DAMAGED, holds_text, parse_json, write_atomically
from penstock.host.limits.bounds import Bounds
from penstock.host.trust import printable
from penstock.models.adapters.files import SETTINGS, WEIGHTS, read_kept, read_settings
from penstock.models.apart.verdicts import sharing_of
from penstock.models.checkpoints.carried import keep_carried
from penstock.models.checkpoints.causes import check_folder, check_model_folder
from penstock.models.checkpoints.files import has_weights
from penstock.models.data.batch import MicroBatch
from penstock.models.data.bounds import BUILDING_S, OPENING_S, BoundedTokenizer
from penstock.models.data.chunks import Progress
from penstock.models.data.marks import Marks, end_ids, marks_of_text
from penstock.models.data.objectives import own_objective
from penstock.models.data.rows.evaluation import SetPreparation, is_whole
from penstock.models.data.rows.packing import Packing
from penstock.models.data.rows.row_file import RowLayout
from penstock.models.data.rows.sharing import Measured, Sharing
from penstock.models.data.rows.sources import RunSources, open_sources
from penstock.models.data.token_sources import file_stamps, fingerprint_of
from penstock.models.data.tokenizer import Tokenizer, open_tokenizer
from penstock.protocol.plan.groups import check_groups
from penstock.protocol.run.bases.base_identity import WEIGHT_FILES
from penstock.protocol.run.checksums import ADAPTER
from penstock.protocol.run.process import tool_main
from penstock.protocol.run.rundir import RunDirectory

_SPLITS = ("train", EVAL)


def prepare(
    config: Config,
    run_dir: Path,
    *,
    table_only: bool = False,
    config_only: bool = False,
    data_only: bool = False,
    progress: Progress = lambda message: None,
    bounds: Bounds | None = None,
) -> None:
    """Makes the files of a run directory.

    ``table_only`` leaves the data out. ``config_only`` does the same, and reads only
    ``config.json`` of a model folder. ``data_only`` makes data for a display. It reads no weights,
    needs no device, and takes data too short for a batch. ``progress`` receives messages during
    long work; ``bounds`` are those of this process. If the platform has a model built in, only the
    data are made.

    Raises:
        ConfigError: the configuration, the model or the data cannot be used; names key and value.
        StateError: files of a local model directory are damaged.
    """
    bounds = Bounds() if bounds is None else bounds
    table_only = table_only or config_only
    if not (table_only or data_only):
        _check_device(config)
    bounds.limit_memory()
    builtin_model, folder = config.cluster.platform.builtin_model, config.model.path
    if folder is not None and not (builtin_model or config_only):
        (check_folder if data_only else check_model_folder)(folder)
    with bounds.within(f"data.tokenizer = {config.tokenizer!r}: opening it", OPENING_S):
        tokenizer = open_tokenizer(config)
    if tokenizer is not None:
        tokenizer = BoundedTokenizer(tokenizer, str(config.tokenizer), bounds)
    marks = None if tokenizer is None else marks_of_text(config, tokenizer)
    if not builtin_model:
        weights = not table_only or (not config_only and folder is not None and has_weights(folder))
        weights = weights and not data_only
        with bounds.within("model: building it without weights", BUILDING_S):
            _prepare_model(config, run_dir, tokenizer, marks, progress, weights=weights)
        # Before the data, which may take minutes.
        check_groups(RunDirectory(run_dir).table, config.optimizer.groups)
    if not table_only:
        measured = cache(partial(_sharing, config, run_dir, bounds))
        sources = open_sources(config, tokenizer, marks, run_dir, progress, measured)
        made = _prepare_data(config, run_dir, sources, progress)
        _check_own_documents(config, run_dir, measured)
        if not data_only:
            _prepare_sets(config, run_dir, tokenizer, marks, progress, measured)
        if not data_only:
            _check_batches(config, made)
        _check_ends(config, made)
        if not data_only:
            keep_carried(config, run_dir, tokenizer)


def _check_device(config: Config) -> None:
    """Refuses a device that this machine lacks before anything is written or started for it.

    Raises:
        ConfigError: torch finds none.
    """
    platform = config.cluster.platform
    if platform.builtin_model or not platform.own_memory:
        return
    import torch

    from penstock.models.torch_device import first_device

    if first_device(platform.name) is None:
        build = " is a build for CPUs, and" if torch.version.cuda is None else ""
        raise ConfigError(
            f"cluster.device = {config.cluster.device!r}: torch {torch.__version__}{build} finds no"
            " GPU on this machine (driver, CUDA_VISIBLE_DEVICES); use cluster.device: cpu"
        )


def _prepare_model(
    config: Config,
    run_dir: Path,
    tokenizer: Tokenizer | None,
    marks: Marks | None,
    progress: Progress,
    *,
    weights: bool,
) -> None:
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    eos = None if tokenizer is None else tokenizer.eos
    if marks is not None and marks.after:
        eos = marks.after[0]
    fingerprint = _fingerprint(config, vocab_size, eos)
    directory = run_dir / "model"
    made = [directory / "config.json", run_dir / "table.json"]
    if config.adapter is not None and config.adapter.path is not None:
        made.append(run_dir / ADAPTER)
    # A run that has trained keeps its files, its ties and its chunks. All else follows from files
    # that may have changed since an earlier preparation.
    kept = RunDirectory(run_dir).has_started and all(p.is_file() for p in made)
    if kept and _recorded(directory / "meta.json") == fingerprint:
        return
    # Imported here: torch takes seconds, and a run that continues needs none of it.
    from penstock.models.checkpoints.adapters import check_adapter_files
    from penstock.models.checkpoints.constants import make_constants
    from penstock.models.checkpoints.folder import FolderWeights
    from penstock.models.surgery.hf import resolve_hf_config
    from penstock.models.surgery.skeleton import build_skeleton
    from penstock.models.surgery.table import build_table

    hf_config = resolve_hf_config(config, tokenizer_vocab_size=vocab_size, eos=eos)
    # A plan needs no weights; a run must be refused for them now, before it takes memory.
    path, source = config.model.path, None
    if path is not None and weights and kept:
        source = FolderWeights.keep(run_dir, path, hf_config, progress)
    elif path is not None and weights:
        source = FolderWeights.find(path, hf_config, progress)
    skeleton = build_skeleton(hf_config) if source is None else source.skeleton
    previous = RunDirectory(run_dir).table if kept else None
    adapter = _adapter(config, run_dir, skeleton.model)
    adapted = skeleton if adapter is None else build_skeleton(hf_config, adapter)
    table = build_table(config, hf_config, adapted, previous=previous)
    meta: dict[str, Any] = {"fingerprint": fingerprint}
    tensors = None if source is None else source.weights
    if source is not None:
        source.check(table, progress)
        meta[WEIGHT_FILES] = list(source.files)
    if weights and not kept:
        check_adapter_files(config, adapted, table, tensors)
    directory.mkdir(parents=True, exist_ok=True)
    if path is None or source is not None:
        make_constants(run_dir, hf_config, skeleton, table, tensors, progress)
    elif skeleton.constants():
        del meta["fingerprint"]  # The run that follows a plan reads them.
    _keep_or_write(directory / "config.json", hf_config.to_json_string(use_diff=False))
    _keep_or_write(run_dir / "table.json", table.to_json())
    _keep_or_write(directory / "meta.json", json.dumps(meta))


def _keep_or_write(path: Path, text: str) -> None:
    if not holds_text(path, text):
        write_atomically(path, text)


def _sharing(config: Config, run_dir: Path, bounds: Bounds) -> Sharing:
    """Returns how samples of the run's model can share rows."""
    with bounds.within("model: running a small one of its type", BUILDING_S):
        return sharing_of(config, run_dir)


def _fingerprint(config: Config, vocab_size: int | None, eos: int | None) -> str:
    """Returns the fingerprint of everything that the model's files follow from."""
    model = config.model.model_dump(mode="json", exclude={"imports", "import_path", "attention"})
    return fingerprint_of(
        # Keys that change no file, with the values that runs of older versions have.
        model | {"compile": False},
        file_stamps([config.model.path / "config.json"]) if config.model.path else None,
        [config.data.sequence_length, *_chosen(config), vocab_size, eos],
        config.optimizer.model_dump(mode="json", include={"name", "grad_dtype"}),
        [version(package) for package in ("torch", "transformers")],
    )


def _chosen(config: Config) -> list[Any]:
    """Returns the keys that choose the trained parameters; newer ones only where they are given, as
    older runs have a fingerprint without them.
    """
    newer: list[Any] = [list(config.train.only)] if config.train.only else []
    if config.adapter is not None:
        newer.append(config.adapter.model_dump(mode="json"))
        folder = config.adapter.path
        if folder is not None:
            files = [file for n in (SETTINGS, WEIGHTS) if (file := folder / n).is_file()]
            newer.append(file_stamps(files))
    return [list(config.train.freeze), *newer]


def _adapter(config: Config, run_dir: Path, model: Any) -> AdapterConfig | None:
    """Returns the settings of the run's adapter. Those of ``adapter.path`` are written to the run's
    directory, and a run that has trained keeps them.

    Raises:
        ConfigError, StateError: the folder cannot be used.
    """
    given, path = config.adapter, run_dir / ADAPTER
    if given is None or given.path is None:
        path.unlink(missing_ok=True)
        return given
    if RunDirectory(run_dir).has_started and path.is_file():
        return read_kept(run_dir, given.dropout)
    names = [name for name, _ in model.named_modules() if name]
    settings = read_settings(given.path, names, given.dropout)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, settings.model_dump_json(exclude={"path", "dropout"}, indent=1))
    return settings


def observe(config: Config, run_dir: Path, progress: Progress) -> None:
    """Notes the kernels of the run's workers, if they compute with torch's."""
    if config.cluster.platform.builtin_model:
        return
    from penstock.models.kernels import observe_kernels

    observe_kernels(config, run_dir, progress)


def review_weights(config: Config, run_dir: Path, progress: Progress) -> None:
    """Reports weights that a new run would take from other files, for a run that was prepared
    before such records existed. Makes the record.
    """
    from penstock.models.checkpoints.folder import review

    if config.model.path is not None:
        review(run_dir, config.model.path, progress)


def _prepare_data(
    config: Config, run_dir: Path, sources: RunSources, progress: Progress
) -> dict[str, Any]:
    """Makes the files of data; returns the entry of each split in ``meta.json``."""
    # an error of the function would otherwise appear in a worker, after memory was allocated
    own_objective(config)
    directory = run_dir / "data"
    directory.mkdir(parents=True, exist_ok=True)
    meta = directory / "meta.json"
    started = RunDirectory(run_dir).has_started
    if started and _has(meta, "train"):
        _keep_tokens(sources, meta, progress)
    elif _recorded(meta) != sources.fingerprint or not _has(meta):
        before = _recorded_sum(meta) if started else None
        if before is None:
            meta.unlink(missing_ok=True)  # first: it would describe files that are being replaced
        splits = sources.write(directory)
        if before not in (None, splits["train"]["sums"]["sha256"]):
            raise StateError(
                f"{directory}: the run's tokens are lost, and its text now gives other tokens: the"
                " text or the keys of data have changed since the run was prepared. Restore the"
                " directory, or start a new run in another run.dir"
            )
        write_atomically(meta, json.dumps({"fingerprint": sources.fingerprint, **splits}, indent=1))
    made: dict[str, Any] = json.loads(meta.read_text(encoding="utf-8"))
    return made


def _keep_tokens(sources: RunSources, meta: Path, progress: Progress) -> None:
    """Keeps the tokens of a run that has trained, even if its text has changed since. The text of
    evaluations may change.
    """
    recorded = parse_json(meta.read_bytes())
    train, held = recorded["train"], recorded.get("eval")
    changed = train.get("source") not in (None, sources.now("path"))
    progress(
        "data: the run keeps the tokens that it was prepared with"
        + ("; a new run would take others: the text, or how it is read, has changed" * changed)
    )
    splits = {"train": train}
    if sources.has_eval_text:
        same = _has(meta, "eval") and _is_same_eval(held, sources)
        splits["eval"] = held if same else sources.write_eval(meta.parent, train.get("fingerprint"))
    elif sources.holds_out and held is not None:
        splits["eval"] = held
    sets = {name: entry for name, entry in recorded.items() if name.startswith(f"{EVAL}.")}
    fields = {"fingerprint": recorded.get("fingerprint"), **splits, **sets}
    if fields != recorded:
        write_atomically(meta, json.dumps(fields, indent=1))


def _is_same_eval(held: Mapping[str, Any], sources: RunSources) -> bool:
    """Returns whether the evaluation text is the one that a run has. Entries of an older Penstock
    know no content, and count by the times of the files.
    """
    if "content" in held:
        return bool(held["content"] == sources.content("eval_path"))
    return bool(held.get("source") == sources.now("eval_path"))


def _prepare_sets(
    config: Config,
    run_dir: Path,
    tokenizer: Tokenizer | None,
    marks: Marks | None,
    progress: Progress,
    measured: Measured,
) -> None:
    """Makes the data of evaluation sets, and removes those that the configuration does not have."""
    meta = run_dir / "data" / "meta.json"
    recorded = parse_json(meta.read_bytes())
    layout = RowLayout.of(recorded["train"])
    preparation = SetPreparation(
        config=config,
        tokenizer=tokenizer,
        marks=marks,
        run_dir=run_dir,
        packs=layout is not None and layout.packing == Packing.BEST_FIT.value,
        keeps=RunDirectory(run_dir).has_started,
        progress=progress,
        measured=measured,
    )
    needed = preparation.needed(recorded)
    entries = {name: entry for name, entry in recorded.items() if name not in needed}
    if entries != recorded:  # first: it would describe files that are being replaced
        write_atomically(meta, json.dumps(entries, indent=1))
    made = {split: preparation.make(each) for split, each in needed.items()}
    # Only now: a resume that is refused for a new set leaves the old ones.
    splits = {each.key for each in config.eval.sets}
    kept = {n: e for n, e in entries.items() if not n.startswith(f"{EVAL}.") or n in splits}
    if {**kept, **made} != entries:
        write_atomically(meta, json.dumps({**kept, **made}, indent=1))
    preparation.remove_others()


def _check_batches(config: Config, meta: dict[str, Any]) -> None:
    """Refuses data that are too short for a global batch without repeated sequences, or for an
    evaluation.
    """
    length = config.data.sequence_length
    layout = RowLayout.of(meta["train"])
    if layout is None:
        sequences = max(0, meta["train"]["num_tokens"] - 1) // length
    else:
        sequences = layout.rows
    if sequences < config.train.global_batch:
        source = config.data.path or config.data.tokens or config.data.sources[0].path
        raise ConfigError(
            f"train.global_batch = {config.train.global_batch}: {str(source)!r} has {sequences}"
            f" sequences of data.sequence_length = {length} to train on; give more text, a"
            " smaller batch or shorter sequences"
        )
    if layout is None and "eval" in meta and meta["eval"]["num_tokens"] <= length:
        raise ConfigError(
            f"data.eval_path = {config.data.eval_path!r}: has {meta['eval']['num_tokens']} tokens;"
            f" one sequence of data.sequence_length = {length} takes {length + 1}"
        )


def _check_ends(config: Config, meta: dict[str, Any]) -> None:
    """Refuses to separate documents if no token ends a document."""
    if RowLayout.of(meta["train"]) is not None:
        return  # samples are kept apart without such a token
    if config.data.document_masks and not end_ids(meta["train"]["eos"]):
        source = "model.hf" if config.model.path is None else str(config.model.path / "config.json")
        raise ConfigError(
            "data.document_masks: true: needs the token that ends a document, and"
            + (
                f" {source} has no eos_token_id; give the token's number as data.eos"
                if config.data.eos == AUTO
                else " data.eos is false; name the token as data.eos"
            )
        )


def _check_own_documents(config: Config, run_dir: Path, measured: Measured) -> None:
    """Refuses an objective of the user that keeps documents of a row apart, if the model does not.

    The function sees made-up tokens; one that cannot take these is not checked.
    """
    objective = own_objective(config)
    if objective is None or RunDirectory(run_dir).has_started:
        return
    batch = None
    with suppress(Exception):  # any error of the user's function
        numbers = np.arange(config.data.sequence_length + 1, dtype=np.int64)
        batch = objective((numbers % RunDirectory(run_dir).table.vocab_size)[None], 0)
    if isinstance(batch, MicroBatch) and batch.document_ids is not None:
        measured().check_documents("data.objective", "give its MicroBatch no document_ids")


def _recorded_sum(meta: Path) -> str | None:
    """Returns the checksum of the training tokens in an earlier file; None where it has none."""
    try:
        return str(parse_json(meta.read_bytes())["train"]["sums"]["sha256"])
    except (OSError, *DAMAGED):
        return None


def _has(meta: Path, *splits: str) -> bool:
    """Returns whether the files of these splits in ``meta.json`` are there in full; of all splits
    that it lists unless given. False where it is damaged.
    """
    try:
        entries = parse_json(meta.read_bytes())
        names = splits or [name for name in _SPLITS if name in entries]
        return all(is_whole(meta.parent, entries[name]) for name in names)
    except (OSError, *DAMAGED):
        return False


def _recorded(meta: Path) -> str | None:
    """Returns the fingerprint in an earlier file; None where it cannot be read."""
    try:
        return str(parse_json(meta.read_bytes())["fingerprint"])
    except (OSError, *DAMAGED):
        return None


def _say(message: str) -> None:
    """Writes a line for the parent process."""
    sys.stdout.write(f"{printable(message)}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the prepare command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="penstock.models.prepare", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="directory with resolved.yaml")
    parser.add_argument("--table-only", action="store_true", help="leave the data out")
    parser.add_argument("--config-only", action="store_true", help="read no data and no weights")
    parser.add_argument("--data-only", action="store_true", help="make only data, for a display")
    parser.add_argument("--review", action="store_true", help="only report a new run's weights")
    parser.add_argument("--kernels", action="store_true", help="only note the kernels")
    parser.add_argument("--parent-pid", type=int, help="die when this process dies")
    options = parser.parse_args(arguments)
    run_dir: Path = options.run_dir

    def work() -> None:
        config = RunDirectory(run_dir).config
        if options.review:
            review_weights(config, run_dir, _say)
            return
        if options.kernels:
            observe(config, run_dir, _say)
            return
        bounds = Bounds(alone=options.parent_pid is not None)
        prepare(
            config,
            run_dir,
            table_only=options.table_only,
            config_only=options.config_only,
            data_only=options.data_only,
            progress=_say,
            bounds=bounds,
        )
        if not (options.table_only or options.config_only or options.data_only):
            observe(config, run_dir, _say)

    return tool_main(work, run_dir, options.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
