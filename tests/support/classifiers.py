"""Classifiers for tests: language models to begin with, and rows of JSONL with labels, encoded by
hand."""

import json
import random

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MptConfig

from tests.support.data import write_lines

SEED, LENGTH, EOD = 1234, 24, 256
TINY = dict(vocab_size=260, num_labels=2)
LANGUAGE_MODELS = {
    "gpt2": GPT2Config(
        **TINY, n_positions=32, n_embd=32, n_layer=4, n_head=4,
        resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0, bos_token_id=256, eos_token_id=256,
    ),
    "llama": LlamaConfig(
        **TINY, max_position_embeddings=32, hidden_size=32, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, pad_token_id=258,
    ),
    "mpt": MptConfig(**TINY, max_seq_len=32, d_model=32, n_layers=4, n_heads=4, pad_token_id=258),
}  # fmt: skip
# Of the losses to compare: constant rates, and steps of several micro-batches.
RATES = "--lr 2e-3 --min-lr 2e-3 --lr-schedule constant --warmup-steps 0 --weight-decay 0.1"
PROGRAM = (
    f"--tokenizer byte --device cpu --seq-length {LENGTH} --global-batch-size 8 "
    f"--micro-batch-size 2 --log-interval 1 --eval-steps 2 --split 75,25 {RATES}"
).split()


def label_of(kind: str, rng: random.Random, good: bool):
    """A label that the text tells in most cases."""
    good ^= rng.random() < 0.2
    if kind == "any of 3":
        return [int(good), rng.randrange(2), int(not good)]
    if kind == "a number":
        return round(rng.gauss(good, 1), 3)
    return int(good) + (rng.randrange(2) if kind == "3 labels" else 0)


def write_rows(path, kind: str, count: int = 64):
    """Rows of many lengths, some with a second text, a few too long for a sample."""
    rng, rows = random.Random(3), []
    for _ in range(count):
        good = rng.random() < 0.6
        words = [rng.choice(["fine", "good"] if good else ["bad", "dull"]) for _ in range(3)]
        row = {"text": " ".join(words)[: rng.randrange(1, 15)], "label": label_of(kind, rng, good)}
        if rng.random() < 0.4:
            row["text_pair"] = "so " * rng.randrange(8)
        rows.append(row)
    return write_lines(path, *rows)


def write_language_models(path):
    """Write a directory of transformers for each family, with random weights; returns `path`."""
    for family, config in LANGUAGE_MODELS.items():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        model.generation_config.eos_token_id = None
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
        model.save_pretrained(path / family)
    return path


def read_rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def batch_of(rows, pad):
    """Ids and labels of rows of JSONL, by hand."""
    ids = []
    for row in rows:
        texts = [list(row["text"].encode()), list(row.get("text_pair", "").encode())]
        between = [EOD] if "text_pair" in row else []
        while sum(map(len, texts)) + len(between) > LENGTH:
            texts[0 if len(texts[0]) > len(texts[1]) else 1].pop()
        ids.append(texts[0] + between + texts[1])
    longest = max(map(len, ids))
    padded = torch.tensor([row + [pad] * (longest - len(row)) for row in ids])
    labels = torch.tensor([row["label"] for row in rows])
    return padded, labels.float() if isinstance(rows[0]["label"], list) else labels
