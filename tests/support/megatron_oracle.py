"""Builds tiny models of Megatron Core on CPU ranks, saves each in both formats, and its logits.

    python -m tests.support.megatron_oracle DIRECTORY RANK RANKS      (needs megatron-core)

DIRECTORY/NAME/dist and DIRECTORY/NAME/legacy are then checkpoints of RANKS tensor-parallel ranks,
as Megatron-LM's training program names what is in them, and DIRECTORY/NAME/logits.pt has the ids
and the logits of the model itself. Nothing here is of megazoo.
"""

import contextlib
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed

SIZES = dict(num_layers=3, hidden_size=32, num_attention_heads=4, padded_vocab_size=64)
SIZES |= dict(norm_epsilon=1e-5, attention_dropout=0.0, hidden_dropout=0.0, vocab_size=61)
SIZES |= dict(max_position_embeddings=32, position_embedding_type="rope", swiglu=True)
SIZES |= dict(add_bias_linear=False, normalization="RMSNorm", num_query_groups=2)
SIZES |= dict(group_query_attention=True, ffn_hidden_size=48, kv_channels=8)
SIZES |= dict(untie_embeddings_and_output_weights=True, rotary_base=50000, rotary_percent=1.0)
SIZES |= dict(add_qkv_bias=False, qk_layernorm=False, bias_gelu_fusion=False, window_size=None)
SIZES |= dict(use_rope_scaling=False, rope_scaling_factor=8.0)
OLDER = dict(normalization="LayerNorm", swiglu=False, add_bias_linear=True, num_query_groups=4)
OLDER |= dict(ffn_hidden_size=128, group_query_attention=False)
TIED = dict(untie_embeddings_and_output_weights=False)
CASES = {
    "gpt, fused gelu": OLDER | TIED | dict(bias_gelu_fusion=True)
    | dict(position_embedding_type="learned_absolute"),
    "gpt, untied": OLDER | dict(position_embedding_type="learned_absolute"),
    "neox": OLDER | dict(rotary_percent=0.5),
    "llama": {},
    "llama, tied, wide heads": TIED | dict(kv_channels=12),
    "llama, biases, scaled": dict(add_bias_linear=True, use_rope_scaling=True)
    | dict(rope_scaling_factor=4.0),
    "qwen2": TIED | dict(add_qkv_bias=True),
    "qwen3": dict(qk_layernorm=True, kv_channels=12),
    "mistral": dict(window_size=(4, 0)),
}  # fmt: skip


def stand_in_for_cuda() -> None:
    """Megatron Core asks for a device in places where CPUs need none."""
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.is_initialized = lambda: False
    torch.Tensor.cuda = lambda self, *_, **__: self
    ones = torch.ones
    torch.ones = lambda *sizes, **how: ones(*sizes, **{**how, "device": "cpu"})


def build(args: Namespace, tp: int):
    """Make a model, with random weights, biases and norms."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    same = "num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels"
    same += " attention_dropout hidden_dropout add_bias_linear add_qkv_bias normalization"
    same += " qk_layernorm window_size"
    config = TransformerConfig(
        **{name: getattr(args, name) for name in same.split()},
        layernorm_epsilon=args.norm_epsilon,
        gated_linear_unit=args.swiglu,
        activation_func=torch.nn.functional.silu if args.swiglu else torch.nn.functional.gelu,
        bias_activation_fusion=args.bias_gelu_fusion,
        tensor_model_parallel_size=tp,
        use_cpu_initialization=True,
        masked_softmax_fusion=False,
        attention_softmax_in_fp32=True,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(
        qk_layernorm=args.qk_layernorm, normalization=args.normalization
    )
    model = GPTModel(
        config,
        spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        parallel_output=False,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        rope_scaling_factor=args.rope_scaling_factor,
    ).eval()
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(len(name))
        if getattr(parameter, "tensor_model_parallel", False):  # another part on each rank
            generator.manual_seed(100 + torch.distributed.get_rank())
        with torch.no_grad():
            is_norm = "norm" in name and name.endswith("weight")
            parameter.normal_(float(is_norm), 0.2, generator=generator)
    return model


def run(root: Path, rank: int, tp: int) -> None:
    stand_in_for_cuda()
    torch.set_num_threads(1)
    root.mkdir(parents=True, exist_ok=True)
    store = torch.distributed.FileStore(str(root / "store"), tp)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=tp)
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    parallel_state.initialize_model_parallel(tp, 1)
    ids = torch.randint(0, 61, (2, 16), generator=torch.Generator().manual_seed(2))
    positions = torch.arange(16).expand(2, 16)
    hidden = torch.ones(16, 16).tril().logical_not()[None, None]
    for name, special in CASES.items():
        args = Namespace(**{**SIZES, **special}, tensor_model_parallel_size=tp)
        model = build(args, tp)
        with torch.no_grad():
            logits = model(ids, positions, hidden)
        of_case = root / name
        dist, legacy = of_case / "dist" / "iter_0000007", of_case / "legacy" / "iter_0000007"
        (mine := legacy / f"mp_rank_{rank:02d}").mkdir(parents=True)
        dist.mkdir(parents=True, exist_ok=True)
        torch.distributed.barrier()
        state = {"args": args, "iteration": 7, "model": model.sharded_state_dict()}
        dist_checkpointing.save(state, str(dist))
        older = {"args": args, "checkpoint_version": 3.0, "iteration": 7}
        older["model"] = model.state_dict_for_save_checkpoint()
        torch.save(older, mine / "model_optim_rng.pt")
        if rank == 0:
            torch.save({"ids": ids, "logits": logits[..., :61]}, of_case / "logits.pt")
            for above in (dist.parent, legacy.parent):
                (above / "latest_checkpointed_iteration.txt").write_text("7")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
