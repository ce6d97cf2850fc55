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


def public_packages() -> list[str]:
    """mixle and its packages, without the command line's job and what is not stable: these export the public names."""
    found = [mixle.__name__]
    found += [info.name for info in pkgutil.walk_packages(mixle.__path__, "mixle.") if info.ispkg]
    return [name for name in found if name not in ("mixle.lm", "mixle.utils")]


def documented_modules() -> list[str]:
    pages = (ROOT / "docs" / "reference").glob("*.md")
    return [name for page in pages for name in re.findall(r"automodule:: (\S+)", page.read_text())]


def names_of(module: str) -> set[tuple[str, int]]:
    loaded = importlib.import_module(module)
    return {(name, id(getattr(loaded, name))) for name in getattr(loaded, "__all__", ())}


@pytest.mark.parametrize("package", public_packages())
def test_every_public_name_is_in_the_api_reference(package):
    documented = set().union(*map(names_of, documented_modules()))
    assert sorted(name for name, _ in names_of(package) - documented) == []


def test_every_example_in_the_readme_runs():
    examples = "\n\n".join(FENCED.findall((ROOT / "README.md").read_text()))
    test = doctest.DocTestParser().get_doctest(examples, {}, "README.md", "README.md", 0)
    assert test.examples
    assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0
