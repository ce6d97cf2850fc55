"""The documentation is complete, and the README's examples run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest

import mixle

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AUTOMODULE = re.compile(r"automodule:: (\S+)\n   :members:([^\n]*)")


def public_modules() -> list[str]:
    """Whatever a package exports, and the modules that users import from because a package cannot without torch."""
    packages = [info.name for info in pkgutil.walk_packages(mixle.__path__, "mixle.") if info.ispkg]
    exporting = [name for name in packages if hasattr(importlib.import_module(name), "__all__")]
    return [
        "mixle",
        *exporting,
        "mixle.stats.sequence",
        "mixle.data.token_file",
        "mixle.data.stream_token_source",
        "mixle.utils.parallel.multiprocessing",
        "mixle.utils.parallel.torchrun",
        "mixle.utils.parallel.torch_neural",
        "mixle.utils.parallel.teacher",
        "mixle.utils.exact",
        "mixle.utils.vector",
        "mixle.utils.optional_import",
    ]


def public_names(module: str) -> set[tuple[str, int]]:
    """Name and identity of what a module exports: its __all__, else what it defines; of ``module:a,b`` only a and b."""
    name, _, members = module.partition(":")
    loaded = importlib.import_module(name)
    defined = [name for name, value in vars(loaded).items() if getattr(value, "__module__", None) == loaded.__name__]
    chosen = members.split(",") if members else getattr(loaded, "__all__", defined)
    return {(name, id(getattr(loaded, name))) for name in chosen if not name.startswith("_")}


def documented_names() -> set[tuple[str, int]]:
    names: set[tuple[str, int]] = set()
    for page in (ROOT / "docs" / "reference").glob("*.md"):
        for module, members in AUTOMODULE.findall(page.read_text()):
            chosen = ",".join(member.strip() for member in members.split(","))
            names |= public_names(f"{module}:{chosen}" if chosen else module)
    return names


@pytest.mark.parametrize("module", public_modules())
def test_every_public_name_is_in_the_api_reference(module):
    assert sorted(name for name, _ in public_names(module) - documented_names()) == []


def test_every_example_in_the_readme_runs():
    examples = "\n\n".join(FENCED.findall((ROOT / "README.md").read_text()))
    test = doctest.DocTestParser().get_doctest(examples, {}, "README.md", "README.md", 0)
    assert test.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0
