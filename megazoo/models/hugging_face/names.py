"""Hugging Face's names of tensors."""

import re


class HFNames:
    """Hugging Face's names of what is one tensor of ours: parts that follow one another along its
    rows.

    transposed: theirs is [inputs, outputs], as GPT-2's Conv1D has it.
    """

    def __init__(self, *names: str, transposed: bool = False):
        self.names, self.transposed = names, transposed


def hf_names(model: type, name: str) -> HFNames:
    """Return Hugging Face's names of a global tensor of ours, by the table in the model's file.

    model: the family's class. name: such as "layers.17.attention.qkv.weight".
    """
    layer = re.search(r"(?<=layers\.)\d+", name)
    module, _, kind = name.rpartition(".")
    pattern = module.replace(f"layers.{layer[0]}.", "layers.{}.") if layer else module
    theirs = model.HUGGING_FACE_NAMES[pattern]
    names = tuple(f"{part.format(layer and layer[0])}.{kind}" for part in theirs.names)
    return HFNames(*names, transposed=theirs.transposed and kind == "weight")
