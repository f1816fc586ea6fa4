"""Read and write Hugging Face model directories: names of tensors, config.json, weights."""

from megazoo.lazy import lazy_attributes

__getattr__, __dir__ = lazy_attributes(__name__, {})
__all__: list[str] = []
