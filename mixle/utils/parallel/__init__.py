"""The data handles: where encoded data lives and how an estimation step runs over it."""

from mixle.utils.parallel.planner import (
    EncodedDataHandle,
    LocalEncodedData,
    encoded_data,
    register_encoded_data_backend,
)

__all__ = ["EncodedDataHandle", "LocalEncodedData", "encoded_data", "register_encoded_data_backend"]
