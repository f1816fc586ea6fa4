"""Adapters in the files of PEFT (0.21): adapter_config.json, and the tensors' names and shapes.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight       [rank, inputs]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight       [outputs, rank]

The factors are never transposed, also for GPT-2's Conv1D: only a merge transposes B A.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import isfinite
from pathlib import Path
from re import fullmatch
from typing import Any

import torch
from torch import nn

from megazoo.checkpoint.ownership import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from megazoo.checkpoint.source import TensorSource
from megazoo.checkpoint.tensor_files import TensorFiles
from megazoo.checkpoint.writing import (
    BytesWritten,
    LazyTensor,
    write_json,
    write_safetensors,
)
from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.lora.matrices import AdapterSource, Matrix, adaptable_matrices, adapted, short_names
from megazoo.lora.peft_config import read_config
from megazoo.lora.settings import LoRASettings, Target, labels_of
from megazoo.models.hugging_face.directory import some_of
from megazoo.models.hugging_face.export import lazy_rows
from megazoo.models.hugging_face.names import Run, hf_names
from megazoo.models.outputs import CLASSIFIER_HEAD
from megazoo.parallel.shard import ParameterSpec, Piece

PICKLED = "adapter_model.bin"  # older versions of PEFT
PREFIX = "base_model.model."
CLASSIFIERS = {"classifier", "score"}  # modules that PEFT trains with any classifier


class PEFTDirectory(AdapterSource):
    """Reads adapters that PEFT or `megazoo.lora.save` wrote.

    The tensors' names show which layers have adapters.

    Args:
        path: a directory with adapter_config.json, and adapter_model.safetensors or .bin.
        whole: the base model with all its layers, for example on the meta device.

    Raises:
        UserError: for a feature of PEFT that is not supported; for missing or unexpected tensors,
            and for other shapes, with their names.
    """

    def __init__(self, path: Path, whole: nn.Module):
        super().__init__(path)
        self.trainer, self.sidecar_files, self.generation = {}, {}, {}
        self._file = weights_file(path)
        self._config = read_config(path / ADAPTER_CONFIG)
        self._names = self.files.names(self._file)
        all_matrices = adaptable_matrices(whole)
        by_name = {
            tensor_name(matrix.target, factor): matrix
            for matrix in all_matrices
            for factor in ("A", "B")
        }
        here = {by_name[name].target for name in self._names if name in by_name}
        self.matrices = [matrix for matrix in all_matrices if matrix.target in here]
        self.settings = self._read_settings([matrix.target for matrix in all_matrices])
        self._theirs, self._runs, self.specs = {}, {}, {}
        for matrix in self.matrices:
            factors = zip(("A", "B"), self.factors(matrix).items(), strict=True)
            for factor, (name, spec) in factors:
                self._theirs[name] = tensor_name(matrix.target, factor)
                self._runs[name] = runs_of(matrix, factor, spec)
                self.specs[name] = spec
        self._add_head(whole)
        self._check_complete(all_matrices, type(whole).__name__)
        for name, spec in self.specs.items():
            self.files.check_shape(self._file, self._theirs[name], spec.shape)
            self.dtype_of(name)  # raises for a dtype that weights can't have

    def dtype_of(self, name: str) -> torch.dtype:
        return self.files.dtype([(self._file, self._theirs[name])])

    def file_sizes(self) -> dict[str, int]:
        return {self._file: (self.path / self._file).stat().st_size}

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        theirs, shape = self._theirs[name], self.specs[name].shape
        for run, piece in product(self._runs[name], pieces):
            (start, stop), columns = piece.box
            low, high = max(start, run.ours), min(stop, run.ours + run.count)
            if low < high:
                moved = run.theirs - run.ours
                values = self.files.box(
                    self._file, theirs, shape, ((low + moved, high + moved), columns)
                )
                self.put(destination[piece.index(((low, high), columns))], values)

    def _read_settings(self, targets: list[Target]) -> LoRASettings:
        """Return the settings. Their target names match exactly the layers of this directory."""
        config, file = self._config, self.path / ADAPTER_CONFIG
        here = [matrix.target for matrix in self.matrices]
        if not here:
            raise UserError(
                f"{self.path / self._file} has no adapter for a linear layer of this model; it has "
                f"{some_of(self._names) or 'no tensors'}"
            )
        settings = LoRASettings(
            rank=config.r,
            alpha=config.lora_alpha,
            dropout=config.lora_dropout,
            targets=short_names(here, targets),
            rslora=config.use_rslora,
            rank_pattern=_pattern("rank_pattern", config.rank_pattern, here, config.r, file),
            alpha_pattern=_pattern(
                "alpha_pattern", config.alpha_pattern, here, config.lora_alpha, file
            ),
        )
        try:
            settings.check()
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        return settings

    def _add_head(self, whole: Any) -> None:
        """Read a classifier's trained head, if there is one; UserError for other trained
        modules."""
        modules = set(self._config.modules_to_save or ())
        if not modules:
            return
        labels = labels_of(whole)
        if "score" not in modules or modules - CLASSIFIERS:
            raise UserError(
                f"{self.path / ADAPTER_CONFIG}: modules_to_save {sorted(modules)} is not "
                "supported; supported: ['score'], the head of a classifier"
            )
        if not labels:
            raise UserError(
                f"{self.path} belongs to a classifier: modules_to_save has its head, score, which "
                "this model lacks; build the model with num_labels"
            )
        self.specs[CLASSIFIER_HEAD] = ParameterSpec((labels, whole.config.hidden_size))
        self._theirs[CLASSIFIER_HEAD] = f"{PREFIX}{CLASSIFIER_HEAD}"
        self._runs[CLASSIFIER_HEAD] = [Run(0, 0, labels)]

    def _check_complete(self, matrices: list[Matrix], model: str) -> None:
        """Raise UserError if a tensor is missing, or one does not belong to the model.

        A tensor is missing if the other factor is there, or target_modules names its layer.
        """
        wanted = set(self._theirs.values())
        for matrix in matrices:
            names = {tensor_name(matrix.target, factor) for factor in ("A", "B")}
            is_target = self._config.is_target(matrix.target.theirs)
            wanted = wanted | names if is_target else wanted - names
        problems = []
        if missing := wanted - self._names:
            problems.append(f"lacks {some_of(missing)}")
        if extra := self._names - wanted:
            problems.append(f"has the unexpected {some_of(extra)}")
        if problems:
            raise UserError(
                f"{self.path / self._file} {' and '.join(problems)}: "
                f"it does not match this {model} and {ADAPTER_CONFIG}"
            )


def weights_file(path: Path) -> str:
    """Return the name of the weight file; UserError with the missing file if there is none."""
    if not path.is_dir():
        raise UserError(f"{path} is not a directory: pass a directory that holds an adapter")
    if not (path / ADAPTER_CONFIG).is_file():
        raise UserError(f"{path} does not hold an adapter: it lacks {ADAPTER_CONFIG}")
    for name in (ADAPTER_WEIGHTS, PICKLED):
        if (path / name).is_file():
            return name
    raise UserError(
        f"{path} does not hold an adapter: it has neither {ADAPTER_WEIGHTS} nor {PICKLED}"
    )


def labels_in(path: Path) -> int:
    """Return the number of labels of the classifier head in a directory of adapters; 0 if there is
    no head."""
    file, files = weights_file(path), TensorFiles(path)
    head = f"{PREFIX}{CLASSIFIER_HEAD}"
    return files.shape(file, head)[0] if head in files.names(file) else 0


def tensor_name(target: Target, factor: str) -> str:
    """Return the name in PEFT of a factor, "A" or "B", of a target's adapter."""
    return f"{PREFIX}{target.theirs}.lora_{factor}.weight"


