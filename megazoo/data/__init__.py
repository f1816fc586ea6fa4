"""Data: tokenize text, order samples and build the batches of a replica."""

from typing import TYPE_CHECKING

from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo.data.dataset import (
        check_data,
        files_of_text,
        needs_preparation,
        open_datasets,
        prepare_datasets,
    )
    from megazoo.data.fingerprint import changes, fingerprints
    from megazoo.data.loading import Batches, documents_of
    from megazoo.data.order import Blend
    from megazoo.data.samples import MockDataset, PackedDataset

_PLACES = {
    "Batches": "loading",
    "documents_of": "loading",
    "Blend": "order",
    "MockDataset": "samples",
    "PackedDataset": "samples",
    "check_data": "dataset",
    "changes": "fingerprint",
    "fingerprints": "fingerprint",
    "open_datasets": "dataset",
    "prepare_datasets": "dataset",
    "files_of_text": "dataset",
    "needs_preparation": "dataset",
}
__getattr__, __dir__ = lazy_attributes(
    __name__, {name: f"megazoo.data.{place}" for name, place in _PLACES.items()}
)

__all__ = [
    "Batches",
    "Blend",
    "MockDataset",
    "PackedDataset",
    "changes",
    "check_data",
    "documents_of",
    "files_of_text",
    "fingerprints",
    "needs_preparation",
    "open_datasets",
    "prepare_datasets",
]
