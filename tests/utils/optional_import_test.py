from __future__ import annotations

import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from mixle.utils.optional_import import is_tensor, is_torch_module, optional_import


def test_what_is_missing_is_named_with_its_extra():
    with pytest.raises(ImportError, match=r"no_such_module is not .*pip install 'mixle\[lm\]'"):
        optional_import("no_such_module", extra="lm")


def test_a_module_that_fails_itself_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_module'"):
        optional_import("broken_module", extra="lm")


def test_torchs_objects_are_known():
    assert is_tensor(torch.zeros(2)) and is_tensor(torch.nn.Parameter(torch.zeros(2)))
    assert is_torch_module(torch.nn.Linear(1, 1))
    assert not any(is_tensor(value) or is_torch_module(value) for value in (np.zeros(2), None, torch, torch.Tensor))


def test_nothing_is_of_torch_while_another_thread_imports_it(monkeypatch):
    tensor, module = torch.zeros(1), torch.nn.Linear(1, 1)
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert not is_tensor(np.zeros(3)) and not is_tensor(tensor) and not is_torch_module(module)


def test_torch_is_not_imported_to_look():
    code = (
        "import sys; from mixle.utils.optional_import import is_tensor;"
        "assert not is_tensor(1) and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
