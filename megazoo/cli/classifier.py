"""Classifiers in the programs: what a config leaves open of one, and what an evaluation tells."""

from dataclasses import fields, replace

from megazoo.data.dataset import Sources
from megazoo.data.labels import ONE_OF_SEVERAL, REGRESSION, Labels, labels_in
from megazoo.errors import UserError
from megazoo.evaluation import Tally
from megazoo.models.source import ModelSource
from megazoo.tokenizer import Tokenizer


def with_pad_token(config, source: ModelSource | None, tokenizer: Tokenizer):
    """Return a classifier's config with a pad_token_id of its vocabulary: the config's own, or else
    the one beside the weights, the tokenizer's, or what ends a document."""
    named = [config.pad_token_id, source and source.pad_token_id, tokenizer.pad_token_id]
    fits = [token for token in named if isinstance(token, int) and 0 <= token < config.vocab_size]
    # The vocabulary may be smaller than the tokenizer's where the data is random tokens alone.
    pad = fits[0] if fits else min(tokenizer.eod, config.vocab_size - 1)
    return replace(config, pad_token_id=pad)


def settle_labels(
    config, source: ModelSource | None, tokenizer: Tokenizer, sources: Sources
) -> tuple[object, Labels | None]:
    """Return a classifier's config with what it leaves open, its problem_type by the data's first
    label, and what labels are. A language model's is returned as it is, with None.

    source: of the weights, or None. sources: of the data; UserError for one without labels.
    """
    if not config.num_labels:
        return config, None
    if missing := {"problem_type", "pad_token_id"} - {f.name for f in fields(config)}:
        raise UserError(f"{type(config).__name__} has no {min(missing)}: it makes no classifier")
    labels = labels_in(sources.names, config.num_labels, config.problem_type)
    config = with_pad_token(config, source, tokenizer)
    return replace(config, problem_type=labels.problem), labels


def measures_of(tally: Tally, labels: Labels) -> dict[str, float]:
    """Return what is told of a classifier's predictions: the accuracy, but of a regression; and the
    F1 of label 1, if one of two labels is predicted."""
    measures = {} if labels.problem == REGRESSION else {"accuracy": tally.accuracy}
    if labels.problem == ONE_OF_SEVERAL and labels.num_labels == 2:
        measures["f1"] = tally.f1
    return measures
