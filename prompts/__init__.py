"""One Markdown prompt per agent that asks the LLM; a value that is missing or unused is an error."""

from importlib.resources import files
from string import Template


def render(agent: str, **values: object) -> str:
    """Return `<agent>.md` filled in; KeyError for a value that is missing or that the prompt never mentions."""
    template = Template(files(__name__).joinpath(f"{agent}.md").read_text(encoding="utf-8"))
    if unused := values.keys() - set(template.get_identifiers()):
        raise KeyError(f"prompt {agent!r} never mentions {sorted(unused)}")
    return template.substitute({name: str(value) for name, value in values.items()})
