"""One Markdown prompt per agent that asks the LLM."""

from importlib.resources import files
from string import Template


def render(agent: str, **values: object) -> str:
    """Return `<agent>.md` filled in; KeyError for a value that is missing."""
    return Template(files(__name__).joinpath(f"{agent}.md").read_text(encoding="utf-8")).substitute(values)
