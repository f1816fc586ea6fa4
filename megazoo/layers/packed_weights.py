"""Weights in the layout of oneDNN's kernels, for inference on CPUs: see `pack_weights`."""

from torch import nn

from megazoo.layers.linear import ParallelLinear
from megazoo.layers.product import PLAIN, Product
from megazoo.parallel.cpu.products import gains_from_packing
from megazoo.torch_internals import linear_by_onednn, packed_weight


class PackedProduct(Product):
    """The product of a packed weight, without gradients."""

    widens = False

    def __reduce__(self):
        return "PACKED"  # a copy is the same object

    def output(self, x, weight, bias=None, counts=None):
        assert counts is None  # experts are not packed
        return linear_by_onednn(x, weight, bias)


PACKED = PackedProduct()


def pack_weights(model: nn.Module) -> None:
    """Store the bfloat16 weights of the parallel linear layers in oneDNN's layout, for inference.

    On CPUs with instructions for bfloat16, a product of few rows, as in generation, then takes
    about half the time. The numbers are the same, and each weight replaces its plain form. On other
    devices and CPUs, and for other dtypes, small weights, and layers with adapters or a custom
    product, nothing changes. The model can't be trained, adapted, saved or converted afterwards.

    Args:
        model: the model, or any module with parallel linear layers.

    Example:
        model = megazoo.from_pretrained("org/model", dtype=torch.bfloat16)
        pack_weights(model)
        model.generate(ids)
    """
    for layer in model.modules():
        if not isinstance(layer, ParallelLinear) or layer.product is not PLAIN:
            continue
        if layer.lora is None and layer.storage is None and gains_from_packing(layer.weight):
            model.requires_grad_(False)
            packed = packed_weight(layer.weight.detach())
            layer.weight, layer.product = nn.Parameter(packed, requires_grad=False), PACKED
