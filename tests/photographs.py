"""Photographs as telephones and scanners store them, for several test files."""

from pathlib import Path

import numpy as np
from PIL import Image

ORIENTATION = 0x0112


def lying_on_its_side() -> Image.Exif:
    """Return what a telephone that is held upright notes: a quarter to the right is to be turned."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return exif


def of_a_telephone(folder: Path) -> Path:
    path = folder / "telephone.jpg"
    pixels = np.random.default_rng(5).integers(0, 256, (48, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, exif=lying_on_its_side())
    return path


def of_a_scanner(folder: Path) -> Path:
    """Write 16 bits of gray."""
    path = folder / "scanner.png"
    Image.fromarray(np.random.default_rng(6).integers(0, 65536, (48, 40), dtype=np.uint16)).save(path)
    return path


PHOTOGRAPHS = (of_a_telephone, of_a_scanner)
