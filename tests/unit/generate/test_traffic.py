"""What travels between stages while generating goes in one order: no rank waits for another in a
circle, even if each send blocks its rank until it is received."""

from collections import Counter
from itertools import count, product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megazoo.generate import traffic
from megazoo.generate.decoding import GOES_ON, OVER, Choice
from megazoo.parallel.cpu.shared_memory import Mailboxes
from megazoo.parallel.placement import Placement

STEPS = 5


class Group:
    """Rows that end after so many tokens, whose prompts go through in so many pieces. sizes: of
    messages, which tell the group."""

    def __init__(self, number: int, tokens: int, pieces: int = 1):
        self.number, self.tokens, self.done = number, tokens, False
        self.pieces, self.steps, self.forwards = pieces - 1, 0, 0
        self.input_ids = torch.zeros(1 + number, 1, dtype=torch.int64)
        self.rows, self.beams, self.choice = 1 + number, False, None

    @property
    def chooses(self) -> bool:
        return not self.pieces

    def take_piece(self) -> None:
        self.pieces, self.forwards = self.pieces - 1, self.forwards + 1

    def take(self, choice: Choice) -> None:
        self.forwards += 1
        self.done = choice.done
        self.steps += not self.done

    def choose(self) -> Choice:
        state = OVER if self.steps + 1 >= self.tokens else GOES_ON
        return Choice(torch.zeros(self.rows, dtype=torch.int64), None, state)


def transfers_of(
    pp_rank: int, placement: Placement, lengths: list[int], pieces: list[int] | None = None
) -> list[tuple]:
    """What a rank starts, in order, as (send or receive, the other rank, kind and rows), and what
    it waits for, as (take, the other rank, which of its messages), by megazoo's own code. lengths:
    tokens of each group; pieces: of its prompts, 1 by default."""
    made, pieces = [], pieces or [1] * len(lengths)
    groups = [Group(*each) for each in zip(range(len(lengths)), lengths, pieces, strict=True)]

    def note(way: str, tensor: torch.Tensor, other: int) -> None:
        kind = "choice" if tensor.dtype == torch.int64 else "activations"
        made.append((way, other, kind, len(tensor) - (kind == "choice")))

    def start_send(tensor, other, ctx):
        note("send", tensor, other)

    def start_receive(buffer, other, ctx):
        number = sum(each[:2] == ("receive", other) for each in made)
        note("receive", buffer, other)
        if buffer.dtype == torch.int64:
            group = groups[len(buffer) - 2]
            buffer.copy_(group.choose().message())
        return SimpleNamespace(wait=lambda: made.append(("take", other, number)))

    ctx = SimpleNamespace(
        pp_rank=pp_rank,
        pp_size=placement.pp,
        placement=placement,
        device=torch.device("cpu"),
    )
    config = SimpleNamespace(hidden_size=2)
    model = SimpleNamespace(ctx=ctx, config=config, dtype=torch.float32)
    with mock.patch.multiple(traffic, start_send=start_send, start_receive=start_receive):
        moving = traffic.Traffic(model, groups)
        for tick in count():
            turn = moving.turn_of(tick, pp_rank)
            if all(group.done for group in groups):
                break
            moving.end_tick(tick, turn, turn and result_of(moving, turn, groups[turn.group]))
    assert not moving.activations
    assert not moving.choices
    return made


def result_of(moving: traffic.Traffic, turn: traffic.Turn, group: Group):
    ctx = moving.ctx
    if ctx.pp_rank or turn.stage:
        moving.input_for(turn)
    if moving.is_last(turn, ctx.pp_rank):
        if not group.chooses:
            return None
        group.choice = group.choose()
        return group.choice
    return torch.zeros(group.rows, 1, 2)


def stuck(programs: list[list[tuple]]) -> list[tuple]:
    """Let every rank do its transfers in its order, each until the other side does the same one;
    returns what is never done."""
    programs = [[each for each in program if each[0] != "take"] for program in programs]
    places = [0] * len(programs)

    def newest(rank):
        program = programs[rank]
        return program[places[rank]] if places[rank] < len(program) else None

    moved = True
    while moved:
        moved = False
        for rank in range(len(programs)):
            while (mine := newest(rank)) and mine[0] == "send":
                _, other, *what = mine
                if newest(other) != ("receive", rank, *what):
                    break
                places[rank] += 1
                places[other] += 1
                moved = True
    return [
        program[place]
        for program, place in zip(programs, places, strict=True)
        if place < len(program)
    ]


