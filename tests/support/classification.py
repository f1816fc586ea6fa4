"""Batches and labels for sequence classifiers."""

import torch

PAD, LABELS = 60, 3


def batches():
    """Token ids with their masks: padding on the right, on the left, inside, everywhere in a row,
    and none."""
    ids = torch.randint(0, PAD, (4, 11), generator=torch.Generator().manual_seed(1))
    place = torch.arange(11)
    ends = torch.tensor([[11], [7], [4], [9]])
    right, left = place < ends, place >= 11 - ends
    inside = torch.ones_like(right)
    inside[:, 4:6] = False
    inside[1, -1] = False
    all_of_one = right.clone()
    all_of_one[2] = False
    kinds = {
        "right": right,
        "left": left,
        "inside": inside,
        "a whole row": all_of_one,
        "none": place < ends + 11,
    }
    made = {name: [ids.masked_fill(~real, PAD), real.long()] for name, real in kinds.items()}
    made["a whole row"][1] = None  # what nothing is seen of has no meaning: here all is
    return made


def labels_for(problem: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    if problem == "single_label_classification":
        return torch.tensor([2, 0, -100, 1])
    if problem == "regression":
        return torch.randn(4, generator=generator)
    return (torch.rand(4, LABELS, generator=generator) < 0.5).float()
