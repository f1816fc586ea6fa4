"""Saves tensors in chunks with torch.distributed.checkpoint, as several ranks do, from one
process."""

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megazoo.parallel.shard import Box


class InChunks(DefaultSavePlanner):
    """Saves each tensor in chunks."""

    def chunks_of(self, name: str, shape: torch.Size) -> list[Box]:
        """Return the chunks of a tensor."""
        raise NotImplementedError

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, tensor in self.state_dict.items():
            if isinstance(tensor, torch.Tensor):
                for index, box in enumerate(self.chunks_of(name, tensor.shape)):
                    items.append(self._item(name, tensor, box, index))
        self.plan = SavePlan(items, planner_data={})
        return self.plan

    def _item(self, name: str, tensor: torch.Tensor, box: Box, index: int) -> WriteItem:
        starts, sizes = [start for start, _ in box], [stop - start for start, stop in box]
        chunk = ChunkStorageMetadata(torch.Size(starts), torch.Size(sizes))
        properties = TensorProperties.create_from_tensor(tensor)
        data = TensorWriteData(chunk, properties, tensor.size())
        place = MetadataIndex(name, chunk.offsets, index)
        return WriteItem(place, WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, item: WriteItem) -> torch.Tensor:
        value = self.state_dict[item.index.fqn]
        chunk = item.tensor_data.chunk
        for dim, (start, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            value = value.narrow(dim, start, size)
        return value.clone()
