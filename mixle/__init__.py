"""Statistical modelling in one verb: the estimator says what is fitted, the data handle says where and how."""