def stuck_in_slots(programs: list[list[tuple]], slots: int) -> bool:
    """Whether ranks wait for each other where a message waits for one of so many slots, which the
    one it is for makes empty by taking what lies there."""
    places, sent, taken = [0] * len(programs), Counter(), set()

    def step(rank: int) -> bool:
        if places[rank] == len(programs[rank]):
            return False
        what, other, *number = programs[rank][places[rank]]
        if what == "send":
            before = sent[rank, other] - slots  # what lay in this slot
            if before >= 0 and (rank, other, before) not in taken:
                return False
            sent[rank, other] += 1
        elif what == "take":
            if sent[other, rank] <= number[0]:
                return False
            taken.add((other, rank, *number))
        places[rank] += 1
        return True

    while any(step(rank) for rank in range(len(programs))):
        pass
    return places != list(map(len, programs))


FORMS = [("loop", 1), ("loop", 2), ("loop", 3), ("v", 2)]  # of stages: placement, stages per rank


@pytest.mark.parametrize(("name", "virtual"), FORMS)
@pytest.mark.parametrize("sizes", [(2, 3, 4, 7), pytest.param((8, 16), marks=pytest.mark.slow)])
def test_no_rank_waits_in_a_circle_for_slots_of_shared_memory(sizes, name, virtual):
    for pp in sizes:
        placement = Placement(name, pp, virtual)
        for groups in (1, pp // 2, pp):
            for pieces in ([1] * groups, [1 + 2 * g % 3 for g in range(groups)]):
                programs = [
                    transfers_of(rank, placement, [3] * groups, pieces) for rank in range(pp)
                ]
                assert not stuck_in_slots(programs, Mailboxes.slots_each(pp))


def test_fewer_slots_of_shared_memory_than_there_are_would_be_too_few():
    pieces = [1 + 2 * g % 3 for g in range(16)]
    programs = [transfers_of(rank, Placement("loop", 16), [3] * 16, pieces) for rank in range(16)]
    assert not stuck_in_slots(programs, Mailboxes.slots_each(16))
    assert stuck_in_slots(programs, 3)


def hops(placement: Placement) -> int:
    """Return how often activations move to another rank in a forward."""
    return placement.count - 1 - (placement.name == "v")


@pytest.mark.parametrize("sizes", [(2, 3, 4, 5), pytest.param((6, 7, 8), marks=pytest.mark.slow)])
def test_no_rank_waits_in_a_circle_though_sends_block(sizes):
    cases = (
        (Placement(name, pp, virtual), groups)
        for pp in sizes
        for name, virtual in FORMS
        for groups in range(1, pp + 1)
    )
    for placement, groups in cases:
        for lengths in ([STEPS] * groups, [1 + (3 * g) % STEPS for g in range(groups)]):
            programs = [transfers_of(rank, placement, lengths) for rank in range(placement.pp)]
            tokens = sum(lengths)
            sends = [each for program in programs for each in program if each[0] == "send"]
            assert len(sends) == tokens * (hops(placement) + placement.pp - 1)
            assert not stuck(programs)


def test_pieces_of_prompts_go_round_without_a_choice():
    for pp, (name, virtual), part in product([2, 3, 4, 8], FORMS, [0, 0.5, 1]):
        placement = Placement(name, pp, virtual)
        groups = max(1, int(pp * part))
        lengths = [1 + (3 * g) % STEPS for g in range(groups)]
        pieces = [1 + (2 * g + 1) % 4 for g in range(groups)]
        programs = [transfers_of(rank, placement, lengths, pieces) for rank in range(pp)]
        kinds = Counter(each[2] for program in programs for each in program if each[0] == "send")
        forwards = sum(lengths) + sum(pieces) - groups
        assert kinds["activations"] == forwards * hops(placement)
        assert kinds["choice"] == sum(lengths) * (pp - 1)
        assert not stuck(programs)


def test_the_check_finds_ranks_that_wait_for_each_other():
    """Each of two ranks sends before it receives, or in other orders than the other."""
    both = [[("send", 1, "a"), ("receive", 1, "b")], [("send", 0, "b"), ("receive", 0, "a")]]
    assert len(stuck(both)) == 2
    orders = [[("send", 1, "a"), ("send", 1, "b")], [("receive", 0, "b"), ("receive", 0, "a")]]
    assert len(stuck(orders)) == 2
    assert not stuck([both[0], both[1][::-1]])


def test_every_rank_computes_in_every_tick_if_there_are_groups_enough():
    loop, v = Placement("loop", 4, 2), Placement("v", 4, 2)
    turns = [traffic.turn_in(tick, 2, 4, loop) for tick in range(2, 100)]
    assert None not in turns
    assert len(set(turns)) == len(turns)
    assert turns == sorted(turns, key=lambda turn: (turn.forward, turn.stage, turn.group))
    assert traffic.turn_in(1, 2, 4, loop) is None
    turns = [traffic.turn_in(tick, 2, 4, v) for tick in range(2, 100)]
    assert None not in turns[3:]  # stage 5, the second one of rank 2, starts in tick 5
    assert len(set(turns[3:])) == len(turns[3:])
