"""torchao, which transformers imports where it is installed, logs its own affairs on every import; not to our users."""

import logging

# CUDA libraries that no CPU has, and a deprecation between torchao and torch: nothing that a user of ours could mend.
UNWANTED = {"torchao": "Failed to load", "torch.utils._pytree": "is an Enum subclass and is now natively supported"}


def _is_wanted(record: logging.LogRecord) -> bool:
    return UNWANTED[record.name] not in str(record.msg)


def silence_torchao() -> None:
    """Filter these two messages out, and nothing else; once for a process, before torch is imported."""
    for name in UNWANTED:
        logger = logging.getLogger(name)
        if _is_wanted not in logger.filters:
            logger.addFilter(_is_wanted)
