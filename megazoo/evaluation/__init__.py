"""Evaluation: losses of texts, how likely a model finds continuations, and classified rows."""

from megazoo.evaluation.classifying import Tally, classify, evaluate_rows, predictions, tally
from megazoo.evaluation.scoring import Scores, TextLoss, evaluate_texts, score, score_choices

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
    "tally",
]
