"""Data: from text to the batches of a replica."""

from megazoo.data.dataset import Batches, PackedDataset, SampleOrder, check_data, documents_of, open_datasets

__all__ = ["Batches", "PackedDataset", "SampleOrder", "check_data", "documents_of", "open_datasets"]
