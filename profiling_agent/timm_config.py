"""timm's models as their config.json describes them, checked before timm or transformers sees it. Importing this imports no torch.

Such a config names one of timm's architectures and arguments for it. Among what timm would take are files, addresses and
settings of a download, so that what is passed on are the arguments of an architecture alone.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from profiling_agent.documents import MAX_QUOTED, clean
from profiling_agent.foreign import Refuse, foreign_code

if TYPE_CHECKING:
    from torch import nn

MODEL_TYPE, EXTRA, PACKAGES = "timm_wrapper", "timm", ("timm", "torchvision")
# How `timm.create_model` and what it calls are told where weights come from, and that a model isn't a classifier.
NOT_OF_AN_ARCHITECTURE = frozenset(
    {"model_name", "checkpoint_path", "cache_dir", "scriptable", "exportable", "no_jit"}
    | {"features_only", "feature_cfg", "out_indices", "kwargs_filter"}
)
LOADING = "pretrained"
MAX_DIGITS = 10
NUM_CLASSES, NAMES, OLD_NAMES, ARGUMENTS = "num_classes", "label_names", "labels", "model_args"
LINEAR = "timm.layers.linear"


def is_timm(config: Mapping[str, Any]) -> bool:
    """Say whether a config.json is of a timm model: as transformers writes it, or as timm, which names no model_type."""
    return config.get("model_type", MODEL_TYPE if "pretrained_cfg" in config else None) == MODEL_TYPE


def settled(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a timm model's config in the form that transformers reads, as far as it can be brought into it.

    timm's exports have the number of classes among the arguments too, where transformers would pass it twice, and may have names of classes by number,
    of which transformers would take the numbers for the names.
    """
    said, arguments = dict(config), config.get(ARGUMENTS)
    if isinstance(arguments, dict) and NUM_CLASSES in arguments:
        said.setdefault(NUM_CLASSES, arguments[NUM_CLASSES])
        if said[NUM_CLASSES] == arguments[NUM_CLASSES]:
            said[ARGUMENTS] = {name: value for name, value in arguments.items() if name != NUM_CLASSES}
    for names in (said.get(OLD_NAMES), said.get(NAMES)):
        if names and isinstance(names, list | dict):
            said[NAMES] = _in_order(names, said.get(NUM_CLASSES)) if isinstance(names, dict) else names
    return said


def _in_order(names: Mapping[str, Any], num_classes: Any) -> list[Any] | Mapping[str, Any]:
    """Return names that are numbered as a list, those that nobody named by their number; as they were where they aren't a model's classes."""
    numbered = {int(number): name for number, name in names.items() if number.isdecimal() and len(number) < MAX_DIGITS}
    count = num_classes if isinstance(num_classes, int) else len(names)
    if len(numbered) < len(names) or max(numbered) >= count:
        return names
    return [numbered.get(number, f"LABEL_{number}") for number in range(count)]


def check_timm(config: Mapping[str, Any], refuse: Refuse) -> None:
    """Raise `refuse` of what a timm model's config, `settled`, asks for and doesn't get, and where timm isn't installed."""
    architecture, arguments = config.get("architecture"), config.get(ARGUMENTS)
    # timm reads what has a scheme as an address, of the Hub or of a folder.
    if ":" in str(architecture):
        raise refuse("it names another model as its architecture, which is never fetched")
    if arguments is not None and not isinstance(arguments, dict):
        raise refuse("its model_args are no JSON object")
    if arguments is not None and NUM_CLASSES in arguments:
        raise refuse(
            f"its model_args ask for {_quoted(str(arguments[NUM_CLASSES]))} classes, and the model has {_quoted(str(config.get(NUM_CLASSES)))}: leave one out"
        )
    for name in arguments or {}:
        if name in NOT_OF_AN_ARCHITECTURE or name.startswith(LOADING):
            raise refuse(f"its model_args set {_quoted(name)}, which is no setting of an architecture: leave it out")
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise refuse(f"it is one of timm's, and {missing[0]} isn't installed: pip install 'profiling-agent[{EXTRA}]'")
    _check_known(architecture, refuse)


def make_plain_(model: "nn.Module") -> None:
    """Make timm's linear layers torch's, which they are but for TorchScript: by their class alone they are somebody else's."""
    from torch import nn

    for module in model.modules():
        if isinstance(module, nn.Linear) and type(module).__module__ == LINEAR:
            module.__class__ = nn.Linear


def check_names(config: Mapping[str, Any], refuse: Refuse) -> None:
    """Raise `refuse` of a timm model's names of classes, `settled`, that aren't one for each of its classes."""
    names, count = config.get(NAMES), config.get(NUM_CLASSES)
    # transformers would take none of them, and number the classes.
    if isinstance(names, list) and isinstance(count, int) and len(names) != count:
        raise refuse(f"it has {count} classes and {len(names)} {NAMES}: name each class")
    if isinstance(names, dict):
        raise refuse(
            f"its {NAMES} don't number its classes from 0: give them as a list, in the order of the model's outputs"
        )


def _check_known(architecture: Any, refuse: Refuse) -> None:
    with foreign_code(lambda raised: refuse(f"it is one of timm's, which can't be imported: {raised}")):
        timm: Any = import_module("timm")
    if isinstance(architecture, str) and timm.is_model(architecture):
        return
    near = get_close_matches(str(architecture), timm.list_models())
    more = f" (near: {', '.join(near)})" if near else ""
    raise refuse(
        f"timm {timm.__version__} has no architecture {_quoted(str(architecture))}{more}: name one of its own, or install a newer timm"
    )


def _quoted(text: str) -> str:
    return repr(clean(text)[:MAX_QUOTED])
