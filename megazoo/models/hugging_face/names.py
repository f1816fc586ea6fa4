"""Hugging Face's names of tensors, and the order of their rows."""

import re
from typing import NamedTuple

from megazoo.parallel.shard import ParameterSpec, Shard


class Run(NamedTuple):
    """Rows that follow one another both in a tensor of theirs and in one of ours: how many, and the
    first one in each."""

    theirs: int
    ours: int
    count: int


class HFFiles(NamedTuple):
    """The settings of a family for Hugging Face directories, besides the names of tensors.

    model_type: in config.json; None: the name that the family is registered by. prefix: of tensors,
    which the files of a backbone leave out. legacy: a regular expression of tensors that may be
    there besides, which older versions of transformers wrote.
    """

    model_type: str | None = None
    prefix: str = ""
    legacy: str = "$^"


class HFNames:
    """Hugging Face's names of what is one tensor of ours: parts that follow one another along its
    rows.

    transposed: theirs is [inputs, outputs], as GPT-2's Conv1D has it. grouped: of a projection to
    queries, keys and values theirs is one tensor that has them group by group: the query heads that
    share a key, the key's head and the value's. In GPT-NeoX each head is a group.
    """

    def __init__(self, *names: str, transposed: bool = False, grouped: bool = False):
        self.names, self.transposed, self.grouped = names, transposed, grouped

    def renamed(self, *names: str) -> "HFNames":
        """Return the same of tensors with other names."""
        return HFNames(*names, transposed=self.transposed, grouped=self.grouped)

    def parts(self, spec: ParameterSpec) -> list[tuple[str, list[Run]]]:
        """Return their tensors, and which rows of ours each has. spec: of the tensor of ours, in
        one process."""
        counts, parts, first = spec.shape[:1], [], 0
        if self.grouped or len(self.names) > 1:
            assert spec.shard  # which has the parts
            if self.grouped:
                return [(self.names[0], runs_of_groups(spec.shard))]
            counts = spec.shard.parts
        for name, count in zip(self.names, counts, strict=True):
            parts.append((name, [Run(0, first, count)]))
            first += count
        return parts


def runs_of_groups(shard: Shard) -> list[Run]:
    """Return where the rows of [q; k; v] stand in a tensor that has them group by group. shard: of
    the projection in one process, whose units are the features of a group."""
    runs, theirs, ours = [], 0, [0, shard.parts[0], shard.parts[0] + shard.parts[1]]
    for _ in range(shard.parts[1] // shard.units[1]):
        for part, count in enumerate(shard.units):
            runs.append(Run(theirs, ours[part], count))
            theirs += count
            ours[part] += count
    return runs


def names_in(table: dict[str, HFNames], module: str) -> HFNames | None:
    """Return Hugging Face's names of a module of ours, by the table in its model's file; None if it
    has none.

    module: its global name, such as "layers.17.attention.qkv".
    """
    layer = re.search(r"(?<=layers\.)\d+", module)
    theirs = table.get(re.sub(r"(?<=layers\.)\d+", "{}", module, count=1))
    return theirs and theirs.renamed(*(name.format(layer and layer[0]) for name in theirs.names))


def hf_names(model: type, name: str) -> HFNames:
    """Return Hugging Face's names of a global tensor of ours, by the table in the model's file.

    model: the family's class. name: such as "layers.17.attention.qkv.weight".
    """
    module, _, kind = name.rpartition(".")
    theirs = names_in(model.HUGGING_FACE_NAMES, module)
    if theirs is None:
        raise KeyError(name)
    names = tuple(f"{part}.{kind}" for part in theirs.names)
    transposed = theirs.transposed and kind == "weight"
    return HFNames(*names, transposed=transposed, grouped=theirs.grouped)
