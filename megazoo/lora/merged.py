"""A model on disk with adapters merged into it while it is read."""

from collections.abc import Iterable
from functools import cached_property

import torch

from megazoo.checkpoint.writing import PIECE_BYTES
from megazoo.formats.source import ModelSource
from megazoo.lora.manifest import check_base_on_disk
from megazoo.lora.matrices import AdapterSource, Matrix
from megazoo.lora.source import SavedAdapters
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import Box, ParameterSpec, Piece, in_parts, overlap
from megazoo.tokenizer.templates import DEFAULT, chat_templates_in, with_template


class MergedSource(ModelSource):
    """The tensors of a model with adapters added: W + scale * B A.

    Each sum is computed in fp32, a few megabytes at a time, and rounded once to the requested
    dtype. Other parameters that were trained with the adapters replace those of the model. config:
    that of the merged model, a classifier if the adapters include its head. The files that are
    listed and checked are those of the model. UserError if a checkpoint's adapters belong to
    another base; to check this, the base is read a second time.
    """

    def __init__(self, base: ModelSource, adapters: AdapterSource, config):
        super().__init__(base.path)
        self.base, self.adapters = base, adapters
        self.config, self.verifies = config, base.verifies
        self.trainer = base.trainer
        if isinstance(adapters, SavedAdapters):
            whole = adapters.on_meta(ParallelContext())
            check_base_on_disk(adapters, whole.entries(), base)
        self._matrices: dict[str, list[Matrix]] = {}
        for matrix in adapters.matrices:
            self._matrices.setdefault(matrix.weight, []).append(matrix)

    @cached_property
    def sidecar_files(self) -> dict[str, bytes]:
        """Return the model's files, and the chat template that the adapters were trained with."""
        files, own = self.base.sidecar_files, chat_templates_in(self.adapters.path)
        return with_template(files, own[DEFAULT]) if DEFAULT in own else files

    @cached_property
    def generation(self) -> dict:
        return self.base.generation

    @property
    def pad_token_id(self) -> int | None:
        return self.base.pad_token_id

    def close(self) -> None:
        super().close()
        self.base.close()
        self.adapters.close()

    def dtype_of(self, name: str) -> torch.dtype:
        return (self.adapters if name in self.adapters.specs else self.base).dtype_of(name)

    def file_sizes(self) -> dict[str, int]:
        return self.base.file_sizes()

    def files_of(
        self, tensors: Iterable[tuple[str, ParameterSpec]], ctx: ParallelContext
    ) -> set[str]:
        return self.base.files_of([each for each in tensors if each[0] in self.base.specs], ctx)

    def check_crc32(self, name: str, crc: int) -> None:
        self.base.check_crc32(name, crc)

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        if name in self.adapters.specs:
            return self.adapters.read_pieces(name, destination, spec, pieces)
        if name not in self._matrices:
            return self.base.read_pieces(name, destination, spec, pieces)
        for piece in pieces:
            for box in in_parts(piece.box, PIECE_BYTES // torch.float32.itemsize):
                values = self._merged(name, spec, box)
                self.put(destination[piece.index(box)], values)
        return None

    def _merged(self, name: str, spec: ParameterSpec, box: Box) -> torch.Tensor:
        """Return a box of a weight with its adapters merged: fp32."""
        values = torch.empty([stop - start for start, stop in box])
        self.base.read_pieces(name, values, spec, [Piece(box, (0,) * len(box))])
        *stack, (start, _), columns = box
        for matrix in self._matrices[name]:
            there = ((matrix.first, matrix.first + matrix.outputs), (0, matrix.inputs))
            if shared := overlap((*stack, *box[-2:]), (*stack, *there)):
                low, high = shared[-2]
                rows = (low - matrix.first, high - matrix.first)
                changed = values[..., low - start : high - start, :]
                changed += self._change(matrix, (*stack, rows, columns))
        return values

    def _change(self, matrix: Matrix, box: Box) -> torch.Tensor:
        """Return a box of the change of a matrix, or of a stack, by its adapter: fp32."""
        *stack, rows, columns = box
        scale = self.adapters.settings.scale_of(matrix.target)
        (a_name, a_spec), (b_name, b_spec) = self.adapters.factors(matrix).items()
        rank = (0, a_spec.shape[-2])
        a = self._factor(a_name, a_spec, (*stack, rank, columns))
        b = self._factor(b_name, b_spec, (*stack, rows, rank))
        return scale * (b @ a)

    def _factor(self, name: str, spec: ParameterSpec, box: Box) -> torch.Tensor:
        """Return a box of a factor of an adapter: fp32."""
        values = torch.empty([stop - start for start, stop in box])
        self.adapters.read_pieces(name, values, spec, [Piece(box, (0,) * len(box))])
        return values
