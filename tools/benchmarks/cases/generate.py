"""Compare generation from random models of transformers with transformers' own generate, in one
process with the same weights."""

import tempfile
from collections.abc import Iterator

import torch
from benchmarks.results import Result, Setup
from benchmarks.turns import CORES, alone, seconds_in_turn

# family, size, hidden size, rows, beams, and megazoo's data type of weights
CASES = [
    ("gpt2", "30M", 512, 1, 1, "fp32"), ("gpt2", "30M", 512, 1, 3, "fp32"),
    ("gpt2", "30M", 512, 8, 1, "fp32"), ("gpt2", "5M", 192, 1, 1, "fp32"),
    ("gpt2", "30M", 512, 1, 1, "bf16"), ("gpt2", "30M", 512, 1, 1, "int8"),
    ("gpt2", "30M", 512, 8, 1, "int8"), ("mpt", "30M", 512, 1, 1, "fp32"),
]  # fmt: skip
NEW_TOKENS = 128


def cases(setup: Setup) -> Iterator[Result]:
    for model, size, hidden, rows, beams, weights in CASES:
        search = f"beam {beams}" if beams > 1 else "greedy"
        name = f"generate {NEW_TOKENS} tokens, {model} {size}, {search}, batch {rows}, {weights}"
        ours, reference = alone(seconds_of_both, model, hidden, rows, beams, weights, setup.pairs)
        yield Result(f"{name}, against transformers in fp32", ours, reference)


def seconds_of_both(
    model: str, hidden: int, rows: int, beams: int, weights: str, pairs: int
) -> list[list[float]]:
    """Return the seconds per run of megazoo and of transformers. In fp32 both must generate the
    same tokens."""
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
    if weights == "bf16":
        ours.to(torch.bfloat16)
    elif weights == "int8":
        megazoo.layers.round_to_int8(ours)
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
        if weights == "fp32":
            assert torch.equal(said["ours"], said["theirs"]), "they differ"

    return seconds_in_turn([lambda: generate("ours", ours), generate_theirs], pairs)
