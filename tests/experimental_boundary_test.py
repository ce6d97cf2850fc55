"""What is experimental may break: no stable module may depend on it by an import statement."""

from __future__ import annotations

import ast
from pathlib import Path

import mixle

PACKAGE = Path(mixle.__file__).parent
EXPERIMENTAL = "mixle.experimental"


def imported_names(source: str, package: str) -> list[str]:
    """The absolute dotted names that a module of ``package`` imports, at any depth of nesting."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def is_experimental(name: str) -> bool:
    return name == EXPERIMENTAL or name.startswith(EXPERIMENTAL + ".")


def imports_experimental(source: str, package: str) -> bool:
    return any(map(is_experimental, imported_names(source, package)))


def test_no_stable_module_imports_the_experimental_package():
    offenders = []
    for path in sorted(PACKAGE.rglob("*.py")):
        package = ".".join(["mixle", *path.relative_to(PACKAGE).parent.parts])
        if not is_experimental(package) and imports_experimental(path.read_text(), package):
            offenders.append(str(path.relative_to(PACKAGE)))
    assert offenders == []


def test_every_spelling_of_a_static_import_is_seen():
    spellings = {
        "import mixle.experimental": "mixle.models",
        "import mixle.experimental.plan as plan": "mixle.models",
        "from mixle import experimental": "mixle.models",
        "from mixle.experimental.plan import Plan": "mixle.models",
        "from .. import experimental": "mixle.models",
        "from ...experimental import plan": "mixle.utils.parallel",
        "def f():\n    from ..experimental import plan": "mixle.models",
    }
    missed = [text for text, package in spellings.items() if not imports_experimental(text, package)]
    assert missed == []


def test_a_sibling_with_a_similar_name_is_not_mistaken_for_it():
    assert not imports_experimental("import mixle.experimental_design", "mixle.models")
