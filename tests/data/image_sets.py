"""Images and tables of images, each image made from a number, and the halves into which their content puts them."""

import hashlib
import io

import datasets
import numpy as np
from PIL import Image

from profiling_agent.data.images import SplitImages, write_rows

# The number of a test split's first image.
TEST = 1000


def encoded(image, kind="PNG", **options):
    """Return the file of an image, or of an array of pixels."""
    stream = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(stream, kind, **options)
    return stream.getvalue()


def noise(rng, width=8, height=8):
    return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(seed):
    """Return a small image that no other seed makes."""
    return encoded(noise(np.random.default_rng(seed)))


def pngs(num_images, first=0):
    return [png(first + row) for row in range(num_images)]


def table(labels, kind, *, image="image", label="label", first=0, broken=()):
    """Return a data set whose image number i is made from the seed `first` + i; `kind` is a type, or names of classes."""
    cells = [
        {"bytes": f"damaged {row}".encode() if row in broken else png(first + row), "path": None}
        for row in range(len(labels))
    ]
    kind = datasets.ClassLabel(names=kind) if isinstance(kind, list) else kind
    features = datasets.Features({image: datasets.Image(), label: kind})
    return datasets.Dataset.from_dict({image: cells, label: list(labels)}, features=features)


def train_and_test(train, kind, test=None, **options):
    """Return tables of two splits with these labels; the test split's are those of the train split, if `test` is None."""
    test = train if test is None else test
    return {"train": table(train, kind, **options), "test": table(test, kind, first=TEST, **options)}


def is_heldout(image):
    """Say what the last bit of an image's SHA-256 says."""
    return bool(int(hashlib.sha256(image).hexdigest()[-1], 16) % 2)


def expected_sizes(images, num_train=0):
    """Return how many images calibrate, are searched on and are held out, of a split of these and a train split."""
    num_heldout = sum(is_heldout(image) for image in images)
    num_search = len(images) - num_heldout
    num_calibrating = min(256, num_train or num_search // 2)
    num_search = min(num_search - (0 if num_train else num_calibrating), num_heldout)
    return num_calibrating, num_search, min(4 * num_search, num_heldout)


def sizes(drawn):
    return tuple(part.num_images for part in (drawn.calibration, drawn.search, drawn.heldout))


def images_of(*splits):
    """Return the bytes of all images of drawn splits."""
    opened = [SplitImages(split.path) for split in splits]
    return [split.encoded(row) for split in opened for row in range(len(split))]


def write_split(folder, images, labels=None):
    """Write encoded images as a drawn split, labelled by their rows if `labels` is None; return it opened."""
    write_rows(folder / "split.arrow", zip(images, range(len(images)) if labels is None else labels, strict=True))
    return SplitImages(folder / "split.arrow")