def runs_of(matrix: Matrix, factor: str, spec: ParameterSpec) -> Sequence[Run]:
    """Return how the rows of a factor, "A" or "B", are ordered in the file of PEFT: those of B like
    the rows of its matrix."""
    return matrix.runs if factor == "B" else [Run(0, 0, spec.shape[0])]


def _pattern(
    key: str, pattern: dict[str, Any] | None, here: list[Target], default: float, file: Path
) -> dict[str, Any]:
    """Return rank_pattern or alpha_pattern with names that match exactly the targets they mean.
    UserError for a regular expression."""
    for name, value in (pattern or {}).items():
        if not fullmatch(r"[\w.-]+", name):
            raise UserError(
                f"{file}: {key} has the regular expression {brief(name)}, which is not supported: "
                "use names of modules, or their ends"
            )
        if not isfinite(value):
            raise UserError(f"{file}: {key} of {name} is {value}: it must be finite")

    def value_of(target: Target) -> float:
        values = (pattern or {}).items()
        ends = (value for name, value in values if f".{target.theirs}".endswith(f".{name}"))
        return next(ends, default)

    return _by_name({target: value_of(target) for target in here}, default)


def _by_name(values: Mapping[Target, float], default: float) -> dict[str, float]:
    """Return the values that differ from the default, by the shortest names that match only their
    targets."""
    others = dict.fromkeys(value for value in values.values() if value != default)
    return {
        name: other
        for other in others
        for name in short_names([t for t, value in values.items() if value == other], [*values])
    }


