"""Evaluation: losses of texts, and the likelihood of given continuations."""
