"""Statistical modelling in one verb: the estimator says what is fitted, the data handle says where and how."""

from mixle.inference import best_of, optimize
from mixle.stats.sequence import seq_encode, seq_estimate, seq_initialize, seq_log_density, seq_log_density_sum
from mixle.utils.parallel.planner import (
    EncodedDataHandle,
    LocalEncodedData,
    encoded_data,
    register_encoded_data_backend,
)

__version__ = "0.1.0"

__all__ = [
    "EncodedDataHandle",
    "LocalEncodedData",
    "__version__",
    "best_of",
    "encoded_data",
    "optimize",
    "register_encoded_data_backend",
    "seq_encode",
    "seq_estimate",
    "seq_initialize",
    "seq_log_density",
    "seq_log_density_sum",
]
