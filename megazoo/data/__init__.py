"""Data: from text to the batches of a replica."""

from megazoo.lazy import lazy_attributes

_PLACES = {
    "Batches": "loading",
    "documents_of": "loading",
    "Blend": "order",
    "MockDataset": "samples",
    "PackedDataset": "samples",
    "check_data": "dataset",
    "check_template": "dataset",
    "changes": "fingerprint",
    "fingerprints": "fingerprint",
    "json_files": "dataset",
    "open_datasets": "dataset",
    "prepare_datasets": "dataset",
}
__all__ = list(_PLACES)

__getattr__ = lazy_attributes(
    __name__, {name: f"megazoo.data.{place}" for name, place in _PLACES.items()}
)
