"""Weights in the layout of oneDNN's kernels, for inference on CPUs: see `pack_weights`."""

from torch import nn

from megazoo.layers.embedding import VocabParallelHead
from megazoo.layers.linear import ParallelLinear, forget_parameters
from megazoo.layers.product import PACKED, PLAIN
from megazoo.parallel.cpu.products import gains_from_packing
from megazoo.torch_internals import packed_weight


def pack_weights(model: nn.Module) -> None:
    """Store the bfloat16 weights of the parallel linear layers in oneDNN's layout, for inference.

    On CPUs with instructions for bfloat16, a product of few rows, as in generation, then takes
    about half the time. The numbers are the same up to rounding, and the plain form of each weight
    is freed. The head then has both forms of its matrix, because losses and a tied embedding need
    the plain one. Nothing changes on other devices and CPUs, for other dtypes and small weights,
    and for layers with adapters or a custom product. The model can't be trained, adapted, saved,
    copied or converted afterwards.

    Args:
        model: the model, or any module with parallel linear layers.

    Example:
        model = megazoo.from_pretrained("org/model", dtype=torch.bfloat16)
        pack_weights(model)
        model.generate(ids)
    """
    layers = [
        layer
        for layer in model.modules()
        if isinstance(layer, ParallelLinear)
        and layer.product is PLAIN
        and layer.lora is None
        and layer.storage is None
        and gains_from_packing(layer.weight)
    ]
    if not layers:
        return
    model.requires_grad_(False)
    for layer in layers:
        packed = packed_weight(layer.weight.detach())
        layer.weight, layer.product = nn.Parameter(packed, requires_grad=False), PACKED
    for head in model.modules():
        if isinstance(head, VocabParallelHead) and head.owner.storage is None:
            matrix = head.matrix.detach()
            head.owner.packed = packed_weight(matrix) if gains_from_packing(matrix) else None
    forget_parameters(model)
