"""The data handles: where encoded data lives and how an estimation step runs over it."""
