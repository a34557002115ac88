"""Batch-norm statistics of a pruned model: estimated anew, because its channels aren't what they were."""

from collections.abc import Iterable

from torch import Tensor, nn

from profiling_agent.modules.norms import batch_norms
from profiling_agent.pruning.calibration import regrouped

# Whole batches of one size, whatever the run's: every batch weighs the same, and the variance of few is poor.
BATCH = 32


def reestimate_(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set the running statistics of every batch norm to the average over batches of 32 of `batches` (b, c, h, w).

    All else stays in the mode it is in, so nothing is dropped; modes and momenta are as found at the end. Needs 32
    images.
    """
    norms = batch_norms(model)
    found = [(norm, norm.training, norm.momentum) for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            # No momentum is the cumulative average.
            norm.train().momentum = None
        for images in regrouped(batches, BATCH):
            model(pixel_values=images)
    finally:
        for norm, training, momentum in found:
            norm.train(training).momentum = momentum
