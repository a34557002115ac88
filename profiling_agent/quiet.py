"""Libraries that talk on their own, silenced while they work for us: we report progress ourselves."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

import datasets
import transformers
from huggingface_hub import logging as hub_logging
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars


@contextmanager
def quiet() -> Generator[None]:
    """Turn off the log lines and progress bars of Hugging Face's libraries, and turn back on what was on."""
    libraries = (transformers.logging, datasets.logging, hub_logging)
    levels = [library.get_verbosity() for library in libraries]
    bars = transformers.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    hub_bars_off = are_progress_bars_disabled()
    for library in libraries:
        library.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    disable_progress_bars()
    try:
        yield
    finally:
        for library, level in zip(libraries, levels, strict=True):
            library.set_verbosity(level)
        if bars[0]:
            transformers.logging.enable_progress_bar()
        if not bars[1]:
            datasets.enable_progress_bars()
        if not hub_bars_off:
            enable_progress_bars()
