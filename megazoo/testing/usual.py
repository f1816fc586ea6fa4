"""The usual causes of a difference between a layout and one process, one sentence each."""

import math
from dataclasses import dataclass

from megazoo.parallel.layout import Layout
from megazoo.testing.batches import micro_batches_of
from megazoo.testing.distances import Clue
from megazoo.testing.optimizer_trial import LOSS_SCALE

STAGES = "a stage builds what belongs to another, or numbers its layers from 0"
INITIAL = (
    "each rank draws its own part instead of a part of the whole, layers share a seed, or the "
    "spread follows from the layer's number within the stage"
)
TRAINED = "parameters are registered again, or unfrozen, after the adapters were added"
LOGITS = "the ranks' parts of the vocabulary, or of the sequence, are joined in another order"
DROPOUT_SITES = "layers are numbered within the stage, or micro-batches share a seed"
DROPOUT_AGAIN = "recomputation draws from a generator that has gone on"
DROPOUT_STEPS = "the seed of a micro-batch does not depend on the step"
DROPOUT_EVALUATED = "the model is evaluated in training mode"
DROPOUT_EQUAL = "dropout outside of the tensor-parallel region draws by the tp rank"
DROPOUT_DIFFERENT = (
    "dropout of what each rank has for itself, heads, features or tokens, draws by one seed for all"
)
MEANS = (
    "each part is divided by its own labels, and the parts weigh the same: divide by the labels of "
    "the whole global batch"
)
LOSS = (
    "the softmax counts columns that are not tokens, or all columns on each rank; targets are not "
    "cut as the logits are; or the loss is not summed over the ranks that have a part of it, is "
    "counted by each rank that has the whole, or is divided by a part's own labels"
)
AUXILIARY = (
    "counts are of a part of the rows, padding counts, or the mean is over the rows or tokens of a "
    "rank instead of the global batch"
)
NORM = (
    "copies over tp, or of a tied parameter, count more than once, or a rank's part is not counted "
    "at all"
)
DECAY = "a parameter is in the wrong group of the optimizer: frozen, norms and biases don't decay"
OPTIMIZER = (
    "the optimizer's step is not that of the paper, or is meant for parameters of another kind"
)
OVERFLOW = "each rank looks at its own gradients, and no maximum is taken over all ranks"
GENERATOR = (
    "the generator's state depends on how many micro-batches and layers a rank has: draw from one "
    "that is seeded by the step and the module's name, or use megazoo.layers.Dropout"
)
OTHER_STAGES = (
    "forward_stage reads what another stage has built or computed: a stage is given the "
    "activations and the MicroBatch only"
)
RESUMED_STATE = "the state is created again after loading, or is not in the checkpoint"
RESUMED_RATES = (
    "the groups of parameters are matched by too few keys or by their position, or the schedule "
    "counts its steps from another one"
)
RESUMED_ORDER = "the samples that were consumed are skipped twice, in each epoch, or not at all"
RESUMED_DROPOUT = "set-up or loading draws from the generator of the dropout"
RESUMED_LOSS = "a state that is not compared is not in the checkpoint, or is not loaded"
PROGRAM_RESUMED = "the program counts its steps or samples from 0 after --load"
EVALUATION = "a layer counts tokens or updates a state in evaluation as in training"
PROGRAM = "a sum or a mean over the ranks of an axis is missing or doubled in what is printed"
_PARTS = (
    "heads, positions, masks, another order of tokens or another cut of a fused weight: often "
    "with local numbers in place of the whole's"
)


def _is(factor: float, expected: float) -> bool:
    """Return whether a factor equals the expected one, up to rounding; False for nan."""
    return math.isclose(factor, expected, rel_tol=1e-3)


@dataclass(frozen=True)
class Place:
    """The position of the first gradient that differs.

    Attributes:
        made_first: It is the first gradient of the backward pass.
        copied: Several tp ranks have the same rows of it.
        on_some_replicas: It is right on other replicas.
    """

    made_first: bool
    copied: bool
    on_some_replicas: bool


def of_activations(kind: str, name: str, clue: Clue | None, step: int, layout: Layout) -> str:
    """Return the usual cause of a difference in a module's input or output. step: the first step
    that differs."""
    if clue and clue.everywhere and layout.tp > 1:
        return "every rank adds the bias to its part before the sum over tp"
    if clue and clue.everywhere:
        return "a bias is added twice, omitted, or another layer's"
    if clue and clue.reordered:
        return "parts are gathered in another order of the ranks, or cut in another"
    if clue and "tp" in clue.sums and math.isclose(clue.sums["tp"], 1, rel_tol=1e-3):
        return "the sum over tp after a row-parallel layer, or an embedding, is missing"
    if clue and not math.isnan(clue.factor):
        twice = ", or something is summed over tp twice" if layout.tp > 1 else ""
        return f"a number of layers, features or heads is this rank's and not the whole's{twice}"
    if step and "attention" in name:
        return "masks of documents or of padding do not reach this stage or this part of sequences"
    if kind == "input" and name.endswith(("attention.output", "q_norm", "k_norm")):
        return f"attention computes with other {_PARTS}; or it computes in a lower precision"
    if kind == "input" and name.endswith(".down") and layout.tp > 1:
        return "gate and up are cut as one block, or an activation is applied to a partial sum"
    if "position" in name or name.startswith("embedding"):
        return "positions, or token ids, are those of this rank's part and not of the whole"
    if kind == "output" and "norm" in name and layout.tp > 1:
        return "the moments are of this rank's features, and not of all"
    if kind == "output" and layout.tp > 1:
        return "something is summed over tp twice, or added before the sum instead of after it"
    return "the module computes with this rank's numbers, of layers or tokens, not with the whole's"


