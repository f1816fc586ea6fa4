"""A training run of adapters by PEFT and by megazoo, from the same values."""

import peft
import torch
import transformers

import megazoo
from megazoo.lora.settings import all_targets
from tests.support.training import context
from tests.support.transformers_models import config_of

STEPS, LR, EPS, CLIP, DECAY = 20, 3e-3, 1e-4, 0.5, 0.1


MODELS = ("llama", "gpt2", "mpt", "mistral", "qwen2", "qwen3", "gpt_neox")


LLAMAS = ("llama", "mistral", "qwen2", "qwen3")


Q_AND_V = {name: ["q_proj", "v_proj"] for name in LLAMAS} | {
    "gpt2": ["c_attn"],
    "mpt": ["Wqkv"],
    "gpt_neox": ["query_key_value"],
}


ALL = {
    **{name: [f"{part}_proj" for part in "q k v o gate up down".split()] for name in LLAMAS},
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "mpt": ["Wqkv", "out_proj", "up_proj", "down_proj"],
    "gpt_neox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
}


# Ours, theirs, and whether the scale is rslora's.
WHAT = {
    "q and v": (("q", "v"), Q_AND_V, False),
    "all": ("all-linear", ALL, False),
    "rslora": ("all-linear", ALL, True),
}


def batch(step):
    return torch.randint(0, 61, (4, 16), generator=torch.Generator().manual_seed(step))


def by_peft(name, what, directory):
    """Losses and norms, and the adapters' values at first and last, by their names in PEFT."""
    torch.manual_seed(3)
    ids = dict(pad_token_id=None, bos_token_id=0, eos_token_id=0)
    config = config_of(name, layers=2, **ids)
    hf = transformers.AutoModelForCausalLM.from_config(config).train()
    with torch.no_grad():
        for parameter in hf.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    hf.save_pretrained(directory)
    _, theirs, rslora = WHAT[what]
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=theirs[name], use_rslora=rslora,
        fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM",
    )  # fmt: skip
    model = peft.get_peft_model(hf, config)
    learn = {n: p for n, p in model.named_parameters() if p.requires_grad}
    first = {n: p.detach().clone() for n, p in learn.items()}
    settings = dict(lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=DECAY)
    optimizer, history = torch.optim.AdamW(learn.values(), **settings), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = model(input_ids=batch(step), labels=batch(step)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(learn.values(), CLIP)
        history.append((loss.item(), norm.item()))
        optimizer.step()
    last = {n: p.detach() for n, p in learn.items()}
    return history, *({n: in_our_order(n, p) for n, p in each.items()} for each in (first, last))


def in_our_order(name, value):
    """Pythia's rows of query_key_value go head by head: q, k and v of the first one, and so on."""
    if name.endswith("query_key_value.lora_B.default.weight"):
        return value.unflatten(0, (4, 3, 8)).transpose(0, 1).flatten(0, 2)
    return value


def by_us(directory, what, first, layout=None):
    """The same, from PEFT's initial values: of the adapters this rank's parts, by their boxes."""
    ctx = context(**(layout or {}))
    model = megazoo.from_pretrained(directory, ctx)
    ours, _, rslora = WHAT[what]
    megazoo.lora.add(model, rank=3, alpha=6, targets=ours, rslora=rslora)
    places = {
        target.parameter(factor): f"base_model.model.{target.theirs}.lora_{factor}.default.weight"
        for target in all_targets(model)
        for factor in "AB"
    }
    pieces = {}
    with torch.no_grad():
        for entry in model.trained_entries():
            theirs = places[entry.name]
            pieces[theirs] = entry.parameter, entry.spec.pieces(ctx.place)
            for piece in pieces[theirs][1]:
                box = tuple(slice(*bounds) for bounds in piece.box)
                entry.parameter[piece.index()] = first[theirs][box]
    optimizer = megazoo.optim.AdamW(model, lr=LR, eps=EPS, weight_decay=DECAY, clip_grad=CLIP)
    history = []
    for step in range(STEPS):
        loss = model.train_batch(batch(step), labels=batch(step), num_microbatches=2)
        history.append((loss.item(), optimizer.step().item()))
    values = {
        name: [(piece.box, parameter.detach()[piece.index()]) for piece in parts]
        for name, (parameter, parts) in pieces.items()
    }
    return history, values


def assert_as_in_peft(found, expected, last):
    """Losses, norms and values of all ranks are PEFT's, and none is missing."""
    seen = set()
    for history, values in found:
        losses, norms = torch.tensor(history).sub(torch.tensor(expected)).abs().T
        assert losses.max() < 1e-5
        assert (norms / torch.tensor(expected)[:, 1]).max() < 1e-4
        for parameter, pieces in values.items():
            seen.add(parameter)
            for box, part in pieces:
                whole = last[parameter][tuple(slice(*bounds) for bounds in box)]
                assert (part - whole).abs().max() < 1e-5, parameter
    assert seen == set(last)
