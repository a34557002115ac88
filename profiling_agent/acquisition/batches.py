"""Batches of prepared images, as torch takes them."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from profiling_agent.acquisition.prepared import PreparedImages


def iter_batches(
    images: PreparedImages, *, batch_size: int, limit: int | None = None
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pixel_values, float32 (b, c, h, w), and labels, int64 (b,), in the split's order; the last may be short.

    With `limit`, only of so many images, which hold the classes in the split's proportions.
    """
    for pixel_values, labels in images.batches(batch_size, limit=limit):
        yield torch.from_numpy(pixel_values), torch.from_numpy(labels.copy())


def shuffled_batches(images: PreparedImages, *, batch_size: int, seed: int) -> Callable[[int], Iterator[torch.Tensor]]:
    """Return a function that gives an epoch's pixel_values, float32 (b, c, h, w), every image once, the last batch short.

    The order is drawn anew for each epoch, from `seed` and its number alone: any epoch can be given again by itself.
    """

    def epoch_of(epoch: int) -> Iterator[torch.Tensor]:
        order = np.random.default_rng([seed, epoch]).permutation(len(images)).tolist()
        for start in range(0, len(order), batch_size):
            yield torch.from_numpy(images.pixel_values(order[start : start + batch_size]))

    return epoch_of
