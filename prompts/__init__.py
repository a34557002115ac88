"""One Markdown prompt per agent."""
