"""Layers for tests: values that depend on names alone, and gradients as pieces of whole tensors."""

from dataclasses import replace

from megazoo.parallel.module import initialize
from megazoo.parallel.random import derive_seed


def parameters_of(layer):
    """Yield (prefix, key, module, spec) of all parameters of sharded modules."""
    for prefix, module in layer.named_modules():
        for key, spec in getattr(module, "specs", {}).items():
            yield prefix, key, module, spec


def drawn_by_name(layer, std_of):
    """The layer, with values that depend on the parameters' names alone: ones and zeros would hide
    what is left out. std_of: of a spec, their standard deviation."""
    for prefix, key, module, spec in parameters_of(layer):
        drawn = replace(spec, std=std_of(spec))
        initialize(getattr(module, key), drawn, module.ctx, derive_seed(prefix, key))
    return layer


def gradients_of(layer, ctx):
    """This rank's gradients: {name: (global shape, [(piece, gradient)])}."""
    found = {}
    for prefix, key, module, spec in parameters_of(layer):
        pieces, gradient = spec.pieces(ctx.place), getattr(module, key).grad
        held = [(piece, gradient[piece.index()]) for piece in pieces]
        found[f"{prefix}.{key}"] = (spec.shape, held)
    return found
