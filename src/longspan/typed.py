"""`@typed`: wrong Python types are refused where they enter, by the annotations that stand there already.

It goes on a public function, or on a class for its constructor. An argument that is not of its annotated kind raises UserError:
the value, what it must be, what to write. Nothing is converted. Whole numbers are numbers, True is none; lists pass for tuples;
Literal values are compared. Tuples and mappings are looked into, and a Sequence of anything but numbers: a row of a million ids
is its reader's to check.
"""

import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from longspan.errors import UserError

__all__ = ["typed"]

Target = TypeVar("Target", bound=Callable[..., Any])
NUMBERS = (int, float)
NAMES = {
    "float": "a number", "int": "a whole number", "bool": "True or False", "str": "a string", "NoneType": "None",
    "Sequence": "a sequence", "Mapping": "a mapping", "Callable": "a function", "ndarray": "an array",
    "Tensor": "a tensor", "PathLike": "a path", "Path": "a path", "SGD": "an SGD",
}  # fmt: skip
PLURALS = {float: "numbers", int: "whole numbers", str: "strings"}
EXAMPLES = {
    "float": "0.1", "int": "1", "bool": "True", "str": "'name'", "Sequence": "[...]", "Mapping": "{'name': ...}",
    "Engine": "Engine.build(config)",
}  # fmt: skip


class Misfit(NamedTuple):
    """The first thing that is not of its kind."""

    place: str  # "betas[1]"
    value: object
    kind: Any


def typed(target: Target) -> Target:
    """Refuse arguments of another kind than annotated; on a class, those of its constructor."""
    if isinstance(target, type):
        target.__init__ = typed(target.__init__)
        return cast(Target, target)
    signature, hints = inspect.signature(target), {}
    owner = target.__qualname__.removesuffix(".__init__")

    @wraps(target)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if not hints:  # at the first call: annotations may name what is defined later
            hints.update(get_type_hints(target))
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            takes = ", ".join(name for name in signature.parameters if name not in ("self", "cls"))
            raise UserError(f"{owner}: {error}. It takes {takes}.") from None
        for name, value in given.items():
            parameter = signature.parameters[name]
            many = parameter.kind is parameter.VAR_KEYWORD
            for own, item in value.items() if many else ((name, value),):
                if name in hints and (found := _misfit(own, item, hints[name])):
                    raise UserError(f"{owner}: {_sentence(found, parameter.default)}")
        return target(*args, **kwargs)

    return cast(Target, checked)


def _misfit(place: str, value: object, kind: Any) -> Misfit | None:
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer in (Union, UnionType):
        found = [_misfit(place, value, part) for part in inner]
        if None in found:
            return None
        deeper = (part for part in found if part and part.place != place)  # the outside fits one of them
        return next(deeper, Misfit(place, value, kind))
    if not _fits(value, outer, inner):
        return Misfit(place, value, kind)
    if outer is tuple and inner and inner[-1] is not Ellipsis:
        parts = enumerate(zip(cast(Sequence[object], value), inner, strict=True))
        return next((odd for n, (item, part) in parts if (odd := _misfit(f"{place}[{n}]", item, part))), None)
    if (outer is tuple and inner) or (outer is Sequence and not _numeric(inner[0])):
        return _first(enumerate(cast(Sequence[object], value)), inner[0], place)
    if outer is Mapping:
        items = cast(Mapping[object, object], value)
        return _first(zip(items, items, strict=True), inner[0], f"key of {place}") or _first(
            items.items(), inner[1], place
        )
    return None


def _first(items: Iterable[tuple[object, object]], kind: Any, place: str) -> Misfit | None:
    """The first item that is not of its kind; each type is looked at once where that decides."""
    plain, known = isinstance(kind, type), set[type]()
    for index, item in items:
        if plain and type(item) in known:
            continue
        if odd := _misfit(f"{place}[{index!r}]", item, kind):
            return odd
        known.add(type(item))
    return None


def _numeric(kind: Any) -> bool:
    return kind in NUMBERS or get_origin(kind) is Sequence


def _fits(value: object, outer: Any, inner: tuple[Any, ...]) -> bool:
    """The outside of a value alone."""
    if outer is Any or isinstance(outer, TypeVar):
        return True
    if outer is Literal:
        return any(type(value) is type(word) and value == word for word in inner)
    if outer in NUMBERS:
        return isinstance(value, Real if outer is float else Integral) and not isinstance(value, bool)
    if outer is tuple:
        size = None if not inner or inner[-1] is Ellipsis else len(inner)
        return isinstance(value, tuple | list) and size in (None, len(value))
    if outer is Callable:
        return callable(value)
    return isinstance(value, outer) and not (outer is Sequence and isinstance(value, str | bytes))


def _sentence(odd: Misfit, default: object) -> str:
    example, inside = _example(odd.kind), not odd.place.isidentifier()
    ways = [f"{'give for example ' if inside else f'write {odd.place}='}{example}"] if example else []
    if default is not inspect.Parameter.empty and not inside:
        # a default that is made anew shows as <factory>
        ways.append("leave it out" + ("" if repr(default).startswith("<") else f" for {default!r}"))
    way = ", or ".join(ways) or "give one"
    return f"{odd.place}={reprlib.repr(odd.value)} must be {_named(odd.kind)}. {way[0].upper()}{way[1:]}."


def _named(kind: Any) -> str:
    """A kind in words."""
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer in (Union, UnionType):
        parts = list(dict.fromkeys(_named(part) for part in inner))
        return " or ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))
    if outer is Literal:
        return f"{'one of ' if len(inner) > 1 else ''}{', '.join(map(repr, inner))}"
    if outer is tuple and inner:
        size = "" if inner[-1] is Ellipsis else f"{len(inner)} "
        return f"a tuple of {size}{PLURALS.get(inner[0], 'items')}"
    article = "an" if outer.__name__[0] in "AEIOU" else "a"
    return NAMES.get(outer.__name__, f"{article} {outer.__name__}")


def _example(kind: Any) -> str:
    """Something of this kind as it is written; empty for kinds with no short form."""
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer in (Union, UnionType):
        return next((said for part in inner if part is not NoneType and (said := _example(part))), "")
    if outer is tuple and inner:
        items = [_example(part) for part in inner if part is not Ellipsis]
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})" if all(items) else ""
    ours = f"{outer.__name__}(...)" if outer.__module__.startswith("longspan.") else ""
    return EXAMPLES.get(outer.__name__, ours)
