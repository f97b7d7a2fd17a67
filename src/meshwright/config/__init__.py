"""What a user asks for: the run file, its keys, its rules and its errors. The only package that knows pydantic.

``choices`` and ``errors`` import nothing heavy; import from the modules, so that an enum does not cost a schema.
"""
