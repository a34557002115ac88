"""Libraries that talk on their own, silenced while they work for us: we report progress ourselves."""

import logging
from collections.abc import Generator
from contextlib import contextmanager

import datasets
import transformers
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars


@contextmanager
def quiet() -> Generator[None]:
    """Turn off the log lines and progress bars of Hugging Face's libraries, and turn back on what was on."""
    levels = transformers.logging.get_verbosity(), datasets.logging.get_verbosity()
    bars = transformers.logging.is_progress_bar_enabled(), datasets.are_progress_bars_disabled()
    hub_bars_off = are_progress_bars_disabled()
    transformers.logging.set_verbosity(logging.CRITICAL)
    datasets.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    disable_progress_bars()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(levels[0])
        datasets.logging.set_verbosity(levels[1])
        if bars[0]:
            transformers.logging.enable_progress_bar()
        if not bars[1]:
            datasets.enable_progress_bars()
        if not hub_bars_off:
            enable_progress_bars()
