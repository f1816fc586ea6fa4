"""The placement of stages on pipeline ranks."""

from dataclasses import dataclass

from megazoo.errors import UserError

PLACEMENTS = ("loop", "v")


@dataclass(frozen=True)
class Placement:
    """The pipeline ranks of the stages. Stages are numbered in the order of the forward pass.

    name: "loop": rank r of P has the stages r, r + P, r + 2P, ... "v": rank r has the stages r and
    2P - 1 - r, so the first rank also has the last stage. pp: pipeline ranks. virtual: stages per
    rank. Raises UserError for another name, or if ranks of "v" do not have two stages.
    """

    name: str = "loop"
    pp: int = 1
    virtual: int = 1

    def __post_init__(self):
        if self.name not in PLACEMENTS:
            known = " or ".join(PLACEMENTS)
            raise UserError(f"unknown placement {self.name!r}: use {known}")
        if self.name == "v" and self.virtual != 2:
            raise UserError(
                f"placement v has two stages per rank, not {self.virtual}: use virtual-pp 2"
            )

    @property
    def count(self) -> int:
        """The number of stages of the whole pipeline."""
        return self.pp * self.virtual

    def rank_of(self, stage: int) -> int:
        """Return the pipeline rank of a stage."""
        return min(stage, self.count - 1 - stage) if self.name == "v" else stage % self.pp

    def stages_of(self, rank: int) -> range:
        """Return the stages of a pipeline rank, in the order of the forward pass."""
        if self.name == "v":
            return range(rank, self.count - rank, self.count - 1 - 2 * rank)
        return range(rank, self.count, self.pp)

    @property
    def first_rank(self) -> int:
        """The pipeline rank that has the first stage."""
        return self.rank_of(0)

    @property
    def last_rank(self) -> int:
        """The pipeline rank that has the last stage."""
        return self.rank_of(self.count - 1)