def of_labels(ours: int, theirs: int, layout: Layout) -> str:
    """Return the usual cause of a mean over a wrong number of labels."""
    if ours > theirs:
        return "the same labels are counted by several ranks, or padding counts as labelled"
    if layout.cp == 1 or (ours * layout.dp < 2 * theirs and ours < theirs / 1.5):
        return "labels are counted on this rank alone, and not over all replicas"
    return "labels are shifted after the sequence was cut, so that each part loses its last one"


def of_loss_scale(factor: float, micro_batches: int) -> str:
    """Return the usual cause of a factor on all gradients."""
    if factor == 0:
        return "no gradient comes back from the loss, or all are set to zero after backward"
    for power, what in ((1, "not taken out"), (-1, "taken out twice")):
        if math.isclose(factor, LOSS_SCALE**power, rel_tol=1e-3):
            return f"the loss scale, {LOSS_SCALE:g} in this check, is applied twice or {what}"
    return (
        "a mean where a sum belongs, or a sum where a mean does, over the ranks of an axis or over "
        f"a replica's micro-batches, {micro_batches} in this check; or only the returned loss is "
        "divided by the number of labels"
    )


def of_ties(factor: float) -> str:
    """Return the usual cause of a wrong gradient of a parameter that stages share. factor: nan if
    it is not a multiple."""
    if factor > 1:
        return "the sum between the stages is made twice, or both the copies and the sum are added"
    return "the sum between the stages is missing, or comes after what shares it out"


def of_weights(tied: bool, zero: int, most_differ: bool) -> str:
    """Return the usual cause of weights that differ although gradients do not.

    Args:
        tied: Stages share the parameter.
        zero: ZeRO stage of the layout.
        most_differ: Most trained parameters differ on every rank.
    """
    if tied and not most_differ:
        return "the copies of the parameter are not stepped alike, or one is not stepped at all"
    reasons = []
    if zero:
        reasons.append("a rank's range of the parameters has a wrong end, or is not gathered")
    if most_differ:
        reasons.append("gradients are clipped before the loss scale is taken out of them")
    reasons.append(
        "the optimizer works with this rank's part as if it were the whole: it clips by the norm "
        "of a part, or normalises a shard"
    )
    return "; or ".join(reasons)


def of_resumed(kind: str) -> str:
    """Return the usual cause of a state that differs after a run is resumed. kind: of the state."""
    if kind == "master weights":
        return (
            "master weights are made before the weights are loaded, and are not loaded themselves"
        )
    if kind == "weights":
        return "weights are loaded into a copy, or into another part of the parameter"
    return "states are not loaded, or are read from another part of the parameter, or with padding"


def of_error(text: str, layout: Layout) -> str:
    """Return the usual cause of an error on a rank, or "". text: the last line of the error."""
    missing = text.startswith(("AttributeError", "KeyError", "NameError"))
    return OTHER_STAGES if missing and layout.pp > 1 else ""


def of_gradients(clue: Clue | None, place: Place, layout: Layout) -> str:
    """Return the usual cause of a gradient that differs."""
    if clue and clue.factor == 0:
        return (
            "the gradient is lost on its way: a graph that is cut, or a parameter that is omitted"
        )
    if clue and layout.pp > 1 and _is(clue.factor * micro_batches_of(layout.dp), 1):
        return "stages before the last divide by the number of micro-batches again"
    if clue and not math.isnan(clue.factor):
        return "a gradient that is whole on every rank is summed over them, or divided by them"
    for axis, factor in clue.sums.items() if clue else ():
        if _is(factor, 1):
            return f"the gradient is never summed over {axis}"
    if place.copied:
        return "the parts that the ranks with copies of a KV head have are not summed"
    replicas, reasons = layout.dp * layout.cp > 1, []
    if replicas and place.on_some_replicas and not layout.zero:
        return "a sum over the replicas left some of them out, or did not reach them"
    if layout.pp > 1 and not place.made_first:  # the first gradient depends on no other stage
        reasons.append(
            "backward pairs a micro-batch's gradient with another's activations, or a buffer is "
            "used again before it was read"
        )
    if replicas:
        reasons.append(
            "a sum over the replicas left before the last micro-batch, or left one out; or "
            "replicas are weighed by their own labels"
        )
    if layout.tp > 1 and not reasons and place.made_first:
        return (
            "the loss gives some ranks no gradient of their logits; or gradients of micro-batches "
            "are not added up as they are"
        )
    if layout.tp > 1 and not reasons:
        return "the sum of the inputs' gradients over tp is missing where a region is entered"
    return "; or ".join(reasons) or "the loss's gradient lacks a micro-batch, or counts one twice"
