"""Options that several tools share."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional

from megazoo.settings import File, Source, mandatory
from megazoo.trainer.options import AS_STORED, DtypeName, VerifyOption

if TYPE_CHECKING:
    import torch


@dataclass
class ImportOption:
    """Option of every tool."""

    import_: Annotated[File, tyro.conf.arg(name="import")] = None
    """Python file to run, which registers a custom model (megazoo.register)."""


@dataclass
class ConversionOptions(ImportOption, VerifyOption):
    """Options of the tools that write a model."""

    source: Source = None
    """Checkpoint saved in any parallel layout (the directory of a step, or its parent for the
    latest step), Hugging Face directory, org/name[@revision] on the Hugging Face hub, GGUF file, or
    checkpoint of torch.distributed.checkpoint or Megatron-LM."""
    output: Positional[Annotated[Path | None, mandatory("OUTPUT")]] = None
    """Directory to write; with --to gguf, the file."""
    dtype: Annotated[DtypeName | None, AS_STORED] = None
    """Data type of the weights to write."""
    overwrite: bool = False
    """Replace the output if it exists and contains only files that megazoo wrote."""

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        import torch

        return self.dtype and getattr(torch, self.dtype)
