"""Convert a checkpoint of adapters to the files of PEFT, without its base model."""

from pathlib import Path

import torch

from megazoo.checkpoint.directories import new_directory
from megazoo.checkpoint.verifying import verifying
from megazoo.checkpoint.writing import BytesWritten
from megazoo.errors import UserError, some_of
from megazoo.hub import name_alone
from megazoo.lora.peft import write_adapters
from megazoo.lora.settings import labels_of
from megazoo.lora.source import SavedAdapters
from megazoo.models.outputs import CLASSIFIER_HEAD
from megazoo.parallel.context import ParallelContext


def write_peft(
    source: SavedAdapters,
    directory: Path,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: BytesWritten = lambda _: None,
) -> None:
    """Write the adapters of a checkpoint in the format of PEFT. The base model is not read.

    The files are those of `megazoo.lora.save`. adapter_config.json names the base that the
    checkpoint names. dtype: of the tensors; by default as stored.

    Raises:
        UserError: if other weights were trained with the adapters, which would be lost; if the
            checkpoint lacks the head of a classifier.
    """
    factors = {name for matrix in source.matrices for name in source.factors(matrix)}
    whole = source.model.on_meta(source.config, ParallelContext())
    if lost := source.specs.keys() - factors - {CLASSIFIER_HEAD}:
        raise UserError(
            f"{source.path} holds {some_of(lost)}, trained in addition to the adapters, which the "
            "format of PEFT can't hold: merge the adapters into the base with --to hf"
        )
    if labels_of(whole) and CLASSIFIER_HEAD not in source.specs:
        raise UserError(
            f"{source.path} lacks {CLASSIFIER_HEAD}, the head of its classifier, which was not "
            "trained: use megazoo.lora.save, which takes it from the model"
        )
    base = str(source.base_path) if source.base_path else None
    with (
        new_directory(directory, overwrite, source.path) as staging,
        verifying(source, source.all_files(states=False), ParallelContext()),
    ):
        name = base if base is None else name_alone(base) or base
        write_adapters(source, whole, source.settings, staging, name, dtype, progress)
