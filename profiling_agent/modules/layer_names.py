"""Match untrusted patterns against the model's layer names, and say which names are near when nothing matches."""

import difflib
from collections.abc import Collection

import re2

from profiling_agent.errors import PlanError

MAX_PATTERN_LENGTH = 300
# Room for any pattern of a sane size; RE2 refuses one that compiles to more, such as nested repetitions.
MAX_PATTERN_MEMORY_BYTES = 256 * 1024
NUM_NEAR_NAMES = 3
MIN_SIMILARITY = 0.3
# What transformers 4 called the layers, in the order in which the replacements have to be made.
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
# Some families lost the encoder around their layers, some renamed its blocks, and some kept it.
OLD_STACKS = ((r"\.encoder\.layer\.", r".layers."), (r"\.encoder\.block\.(\d+)\.(\d+)\.", r".stages.\1.blocks.\2."))


def matching_names(pattern: str, names: Collection[str]) -> list[str]:
    """Return those of `names` in which `pattern`, an RE2 expression, is found, in their order; linear time.

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
        return [name for name in names if regex.search(name)]
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else str(error)
        raise PlanError(
            f"the layer pattern {pattern!r} is no RE2 expression of a sane size ({reason[:80]!r}); "
            "use one without backreferences, lookarounds and large repetitions"
        ) from error


def near_names(pattern: str, names: Collection[str]) -> list[str]:
    """Return up to three of `names` that `pattern` may have meant, nearest first, or the first three if none is near.

    Names of transformers 4 are translated; families that kept them are asked for as they are.
    """
    near: dict[str, float] = {}
    for literal in _translations(_as_name(pattern)):
        for name in difflib.get_close_matches(literal, names, n=NUM_NEAR_NAMES, cutoff=MIN_SIMILARITY):
            near[name] = max(near.get(name, 0.0), difflib.SequenceMatcher(None, name, literal).ratio())
    best = sorted(near, key=lambda name: near[name], reverse=True)[:NUM_NEAR_NAMES]
    return best or list(names)[:NUM_NEAR_NAMES]


def _translations(literal: str) -> list[str]:
    """Return the name as it is, with its layer renamed, and with the stack around it renamed too."""
    renamed = literal
    for old, new in OLD_NAMES:
        renamed = renamed.replace(old, new)
    return list(dict.fromkeys([literal, renamed, *(re2.sub(old, new, renamed) for old, new in OLD_STACKS)]))


def _as_name(pattern: str) -> str:
    """Return a name that looks like what `pattern` would match: numbers are 0, anchors and groups are gone."""
    for number in (r"\d+", r"\d*", "[0-9]+", "[0-9]*", r"\d"):
        pattern = pattern.replace(number, "0")
    for mark in ("(?:", "^", "$", "\\", "(", ")", ".*", ".+"):
        pattern = pattern.replace(mark, "")
    return pattern
