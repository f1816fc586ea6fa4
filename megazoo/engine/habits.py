"""Arguments that users of transformers pass by habit: those that change nothing here are ignored,
the others are translated, or raise an error that says what to write."""

from pathlib import Path
from typing import Any, NamedTuple

from megazoo.errors import UserError
from megazoo.files import brief
from megazoo.parallel.dtypes import dtype_named


class Habit(NamedTuple):
    """An argument of transformers. neutral: the values that change nothing; None: all. instead:
    what to write for any other value."""

    neutral: tuple | None
    instead: str


HUB = "set the variable {} of huggingface_hub"
LOADING = {
    "trust_remote_code": Habit(None, ""),  # no code of a model's directory ever runs
    "low_cpu_mem_usage": Habit(None, ""),
    "use_cache": Habit((True, False), "pass use_cache to model.generate"),
    "use_safetensors": Habit((True,), "remove it: the format follows from the files"),
    "attn_implementation": Habit(
        ("sdpa", "eager"), "remove it: megazoo chooses the kernel of attention by itself"
    ),
    "device_map": Habit(
        ("auto",), "the model is on the device of its context: pass ctx, built with that device"
    ),
    "load_in_8bit": Habit((False,), "call megazoo.layers.round_to_int8(model) after loading"),
    "load_in_4bit": Habit((False,), "call megazoo.layers.round_to_int8(model) after loading"),
    "quantization_config": Habit((), "call megazoo.layers.round_to_int8(model) after loading"),
    "config": Habit((), "the config is that of the directory"),
    "subfolder": Habit(("",), "pass the path of the subfolder"),
    "token": Habit((), HUB.format("HF_TOKEN")),
    "cache_dir": Habit((), HUB.format("HF_HOME")),
    "local_files_only": Habit((False,), HUB.format("HF_HUB_OFFLINE=1")),
    "force_download": Habit((False,), "remove it"),
    "output_hidden_states": Habit((False,), "use forward hooks on the layers: model.layers[i]"),
    "output_attentions": Habit((False,), "remove it: the probabilities are never stored"),
}
CALL = {
    "output_hidden_states": LOADING["output_hidden_states"],
    "output_attentions": LOADING["output_attentions"],
    "use_cache": Habit((True, False), "call model.generate"),
    "return_dict": Habit((True,), "remove it: the result has names, and is also a tuple"),
    "past_key_values": Habit((), "call model.generate, which keeps the cache"),
    "inputs_embeds": Habit((), "pass input_ids"),
    "logits_to_keep": Habit((0,), "take a slice of the logits"),
    "num_items_in_batch": Habit((), "call model.train_batch, whose mean is that of the batch"),
}


def refuse(arguments: dict[str, Any], known: dict[str, Habit], call: str) -> None:
    """Raise UserError for an argument that changes what a call computes, with what to write.

    call: name of the function. known: its habits; other names raise TypeError, as Python does.
    """
    for name, value in arguments.items():
        if name not in known:
            raise TypeError(f"{call} has no argument {name}")
        neutral, instead = known[name]
        same = neutral is None or any(type(value) is type(x) and value == x for x in neutral)
        if value is not None and not same:
            raise UserError(f"{call} does not support {name}={brief(value)}: {instead}")


def translated(path: Any, dtype: Any, device: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Return the path and dtype of from_pretrained after its arguments with the names of
    transformers, which are removed from `arguments`. UserError for those that megazoo lacks.

    device: that of the context.
    """
    if (revision := arguments.pop("revision", None)) is not None:
        path = path if Path(path).exists() else f"{path}@{revision}"
    if (older := arguments.pop("torch_dtype", None)) is not None:
        if dtype not in ("auto", None) and dtype_named(dtype) != dtype_named(older):
            raise UserError(f"dtype {dtype} and torch_dtype {older} differ: pass one of them")
        dtype = older
    places = arguments.get("device_map")
    if isinstance(places, dict) and list(places) == [""]:
        arguments["device_map"] = places = places[""]
    if places is not None and str(places) in (str(device), device.type, str(device.index)):
        del arguments["device_map"]
    habits = {name: arguments.pop(name) for name in list(arguments) if name in LOADING}
    refuse(habits, LOADING, "from_pretrained")
    return path, dtype
