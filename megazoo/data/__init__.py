"""Data: from text to the batches of a replica."""

from megazoo.lazy import lazily

__all__ = ["Batches", "PackedDataset", "SampleOrder", "check_data", "documents_of", "open_datasets"]

__getattr__ = lazily(__name__, dict.fromkeys(__all__, "megazoo.data.dataset"))
