"""Read a Megatron-LM checkpoint as the named global tensors of a megazoo model."""

from collections.abc import Callable, Iterator
from functools import cached_property, reduce
from itertools import product
from pathlib import Path

import torch

from megazoo.checkpoint.format import DTYPES
from megazoo.checkpoint.generation import generation_config
from megazoo.checkpoint.places import DCP_METADATA
from megazoo.checkpoint.tensor_files import pieces_of_file
from megazoo.errors import UserError, advise, some_of
from megazoo.files import read_bytes
from megazoo.formats.dcp.metadata import is_distributed
from megazoo.formats.dcp.tensors import place_in
from megazoo.formats.megatron.arguments import adds_one_to_norms, config_of, values_of
from megazoo.formats.megatron.distributed import read_distributed
from megazoo.formats.megatron.legacy import is_legacy, read_legacy
from megazoo.formats.megatron.names import EMBEDDING, HEAD, kind_of, their_names
from megazoo.formats.source import ModelSource
from megazoo.parallel.shard import Box, ParameterSpec, Piece, overlap, volume
from megazoo.sidecars import GENERATION
from megazoo.tokenizer import has_tokenizer, open_tokenizer, sidecar_files_in

TRACKER = "latest_checkpointed_iteration.txt"
ROWS = 1 << 10  # of the vocabulary that are compared together


def is_megatron(directory: Path) -> bool:
    """Return whether a directory is a Megatron-LM checkpoint of one or more iterations."""
    return (directory / TRACKER).is_file() or is_iteration(directory)


def is_iteration(directory: Path) -> bool:
    """Return whether a directory has the files of one iteration."""
    has_metadata = (directory / DCP_METADATA).is_file() and not is_distributed(directory)
    return has_metadata or is_legacy(directory)


def find_iteration(path: Path, iteration: int | None = None) -> Path:
    """Return the directory of an iteration, by default the last one that Megatron-LM wrote. Raises
    UserError if it does not exist.

    path: the `--save` directory of Megatron-LM, or the directory of one iteration.
    """
    if is_iteration(path):
        if iteration is not None:
            raise UserError(f"{path} is the directory of one iteration: use its parent directory")
        return path
    tracker = path / TRACKER
    if iteration is None:
        if not tracker.is_file():
            raise UserError(f"{path} is not a checkpoint of Megatron-LM: it has no {TRACKER}")
        word = read_bytes(tracker).decode(errors="replace").strip()
        if word != "release" and not (word.isascii() and word.isdigit()):
            raise UserError(f"{tracker} does not name an iteration")
    else:
        word = str(iteration)
    found = path / (word if word == "release" else f"iter_{int(word):07d}")
    if not is_iteration(found):
        there = sorted(entry.name for entry in path.glob("iter_*") if is_iteration(entry))
        raise UserError(
            f"{found} is not a Megatron-LM checkpoint in a supported format (torch_dist, "
            f"torch). Iterations found in the same directory: {', '.join(there) or 'none'}"
        )
    return found


