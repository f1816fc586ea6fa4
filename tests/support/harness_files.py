"""Files for tests of lm-evaluation-harness: tiny directories of transformers with tokenizers that
both sides read, and tasks whose data lie beside them."""

import json
import textwrap

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.harness import LENGTH, words
from tests.support.transformers_models import deep_gpt2, deep_llama, deep_mpt

CHAT = (
    "{%- for message in messages %}\n"
    "    {%- if message.role == 'system' and loop.index > 1 %}\n"
    "        {{- raise_exception('the system speaks first') }}\n"
    "    {%- endif %}\n"
    "{{ '<|im_start|>' + message['role'] }}\n"
    "{{ message['content'] | trim + '<|im_end|>' + eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# How the tokenizer of each family names its special tokens, and what it puts before a text.
TOKENS = {
    "gpt2": {"eos_token": "</s>"},
    "llama": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
    "mpt": {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
}
IDS = {"<pad>": 0, "<s>": 1, "</s>": 2}
FAMILIES = {
    "gpt2": lambda **sizes: deep_gpt2(n_positions=LENGTH, **sizes),
    "llama": lambda **sizes: deep_llama(kv_heads=2, max_positions=LENGTH, **sizes),
    "mpt": lambda **sizes: deep_mpt(max_seq_len=LENGTH, **sizes),
}


def tokenizer_of(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template; LLaMA's puts bos before a text."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = [*IDS, "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet)
    bpe.train([textwrap.__file__], trainer)
    bpe.add_tokens([AddedToken("  plain  ", special=False, normalized=False)])
    if family == "llama":
        bpe.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, model_max_length=LENGTH, **TOKENS[family]
    )
    tokenizer.chat_template = CHAT
    return tokenizer


def write_family(path, family: str):
    """Write a model of random weights, whose logits are far apart, with its tokenizer; returns
    `path`."""
    tokenizer = tokenizer_of(family)
    hf = FAMILIES[family](vocab_size=len(tokenizer))
    with torch.no_grad():
        for name, parameter in hf.named_parameters():
            if name.endswith("bias"):  # large ones would make all tokens' logits alike
                parameter.normal_(std=0.1)
    for ids in (hf.config, hf.generation_config):
        named = {f"{role}_token_id": IDS.get(tokenizer.special_tokens_map.get(f"{role}_token"))
                 for role in ("bos", "eos", "pad")}  # fmt: skip
        for name, value in named.items():
            setattr(ids, name, value)
    hf.save_pretrained(path)
    tokenizer.save_pretrained(path)
    settings = path / "tokenizer_config.json"
    # transformers leaves out a token that is none
    settings.write_text(json.dumps({**json.loads(settings.read_text()), **TOKENS[family]}))
    return path


def write_tasks(path) -> list[str]:
    """Write four tasks with their data into a directory; returns the names of their files."""
    path.mkdir(exist_ok=True)
    choices = [" self", "return the width", ")", " import text wrap", " \u00e9"]
    questions = [
        {"q": words(n, size) + end, "choices": choices[: 2 + n % 4], "answer": n % 2}
        for n, (size, end) in enumerate(
            [(3, ""), (5, " "), (0, ""), (60, ""), (4, "\n\n"), (9, " \u00e9")]
        )
    ]
    texts = [{"text": words(20 + n, size)} for n, size in enumerate([4, 1, 90, 30, 47])]
    prompts = [{"q": words(40 + n, size)} for n, size in enumerate([2, 7, 80, 1, 4, 4])]
    tasks = {
        "choices": (questions, {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}",
                    "doc_to_text": "{{q}}", "doc_to_target": "{{answer}}",
                    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]}),
        "rolling": (texts, {"output_type": "loglikelihood_rolling", "doc_to_text": "",
                    "doc_to_target": "{{text}}",
                    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]}),
        "writing": (prompts, {"output_type": "generate_until", "doc_to_text": "{{q}}",
                    "doc_to_target": "{{q}}", "metric_list": [{"metric": "exact_match"}],
                    "generation_kwargs": {"until": [" in", "d", "s"], "max_gen_toks": 12}}),
        "chatting": (prompts, {"output_type": "generate_until", "doc_to_text": "{{q}}",
                     "doc_to_target": "{{q}}", "metric_list": [{"metric": "exact_match"}],
                     "description": "Answer.", "fewshot_split": "test", "num_fewshot": 1,
                     "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": 9}}),
    }  # fmt: skip
    for name, (rows, settings) in tasks.items():
        data = path / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        loading = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        # JSON is YAML
        task = {"task": name, "test_split": "test", **loading, **settings}
        (path / f"{name}.yaml").write_text(json.dumps(task))
    return [str(path / f"{name}.yaml") for name in tasks]
