"""From any source of named tensors to shards of any layout, one tensor at a time."""

from pathlib import Path

import torch

from megazoo.checkpoint.format import Lazy, check_replaceable, new_directory
from megazoo.checkpoint.saving import files_of_rank, write_manifest, write_rank
from megazoo.files import in_threads
from megazoo.models.hugging_face.export import Progress
from megazoo.models.source import ModelSource
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.module import Entry
from megazoo.parallel.shard import ParameterSpec


def write_shards(
    source: ModelSource,
    directory: Path,
    tp: int,
    pp: int,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> None:
    """Write all that `source` holds, optimizer state too, as shards for tp x pp. dtype: of the
    weights; as stored."""
    config, family = source.config, source.model
    family.check(config, tp, pp)
    check_replaceable(directory, overwrite)

    def lazy(name: str, spec: ParameterSpec, ctx: ParallelContext, dtype: torch.dtype) -> Lazy:
        mine = spec.pieces(ctx.tp_size, ctx.tp_rank)

        def fill(rows: torch.Tensor, start: int) -> None:
            pieces = [part for piece in mine if (part := piece.in_rows(start, start + len(rows)))]
            source.read_pieces(name, rows, spec, pieces)
            progress(rows.nbytes)

        return Lazy(spec.local_shape(ctx.tp_size, ctx.tp_rank), dtype, fill)

    def write(rank: int) -> dict:
        ctx = ParallelContext.virtual(tp, pp, rank=rank)

        def weight(entry: Entry) -> Lazy:
            return lazy(entry.name, entry.spec, ctx, dtype or source.dtype_of(entry.name))

        def states(entry: Entry, _writer: int) -> dict[str, Lazy]:
            names = {state: f"{entry.name}.{state}" for state in source.states_of(entry.name)}
            return {
                state: lazy(name, entry.spec, ctx, source.dtype_of(name))
                for state, name in names.items()
            }

        files = files_of_rank(
            family.on_meta(config, ctx), weight, states if source.has_states else None
        )
        return write_rank(staging, files, ctx)

    with new_directory(directory) as staging:
        written = in_threads(write, range(tp * pp))
        layout = ParallelContext.virtual(tp, pp)
        write_manifest(
            staging, family.family, config, layout, written, source.trainer, source.sidecar_files
        )
