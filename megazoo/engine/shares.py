"""The rows of a batch are shared out: to replicas, or to groups that go through the stages in
turn."""


def share_of(rows: range, parts: int, index: int) -> range:
    """Return the index-th of nearly equal parts of the rows. The first parts are the larger ones;
    there may be none left for the last."""
    first, last = -(-len(rows) * index // parts), -(-len(rows) * (index + 1) // parts)
    return rows[first:last]
