"""Model card, `README.md` of a saved folder: what it is, how to run it with us and without, what was measured."""

from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from profiling_agent.artifacts.recipe import CARD, MODEL_FILES, PACKAGES, Recipe, read_recipe
from profiling_agent.documents import clean
from profiling_agent.files import write_text
from profiling_agent.records import Record

SCHEMES = {
    "float32": "float32, nothing is quantized",
    "bfloat16": "bfloat16 weights and products",
    "float16": "float16 weights",
    "dynamic": "int8 weights per output channel, int8 activations scaled as they come",
    "static": "int8 weights per output channel, int8 activations with scales from calibration images",
    "static_nncf": "int8 by NNCF, attention products and residual adds included, scales from calibration images",
}


class CardRow(Record):
    """One line of the card's table, each cell ready to be read: `accuracy`, `88.1% (87.2 to 89.0)`, `87.9% (...)`."""

    name: str
    before: str
    after: str


def write_card(folder: Path, rows: Sequence[CardRow] = (), notes: Sequence[str] = ()) -> None:
    """Write `README.md` into a saved folder, with a table of `rows` and a list of `notes` where some are given.

    Raises:
        ArtifactError: the folder is no saved model.
    """
    jinja = Environment(
        # Markdown, not HTML: autoescape would mangle it; names of strangers go through `plain`.
        loader=PackageLoader("profiling_agent.artifacts", ""),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    jinja.filters["plain"] = _plain
    recipe = read_recipe(folder)
    text = jinja.get_template("card.md.jinja").render(
        r=recipe,
        scheme=SCHEMES[recipe.deployment.scheme],
        is_plain=_is_plain(recipe),
        files=MODEL_FILES[recipe.deployment.runtime],
        libraries=", ".join(f"{name} {version}" for name, version in sorted(_versions(recipe).items())),
        rows=rows,
        notes=notes,
    )
    write_text(folder / CARD, text)


def _plain(text: object) -> str:
    """Return a stranger's text so that it stays in its cell and opens no markup."""
    return clean(" ".join(str(text).split()))[:300].replace("`", "'").replace("<", "&lt;").replace("|", "\\|")


def _is_plain(recipe: Recipe) -> bool:
    """Return whether transformers alone can read the weights."""
    return not (recipe.quantized or recipe.cuts or recipe.folded)


def _versions(recipe: Recipe) -> dict[str, str]:
    wanted = ("torch", "transformers", *PACKAGES[recipe.deployment.runtime])
    return {name: recipe.libraries[name] for name in wanted if name in recipe.libraries}
