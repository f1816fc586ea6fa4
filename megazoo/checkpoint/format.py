"""The manifest of a checkpoint, megazoo.json: what a step's files hold.

    format, family, config   the version, the model's family, its config as a dictionary
    layout                   {"tp": 2, "pp": 2, "dp": 2} of the run that wrote it
    files                    of each file its {"size", "crc32"}
    tensors                  of each global tensor its {"shape", "dtype", "shard", "file"}
    crc32                    of the manifest itself

Of a model with adapters the tensors are these alone, and what else was trained. Two keys more say

    adapters                 what they are: rank, alpha, targets ...
    base                     the weights that they belong to: {"checksum", "dtype", "path"}

places.py says which files there are, and when they appear.
"""

import json
from dataclasses import asdict

import torch
from zlib_ng.zlib_ng import crc32

from megazoo.parallel.shard import ParameterSpec, Shard
from megazoo.tokenizer import TOKENIZER_FILES, TOKENIZER_SIDECARS

FORMAT_VERSION = 1
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
GENERATION = "generation_config.json"
# Files that travel along with the weights, so that what is written runs as it is.
SIDECAR_FILES = (GENERATION, *TOKENIZER_FILES, *TOKENIZER_SIDECARS, "chat_template.jinja")


def tensor_to_manifest(spec: ParameterSpec, dtype: torch.dtype, file: str) -> dict:
    """Return what the manifest says of a tensor. file: its file's name, with {tp} where the rank's
    number stands."""
    shard = asdict(spec.shard) if spec.shard else None
    if shard:
        del shard["axis"]  # tp
    return {"shape": list(spec.shape), "dtype": DTYPES[dtype], "shard": shard, "file": file}


def spec_from_manifest(stored: dict) -> ParameterSpec:
    """Return the shape and cut of a tensor, from what the manifest says of it."""
    shard = stored["shard"]
    if shard:
        shard = Shard(shard["dim"], tuple(shard["parts"]), tuple(shard["units"]))
    return ParameterSpec(tuple(stored["shape"]), shard or None)


def file_of_rank(pattern: str, tp_rank: int) -> str:
    """Return the name of a tp rank's file. pattern: what the manifest says of it."""
    return pattern.replace("{tp}", str(tp_rank))


def manifest_checksum(manifest: dict) -> int:
    """Compute the crc32 of a manifest: of its compact JSON, keys sorted, without the key crc32."""
    rest = {key: value for key, value in manifest.items() if key != "crc32"}
    return crc32(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode())
