"""The calls by which users write a model's weights, and read others into it."""

from pathlib import Path
from typing import Self

from megazoo.models.pretrained import load_weights, one_of, open_directory, save_parallelized
from megazoo.parallel.failure import on_all_ranks


class Saving:
    """The part of `Model` that writes its weights to files and reads them."""

    def save_parallelized(
        self,
        directory: str | Path | None = None,
        *,
        save_directory: str | Path | None = None,
        merge_checkpoints: bool = False,
        max_shard_size: int | str = "5GB",
    ) -> None:
        """Write a checkpoint of the weights, from all ranks together; any layout can load it.

        Args:
            directory: where to write. What megazoo wrote there before is replaced.
            save_directory: OSLO's name for directory.
            merge_checkpoints: write a Hugging Face directory instead: see `save_pretrained`.
            max_shard_size: as in `save_pretrained`; without merge_checkpoints it has no effect.

        Files: megazoo.json and one .safetensors file per (tp, pp) rank; tokenizer files that came
        with the weights.
        Errors: UserError, on every rank, if one of them fails, if the directory holds other files,
        or if the model has adapters.
        """
        save_parallelized(
            self,
            directory,
            save_directory=save_directory,
            merge_checkpoints=merge_checkpoints,
            max_shard_size=max_shard_size,
        )

    @on_all_ranks
    def save_pretrained(
        self, save_directory: str | Path, *, max_shard_size: int | str = "5GB"
    ) -> None:
        """Write a Hugging Face directory, from all ranks together, a piece at a time.

        Args:
            save_directory: where to write. What megazoo wrote there before is replaced.
            max_shard_size: the largest file of weights, in bytes or as "5GB".

        Files: config.json; model.safetensors, or, if the weights exceed max_shard_size,
        model-00001-of-00002.safetensors and so on with model.safetensors.index.json; tokenizer
        files and generation_config.json that came with the weights. transformers'
        AutoModelForCausalLM.from_pretrained and megazoo.from_pretrained load it.
        Errors: as in `save_parallelized`; UserError also for a config that transformers' model
        can't represent.

        Example:
            model = megazoo.from_pretrained("path/to/gpt2", ctx)
            model.train_batch(ids, labels=ids)
            model.save_pretrained("tuned")
        """
        save_parallelized(
            self, save_directory, merge_checkpoints=True, max_shard_size=max_shard_size
        )

    @on_all_ranks
    def from_parallelized(
        self,
        directory: str | Path | None = None,
        *,
        load_directory: str | Path | None = None,
        verify: bool = True,
    ) -> Self:
        """Take the weights of a checkpoint of any layout, or of a Hugging Face directory; returns
        self.

        load_directory: OSLO's name for directory. verify: as in `from_pretrained`. UserError if
        they are of another model.
        """
        given = one_of("from_parallelized", directory, "load_directory", load_directory)
        load_weights(open_directory(given, verify=verify), self)
        return self
