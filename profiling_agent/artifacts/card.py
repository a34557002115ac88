"""Model card, `README.md` of a saved folder: what it is, how to run it with us and without, what was measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import Environment, PackageLoader, StrictUndefined

from profiling_agent.artifacts.recipe import CARD, PACKAGES, Recipe, read_recipe
from profiling_agent.documents import clean
from profiling_agent.errors import ArtifactError
from profiling_agent.files import inside, write_text
from profiling_agent.records import Record

# What the template says there.
HOW_TO_RUN = "## Run it with profiling-agent\n"
SCHEMES = {
    "float32": "float32, nothing is quantized",
    "tf32": "float32 weights, products with TF32's ten bits of a mantissa",
    "bfloat16": "bfloat16 weights and products",
    "float16": "float16 weights",
    "dynamic": "int8 weights per output channel, int8 activations scaled as they come",
    "float8": "float8 (e4m3) weights per output channel, float8 activations scaled by row, the rest bfloat16",
    "static": "int8 weights per output channel, int8 activations with scales from calibration images",
    "static_nncf": "int8 by NNCF, attention products and residual adds included, scales from calibration images",
}


class CardRow(Record):
    """One line of the card's table, each cell ready to be read: `accuracy`, `88.1% (87.2 to 89.0)`, `87.9% (...)`."""

    name: str
    before: str
    after: str


class Judged(Record):
    """Top-1 on held-out images of a data set that is on the Hub, for the card's metadata."""

    dataset: str
    config: str | None = None
    split: str
    top1: float


def write_card(
    folder: Path, rows: Sequence[CardRow] = (), notes: Sequence[str] = (), *, judged: Judged | None = None
) -> None:
    """Write `README.md` into a saved folder, with a table of `rows` and a list of `notes` where some are given.

    Raises:
        ArtifactError: the folder is no saved model.
    """
    write_text(folder / CARD, _rendered(read_recipe(folder), rows, notes, judged))


def read_card(folder: Path) -> str:
    """Return the card of a saved folder, a new one where there is none.

    Raises:
        ArtifactError: the folder is no saved model, or its card leads out of it.
    """
    try:
        return (inside(folder / CARD, folder)).read_text(encoding="utf-8")
    except FileNotFoundError:
        return _rendered(read_recipe(folder), (), (), None)
    except OSError as error:
        raise ArtifactError(
            f"{str(folder / CARD)!r} can't be read ({error.strerror}): remove it, it is made anew"
        ) from error


def card_head(folder: Path) -> str:
    """Return what the card of a saved folder says before it says how to run it. Raises what `read_card` does."""
    return read_card(folder).partition(HOW_TO_RUN)[0]


def text_templates(package: str) -> Environment:
    """Return what renders the templates of a package that are Markdown or Python: what strangers wrote has to be clean already."""
    return Environment(
        # Not HTML: autoescape would mangle them.
        loader=PackageLoader(package, ""),
        undefined=StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _rendered(recipe: Recipe, rows: Sequence[CardRow], notes: Sequence[str], judged: Judged | None) -> str:
    jinja = text_templates("profiling_agent.artifacts")
    # Names of strangers go through it.
    jinja.filters["plain"] = _plain
    wanted = ("torch", "transformers", *PACKAGES[recipe.deployment.runtime])
    return jinja.get_template("card.md.jinja").render(
        r=recipe,
        metadata=metadata_of(recipe, judged).to_yaml(),
        scheme=SCHEMES[recipe.deployment.scheme],
        files=recipe.model_files,
        libraries=", ".join(f"{name} {recipe.libraries[name]}" for name in sorted(wanted) if name in recipe.libraries),
        rows=rows,
        notes=notes,
    )


def metadata_of(recipe: Recipe, judged: Judged | None = None) -> ModelCardData:
    """Return what the Hub reads of a card; paths of this machine aren't in it."""
    known: dict[str, Any] = {}
    if recipe.base_revision is not None and _is_hub_id(recipe.base_model):
        known |= {"base_model": recipe.base_model}
        known |= {"base_model_relation": "quantized"} if recipe.deployment.scheme != "float32" else {}
    if judged is not None:
        known |= {
            "datasets": [judged.dataset],
            "metrics": ["accuracy"],
            "model_name": f"{clean(recipe.architecture)} for {recipe.deployment.name}",
        }
        told = EvalResult(
            task_type="image-classification",
            dataset_type=judged.dataset,
            dataset_name=judged.dataset,
            dataset_config=judged.config,
            dataset_split=judged.split,
            metric_type="accuracy",
            metric_value=judged.top1,
        )
        known |= {"eval_results": [told]}
    tags = ["profiling-agent", recipe.deployment.runtime, recipe.deployment.scheme]
    tags += ["pruned"] if recipe.cuts else []
    return ModelCardData(library_name="profiling-agent", pipeline_tag="image-classification", tags=tags, **known)


def _is_hub_id(name: str) -> bool:
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _plain(text: object) -> str:
    """Return a stranger's text so that it stays in its cell and opens no markup."""
    return clean(" ".join(str(text).split()))[:300].replace("`", "'").replace("<", "&lt;").replace("|", "\\|")
