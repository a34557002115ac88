"""The LangGraph nodes: thin, one file each."""
