"""Adapters in the files of PEFT (0.21): adapter_config.json, and the tensors' names and shapes.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight       [rank, inputs]
    base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight       [outputs, rank]

The factors are never transposed, also for GPT-2's Conv1D: only a merge transposes B A.

The stacked weights of experts are parameters, not modules. PEFT wraps their module once for each:

    ....mlp.experts.base_layer.lora_A.weight    of gate_up_proj, [experts x rank, inputs]
    ....mlp.experts.lora_B.weight               of down_proj, [outputs, rank x experts]
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
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
from megazoo.errors import UserError, some_of
from megazoo.families.names import Run, hf_names
from megazoo.files import brief
from megazoo.formats.hugging_face.export import lazy_rows
from megazoo.lora.matrices import AdapterSource, Matrix, adaptable_matrices, adapted, short_names
from megazoo.lora.peft_config import check_pattern, read_config
from megazoo.lora.settings import LoRASettings, Target, labels_of
from megazoo.models.outputs import CLASSIFIER_HEAD
from megazoo.parallel.shard import Box, ParameterSpec, Piece

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
        self._check_parameters([matrix.target for matrix in all_matrices])
        self._tensors = tensors_of([m.target for m in all_matrices if self._may_have(m.target)])
        by_name = {name: target for (target, _), name in self._tensors.items()}
        here = {by_name[name] for name in self._names if name in by_name}
        self.matrices = [matrix for matrix in all_matrices if matrix.target in here]
        self.settings = self._read_settings([matrix.target for matrix in all_matrices])
        self._theirs, self._runs, self.specs = {}, {}, {}
        self._stacked: dict[str, str] = {}  # the factor, "A" or "B", of each stacked tensor
        for matrix in self.matrices:
            factors = zip(("A", "B"), self.factors(matrix).items(), strict=True)
            for factor, (name, spec) in factors:
                self._theirs[name] = self._tensors[matrix.target, factor]
                self._runs[name] = runs_of(matrix, factor, spec)
                self.specs[name] = spec
                if matrix.experts:
                    self._stacked[name] = factor
        self._add_head(whole)
        self._check_complete([m.target for m in all_matrices], type(whole).__name__)
        for name in self.specs:
            self.files.check_shape(self._file, self._theirs[name], self._shape(name))
            self.dtype_of(name)  # raises for a dtype that weights can't have

    def dtype_of(self, name: str) -> torch.dtype:
        return self.files.dtype([(self._file, self._theirs[name])])

    def file_sizes(self) -> dict[str, int]:
        return {self._file: (self.path / self._file).stat().st_size}

    def read_pieces(
        self, name: str, destination: torch.Tensor, spec: ParameterSpec, pieces: list[Piece]
    ) -> None:
        if name in self._stacked:
            for piece in pieces:
                self.put(destination[piece.index()], self._of_stack(name, piece.box))
            return
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

    def _of_stack(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a factor of stacked weights."""
        experts, _, rank = self.specs[name].shape
        (first, last), (start, stop), (left, right) = box
        shape, theirs = self._shape(name), self._theirs[name]
        if self._stacked[name] == "A":
            rank = self.specs[name].shape[1]
            rows = (first * rank, last * rank), (left, right)
            values = self.files.box(self._file, theirs, shape, rows)
            return values.reshape(last - first, rank, right - left)[:, start:stop]
        columns = (start, stop), (left * experts, right * experts)
        values = self.files.box(self._file, theirs, shape, columns)
        by_expert = values.reshape(stop - start, right - left, experts).permute(2, 0, 1)
        return by_expert[first:last]

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that a tensor must have in the file."""
        shape = self.specs[name].shape
        return stored_shape(shape, self._stacked[name]) if name in self._stacked else shape

    def _check_parameters(self, targets: list[Target]) -> None:
        """Raise UserError for a name in target_parameters that is not that of experts or a
        router."""
        for name in self._config.target_parameters or []:
            if not any(each.is_parameter and each.is_called(name) for each in targets):
                raise UserError(
                    f"{self.path / ADAPTER_CONFIG}: target_parameters {brief(name)} is not "
                    "supported: the model has no experts or routers with this name"
                )

    def _may_have(self, target: Target) -> bool:
        """Return whether the directory may have an adapter for a target. The names of tensors
        don't show which parameters of a module are adapted."""
        return not target.is_parameter or self._config.is_parameter(target.theirs)

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

    def _check_complete(self, targets: list[Target], model: str) -> None:
        """Raise UserError if a tensor is missing, or one does not belong to the model.

        A tensor is missing if the other factor is there, or if target_modules or target_parameters
        name its layer.
        """
        wanted = set(self._theirs.values())
        for target in filter(self._may_have, targets):
            names = {self._tensors[target, factor] for factor in ("A", "B")}
            is_target = target.is_parameter or self._config.is_module(target.theirs)
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


