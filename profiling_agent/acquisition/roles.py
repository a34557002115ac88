"""Which split of a data set to evaluate on, and which to calibrate with."""

from itertools import islice

from profiling_agent.acquisition.columns import is_label, label_candidates
from profiling_agent.acquisition.data import OpenedData
from profiling_agent.errors import AcquisitionError

TRAIN = ("train", "training")
EVALUATION = ("test", "validation", "valid", "val", "dev")
# Enough rows to see past a stray unlabelled image; a split of a competition has no label at all.
NUM_LABELS_SEEN = 100


def _is_labelled(data: OpenedData, split: str) -> bool:
    """Say whether any of a split's first rows has a label; columns are checked on the way."""
    tiers = label_candidates(data.features(split), data.query.label_column)
    return any(
        is_label(cell)
        for tier in tiers
        for column in tier
        for cell in islice(data.labels(split, column), NUM_LABELS_SEEN)
    )


def choose_evaluation_split(data: OpenedData) -> str:
    """Return the labelled split to evaluate on: the named one, else the first usual one but train.

    Raises:
        AcquisitionError: there is none.
    """
    name, there = data.query.dataset, ", ".join(data.splits)
    if (named := data.query.split) is not None:
        if named not in data.splits:
            raise AcquisitionError(f"dataset {name!r} has no split {named!r}: use one of {there}")
        if not _is_labelled(data, named):
            raise AcquisitionError(f"split {named!r} of {name!r} has no labels (missing or -1): use another of {there}")
        return named
    refusal: AcquisitionError | None = None
    for split in (split for split in EVALUATION if split in data.splits):
        try:
            if _is_labelled(data, split):
                return split
        except AcquisitionError as error:
            # A test split may come without the label column that the others have.
            refusal = refusal or error
    raise refusal or AcquisitionError(
        f"dataset {name!r} has no labelled test or validation split (it has {there}): name one with split; "
        "accuracies on images that the model was trained on are optimistic"
    )


def choose_calibration_split(data: OpenedData, evaluation: str) -> str:
    """Return the train split, or the evaluation split where there is no other."""
    return next((split for split in TRAIN if split in data.splits and split != evaluation), evaluation)
