"""Convert any source of named tensors to shards of any layout, one tensor at a time."""

from pathlib import Path

import torch

from megazoo.checkpoint.directories import new_directory
from megazoo.checkpoint.shards import check_rank, files_of_rank, write_manifest, write_rank
from megazoo.checkpoint.verifying import verifying
from megazoo.checkpoint.writing import BytesWritten, LazyTensor
from megazoo.files import in_threads
from megazoo.formats.source import ModelSource
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.layout import Layout
from megazoo.parallel.module import NamedParameter
from megazoo.parallel.shard import ParameterSpec


def write_shards(
    source: ModelSource,
    directory: Path,
    tp: int,
    pp: int,
    *,
    dtype: torch.dtype | None = None,
    overwrite: bool = False,
    progress: BytesWritten = lambda _: None,
) -> None:
    """Write all tensors of `source`, including optimizer state, as shards for tp x pp.

    dtype: of the weights; by default as stored.
    """
    config, family = source.config, source.model
    family.check(config, tp, pp)
    layout = Layout(tp=tp, pp=pp)

    def write(rank: int) -> dict:
        ctx = ParallelContext(layout, rank)

        def weight_of(entry: NamedParameter) -> LazyTensor:
            stored = source.dtype_of(entry.name)
            return _lazy_shard(source, entry.name, entry.spec, ctx, dtype or stored, progress)

        def states_of(entry: NamedParameter, _writer: int) -> dict[str, LazyTensor]:
            states = {}
            for state in source.states_of(entry.name):
                name = f"{entry.name}.{state}"
                stored = source.dtype_of(name)
                states[state] = _lazy_shard(source, name, entry.spec, ctx, stored, progress)
            return states

        model = source.on_meta(ctx)
        files = files_of_rank(model, states_of if source.has_states else None, weight_of)
        return write_rank(staging, files, ctx)

    with new_directory(directory, overwrite, source.path) as staging:
        with verifying(source, source.all_files(states=True), ParallelContext()):
            written = in_threads(write, range(layout.ranks))
        for of_rank in written:
            check_rank(staging, of_rank)
        write_manifest(
            staging,
            family.family,
            config,
            ParallelContext(layout),
            written,
            source.trainer,
            source.sidecar_files,
            source.attached,
        )


def _lazy_shard(
    source: ModelSource,
    name: str,
    spec: ParameterSpec,
    ctx: ParallelContext,
    dtype: torch.dtype,
    progress: BytesWritten,
) -> LazyTensor:
    """Return a rank's shard of a global tensor, which is read while it is written."""
    owned = spec.pieces(ctx.place)

    def fill(rows: torch.Tensor, start: int) -> None:
        pieces = [part for piece in owned if (part := piece.in_rows(start, start + len(rows)))]
        source.read_pieces(name, rows, spec, pieces)
        progress(rows.nbytes)

    return LazyTensor(spec.local_shape(ctx.place), dtype, fill)
