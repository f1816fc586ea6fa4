"""Evaluation: losses of texts, and how likely a model finds given continuations."""

from megazoo.evaluation.scoring import Scores, TextLoss, evaluate_texts, score, score_choices

__all__ = ["Scores", "TextLoss", "evaluate_texts", "score", "score_choices"]
