"""What modules of ours import and whether they read the environment, from their source."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOTS = ("", "kernels", "retriever", "apps")
OURS = ("hypic", "hypic_kernels", "hypic_retriever", "hypic_apps")


def modules() -> Mapping[str, Path]:
    """Every module of ours by its name."""
    found = {}
    for root in ROOTS:
        for package in OURS:
            for path in (ROOT / root / package).rglob("*.py"):
                parts = path.relative_to(ROOT / root).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def imports(module: str, source: str, is_package: bool = False) -> Iterator[str]:
    """The full name of everything that a module imports, modules of ours by their own name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = module.split(".")[: None if not node.level else len(module.split(".")) - node.level + is_package]
            base = ".".join([*up, *([node.module] if node.module else [])]) if node.level else str(node.module)
            # A name taken from a package may be one of its modules; else it is the package that is used.
            yield from (
                f"{base}.{a.name}" if base not in MODULES or f"{base}.{a.name}" in MODULES else base for a in node.names
            )


def reads_environment(source: str) -> bool:
    """Setting a variable for libraries that are imported later is no reading."""
    tree = ast.parse(source)
    stored = [node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript) and _is_target(node)]
    return any(
        isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv") and node not in stored
        for node in ast.walk(tree)
    )


def _is_target(node: ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Store)
