"""The manifest of a checkpoint, megazoo.json, which describes the files of a step.

    format, family, config   the version, the model's family, its config as a dictionary
    layout                   {"tp": 2, "pp": 2, "dp": 2} of the run that wrote it; dp is dp x cp
    files                    {"size", "crc32"} of each file
    tensors                  {"shape", "dtype", "shard", "file"} of each global tensor
    crc32                    checksum of the manifest itself

A tensor that is sharded over an axis folded into dp x cp has a list of shards. Each has its `axis`,
unless that is tp, and the name of the file also has the rank along the axis. The layout then has
the sizes of the axes, "folded": {"ep": 2}, and the format is 2; otherwise the format is 1.

The checkpoint of a model with an attachment, such as adapters, holds only the attached parameters
and the other trained ones. It has two more keys, whose values the attachment writes and checks:

    adapters, base           see megazoo/lora/manifest.py

places.py describes which files there are, and when they appear.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import product
from typing import Literal

import torch
from zlib_ng.zlib_ng import crc32

from megazoo.parallel.context import ParallelContext
from megazoo.parallel.shard import ParameterSpec, Place, Shard

ATTACHED = ADAPTERS, BASE = "adapters", "base"  # the keys on what is attached to the model
FORMAT_VERSION, FOLDED_VERSION = 1, 2  # the latter with tensors sharded over folded axes
Dtype = Literal["F32", "BF16", "F16"]
DTYPES: dict[torch.dtype, Dtype] = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


def tensor_to_manifest(
    spec: ParameterSpec, dtype: torch.dtype, file: str, ctx: ParallelContext
) -> dict:
    """Return the manifest's description of a tensor. ctx: the context that writes it. file: name of
    its file, with {tp} in place of the rank."""
    cuts: list[dict] = [asdict(shard) for shard in spec.shards_in(ctx)]
    for cut in cuts:
        if cut["axis"] == "tp":
            del cut["axis"]
    only_tp = len(cuts) == 1 and "axis" not in cuts[0]
    shard = cuts[0] if only_tp else cuts or None
    return {"shape": list(spec.shape), "dtype": DTYPES[dtype], "shard": shard, "file": file}


def spec_from_manifest(stored: dict) -> ParameterSpec:
    """Return the shape and shards of a tensor from its description in the manifest."""
    given = stored["shard"] or []
    shards = tuple(
        Shard(cut["dim"], tuple(cut["parts"]), tuple(cut["units"]), cut.get("axis", "tp"))
        for cut in (given if isinstance(given, list) else [given])
    )
    return ParameterSpec(tuple(stored["shape"]), shards)


def file_of_rank(pattern: str, place: Place) -> str:
    """Return the name of a rank's file. pattern: the name in the manifest. place: the rank along
    each axis that shards the file's tensors."""
    for axis, (_, rank) in {"tp": (1, 0), **place}.items():
        pattern = pattern.replace(f"{{{axis}}}", str(rank))
    return pattern


def writing_places(sizes: Mapping[str, int]) -> Iterator[Place]:
    """Yield the place of each rank that has a shard of a tensor. sizes: of the axes that shard
    it."""
    for numbers in product(*map(range, sizes.values())):
        yield {a: (sizes[a], rank) for a, rank in zip(sizes, numbers, strict=True)}


def manifest_checksum(manifest: dict) -> int:
    """Compute the crc32 of a manifest: that of its compact JSON with sorted keys, without the key
    crc32."""
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())
