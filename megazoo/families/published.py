"""Sources of presets: their names on the Hugging Face hub, and published learning rates and batch
sizes."""

import math
import sys
from dataclasses import dataclass
from typing import NamedTuple

from megazoo.families.registry import family_with

MILLION = 1_000_000


@dataclass(frozen=True)
class Published:
    """The source of a preset.

    hub: its name on the Hugging Face hub, or None. lr: peak learning rate of AdamW in pretraining.
    batch_tokens: tokens per optimizer step in pretraining. Both are None if not published.
    """

    hub: str | None = None
    lr: float | None = None
    batch_tokens: int | None = None


# Parameters in millions, learning rate, tokens per step in millions: Brown et al. 2020, table 2.1.
GPT3 = (
    (125, 6e-4, 0.5),
    (350, 3e-4, 0.5),
    (760, 2.5e-4, 0.5),
    (1_300, 2e-4, 1),
    (2_700, 1.6e-4, 1),
    (6_700, 1.2e-4, 2),
    (13_000, 1e-4, 2),
    (175_000, 0.6e-4, 3.2),
)


class Pretraining(NamedTuple):
    """Settings to pretrain a model. source: a short description of the source of the learning
    rate."""

    lr: float
    global_batch_size: int
    source: str


def pretraining_defaults(parameters: int, preset: str | None, seq_length: int) -> Pretraining:
    """Return the learning rate and batch size for training from random weights: the published
    values of the preset, otherwise those of the GPT-3 model of the nearest size.

    parameters: number of parameters of the model. preset: its name, if the model has the preset's
    sizes, otherwise None. seq_length: tokens per sequence. The batch, in sequences, is the power of
    two that is nearest to the published number of tokens.
    """
    size, lr, tokens = min(GPT3, key=lambda row: abs(math.log(parameters / (row[0] * MILLION))))
    known = published(preset or "")
    named = f"{size / 1000:g}B" if size >= 1000 else f"{size}M"
    source = f"published for {preset}" if known.lr else f"of GPT-3 {named}, the nearest in size"
    sequences = (known.batch_tokens or tokens * MILLION) / seq_length
    return Pretraining(known.lr or lr, 2 ** max(0, round(math.log2(sequences))), source)


def published(preset: str) -> Published:
    """Return the source of a preset, from PUBLISHED in the file of its family; without an entry,
    one without values."""
    family = family_with(preset)
    entries = getattr(sys.modules[family.__module__], "PUBLISHED", {}) if family else {}
    return entries.get(preset, Published())
