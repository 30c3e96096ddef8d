# SPDX-License-Identifier: Apache-2.0
"""What Megatron's parameter buffers say: the ranges that this rank owns, and their buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from megatron_dos.program.partition import OwnedRange

__all__ = ["bucket_groups", "owned_ranges", "owned_shards"]


def owned_shards(optimizer: Any) -> tuple[list[Any], list[Any]]:
    """The params of Megatron's distributed optimizer that this rank owns a part of, and their shards: the flat views of
    those parts that Megatron has made."""
    params, shards = [], []
    for of_params, of_shards in (
        (optimizer.model_float16_groups, optimizer.shard_float16_groups),
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
    ):
        for params_of_group, shards_of_group in zip(of_params, of_shards, strict=True):
            params += params_of_group
            shards += shards_of_group
    return params, shards


def owned_ranges(
    gbuf_ranges: Sequence[Mapping[Any, Sequence[Mapping[str, Any]]]], owners: Mapping[Any, int]
) -> list[OwnedRange]:
    """Read Megatron's `DistributedOptimizer.gbuf_ranges` (buffer -> dtype -> bucket -> param map).

    Args:
        gbuf_ranges: the structure `_build_gbuf_range_map` makes, one entry a buffer.
        owners: model parameter -> index of its shard in the caller's list.

    Raises:
        KeyError: a parameter that the buffers hold is in no param group of the optimizer.
    """
    result = []
    for buffer_index, by_dtype in enumerate(gbuf_ranges):
        for buckets in by_dtype.values():
            for bucket_index, bucket in enumerate(buckets):
                for param, range_map in bucket["param_map"].items():
                    in_bucket = range_map["gbuf_world_in_bucket"]
                    result.append(
                        OwnedRange(owners[param], (buffer_index, bucket_index), in_bucket.start, in_bucket.size)
                    )
    return result


def bucket_groups(model_chunks: Iterable[Any], buffers: Sequence[Any]) -> Iterator[tuple[Any, set[tuple[int, int]]]]:
    """Megatron's bucket groups, whose collectives start together, that hold a bucket of `buffers`.

    Args:
        model_chunks: Megatron's DDP-wrapped chunks.
        buffers: the buffers of one optimizer, in its order.

    Yields:
        Each group with its buckets in these buffers, as (buffer index, bucket index).
    """
    keys = {
        id(bucket): (buffer_index, bucket_index)
        for buffer_index, buffer in enumerate(buffers)
        for bucket_index, bucket in enumerate(buffer.buckets)
    }
    for chunk in model_chunks:
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            buckets = {keys[id(bucket)] for bucket in group.buckets if id(bucket) in keys}
            if buckets:
                yield group, buckets
