"""Generation: tokens are chosen from logits, by as many forwards as that takes, in every layout."""

from megazoo.generate.settings import GenerationSettings

__all__ = ["GenerationSettings"]
