"""A place for one run of the teacher, which everything that a test starts finds by itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def teacher_folder() -> Iterator[str]:
    """Give a private folder with a short path, in which ``MIXLE_TEACHER_DIR`` lies meanwhile."""
    with tempfile.TemporaryDirectory(prefix="mx") as directory:
        os.chmod(directory, 0o700)
        with mock.patch.dict(os.environ, {"MIXLE_TEACHER_DIR": f"{directory}/run"}):
            yield directory
