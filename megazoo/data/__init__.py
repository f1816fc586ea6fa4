"""Data: tokenize text, order samples and build the batches of a replica."""

from typing import TYPE_CHECKING

from megazoo.lazy import lazy_attributes

if TYPE_CHECKING:
    from megazoo.data.dataset import (
        check_data,
        needs_preparation,
        open_datasets,
        prepare_datasets,
    )
    from megazoo.data.fingerprint import changes, fingerprints
    from megazoo.data.loading import Batches, documents_of
    from megazoo.data.order import Blend
    from megazoo.data.samples import MockDataset, PackedDataset
    from megazoo.data.sources import Source, register_source
    from megazoo.data.texts import Rows

_PLACES = {
    "Batches": "loading",
    "documents_of": "loading",
    "Blend": "order",
    "MockDataset": "samples",
    "PackedDataset": "samples",
    "Rows": "texts",
    "Source": "sources",
    "register_source": "sources",
    "check_data": "dataset",
    "changes": "fingerprint",
    "fingerprints": "fingerprint",
    "open_datasets": "dataset",
    "prepare_datasets": "dataset",
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
    "Rows",
    "Source",
    "changes",
    "check_data",
    "documents_of",
    "fingerprints",
    "needs_preparation",
    "open_datasets",
    "prepare_datasets",
    "register_source",
]
