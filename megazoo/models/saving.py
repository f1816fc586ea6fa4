"""The methods of `Model` that save its weights and load others into it."""

import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Self

from megazoo.errors import UserError
from megazoo.lazy import LazyModule
from megazoo.parallel.collectives import all_gather_objects
from megazoo.parallel.context import ParallelContext
from megazoo.parallel.failure import on_all_ranks

hub = LazyModule("megazoo.hub")
pretrained = LazyModule("megazoo.models.pretrained")


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
        """Save a checkpoint of the weights, from all ranks together. Any parallel layout can load
        it.

        The files are megazoo.json, one .safetensors file per (tp, pp) rank, and the tokenizer files
        that were loaded with the weights.

        Args:
            directory: directory to write. A model that megazoo wrote there before is replaced.
            save_directory: the name of `directory` in OSLO. Pass one of the two.
            merge_checkpoints: write a Hugging Face directory instead, as `save_pretrained` does.
            max_shard_size: largest size of a weight file with merge_checkpoints, in bytes or as a
                string such as "5GB"; otherwise it has no effect.

        Raises:
            UserError: on every rank, if one of them fails, if the directory holds other files, or
                if the model has adapters.

        Example:
            model.save_parallelized("saved")
            model = megazoo.from_parallelized("saved", ctx)
        """
        pretrained.save_parallelized(
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
        """Save a Hugging Face directory, from all ranks together.

        transformers' AutoModelForCausalLM.from_pretrained and megazoo.from_pretrained load it. The
        files are config.json, model.safetensors, and the tokenizer files and generation_config.json
        that were loaded with the weights. If the weights exceed max_shard_size, there are several
        files, model-00001-of-00002.safetensors and so on, and model.safetensors.index.json. Ranks
        stream the tensors: none holds the whole model.

        Args:
            save_directory: directory to write. A model that megazoo wrote there before is replaced.
            max_shard_size: largest size of a weight file, in bytes or as a string such as "5GB".

        Raises:
            UserError: on every rank, if one of them fails, if the directory holds other files, if
                the model has adapters, or if the model in transformers can't represent the config.

        Example:
            model = megazoo.from_pretrained("path/to/gpt2", ctx)
            model.train_batch(ids, labels=ids)
            model.save_pretrained("tuned")
        """
        pretrained.save_parallelized(
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
        """Upload a Hugging Face directory to a repository of the Hugging Face hub. Every rank calls
        it.

        It needs huggingface_hub (the extra `hub`) and uses its token. All ranks must be able to
        write to the temporary directory of rank 0.

        Args:
            repo_id: name of the repository, org/name. It is created if it does not exist.
            private: whether a new repository is private; by default the hub's setting.
            commit_message: message of the commit.
            max_shard_size: largest size of a weight file, in bytes or as a string such as "5GB".

        Returns:
            The URL of the repository.

        Raises:
            UserError: as in `save_pretrained`, and with exit code 1 if the upload fails.
        """
        hub.check_upload(repo_id)
        ctx = self.ctx
        patient = ctx.new_cpu_group(timeout=timedelta(days=30))  # the others wait for the upload
        with tempfile.TemporaryDirectory(prefix="megazoo-push-") as directory:
            place = Path(all_gather_objects(directory, ctx)[0]) / "model"
            pretrained.save_parallelized(
                self, place, merge_checkpoints=True, max_shard_size=max_shard_size
            )
            address, error = "", None
            if ctx.rank == 0:
                try:
                    address = hub.upload(place, repo_id, private=private, message=commit_message)
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
        """Load other weights into this model. Every rank calls it.

        Args:
            directory: a checkpoint of any parallel layout, a Hugging Face directory, or another
                path that `megazoo.from_pretrained` accepts.
            load_directory: the name of `directory` in OSLO. Pass one of the two.
            verify: compare the files with the checksums of a megazoo checkpoint.

        Returns:
            The model itself.

        Raises:
            UserError: if the weights belong to another model, or a file is corrupt.
        """
        given = pretrained.one_of("from_parallelized", directory, "load_directory", load_directory)
        pretrained.load_weights(pretrained.open_directory(given, verify=verify), self)
        return self
