"""Hugging Face names of tensors, and the order of their rows."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from megazoo.errors import UserError
from megazoo.parallel.shard import Box, ParameterSpec, Shard


class Run(NamedTuple):
    """A range of rows that is contiguous both in a Hugging Face tensor and in a megazoo tensor: the
    first row in each, and the number of rows.

    index: of the matrix in the megazoo tensor, if that is a stack of matrices.
    """

    theirs: int
    ours: int
    count: int
    index: tuple[int, ...] = ()

    def box(self, shape: Sequence[int]) -> Box:
        """Return the box of these rows in the megazoo tensor. shape: of that tensor."""
        matrix = tuple((number, number + 1) for number in self.index)
        columns = ((0, size) for size in shape[len(matrix) + 1 :])
        return (*matrix, (self.ours, self.ours + self.count), *columns)


class HFFiles(NamedTuple):
    """The settings of a family for Hugging Face directories, other than the names of tensors.

    model_type: its value in config.json; None: the name that the family is registered by.
    class_name: the start of the names of its transformers classes, such as StableLm; None: that of
    model_type, by `class_name`, such as Qwen3Moe for qwen3_moe. prefix: of tensor names; the files
    of a backbone omit it. legacy: regular expression for additional tensors that older versions of
    transformers wrote; they are ignored.
    """

    model_type: str | None = None
    class_name: str | None = None
    prefix: str = ""
    legacy: str = "$^"


class HFNames:
    """The Hugging Face tensors that make up one megazoo tensor, in the order of its rows.

    A name with [] is that of one matrix of a stack, such as those of experts; the number of the
    matrix replaces [].

    transposed: the Hugging Face tensor is [in_features, out_features], as in GPT-2's Conv1D.
    grouped: the Hugging Face tensor of a query/key/value projection has its rows group by group:
    the query heads that share a key head, that key head, and its value head. In GPT-NeoX each head
    is a group.
    parameter: name of the one parameter of the transformers model that holds the tensors, if that
    is not the weight of a linear layer. PEFT adapts it by target_parameters.
    """

    def __init__(
        self, *names: str, transposed: bool = False, grouped: bool = False, parameter: str = ""
    ):
        self.names, self.transposed, self.grouped = names, transposed, grouped
        self.parameter = parameter

    def renamed(self, rename: Callable[[str], str]) -> "HFNames":
        """Return a copy with other names. rename: returns the new name."""
        names, parameter = map(rename, self.names), rename(self.parameter)
        how = {"transposed": self.transposed, "grouped": self.grouped}
        return HFNames(*names, **how, parameter=parameter)

    def parts(self, spec: ParameterSpec) -> list[tuple[str, list[Run]]]:
        """Return the name of each Hugging Face tensor, with the rows of the megazoo tensor that it
        has. spec: of the unsharded megazoo tensor."""
        if "[]" in self.names[0]:
            return self._parts_of_stack(spec)
        counts, parts, first = spec.shape[:1], [], 0
        if self.grouped or len(self.names) > 1:
            assert spec.shard  # it defines the parts
            if self.grouped:
                return [(self.names[0], runs_of_groups(spec.shard))]
            counts = spec.shard.parts
        for name, count in zip(self.names, counts, strict=True):
            parts.append((name, [Run(0, first, count)]))
            first += count
        return parts

    def _parts_of_stack(self, spec: ParameterSpec) -> list[tuple[str, list[Run]]]:
        """Return the parts of each matrix of a stack."""
        shard = next((shard for shard in spec.shards if shard.dim == 1), None)
        counts = shard.parts if shard else spec.shape[1:2]
        parts = []
        for number in range(spec.shape[0]):
            first = 0
            for name, count in zip(self.names, counts, strict=True):
                run = Run(0, first, count, (number,))
                parts.append((name.replace("[]", str(number)), [run]))
                first += count
        return parts


def runs_of_groups(shard: Shard) -> list[Run]:
    """Return where a tensor with rows group by group has the rows of [q; k; v]. shard: of the
    unsharded projection; its units are the features per group."""
    runs, theirs, ours = [], 0, [0, shard.parts[0], shard.parts[0] + shard.parts[1]]
    for _ in range(shard.parts[1] // shard.units[1]):
        for part, count in enumerate(shard.units):
            runs.append(Run(theirs, ours[part], count))
            theirs += count
            ours[part] += count
    return runs


def names_in(table: dict[str, HFNames], module: str) -> HFNames | None:
    """Return the Hugging Face names of a megazoo module from the table of its family, or None if it
    has none.

    module: global name, such as "layers.17.attention.qkv".
    """
    layer = re.search(r"(?<=layers\.)\d+", module)
    theirs = table.get(re.sub(r"(?<=layers\.)\d+", "{}", module, count=1))
    return theirs and theirs.renamed(lambda name: name.format(layer and layer[0]))


def check_names(model: Any, names: Iterable[str]) -> None:
    """Raise UserError if the table of a family lacks a tensor. names: global names of tensors."""
    table = model.HUGGING_FACE_NAMES
    missing = [name for name in names if names_in(table, name.rpartition(".")[0]) is None]
    if missing:
        raise UserError(
            f"{model.__name__} has no Hugging Face name for {missing[0]}: add it to "
            "HUGGING_FACE_NAMES of the class, as in docs/new_model.md, or use shards"
        )


def hf_names(model: type, name: str) -> HFNames:
    """Return the Hugging Face names of a global megazoo tensor from the table of its family.

    model: class of the family. name: such as "layers.17.attention.qkv.weight".
    """
    module, _, kind = name.rpartition(".")
    theirs = names_in(model.HUGGING_FACE_NAMES, module)
    if theirs is None:
        raise KeyError(name)
    names = tuple(f"{part}.{kind}" for part in theirs.names)
    transposed = theirs.transposed and kind == "weight"
    how = {"grouped": theirs.grouped, "parameter": theirs.parameter}
    return HFNames(*names, transposed=transposed, **how)