def write_adapters(
    source: TensorSource,
    whole: Any,
    settings: LoRASettings,
    directory: Path,
    base_model_name_or_path: str | None = None,
    dtype: torch.dtype | None = None,
    progress: BytesWritten = lambda _: None,
) -> None:
    """Write adapter_config.json and adapter_model.safetensors into an existing directory. Tensors
    are streamed.

    source: has the adapters of `whole` and a classifier's head, by their global names. settings:
    those of the adapters. dtype: of the tensors; by default as stored.
    """
    matrices, tensors = adapted(adaptable_matrices(whole), settings), {}

    for matrix in matrices:
        for factor, spec in matrix.specs(settings.rank_of(matrix.target)).items():
            name, runs = matrix.target.parameter(factor), runs_of(matrix, factor, spec)
            tensors[tensor_name(matrix.target, factor)] = lazy_rows(
                source, name, spec, runs, dtype or source.dtype_of(name), progress
            )
    if labels := labels_of(whole):
        kind = dtype or source.dtype_of(CLASSIFIER_HEAD)
        head = ParameterSpec((labels, whole.config.hidden_size))
        tensors[f"{PREFIX}{CLASSIFIER_HEAD}"] = lazy_rows(
            source, CLASSIFIER_HEAD, head, [Run(0, 0, labels)], kind, progress
        )
    in_order: dict[str, LazyTensor] = dict(sorted(tensors.items()))
    write_safetensors(directory / ADAPTER_WEIGHTS, in_order)
    config = peft_config(whole, settings, base_model_name_or_path)
    write_json(directory / ADAPTER_CONFIG, config)


def peft_config(
    whole: nn.Module, settings: LoRASettings, base_model_name_or_path: str | None = None
) -> dict[str, Any]:
    """Return the contents of adapter_config.json for a model's adapters."""
    targets = [matrix.target for matrix in adaptable_matrices(whole)]
    here = [matrix.target for matrix in adapted(adaptable_matrices(whole), settings)]
    is_classifier = labels_of(whole) > 0
    ranks = {target: settings.rank_of(target) for target in here}
    alphas = {target: _plain(settings.alpha_of(target)) for target in here}
    return {
        "alpha_pattern": _by_name(alphas, _plain(settings.alpha)),
        "base_model_name_or_path": base_model_name_or_path,
        "bias": "none",
        "fan_in_fan_out": any(_is_transposed(whole, target) for target in here),
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": _plain(settings.alpha),
        "lora_dropout": settings.dropout,
        "modules_to_save": ["score"] if is_classifier else None,
        "peft_type": "LORA",
        "r": settings.rank,
        "rank_pattern": _by_name(ranks, settings.rank),
        "target_modules": list(short_names(here, targets)),
        "task_type": "SEQ_CLS" if is_classifier else "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": settings.rslora,
    }


def _plain(alpha: float) -> float:
    """Return an alpha as PEFT writes it: as an int if it is whole."""
    return int(alpha) if alpha == int(alpha) else alpha


def _is_transposed(whole: nn.Module, target: Target) -> bool:
    """Return whether the Hugging Face model stores the matrix as [inputs, outputs]."""
    try:
        return hf_names(type(whole), f"{target.module}.weight").transposed
    except (AttributeError, KeyError):  # a custom model has no table, or not this layer
        return False
