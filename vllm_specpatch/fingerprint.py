"""sha256 of the raw source of a function, from the imported object or from the file it comes from.

The raw text, not ``ast.dump``: the dump of the same function differs between Python 3.11, 3.12 and 3.13.
A comment-only change upstream therefore refuses the patch until someone looked, which is the point.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import inspect
import sys
import textwrap
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

#: Stands for the digest of a function that its module does not define. A table may accept it.
ABSENT = "absent"


class NoSource(LookupError):
    """There is nothing to take a digest of; the text says what was found instead."""


class NoSymbol(NoSource):
    """The module was found and does not define it."""


def digest_of_text(source: str) -> str:
    return hashlib.sha256(textwrap.dedent(source).encode()).hexdigest()


def _code_of(obj: Any, where: str, package: str) -> CodeType:
    while True:
        # By exact type: a wrapt proxy claims to be a function, and a wrapper made with functools.wraps
        # leads inspect to the original's source. Both would hide a foreign patch. Decorators of the
        # symbol's own package are part of it (flashinfer_api wraps when API logging is on).
        if type(obj) in (classmethod, staticmethod):
            obj = obj.__func__
        elif type(obj) is property and obj.fget is not None:
            obj = obj.fget
        elif type(obj) is type(functools.lru_cache(lambda: None)):
            obj = obj.__wrapped__
        elif type(obj) is FunctionType and "__wrapped__" in vars(obj) and _is_of(obj, package):
            obj = vars(obj)["__wrapped__"]
        elif type(obj) is FunctionType:
            return obj.__code__
        else:
            module = getattr(type(obj), "__module__", "?")
            raise NoSource(f"{where} is a {module}.{type(obj).__qualname__}, not a plain function")


def _is_of(function: FunctionType, package: str) -> bool:
    # Not __module__: functools.wraps copies that from the original.
    return function.__globals__.get("__name__", "").split(".")[0] == package


def of_object(owner: Any, name: str, where: str) -> str:
    """Digest of ``owner.name`` as it is now (no descriptor binding, no following of ``__wrapped__``)."""
    for space in inspect.getmro(owner) if inspect.isclass(owner) else (owner,):
        if name in vars(space):
            code = _code_of(vars(space)[name], where, where.split(".")[0].split(":")[0])
            try:
                return digest_of_text(inspect.getsource(code))
            except (OSError, TypeError) as e:
                raise NoSource(f"{where}: its source cannot be read ({e})") from e
    raise NoSymbol(f"{where} does not exist")


@functools.lru_cache(maxsize=32)
def _functions_of_file(path: str) -> dict[str, str]:
    """qualname -> digest, for every function in a source file (the last definition of a name counts)."""
    text = Path(path).read_text()
    lines = text.splitlines(keepends=True)
    found: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                # inspect.getsource ends a block with its last statement, comments after it not included.
                found[prefix + child.name] = digest_of_text("".join(lines[first - 1 : child.end_lineno]))
            elif isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.")
            elif isinstance(child, (ast.If, ast.Try)):
                visit(child, prefix)

    visit(ast.parse(text), "")
    return found


def of_file(path: str | Path, qualname: str) -> str:
    """Digest of a function in a source file that need not be imported."""
    try:
        return _functions_of_file(str(path))[qualname]
    except (OSError, SyntaxError, UnicodeDecodeError) as e:
        raise NoSource(f"{path}: cannot be read ({e})") from e
    except KeyError:
        raise NoSymbol(f"{qualname} does not exist in {path}") from None


def of_symbol(symbol: str) -> str:
    """Digest of ``"module:qualname"``: from memory if the module is imported, otherwise from its file.

    A module that is not imported yet is not imported for this (its parent packages are): its import may be
    heavy, or circular while a post-import hook runs. :data:`ABSENT` if the module does not define it. Raises
    :class:`NoSource`.
    """
    try:
        return _of_symbol(symbol)
    except NoSymbol:
        return ABSENT


def _of_symbol(symbol: str) -> str:
    module_name, _, qualname = symbol.partition(":")
    owner_name, _, name = qualname.rpartition(".")
    module = sys.modules.get(module_name)
    if module is not None and not owner_name and hasattr(module, name):
        return of_object(module, name, symbol)
    if module is not None and owner_name and hasattr(module, owner_name):
        return of_object(getattr(module, owner_name), name, symbol)
    try:
        spec = importlib.util.find_spec(module_name)
    except (ImportError, ValueError) as e:
        raise NoSource(f"{module_name} cannot be found ({e})") from e
    if spec is None or spec.origin is None:
        raise NoSource(f"{module_name} cannot be found")
    return of_file(spec.origin, qualname)
