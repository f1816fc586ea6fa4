"""The manifest of a checkpoint, megazoo.json: what a step's files hold.

    format, family, config   the version, the model's family, its config as a dictionary
    layout                   {"tp": 2, "pp": 2, "dp": 2} of the run that wrote it; dp is dp x cp
    files                    of each file its {"size", "crc32"}
    tensors                  of each global tensor its {"shape", "dtype", "shard", "file"}
    crc32                    of the manifest itself

A tensor that is cut over an axis that is folded into dp x cp has a list of shards, each with its
`axis` unless that is tp, and its file's name has the axis's rank, too. The layout then has the
sizes, "folded": {"ep": 2}, and the format is 2; else it is 1.

Of a model with adapters the tensors are these alone, and what else was trained. Two keys more say

    adapters                 what they are: rank, alpha, targets ...
    base                     the weights that they belong to: {"checksum", "dtype", "path"}

places.py says which files there are, and when they appear.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product

import torch
from zlib_ng.zlib_ng import crc32

from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec, Place, Shard
from megazoo.tokenizer import TOKENIZER_FILES, TOKENIZER_SIDECARS

FORMAT_VERSION, FOLDED_VERSION = 1, 2  # the latter of what is cut over folded axes
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
GENERATION = "generation_config.json"
# Files that travel along with the weights, so that what is written runs as it is.
SIDECAR_FILES = (GENERATION, *TOKENIZER_FILES, *TOKENIZER_SIDECARS, "chat_template.jinja")


def tensor_to_manifest(
    spec: ParameterSpec, dtype: torch.dtype, file: str, ctx: ParallelContext
) -> dict:
    """Return what the manifest says of a tensor that is written in a context. file: its file's
    name, with {tp} where the rank's number stands."""
    cuts: list[dict] = [asdict(shard) for shard in spec.shards_in(ctx)]
    for cut in cuts:
        if cut["axis"] == "tp":
            del cut["axis"]
    only_tp = len(cuts) == 1 and "axis" not in cuts[0]
    shard = cuts[0] if only_tp else cuts or None
    return {"shape": list(spec.shape), "dtype": DTYPES[dtype], "shard": shard, "file": file}


def spec_from_manifest(stored: dict) -> ParameterSpec:
    """Return the shape and cut of a tensor, from what the manifest says of it."""
    given = stored["shard"] or []
    shards = tuple(
        Shard(cut["dim"], tuple(cut["parts"]), tuple(cut["units"]), cut.get("axis", "tp"))
        for cut in (given if isinstance(given, list) else [given])
    )
    return ParameterSpec(tuple(stored["shape"]), shards)


def file_of_rank(pattern: str, place: Place) -> str:
    """Return the name of a rank's file. pattern: what the manifest says of it. place: where the
    rank lies along the axes that cut the file's tensors."""
    for axis, (_, rank) in {"tp": (1, 0), **place}.items():
        pattern = pattern.replace(f"{{{axis}}}", str(rank))
    return pattern


def writing_places(sizes: Mapping[str, int]) -> Iterator[Place]:
    """Yield the place of each rank that has a part of a tensor. sizes: of the axes that cut it."""
    for numbers in product(*map(range, sizes.values())):
        yield {a: (sizes[a], rank) for a, rank in zip(sizes, numbers, strict=True)}


def manifest_checksum(manifest: dict) -> int:
    """Compute the crc32 of a manifest: of its compact JSON, keys sorted, without the key crc32."""
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())