def tensors_of(targets: Sequence[Target]) -> dict[tuple[Target, str], str]:
    """Return the names in PEFT of the factors, "A" and "B", of the adapters of targets.

    targets: all adapted targets of a model, in its order. PEFT wraps a module once for each of its
    adapted parameters; the first one is the innermost.
    """
    names, wrapped = {}, Counter()
    for target in reversed(targets):
        module = target.theirs
        if target.is_parameter:
            module = module.rpartition(".")[0]
            wrapped[module] += 1
            module += ".base_layer" * (wrapped[module] - 1)
        for factor in ("A", "B"):
            names[target, factor] = f"{PREFIX}{module}.lora_{factor}.weight"
    return names


def stored_shape(shape: tuple[int, ...], factor: str) -> tuple[int, int]:
    """Return the shape in the file of a factor of stacked weights: A is [experts x rank, inputs],
    B is [outputs, rank x experts]. shape: of the factor in megazoo."""
    experts, rows, columns = shape
    return (experts * rows, columns) if factor == "A" else (rows, columns * experts)


def runs_of(matrix: Matrix, factor: str, spec: ParameterSpec) -> Sequence[Run]:
    """Return how the rows of a factor, "A" or "B", are ordered in the file of PEFT: those of B like
    the rows of its matrix. Not for the B of stacked weights, whose experts are interleaved."""
    if matrix.experts:
        rank = spec.shape[1]
        return [Run(index * rank, 0, rank, (index,)) for index in range(matrix.experts)]
    return matrix.runs if factor == "B" else [Run(0, 0, spec.shape[0])]


def lazy_stack(
    source: TensorSource,
    name: str,
    spec: ParameterSpec,
    dtype: torch.dtype,
    progress: BytesWritten,
) -> LazyTensor:
    """Return the factor B of stacked weights, [experts, outputs, rank], as PEFT stores it."""
    experts, outputs, rank = spec.shape

    def fill(rows: torch.Tensor, start: int) -> None:
        box = ((0, experts), (start, start + len(rows)), (0, rank))
        by_expert = rows.view(len(rows), rank, experts).permute(2, 0, 1)
        source.read_pieces(name, by_expert, spec, [Piece(box, (0, 0, 0))])
        progress(rows.nbytes)

    return LazyTensor((outputs, rank * experts), dtype, fill)


def _pattern(
    key: str, pattern: dict[str, Any] | None, here: list[Target], default: float, file: Path
) -> dict[str, Any]:
    """Return rank_pattern or alpha_pattern with names that match exactly the targets they mean.

    As in PEFT, a key is a regular expression for the last parts of a module's name, so that a dot
    is any character; the first key that matches counts. UserError for one that is not valid.
    """
    compiled = []
    for name, value in (pattern or {}).items():
        if not abs(value) < 2**31:
            raise UserError(f"{file}: {key} of {brief(name)} is {brief(value)}: it must be finite")
        check_pattern(name, key, file)
        compiled.append((re.compile(rf"(.*\.)?({name})$"), value))

    def value_of(target: Target) -> float:
        found = (value for expression, value in compiled if expression.match(target.theirs))
        return next(found, default)

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
    names = tensors_of([matrix.target for matrix in matrices])
    for matrix in matrices:
        for factor, spec in matrix.specs(settings.rank_of(matrix.target)).items():
            name = matrix.target.parameter(factor)
            kind = dtype or source.dtype_of(name)
            if matrix.experts and factor == "B":
                tensor = lazy_stack(source, name, spec, kind, progress)
            else:
                runs = runs_of(matrix, factor, spec)
                tensor = lazy_rows(source, name, spec, runs, kind, progress)
            tensors[names[matrix.target, factor]] = tensor
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

    def short(is_parameter: bool) -> list[str]:
        of_kind = ([t for t in some if t.is_parameter == is_parameter] for some in (here, targets))
        return list(short_names(*of_kind))

    parameters = short(is_parameter=True)
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
        "target_modules": short(is_parameter=False),
        **({"target_parameters": parameters} if parameters else {}),
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
