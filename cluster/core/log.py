"""Events and commands as plain JSON data and back: the event log, and the proof that live and simulated are one.

A log is one entry per handled event: when, what, and what was answered.  Replayed through a fresh conductor of the
same configuration it must give the same answers (`replay`).  A value is encoded as its fields; a top-level one also
names its type.  Block hashes are hex.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from cluster.core.commands import Command, Explanation
from cluster.core.conductor import Conductor
from cluster.core.events import Event

_TYPES = {kind.__name__: kind for kind in (*get_args(Event), *get_args(Command))}


def encode(value: Event | Command) -> dict[str, Any]:
    """The event or command as JSON data, with its type's name under `type`."""
    return {"type": type(value).__name__, **_plain(value)}


def encode_explanation(why: Explanation) -> dict[str, Any]:
    """A decision's explanation alone, as JSON data."""
    return cast(dict[str, Any], _plain(why))


def decode(data: dict[str, Any]) -> Event | Command:
    """The inverse of `encode`. Raises ValueError for an unknown type, and for fields missing, unknown or wrong."""
    rest = dict(data)
    kind = _TYPES.get(rest.pop("type", ""))
    if kind is None:
        raise ValueError(f"not an event or command: {data.get('type')!r}")
    return cast(Event | Command, _typed(rest, kind))


def entry(event: Event, now: float, commands: Iterable[Command]) -> dict[str, Any]:
    """One line of the log."""
    return {"now": now, "event": encode(event), "commands": [encode(command) for command in commands]}


def replay(entries: Iterable[dict[str, Any]], conductor: Conductor) -> Iterator[tuple[int, dict[str, Any]]]:
    """Feed a log to a fresh `conductor`; yields (entry's number, what it answered now) where the answers differ."""
    for number, logged in enumerate(entries):
        event = cast(Event, decode(logged["event"]))
        again = entry(event, logged["now"], conductor.handle(event, logged["now"]))
        if again != logged:
            yield number, again


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


def _typed(data: Any, hint: Any) -> Any:
    hint = getattr(hint, "__supertype__", hint)  # a NewType is what it is made of
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return None if data is None else _typed(data, get_args(hint)[0])
    if origin is tuple:
        return tuple(_typed(item, get_args(hint)[0]) for item in data)
    if is_dataclass(hint):
        return _fields(data, cast(type, hint))
    if hint is bytes:
        return bytes.fromhex(data)
    if issubclass(hint, Enum):
        return hint(data)
    if hint is float and isinstance(data, int):
        return float(data)
    if not isinstance(data, hint):
        raise TypeError(f"{data!r} is no {hint.__name__}")
    return data


def _fields(data: dict[str, Any], kind: type) -> Any:
    hints = _hints(kind)
    if unknown := [name for name in data if name not in hints]:
        raise ValueError(f"{kind.__name__} has no {', '.join(unknown)}")
    try:
        return kind(**{name: _typed(item, hints[name]) for name, item in data.items()})
    except TypeError as error:
        raise ValueError(str(error)) from error
