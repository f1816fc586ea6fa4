"""The matrices that adapters change, the shortest names for some of them, and adapters on disk,
whatever their files are."""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from megazoo.checkpoint.source import TensorSource
from megazoo.lora.settings import LoRASettings, Target, linear_layers, targets_of
from megazoo.models.hugging_face.names import Run, runs_of_groups
from megazoo.parallel.shard import ParameterSpec


@dataclass(frozen=True)
class Matrix:
    """A target with its size, [outputs, inputs], and its place: it is the rows from `first` on of
    its layer's weight. runs: which of its rows stand where in Hugging Face's."""

    target: Target
    first: int
    outputs: int
    inputs: int
    runs: tuple[Run, ...]

    @property
    def weight(self) -> str:
        """The global name of its layer's weight."""
        return f"{self.target.module}.weight"

    def specs(self, rank: int) -> dict[str, ParameterSpec]:
        """Return the global shapes of an adapter's factors, "A" and "B". They say no cut."""
        return {"A": ParameterSpec((rank, self.inputs)), "B": ParameterSpec((self.outputs, rank))}


def adaptable_matrices(model: nn.Module) -> list[Matrix]:
    """Return the matrices of a model that can be adapted, of all layers that are here."""
    matrices = []
    for name, layer in linear_layers(model):
        targets, spec = targets_of(model, name, layer), layer.specs["weight"]
        counts = layer.shard.parts if len(targets) > 1 else spec.shape[:1]
        first = 0
        for target, outputs in zip(targets, counts, strict=True):
            runs = runs_of_groups(layer.shard) if target.grouped else [Run(0, 0, outputs)]
            matrices.append(Matrix(target, first, outputs, spec.shape[1], tuple(runs)))
            first += outputs
    return matrices


def adapted(matrices: Iterable[Matrix], settings: LoRASettings) -> list[Matrix]:
    """Return those that the settings call."""
    return [matrix for matrix in matrices if any(map(matrix.target.is_called, settings.targets))]


def short_names(wanted: list[Target], among: list[Target]) -> tuple[str, ...]:
    """Return the shortest ends of Hugging Face's names that call the wanted targets, and none
    besides among these; where only some layers are wanted, the whole names."""
    names, exact = {}, {}
    for target in wanted:
        words = target.theirs.split(".")
        for count in range(1, len(words)):
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
    """Adapters on disk: of each factor, by its global name, any box can be read.

    settings: what the adapters are. matrices: what they change. specs: the global shapes of all
    that is there: the factors, and what was trained beside them.
    """

    settings: LoRASettings
    matrices: list[Matrix]
    specs: dict[str, ParameterSpec]

    def factors(self, matrix: Matrix) -> dict[str, ParameterSpec]:
        """Return the shapes of the factors of a matrix' adapter, by their global names: A, B."""
        specs = matrix.specs(self.settings.rank_of(matrix.target))
        return {matrix.target.parameter(factor): spec for factor, spec in specs.items()}
