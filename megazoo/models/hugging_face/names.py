"""Hugging Face's names of tensors."""


class HFNames:
    """Hugging Face's names of what is one tensor of ours: parts that follow one another along its
    rows.

    transposed: theirs is [inputs, outputs], as GPT-2's Conv1D has it.
    """

    def __init__(self, *names: str, transposed: bool = False):
        self.names, self.transposed = names, transposed
