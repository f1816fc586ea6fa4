"""Divide a range: rows over replicas or groups, heads over context-parallel ranks."""


def share_of(items: range, parts: int, index: int) -> range:
    """Return the index-th of nearly equal parts of the items. The first parts are the larger ones;
    there may be none left for the last."""
    first, last = -(-len(items) * index // parts), -(-len(items) * (index + 1) // parts)
    return items[first:last]
