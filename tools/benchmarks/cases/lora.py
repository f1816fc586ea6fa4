"""Compare training adapters of all linear layers in one process with PEFT on the same weights."""

import tempfile
from collections.abc import Callable, Iterator

import torch
from benchmarks.cases.train import ROWS, batch, make, rates
from benchmarks.results import Result, Setup
from benchmarks.turns import CORES, Job, alone, jobs_in_turn

RANK = 8


def cases(setup: Setup) -> Iterator[Result]:
    for model in ("gpt2", "llama"):
        with tempfile.TemporaryDirectory() as directory:
            alone(make, model, directory)
            jobs = [Job(1, ours, (directory,)), Job(1, theirs, (directory,))]
            name = f"train adapters of rank {RANK}, all linear layers of {model}, against PEFT"
            yield rates(name, jobs_in_turn(jobs, setup.pairs), ROWS)


def ours(directory: str) -> Callable[[], object]:
    """Return a function that runs a training step of megazoo."""
    import megazoo

    torch.set_num_threads(CORES)
    model, ids = megazoo.from_pretrained(directory).train(), batch()
    megazoo.lora.add(model, rank=RANK, alpha=RANK, targets="all-linear")
    optimizer = megazoo.optim.AdamW(model, lr=1e-4, clip_grad=1.0)

    def step():
        model.train_batch(ids, labels=ids)
        optimizer.step()

    return step


def theirs(directory: str) -> Callable[[], object]:
    """Return a function that runs a training step of PEFT."""
    import peft
    import transformers

    torch.set_num_threads(CORES)
    base, ids = transformers.AutoModelForCausalLM.from_pretrained(directory), batch()
    settings = peft.LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
    model = peft.get_peft_model(base, settings).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step
