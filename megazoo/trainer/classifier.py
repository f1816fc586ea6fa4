"""Classifiers in the programs: config fields that depend on the data, and evaluation measures."""

from dataclasses import fields, replace

from megazoo.data.dataset import Sources
from megazoo.data.labels import ONE_OF_SEVERAL, REGRESSION, Labels, labels_in
from megazoo.errors import UserError
from megazoo.evaluation import Tally
from megazoo.formats.source import ModelSource
from megazoo.tokenizer import Tokenizer


def with_pad_token(config, source: ModelSource | None, tokenizer: Tokenizer):
    """Return a classifier's config with a valid pad_token_id.

    It is the first valid one of the config, the weights, and the tokenizer; otherwise the token
    that ends a document.
    """
    named = [config.pad_token_id, source and source.pad_token_id, tokenizer.pad_token_id]
    fits = [token for token in named if isinstance(token, int) and 0 <= token < config.vocab_size]
    # With mock data, the vocabulary may be smaller than that of the tokenizer.
    pad = fits[0] if fits else min(tokenizer.eod, config.vocab_size - 1)
    return replace(config, pad_token_id=pad)


def settle_labels(
    config, source: ModelSource | None, tokenizer: Tokenizer, sources: Sources
) -> tuple[object, Labels | None]:
    """Return a classifier's config with problem_type and pad_token_id, and its labels.

    The problem_type follows from the first label of the data. The config of a language model is
    returned unchanged, with None.

    Args:
        config: Config of the model.
        source: Source of the weights, or None.
        tokenizer: Tokenizer of the data.
        sources: Sources of the data.

    Raises:
        UserError: A source has no labels, or the model family has no classifier.
    """
    if not config.num_labels:
        return config, None
    if {"problem_type", "pad_token_id"} - {f.name for f in fields(config)}:
        raise UserError(
            f"--num-labels cannot be used with {type(config).__name__}: its family has no "
            "classifier"
        )
    labels = labels_in(sources.names, config.num_labels, config.problem_type)
    config = with_pad_token(config, source, tokenizer)
    return replace(config, problem_type=labels.problem), labels


def measures_of(tally: Tally, labels: Labels) -> dict[str, float]:
    """Return the measures of a classifier: the accuracy (except for a regression), and the F1 score
    of label 1 if one of two labels is predicted."""
    measures = {} if labels.problem == REGRESSION else {"accuracy": tally.accuracy}
    if labels.problem == ONE_OF_SEVERAL and labels.num_labels == 2:
        measures["f1"] = tally.f1
    return measures
