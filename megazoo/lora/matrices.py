"""The matrices that adapters change, their shortest names, and the interface of adapters on
disk."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from megazoo.checkpoint.source import TensorSource
from megazoo.families.names import Run, runs_of_groups
from megazoo.lora.settings import LoRASettings, Target, linear_layers, targets_of
from megazoo.parallel.shard import ParameterSpec


@dataclass(frozen=True)
class Matrix:
    """A target with its size, [outputs, inputs].

    first: its first row in the weight of its layer. runs: the order of its rows in the Hugging Face
    model. experts: number of such matrices in a stack; 0: a single matrix.
    """

    target: Target
    first: int
    outputs: int
    inputs: int
    runs: tuple[Run, ...]
    experts: int = 0

    @property
    def weight(self) -> str:
        """The global name of its layer's weight."""
        return f"{self.target.module}.weight"

    def specs(self, rank: int) -> dict[str, ParameterSpec]:
        """Return the global shapes of an adapter's factors, "A" and "B", without shards."""
        stack = (self.experts,) if self.experts else ()
        shapes = {"A": (*stack, rank, self.inputs), "B": (*stack, self.outputs, rank)}
        return {factor: ParameterSpec(shape) for factor, shape in shapes.items()}


def adaptable_matrices(model: nn.Module) -> list[Matrix]:
    """Return the matrices that can be adapted, of all layers of a model on this rank."""
    matrices = []
    for name, layer in linear_layers(model):
        targets, spec = targets_of(model, name, layer), layer.specs["weight"]
        *stack, rows, columns = spec.shape
        counts, first = (rows,), 0
        if spec.shard and len(targets) > 1:
            counts = spec.shard.parts
        for target, outputs in zip(targets, counts, strict=True):
            runs = [Run(0, 0, outputs)]
            if spec.shard and target.grouped:
                runs = runs_of_groups(spec.shard)
            matrices.append(Matrix(target, first, outputs, columns, tuple(runs), *stack))
            first += outputs
    return matrices


def adapted(matrices: Iterable[Matrix], settings: LoRASettings) -> list[Matrix]:
    """Return the matrices that the settings adapt."""
    return [matrix for matrix in matrices if any(map(matrix.target.is_called, settings.targets))]


def short_names(wanted: list[Target], among: list[Target]) -> tuple[str, ...]:
    """Return the shortest ends of Hugging Face names that match only the wanted targets.

    If a target is wanted only in some layers, its complete names are returned. among: all targets.
    """
    names, exact = {}, {}
    for target in wanted:
        words = target.theirs.split(".")
        for count in range(1 + (words[-1] == "weight"), len(words)):
            end = ".".join(words[-count:])
            if any(word.isdigit() for word in words[-count:]):
                continue
            if end not in exact:
                exact[end] = all(other in wanted for other in among if other.is_called(end))
            if exact[end]:
                names[end] = None
                break
        else:
            names[target.theirs] = None
    return tuple(names)


class AdapterSource(TensorSource):
    """Adapters on disk, of which any box of any factor can be read by its global name.

    settings: those of the adapters. matrices: the matrices that they change. specs: global shapes
    of the factors, and of the other trained parameters.
    """

    settings: LoRASettings
    matrices: list[Matrix]
    specs: dict[str, ParameterSpec]

    def factors(self, matrix: Matrix) -> dict[str, ParameterSpec]:
        """Return the shapes of the factors A and B of a matrix's adapter, by their global names."""
        specs = matrix.specs(self.settings.rank_of(matrix.target))
        return {matrix.target.parameter(factor): spec for factor, spec in specs.items()}
