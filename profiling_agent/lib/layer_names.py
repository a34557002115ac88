"""Layer names that match an untrusted pattern, and similar names to suggest if none matches. Imports no torch."""

import difflib
from collections.abc import Collection

import re2

from profiling_agent.errors import PlanError

# Enough for any reasonable pattern; RE2 rejects one that compiles to more memory, such as nested repetitions.
MAX_PATTERN_LENGTH, MAX_PATTERN_MEMORY_BYTES = 300, 256 * 1024
NUM_NEAR_NAMES, MIN_SIMILARITY = 3, 0.3
# Layer names of transformers 4 and their replacements, which must be applied in this order.
OLD_NAMES = (
    ("attention.attention.", "attention."),
    ("attention.self.", "attention."),
    ("attention.output.dense", "attention.o_proj"),
    ("attention.query", "attention.q_proj"),
    ("attention.key", "attention.k_proj"),
    ("attention.value", "attention.v_proj"),
    ("intermediate.dense", "mlp.fc1"),
    ("output.dense", "mlp.fc2"),
    ("mlp.weights_in", "mlp.gate_proj"),
    ("mlp.weights_out", "mlp.down_proj"),
    ("mlp.dense", "mlp.fc"),
)
# In transformers 5 some families lost the encoder around their layers, some renamed its blocks, and some kept it.
OLD_STACKS = ((r"\.encoder\.layer\.", r".layers."), (r"\.encoder\.block\.(\d+)\.(\d+)\.", r".stages.\1.blocks.\2."))


def matching_names(pattern: str, names: Collection[str]) -> list[str]:
    """Return the `names` in which `pattern`, an RE2 expression, is found, in their order; linear time.

    Raises:
        PlanError: the pattern is too long, not RE2 (backreferences, lookarounds), or too large once compiled.
    """
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise PlanError(f"the layer pattern {pattern[:40]!r}... has {len(pattern)} characters; use at most 300")
    options = re2.Options()
    options.max_mem = MAX_PATTERN_MEMORY_BYTES
    options.log_errors = False
    try:
        regex = re2.compile(pattern, options)
    except re2.error as error:
        raise PlanError(
            f"the layer pattern {pattern!r} is no RE2 expression of a sane size: "
            "use one without backreferences, lookarounds and large repetitions"
        ) from error
    return [name for name in names if regex.search(name)]


def near_names(pattern: str, names: Collection[str]) -> list[str]:
    """Return up to three of `names` similar to `pattern`, nearest first, or the first three if none is similar.

    Names of transformers 4 are tried in translation as well as unchanged, since some families kept them.
    """
    # A name that the pattern would match: numbers become 0, anchors and groups are removed.
    literal = re2.sub(r"\\d[+*]?|\[0-9\][+*]", "0", pattern)
    literal = re2.sub(r"\(\?:|\.[*+]|[\\^$()]", "", literal)
    renamed = literal
    for old, new in OLD_NAMES:
        renamed = renamed.replace(old, new)
    wanted = {literal, renamed, *(re2.sub(old, new, renamed) for old, new in OLD_STACKS)}
    similarity = {name: max(difflib.SequenceMatcher(None, name, one).ratio() for one in wanted) for name in names}
    best = sorted(similarity, key=lambda name: similarity[name], reverse=True)[:NUM_NEAR_NAMES]
    return [name for name in best if similarity[name] >= MIN_SIMILARITY] or list(names)[:NUM_NEAR_NAMES]
