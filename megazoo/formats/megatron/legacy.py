"""Read Megatron-LM's older format torch: one file per rank, with its shards of the tensors.

mp_rank_TT/model_optim_rng.pt         tensor-parallel rank TT
mp_rank_TT_PPP/model_optim_rng.pt     with several pipeline stages: of stage PPP
"""

import re
from itertools import product
from pathlib import Path
from typing import Any

from megazoo.errors import UserError
from megazoo.formats.dcp.tensors import Chunk, Whole, place_in, whole_of
from megazoo.formats.dcp.torch_files import load_torch
from megazoo.formats.dcp.unpickling import StandIn, StoredTensor
from megazoo.formats.megatron.names import LAYER, bare_name, is_state
from megazoo.parallel.shard import Piece

FILE = "model_optim_rng.pt"
RANK = re.compile(r"mp_rank_(\d\d)(?:_(\d\d\d))?(_\d\d\d)?")
CUT_BY_ROWS = re.compile(r".*(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)")
CUT_BY_COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight")
GATED = re.compile(r".*linear_fc1\.(weight|bias)")


def is_legacy(directory: Path) -> bool:
    """Return whether a directory is one iteration in this format."""
    return any(directory.glob(f"mp_rank_*/{FILE}"))


def read_legacy(directory: Path) -> tuple[Any, dict[str, Whole]]:
    """Return the arguments of a checkpoint in the format torch, and its tensors by Megatron's names
    with global layer numbers. No tensor is read. Raises UserError for missing or broken files."""
    files = _files(directory)
    tp, pp = (max(ranks) + 1 for ranks in zip(*files, strict=True))
    if missing := set(product(range(tp), range(pp))) - files.keys():
        raise UserError(f"{directory} lacks the file of rank {min(missing)} of tp {tp} x pp {pp}")
    held = {rank: _load(path) for rank, path in files.items()}
    arguments = held[0, 0].get("args")
    values = arguments.state if isinstance(arguments, StandIn) else {}
    gated, parts, layers = bool((values or {}).get("swiglu")), {}, 0
    for model in _models(files[0, 0], held[0, 0]):  # several if stages are interleaved
        for stage in range(pp):
            of_stage: dict[str, list] = {}
            for rank in range(tp):
                path = files[rank, stage]
                for name, tensor in _tensors(path, held[rank, stage], model):
                    of_stage.setdefault(_numbered(name, layers), []).append((path, tensor))
            if twice := of_stage.keys() & parts.keys():
                raise UserError(f"{directory} has {min(twice)} on two stages")
            parts |= of_stage
            layers = max((int(at[1]) + 1 for at in map(LAYER.search, parts) if at), default=layers)
    return arguments, {name: _joined(name, of_ranks, gated) for name, of_ranks in parts.items()}


def _files(directory: Path) -> dict[tuple[int, int], Path]:
    files = {}
    for path in sorted(directory.glob(f"mp_rank_*/{FILE}")):
        match = RANK.fullmatch(path.parent.name)
        if not match or match[3]:
            raise UserError(
                f"{path.parent} belongs to an unknown kind of rank (experts are not supported)"
            )
        files[int(match[1]), int(match[2] or 0)] = path
    return files


def _load(path: Path) -> dict:
    held = load_torch(path)
    if not isinstance(held, dict) or not any(name in held for name in ("model", "model0")):
        raise UserError(f"{path} does not contain a model")
    version = held.get("checkpoint_version", 3.0)
    if not isinstance(version, int | float) or version < 2:
        raise UserError(
            f"{path} has version {version!r}, whose rows are in another order, which is not "
            "supported"
        )
    return held


def _models(path: Path, held: dict) -> list[str]:
    """Return the names of a rank's model chunks, in the order of their layers."""
    if "model" in held:
        return ["model"]
    names = [name for name in held if isinstance(name, str) and re.fullmatch(r"model\d+", name)]
    expected = [f"model{number}" for number in range(len(names))]
    if sorted(names) != sorted(expected):
        raise UserError(f"{path} lacks one of {', '.join(expected)}")
    return expected


def _tensors(path: Path, held: dict, model: str) -> list[tuple[str, StoredTensor]]:
    """Return a rank's tensors, by name. Layers are numbered within the stage."""
    values, tensors = held.get(model), []
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise UserError(f"{path} has no tensors of {model}")
    if "language_model" in values:
        raise UserError(
            f"{path} is of a model from before Megatron Core (--use-legacy-models), which is not "
            "supported"
        )
    for name, tensor in values.items():
        bare = bare_name(name)
        if is_state(bare):
            continue
        if not isinstance(tensor, StoredTensor):
            raise UserError(f"{path}: {name} is not a plain tensor")
        tensors.append((bare, tensor))
    return tensors


def _numbered(name: str, before: int) -> str:
    """Return a name with the global layer number. before: number of layers in earlier stages."""
    return LAYER.sub(lambda at: f"layers.{before + int(at[1])}.", name)


def _joined(name: str, parts: list[tuple[Path, StoredTensor]], gated: bool) -> Whole:
    """Return the whole tensor, made of the shards of all ranks."""
    dim = 0 if CUT_BY_ROWS.fullmatch(name) else 1 if CUT_BY_COLUMNS.fullmatch(name) else None
    if dim is None:
        parts = parts[:1]  # replicated on all ranks
    halves = 2 if gated and GATED.fullmatch(name) else 1
    dim, chunks, start = dim or 0, [], 0
    for half in range(halves):  # each rank has its shard of gate, then its shard of up
        for path, tensor in parts:
            if dim >= len(tensor.shape) or tensor.shape[dim] % halves:
                raise UserError(f"{path}: {name} has shape {list(tensor.shape)}")
            rows = tensor.shape[dim] // halves
            box = place_in(tensor.shape, dim, start, start + rows)
            offset = tuple(half * rows if d == dim else 0 for d in range(len(box)))
            chunks.append(
                Chunk(Piece(box, offset), tensor.dtype, path, lambda tensor=tensor: tensor)
            )
            start += rows
    return whole_of(chunks)
