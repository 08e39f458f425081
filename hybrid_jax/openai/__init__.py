"""OpenAI's API: from bodies to prompts and parameters, from outputs and errors to bodies.

Nothing here knows a file or a server. Whoever serves the API does, and hands in what differs.

May import: api.outputs, config, text.
"""