class MegatronCheckpoint(ModelSource):
    """Read boxes of global tensors from a Megatron-LM checkpoint of any layout.

    path: the directory of one iteration, or its parent. iteration: by default the last one.
    vocab_size: the true vocabulary size, without Megatron-LM's padding. Its default comes from the
    arguments, otherwise from the tokenizer next to the checkpoint, otherwise it is the padded size,
    with a warning. config: the config of the megazoo family. Pickles can't import or call anything.
    Raises UserError for missing tensors, and for a model that is not supported, with the name of
    the argument or tensor.
    """

    def __init__(
        self, path: str | Path, *, iteration: int | None = None, vocab_size: int | None = None
    ):
        super().__init__(find_iteration(Path(path), iteration))
        self.trainer = {}
        read = read_distributed if (self.path / DCP_METADATA).is_file() else read_legacy
        arguments, self._wholes = read(self.path)
        for name in sorted(self._wholes):
            if kind := kind_of(name):
                raise UserError(f"{self.path} has {name}: it is {kind}, which is not supported")
        if EMBEDDING not in self._wholes:
            raise UserError(f"{self.path} lacks {EMBEDDING}")
        try:
            values = values_of(arguments)
            self._adds_one = adds_one_to_norms(values)
            self.config = config_of(values, self._vocab_size(vocab_size, values))
            if self.config.layers > len(self._wholes):
                raise UserError(
                    f"it has {len(self._wholes)} tensors for {self.config.layers} layers"
                )
            self._names = {name: their_names(name, self._wholes) for name in self.specs}
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        self._check_complete()
        self._check_shapes()
        if self.config.tie_embeddings and HEAD in self._wholes:
            self._check_tied()

    @cached_property
    def sidecar_files(self) -> dict[str, bytes]:
        return sidecar_files_in(self._beside)

    @cached_property
    def generation(self) -> dict:
        data = self.sidecar_files.get(GENERATION)
        return generation_config(self._beside / GENERATION, data) if data else {}

    @property
    def tokenizer(self) -> str | None:
        return str(self._beside) if has_tokenizer(self._beside) else None

    @property
    def _beside(self) -> Path:
        """The directory where a tokenizer may be: the iteration's or its parent."""
        above = self.path.parent
        is_there = (above / TRACKER).is_file() and not has_tokenizer(self.path)
        return above if is_there else self.path

    def dtype_of(self, name: str) -> torch.dtype:
        parts = self._names[name].names
        dtype = reduce(torch.promote_types, (self._wholes[part].dtype for part in parts))
        if dtype not in DTYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise UserError(
                f"{self.path}: {parts[0]} has the data type {dtype}: use one of {known}"
            )
        return dtype

    def file_sizes(self) -> dict[str, int]:
        """Return the size of each weight file, in bytes."""
        parts = {part for name in self._names.values() for part in name.names}
        files = {chunk.path for part in parts for chunk in self._wholes[part].chunks}
        return {str(file.relative_to(self.path)): file.stat().st_size for file in sorted(files)}

    def verify(self, progress: Callable[[int], object] = lambda _: None) -> None:
        """Read every file. Raises UserError with the name of the first file that can't be read. The
        format has no checksums to compare.

        progress: called with the number of bytes read since the last call.
        """
        for name in self.file_sizes():
            for piece in pieces_of_file(self.path / name):
                progress(len(piece))

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        is_norm = self._adds_one and name.endswith("norm.weight")
        for part, runs in self._names[name].parts(self.specs[name]):
            for run, piece in product(runs, pieces):
                there = place_in(spec.shape, 0, run.ours, run.ours + run.count)
                if shared := overlap(piece.box, there):
                    (first, last), *others = shared
                    moved = run.theirs - run.ours
                    box = ((first + moved, last + moved), *others)
                    place = destination[piece.index(shared)]
                    for index, values in self._read(part, box):
                        self.put(place[index], values.float() + 1 if is_norm else values)

    def _read(self, part: str, box: Box) -> Iterator[tuple[tuple[slice, ...], torch.Tensor]]:
        """Yield a box of a Megatron-LM tensor, piece by piece: the index of each piece in the box,
        and its values. Raises UserError if the files don't have all of the box."""
        missing, place = volume(box), Piece(box, (0,) * len(box))
        for found, values in self._wholes[part].read(box):
            self.files.bytes_read += values.nbytes
            yield place.index(found), values
            missing -= volume(found)
        if missing:
            stored_how = "not stored" if missing > 0 else "stored more than once"
            raise UserError(
                f"{self.path}: {abs(missing)} of {volume(box)} elements of {part} are "
                f"{stored_how}: use another checkpoint",
                exit_code=1,
            )

    def _vocab_size(self, given: int | None, values: dict) -> int:
        """Return the true size of the vocabulary."""
        padded = self._wholes[EMBEDDING].shape[0]
        size = values.get("vocab_size") if given is None else given
        if size is None and self.tokenizer:
            size = open_tokenizer(self.tokenizer).vocab_size
        if size is None:
            advise(
                f"{self.path}: the vocabulary is assumed to have {padded} tokens, but "
                "Megatron-LM may have padded it: `megazoo convert --vocab-size N` sets its "
                "true size"
            )
            return padded
        if type(size) is not int or not 0 < size <= padded:
            raise UserError(f"vocab-size {size!r} must be from 1 to {padded}, the padded size")
        return size

    def _check_complete(self) -> None:
        """Raise UserError if a tensor is missing or unexpected."""
        wanted = {part for theirs in self._names.values() for part in theirs.names}
        tied = {HEAD} if self.config.tie_embeddings else set()
        problems = []
        if missing := wanted - self._wholes.keys():
            problems.append(f"lacks {some_of(missing)}")
        if extra := self._wholes.keys() - wanted - tied:
            problems.append(f"has the unexpected {some_of(extra)}")
        if problems:
            raise UserError(
                f"{self.path} {' and '.join(problems)}: its tensors do not match the "
                f"{self.model.__name__} of its arguments"
            )

    def _check_shapes(self) -> None:
        for name, spec in self.specs.items():
            padded = name in ("embedding.weight", "head.weight")
            for part, runs in self._names[name].parts(spec):
                stored = self._wholes[part].shape
                rows = sum(run.count for run in runs)
                fits = stored[:1] >= (rows,) if padded else stored[:1] == (rows,)
                if not fits or stored[1:] != spec.shape[1:]:
                    raise UserError(
                        f"{self.path}: {part} has shape {list(stored)}, but in the model "
                        f"it has shape {[rows, *spec.shape[1:]]}"
                    )

    def _check_tied(self) -> None:
        """Raise UserError if the head differs from the embedding, to which it should be tied."""
        shape, columns = self.specs["embedding.weight"].shape, self.config.hidden_size
        for start in range(0, shape[0], ROWS):
            box = ((start, min(start + ROWS, shape[0])), (0, columns))
            rows = [torch.empty(box[0][1] - start, columns) for _ in (EMBEDDING, HEAD)]
            for part, whole in zip((EMBEDDING, HEAD), rows, strict=True):
                for index, values in self._read(part, box):
                    whole[index] = values
            if not torch.equal(*rows):
                raise UserError(
                    f"{self.path}: {HEAD} differs from {EMBEDDING}, but the arguments describe "
                    "them as tied"
                )
