"""The calls by which users write a model's weights, and read others into it."""

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Self

from megazoo.errors import UserError
from megazoo.hub import check_upload, upload
from megazoo.models.pretrained import load_weights, one_of, open_directory, save_parallelized
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import on_all_ranks


class Saving:
    """The part of `Model` that writes its weights to files and reads them."""

    ctx: ParallelContext

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
    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        commit_message: str = "Upload model",
        max_shard_size: int | str = "5GB",
    ) -> str:
        """Write a Hugging Face directory to a repository of the Hugging Face hub; return its
        address. Every rank calls it; all must see the temporary directory of rank 0.

        Args:
            repo_id: org/name; made if it is not there.
            private: whether a new repository is private; by default the hub's setting.
            commit_message: of the commit.
            max_shard_size: as in `save_pretrained`.

        Errors: as in `save_pretrained`; UserError, exit code 1, if the upload fails. It needs
        huggingface_hub (pip install 'megazoo[hub]'), whose token is used.
        """
        check_upload(repo_id)
        ctx = self.ctx
        patient = ctx.new_cpu_group(timeout=timedelta(days=30))  # the others wait for the upload
        with tempfile.TemporaryDirectory(prefix="megazoo-push-") as directory:
            place = Path(all_gather_objects(directory, ctx)[0]) / "model"
            save_parallelized(self, place, merge_checkpoints=True, max_shard_size=max_shard_size)
            address, error = "", None
            if ctx.rank == 0:
                try:
                    address = upload(place, repo_id, private=private, message=commit_message)
                except UserError as failure:
                    error = failure
            found = all_gather_objects((address, error and str(error)), ctx, patient)
        address, message = found[0]
        if message:
            raise error or UserError(message, exit_code=1)
        return address

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
