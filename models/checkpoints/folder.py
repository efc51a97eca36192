"""The meaning of a model folder's weights for a run: chosen files, ties, messages to the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PretrainedConfig

from penstock.host.errors import ConfigError, PenstockError, StateError
from penstock.models.checkpoints.causes import cause_of_misfit
from penstock.models.checkpoints.checkpoint import Checkpoint
from penstock.models.checkpoints.conversion import Weights, folded
from penstock.models.checkpoints.files import (
    chosen_files,
    few,
    files_before,
    files_beside,
    write_record,
)
from penstock.models.surgery.hf import folder_composite, load_run_config
from penstock.models.surgery.skeleton import Skeleton, build_skeleton
from penstock.protocol.run.bases.base_identity import weight_files
from penstock.shm.table import BlockTable

_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderWeights:
    """The weights in a model folder, and the model that they make, untied if transformers does not
    tie.
    """

    directory: Path
    files: tuple[str, ...]
    skeleton: Skeleton
    weights: Weights

    @classmethod
    def find(
        cls, directory: Path, hf_config: PretrainedConfig, say: Callable[[str], None]
    ) -> FolderWeights:
        """Chooses the files as transformers does. Sets ``tie_word_embeddings`` of ``hf_config`` to
        false where the files have two different tensors for one that it ties.

        Raises:
            ConfigError, StateError: there are no weights, or they cannot be used.
        """
        files = chosen_files(directory, hf_config)
        beside = files_beside(directory, files)
        if beside:
            say(
                f"model.path: {few(files)} {_are(files)} read, as transformers does;"
                f" {len(beside)} other file{'s' * (len(beside) > 1)} of weights {_are(beside)} not:"
                f" {few(beside)}"
            )
        checkpoint = Checkpoint(directory, files)
        checkpoint.check_repeated()
        skeleton, composite = build_skeleton(hf_config), folder_composite(directory)
        weights = Weights(skeleton, checkpoint, composite)
        if composite is not None:
            say(
                f"model.path: its text model ({hf_config.model_type}) is trained;"
                f" {len(weights.left_out):,} tensors of other parts are left out (penstock export"
                " --whole puts them back)"
            )
        if weights.untied():
            target, source = weights.differing()[0]
            say(
                f"model.path: {source} and {target} differ in the files, so they are not tied, as"
                " in transformers: tie_word_embeddings is false"
            )
            hf_config.tie_word_embeddings = False
            skeleton = build_skeleton(hf_config)
            weights = Weights(skeleton, checkpoint, composite)
            weights.untied()
        return cls(directory=directory, files=files, skeleton=skeleton, weights=weights)

    @classmethod
    def keep(
        cls, run_dir: Path, directory: Path, hf_config: PretrainedConfig, say: Callable[[str], None]
    ) -> FolderWeights:
        """Returns the weights with the files and the ties of a run that may have trained.

        Raises:
            ConfigError, StateError: the files are gone, or cannot be used.
        """
        review(run_dir, directory, say)
        files = weight_files(run_dir) or files_before(directory)
        kept = load_run_config(run_dir)
        hf_config.tie_word_embeddings = getattr(kept, "tie_word_embeddings", False)
        skeleton = build_skeleton(hf_config)
        weights = Weights(skeleton, Checkpoint(directory, files), folder_composite(directory))
        return cls(directory=directory, files=files, skeleton=skeleton, weights=weights)

    def check(self, table: BlockTable, say: Callable[[str], None]) -> None:
        """Compares the headers with the model, and names the tensors that the model does not use.

        Raises:
            ConfigError: the tensors are not those of plain weights; names the cause.
            StateError: tensors are missing, or of another shape or type.
        """
        try:
            self.weights.check(table)
        except StateError as error:
            missing = self.weights.missing(table)
            cause = cause_of_misfit(self.directory, missing, self.weights.unused)
            raise error if cause is None else ConfigError(f"model.path: {cause}") from error
        if unused := self.weights.unused:
            count = f"{len(unused)} tensor{'s' * (len(unused) > 1)}"
            say(
                f"model.path: {count} of the files {_are(unused)} not used, as the model has no"
                f" place for {'them' if len(unused) > 1 else 'it'}:"
                f" {few(folded(unused), _NAMES)}"
            )


def review(run_dir: Path, directory: Path, say: Callable[[str], None]) -> None:
    """Reports weights that a new run would take from other files, and records this run's files.
    Does nothing if the run has a record already.
    """
    if weight_files(run_dir) is not None:
        return
    try:
        kept = files_before(directory)
    except (PenstockError, OSError):
        return  # The weights are in the run's state, or a restore says what is missing.
    try:
        hf_config = load_run_config(run_dir)
        files = chosen_files(directory, hf_config)
        if set(files) != set(kept):
            say(
                f"model.path: this run keeps to {few(kept)}; a new one would read {few(files)}, as"
                " transformers does"
            )
        weights = Weights(build_skeleton(hf_config), Checkpoint(directory, files))
        for target, source in weights.differing():
            say(
                f"model.path: this run keeps {source} and {target} tied; a new one would not, as"
                " they differ in the files"
            )
    except (PenstockError, OSError) as error:
        say(f"model.path: this run keeps to {few(kept)}; a new one would be refused: {error}")
    write_record(run_dir, kept)


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 else "are"
