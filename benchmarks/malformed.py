"""Hypothesis strategies for malformed input: flags, documents, and folders of which one file is hurt."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

# Numbers that no field takes, words that no number is, names that no file has.
ODD = st.one_of(
    st.sampled_from(
        ["", " ", "nan", "-inf", "1e999", "-1", "0x10", "many", "\x00", "../..", "None", "[]", "¼", "9" * 400]
    ),
    st.text(max_size=30),
)
NUMBERS = ("max_accuracy_drop", "min_speedup", "max_size_ratio", "max_iterations", "batch_size", "seed", "num_samples")
NAMES = ("device", "selection", "objective", "criterion", "quantize_dtype", "planner", "approve", "run_id", "runtimes")
JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)


@st.composite
def requests(draw: st.DrawFn) -> list[str]:
    """Draw flags of which one at least can't be taken."""
    wrong = draw(st.sampled_from(NUMBERS))
    flags = [f"--{wrong.replace('_', '-')}", draw(st.sampled_from(["nan", "-3", "many", "1e999", "", "-inf", "0x1"]))]
    for name in draw(st.lists(st.sampled_from(NAMES), max_size=3, unique=True)):
        flags += [f"--{name.replace('_', '-')}", draw(ODD)]
    return flags


@st.composite
def hurt(draw: st.DrawFn) -> Callable[[Path], str]:
    """Draw a way to hurt one file of a folder; it returns what it did."""
    pick, way, at = (
        draw(st.integers(0, 10_000)),
        draw(st.sampled_from(["cut", "fill", "edit", "swap", "remove"])),
        draw(st.floats(0, 1)),
    )
    junk, value = draw(st.binary(min_size=1, max_size=64)), draw(JSON)

    def do(folder: Path) -> str:
        files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
        chosen, other = files[pick % len(files)], files[(pick * 7 + 1) % len(files)]
        content = chosen.read_bytes()
        place = int(at * len(content))
        if way == "edit" and chosen.suffix == ".json":
            chosen.write_text(json.dumps(edited(json.loads(content), pick, value)))
        elif way == "remove":
            chosen.unlink()
        elif way == "swap":
            chosen.write_bytes(other.read_bytes())
        else:
            chosen.write_bytes(content[:place] + (b"" if way == "cut" else junk + content[place + len(junk) :]))
        return f"{way} {chosen.relative_to(folder)}"

    return do


def edited(document: Any, pick: int, value: Any) -> Any:
    """Return a document with one of its values replaced, however deep."""
    if not document or not isinstance(document, (dict, list)):
        return value
    keys = list(document) if isinstance(document, dict) else list(range(len(document)))
    key = keys[pick % len(keys)]
    document[key] = edited(document[key], pick // len(keys), value)
    return document


DRAWN: dict[str, st.SearchStrategy[Any]] = {
    "requests": requests(),
    "plans": st.tuples(JSON, st.integers(0, 10_000), JSON),
    "label maps": st.tuples(
        st.lists(st.text(max_size=12), max_size=6),
        st.dictionaries(st.integers(-2, 8), st.text(max_size=12), max_size=6),
    ),
    "run folders": st.tuples(hurt(), st.integers(0, 100)),
    "checkpoints": hurt(),
    "saved models": hurt(),
}
