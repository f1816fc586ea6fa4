"""Tokenizer classes of transformers 5: what a class defines if the files of a tokenizer do not."""

GENERIC = "TokenizersBackend"  # the class without special tokens
END = "<|endoftext|>"


def _named(**tokens: str) -> dict[str, str]:
    return {f"{name}_token": content for name, content in tokens.items()}


LEFT = {"padding_side": "left"}


LLAMA = _named(bos="<s>", eos="</s>", unk="<unk>")
QWEN2 = _named(eos=END, unk=END, pad=END)
# Special tokens by name, and the padding side, from transformers/models/*/tokenization_*.py (5.23).
DEFAULTS = {
    "BertTokenizer": _named(unk="[UNK]", sep="[SEP]", pad="[PAD]", cls="[CLS]", mask="[MASK]"),
    "CodeLlamaTokenizer": (
        LLAMA
        | _named(
            prefix="\u2581<PRE>", middle="\u2581<MID>", suffix="\u2581<SUF>", eot="\u2581<EOT>"
        )
        | LEFT
    ),
    "CohereTokenizer": (
        _named(
            unk="<UNK>",
            bos="<BOS_TOKEN>",
            eos="<|END_OF_TURN_TOKEN|>",
            pad="<PAD>",
            cls="<CLS>",
            sep="<SEP>",
            mask="<MASK_TOKEN>",
        )
        | LEFT
    ),
    "GPT2Tokenizer": _named(bos=END, eos=END, unk=END),
    "GPTNeoXTokenizer": _named(bos=END, eos=END, unk=END, pad="<|padding|>"),
    "GemmaTokenizer": (
        _named(bos="<bos>", eos="<eos>", unk="<unk>", pad="<pad>", mask="<mask>") | LEFT
    ),
    "LlamaTokenizer": LLAMA | LEFT,
    "Qwen2Tokenizer": QWEN2,
    "Qwen3_5Tokenizer": QWEN2,
    "RobertaTokenizer": LLAMA | _named(sep="</s>", cls="<s>", pad="<pad>", mask="<mask>"),
    "T5Tokenizer": _named(eos="</s>", unk="<unk>", pad="<pad>"),
}
# The classes that decide by add_prefix_space whether byte-level BPE adds a space before a text.
PREFIXED = {
    *("BartTokenizer", "CodeGenTokenizer", "CohereTokenizer", "DebertaTokenizer", "GPT2Tokenizer"),
    *("GPTNeoXTokenizer", "LukeTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer"),
    *("RobertaTokenizer", "WhisperTokenizer"),
}
# From TOKENIZER_MAPPING_NAMES: the class of a model_type. Other models have the class that their
# files name, or none.
CLASS_OF = {
    model_type: name
    for name, model_types in {
        "BertTokenizer": "bert distilbert electra",
        "CodeLlamaTokenizer": "code_llama",
        "CohereTokenizer": "cohere cohere2",
        "GPT2Tokenizer": "gpt2 gpt_neo gptj codegen dbrx jais2 opt phi starcoder2",
        "GPTNeoXTokenizer": "gpt_neox falcon_mamba mamba mamba2 mpt olmo olmoe rwkv xlstm",
        "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma",
        "Qwen2Tokenizer": "qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3 qwen3_moe qwen3_next",
        "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text",
        "RobertaTokenizer": "roberta",
        "T5Tokenizer": "t5 mt5",
        GENERIC: "flex_olmo glm glm4 glm4_moe glm4_moe_lite gpt_bigcode granite granitemoe "
        "granitemoehybrid granitemoeshared internlm2 internlm3 jamba minicpm3 ministral ministral3 "
        "mistral mistral3 mixtral modernbert nemotron olmo2 olmo3 olmo_hybrid persimmon phi3 "
        "phimoe stablelm",
    }.items()
    for model_type in model_types.split()
}
# From MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS: the class in the files of these is ignored.
MISNAMED = {"qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"}


def class_of(declared: str | None, model_type: str | None, byte_level: bool) -> str | None:
    """Return the class with which AutoTokenizer opens a tokenizer, without "Fast".

    Args:
        declared: The tokenizer_class in the files, or None.
        model_type: The model_type in config.json, or None.
        byte_level: There is a tokenizer.json with a ByteLevel step.
    """
    declared = declared and declared.removesuffix("Fast")
    registered = CLASS_OF.get(model_type or "")
    if model_type in MISNAMED:
        return registered
    if declared == "LlamaTokenizer" and byte_level:
        return GENERIC
    if declared and registered == GENERIC:
        return GENERIC
    return declared or registered
