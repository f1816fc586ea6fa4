"""Bugs that tests plant in the ranks of a layout, and what the check of layouts says of each."""

from dataclasses import replace

from megazoo.models.registry import find_config

# In each file of a bug: a function is replaced in every module that has imported it.
REPLACE = """
import sys
def replace(name, make):
    for key, module in list(sys.modules.items()):
        if key.startswith("megazoo.") and name in vars(module):
            setattr(module, name, make(vars(module)[name]))
"""
# What breaks, where it must be noticed, and how it must be told.
BUGS = {
    "a missing all-reduce": (
        "gpt2",
        "tp2",
        r"module layers\.0\.attention\.output: its output differs on ranks 0 .*, 1",
        """
        from megazoo.layers import linear
        linear.leave_tensor_parallel = lambda x, ctx: x
        """,
    ),
    "a missing all-reduce in backward": (
        "gpt2",
        "tp2",
        r"gradient of norm\.bias: differs at step 1 on ranks 0 .*, 1",
        """
        replace("enter_tensor_parallel", lambda enter: lambda x, ctx: x)
        """,
    ),
    "a wrong slice of the fused QKV": (
        "gpt2",
        "tp2",
        r"module layers\.0\.attention\.output: its input differs on ranks 0 .*, 1",
        """
        from megazoo.parallel.shard import Cut, Shard
        cuts = Shard.cuts
        def contiguous(self, tp_size, tp_rank):
            if tp_size == 1 or len(self.parts) != 3:
                return cuts(self, tp_size, tp_rank)
            each, first = self.parts[0] // tp_size, tp_rank * sum(self.parts) // tp_size
            return [Cut(first + part * each, part * each, each, True) for part in range(3)]
        Shard.cuts = contiguous
        """,
    ),
    "a bias added tp times": (
        "gpt2",
        "tp2",
        r"module layers\.0\.attention\.output: its output differs on ranks 0 .*, 1",
        """
        from megazoo.layers import RowParallelLinear
        forward = RowParallelLinear.forward
        def biased(self, *arguments):
            return forward(self, *arguments) + (self.ctx.tp_size - 1) * self.bias
        RowParallelLinear.forward = biased
        """,
    ),
    "a local layer index": (
        "gpt2",
        "pp2",
        r"module layers\.2\.attention\.output: its input differs on rank 1",
        """
        from dataclasses import replace
        from megazoo.layers import CausalSelfAttention
        from megazoo.models.gpt2 import GPT2
        init = GPT2.__init__
        def scaled(self, *arguments):
            init(self, *arguments)
            for index, layer in enumerate(self.layers.values()):
                layer.attention.scale /= index + 1
        GPT2.__init__ = scaled
        """,
    ),
    "an unscaled loss": (
        "gpt2",
        "dp2",
        r"loss: .* instead of .*, though no module's output differs",
        """
        import torch
        from megazoo.engine import pipeline
        reduce = pipeline.all_reduce
        calls = []
        def forgets_the_labels(tensor, group):
            calls.append(tensor)
            if len(calls) % 2 == 0:
                reduce(tensor, group)
        pipeline.all_reduce = forgets_the_labels
        """,
    ),
    "gradients that are not divided by the loss scale": (
        "gpt2",
        "dp2",
        r"loss scale: every gradient is 2 x what it should be",
        """
        from megazoo.parallel.buckets import GradientBuckets
        finish = GradientBuckets.finish
        def doubled(self, loss_scale=1.0):
            finish(self, loss_scale / self.ctx.dp_size)
        GradientBuckets.finish = doubled
        """,
    ),
    "a double tied gradient": (
        "gpt2",
        "pp2",
        r"tie: the gradient of embedding\.weight, which stages share, is 2 x what it should be",
        """
        def twice(between):
            def summed(tensor, *arguments):
                between(tensor, *arguments)
                between(tensor, *arguments)
            return summed
        replace("sum_between_stages", twice)
        """,
    ),
    "ALiBi slopes not sliced": (
        "mpt",
        "tp2",
        r"module layers\.0\.attention\.output: its input differs on rank 1 ",
        """
        from megazoo.layers import CausalSelfAttention
        heads = CausalSelfAttention.heads.fget
        CausalSelfAttention.heads = property(lambda self: range(len(heads(self))))
        """,
    ),
    "queries normalised with the moments of a rank's own heads": (
        replace(find_config("mpt"), qk_norm=True),
        "tp2",
        r"module layers\.0\.attention\.q_norm: its output differs on ranks 0 .*, 1",
        """
        from megazoo.layers import norm
        norm.reduce_from_tensor_parallel = lambda x, ctx: x * ctx.tp_size
        """,
    ),
    "dropout in step across dp": (
        "gpt2",
        "dp2",
        r"dropout embedding_dropout: the same masks on ranks 0 .*, 1",
        """
        from megazoo.engine import batch
        derive_seed = batch.derive_seed
        batch.derive_seed = lambda *what: derive_seed(*what[:-1])
        """,
    ),
    "a norm that counts copies twice": (
        "gpt2",
        "tp2",
        r"gradient norm: .* instead of .* at step 1, though no gradient differs",
        """
        from megazoo.parallel.module import Entry
        Entry.counted_pieces = lambda self, ctx: self.spec.pieces(ctx.tp_size, ctx.tp_rank)
        """,
    ),
    "a norm's gradient not summed under sequence parallelism": (
        "llama",
        "tp2+sp",
        r"gradient of norm\.weight: differs at step 1 on ranks 0 .*, 1 .*, and of 8 more",
        """
        replace("sum_over_copies", lambda _: lambda *_: None)
        """,
    ),
    "a mask for the last chunk of a sequence alone": (
        "llama",
        "cp2",
        r"module layers\.0\.attention\.output: its input differs "
        r"on rank 1 \(tp 0, cp 1, pp 0, dp 0\), only where cp is 1$",
        """
        from megazoo.layers import masks
        mask_of_chunk = masks._mask_of_chunk
        def lacking(segments, chunk, *others):
            return None if chunk.start in (4, 8) else mask_of_chunk(segments, chunk, *others)
        masks._mask_of_chunk = lacking
        """,
    ),
    "packed documents that see each other": (
        "llama",
        "tp2cp2",
        r"module layers\.0\.attention\.output: its input differs "
        r"at step 2 \(packed documents\) on ranks 0 .* and 2 more$",
        """
        def seeing(make):
            return lambda *what, segments, **more: make(*what, segments=None, **more)
        replace("masks_of_chunks", seeing)
        """,
    ),
    "the padding of an odd length at the front": (
        "gpt2",
        "cp2",
        r"module (position_)?embedding: its (in|out)put differs at step 3 \(padding\) on ranks 0 ",
        """
        def turned(make):
            return lambda tokens, padding: {
                name: x.roll(padding, 1) for name, x in make(tokens, padding).items()
            }
        from megazoo.engine import batch
        batch._padded = turned(batch._padded)
        """,
    ),
    "gradients that are divided by cp": (
        "gpt2",
        "cp2",
        r"loss scale: every gradient is 0\.5 x what it should be, and cp is 2$",
        """
        from megazoo.parallel.buckets import GradientBuckets
        finish = GradientBuckets.finish
        def divided(self, loss_scale=1.0):
            finish(self, loss_scale * self.ctx.cp_size)
        GradientBuckets.finish = divided
        """,
    ),
    "dropout in step across cp": (
        "gpt2",
        "cp2",
        r"dropout embedding_dropout: the same masks on ranks 0 .*cp 0.*, 1 .*cp 1",
        """
        from megazoo.engine import batch
        derive_seed = batch.derive_seed
        batch.derive_seed = lambda *what: derive_seed(*what[:-1])
        """,
    ),
}
