"""One Markdown prompt per agent that asks the LLM."""

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.resources import files
from string import Template

_EDITED: ContextVar[Mapping[str, str]] = ContextVar("edited prompts")


def names() -> list[str]:
    """Return the names of all prompts."""
    return sorted(file.name.removesuffix(".md") for file in files(__name__).iterdir() if file.name.endswith(".md"))


def default_text(name: str) -> str:
    """Return the text of `<name>.md`."""
    return files(__name__).joinpath(f"{name}.md").read_text(encoding="utf-8")


def check(name: str, text: str) -> None:
    """Raise ValueError for a text with a variable that has no value in the prompt of this name."""
    known, template = Template(default_text(name)).get_identifiers(), Template(text)
    if not template.is_valid():
        raise ValueError(f"prompt {name!r} has a $ that names no variable: write $$ for the sign")
    if unknown := [variable for variable in template.get_identifiers() if variable not in known]:
        variables = ", ".join(f"${variable}" for variable in known) or "none here"
        raise ValueError(f"prompt {name!r} has no variable ${unknown[0]}: use {variables}, or $$ for the sign")


@contextmanager
def edited(texts: Mapping[str, str]) -> Generator[None]:
    """Render these texts instead of the files of their names."""
    token = _EDITED.set(texts)
    try:
        yield
    finally:
        _EDITED.reset(token)


def render(agent: str, **values: object) -> str:
    """Return a prompt filled in; KeyError for a value that is missing."""
    return Template(_EDITED.get({}).get(agent) or default_text(agent)).substitute(values)
