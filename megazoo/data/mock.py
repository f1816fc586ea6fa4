"""`--data mock`: random tokens, for benchmarks."""

from megazoo.data.samples import MockDataset
from megazoo.data.sources import Opening, Source


class Mock(Source):
    """Random tokens, with random labels for a classifier."""

    @classmethod
    def accepts(cls, name: str) -> bool:
        return name == "mock"

    def parts(self, opening: Opening) -> list[MockDataset]:
        size, length, labels = opening.vocab_size, opening.seq_length, opening.encoding.labels
        return [MockDataset(size, length, seed, labels) for seed in range(len(opening.shares))]
