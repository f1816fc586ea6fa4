"""Evaluation: losses of texts, log-likelihoods of continuations, and classification of rows."""

from typing import TYPE_CHECKING

from megazoo.evaluation.classifying import Tally, classify, evaluate_rows, predictions, tally
from megazoo.evaluation.scoring import (
    Scores,
    TextLoss,
    evaluate_texts,
    score,
    score_choices,
    score_tokens,
)
from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo.evaluation.harness import HarnessModel as HarnessModel

# HarnessModel needs an extra. It is not in __all__, so that `import *` works without the extra.
__getattr__, __dir__ = lazy_attributes(__name__, {"HarnessModel": "megazoo.evaluation.harness"})

__all__ = [
    "Scores",
    "Tally",
    "TextLoss",
    "classify",
    "evaluate_rows",
    "evaluate_texts",
    "predictions",
    "score",
    "score_choices",
    "score_tokens",
    "tally",
]
