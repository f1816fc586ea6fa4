"""Compare generation from random models with transformers: in one process with the same weights;
and in separate processes, whose peak memory includes loading."""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from benchmarks.cases.train import DTYPES, rates
from benchmarks.results import Result, Setup
from benchmarks.turns import CORES, Job, alone, jobs_in_turn, seconds_in_turn

# family, size, hidden size, rows, beams
CASES = [
    ("gpt2", "30M", 512, 1, 1), ("gpt2", "30M", 512, 1, 3), ("gpt2", "30M", 512, 8, 1),
    ("gpt2", "5M", 192, 1, 1), ("mpt", "30M", 512, 1, 1),
]  # fmt: skip
NEW_TOKENS = 128
HOW = dict(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, eos_token_id=2, pad_token_id=3)


def cases(setup: Setup) -> Iterator[Result]:
    for model, size, hidden, rows, beams in CASES:
        search = f"beam {beams}" if beams > 1 else "greedy"
        name = f"generate {NEW_TOKENS} tokens, {model} {size}, {search}, batch {rows}"
        ours, reference = alone(seconds_of_both, model, hidden, rows, beams, setup.pairs)
        yield Result(f"{name}, against transformers", ours, reference)
    with tempfile.TemporaryDirectory() as directory:
        alone(make_135m, directory)
        for dtype, rows in product(DTYPES, (1, 8)):
            jobs = [Job(1, side, (directory, dtype, rows)) for side in (ours_135m, theirs_135m)]
            name = f"generate {NEW_TOKENS} tokens, SmolLM2-135M in {dtype}, batch {rows}"
            found = jobs_in_turn(jobs, setup.pairs)
            yield rates(f"{name}, against transformers", found, rows, NEW_TOKENS)


def make_135m(directory: str) -> None:
    """Write a Hugging Face directory with random weights of the shapes of SmolLM2-135M."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        max_position_embeddings=8192,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory)


def ours_135m(directory: str, dtype: str, rows: int) -> Callable[[], object]:
    """Load the model as the programs do, and return a function that generates."""
    import megazoo

    torch.set_num_threads(CORES)
    model = megazoo.from_pretrained(directory, dtype=DTYPES[dtype]).eval()
    megazoo.layers.pack_weights(model)
    return partial(model.generate, prompts(rows), **HOW)


def theirs_135m(directory: str, dtype: str, rows: int) -> Callable[[], object]:
    """Load the model in transformers, and return a function that generates."""
    import transformers

    torch.set_num_threads(CORES)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[dtype])
    ids = prompts(rows)
    more = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    return partial(model.eval().generate, ids, **HOW, **more)


def prompts(rows: int) -> torch.Tensor:
    """Return random tokens, [rows, 16]; the same on each call."""
    return torch.randint(4, 8000, (rows, 16), generator=torch.Generator().manual_seed(0))


def seconds_of_both(
    model: str, hidden: int, rows: int, beams: int, pairs: int
) -> list[list[float]]:
    """Return the seconds per run of megazoo and of transformers, which must generate the same
    tokens."""
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
    ids = prompts(rows)
    said = {}

    def generate(side: str, model, **options) -> None:
        said[side] = model.generate(ids, num_beams=beams, **HOW, **options)

    def generate_theirs() -> None:
        generate("theirs", theirs, attention_mask=torch.ones_like(ids), do_sample=False)
        assert torch.equal(said["ours"], said["theirs"]), "they differ"

    return seconds_in_turn([lambda: generate("ours", ours), generate_theirs], pairs)
