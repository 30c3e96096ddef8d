# SPDX-License-Identifier: Apache-2.0
"""Turns real English text into Megatron's dataset files: the text of CPython's own help topics, one byte a token.

Every Python carries this text (`pydoc_data.topics`, about half a megabyte), so the demo needs no download. A topic is a
document; each document ends with the end-of-document token. Run as a program: `python scripts/demo_data.py PREFIX`
writes PREFIX.bin and PREFIX.idx with megatron-core's own builder.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

END_OF_DOCUMENT = 256
"""Token after each document; the tokens below it are the byte values."""

VOCABULARY_SIZE = 257
"""Byte values and the end-of-document token (the last one, as Megatron's NullTokenizer expects it)."""


def help_topics() -> dict[str, str]:
    """CPython's help topics: name to text."""
    from pydoc_data.topics import topics

    return topics


def tokens_of(text: str) -> np.ndarray:
    """The UTF-8 bytes of `text` and the end-of-document token: uint16 array of shape (bytes + 1,)."""
    encoded = np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16)
    return np.append(encoded, np.uint16(END_OF_DOCUMENT))


def write_dataset(prefix: str, documents: dict[str, str]) -> int:
    """Writes `documents` (name to text) to PREFIX.bin and PREFIX.idx, ordered by name; returns the number of tokens.

    Raises ValueError when there is no text: Megatron would fail on such a dataset much later and less clearly.
    """
    if not any(documents.values()):
        raise ValueError("the dataset would be empty: no document holds any text")

    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=np.uint16)
    total = 0
    for name in sorted(documents):
        tokens = tokens_of(documents[name])
        # The builder takes torch tensors and stores them in its own dtype; torch has little arithmetic in uint16.
        builder.add_item(torch.from_numpy(tokens.astype(np.int32)))
        builder.end_document()
        total += len(tokens)
    builder.finalize(get_idx_path(prefix))
    return total


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/demo_data.py PREFIX   (writes PREFIX.bin and PREFIX.idx)")
    topics = help_topics()
    total = write_dataset(sys.argv[1], topics)
    print(f"{len(topics)} documents, {total} tokens")


if __name__ == "__main__":
    main()
