"""What models look like on disk: Hugging Face directories, GGUF, DCP, Megatron-LM, and shards."""

from megazoo.lazy import lazy_attributes

__getattr__, __dir__ = lazy_attributes(__name__, {})
__all__: list[str] = []
