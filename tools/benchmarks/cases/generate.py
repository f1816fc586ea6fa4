"""Generate from random models of transformers, against its own generate, in one process on the same
weights."""

import tempfile
from collections.abc import Iterator

import torch
from benchmarks.results import Result, Setup
from benchmarks.turns import CORES, alone, seconds_in_turn

CASES = [
    ("gpt2", "30M", 512, 1, 1), ("gpt2", "30M", 512, 1, 3), ("gpt2", "30M", 512, 8, 1),
    ("gpt2", "5M", 192, 1, 1), ("mpt", "30M", 512, 1, 1),
]  # fmt: skip
NEW_TOKENS = 128


def cases(setup: Setup) -> Iterator[Result]:
    for model, size, hidden, rows, beams in CASES:
        search = f"beam {beams}" if beams > 1 else "greedy"
        name = f"generate {NEW_TOKENS} tokens, {model} {size}, {search}, batch {rows}"
        ours, reference = alone(seconds_of_both, model, hidden, rows, beams, setup.pairs)
        yield Result(f"{name}, against transformers", ours, reference)


def seconds_of_both(
    model: str, hidden: int, rows: int, beams: int, pairs: int
) -> list[list[float]]:
    """Return the seconds of each run, ours and transformers'; both must say the same."""
    import transformers

    import megazoo

    torch.set_num_threads(CORES)
    torch.manual_seed(0)
    if model == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=8192, n_positions=512, n_embd=hidden, n_layer=8, n_head=8
        )
    else:
        config = transformers.MptConfig(
            vocab_size=8192, max_seq_len=512, d_model=hidden, n_layers=8, n_heads=8
        )
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    with tempfile.TemporaryDirectory() as directory:
        theirs.save_pretrained(directory)
        ours = megazoo.from_pretrained(directory)
    ids = torch.randint(4, 8000, (rows, 16))
    said = {}

    def generate(side: str, model, **options) -> None:
        said[side] = model.generate(
            ids,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            num_beams=beams,
            eos_token_id=2,
            pad_token_id=3,
            **options,
        )

    def generate_theirs() -> None:
        generate("theirs", theirs, attention_mask=torch.ones_like(ids), do_sample=False)
        assert torch.equal(said["ours"], said["theirs"]), "they differ"

    return seconds_in_turn([lambda: generate("ours", ours), generate_theirs], pairs)
