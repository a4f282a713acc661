"""The table of a message: what each field is, how it stands on the wire, and what follows from that.

A message is a frozen dataclass over `Message`, and a map within one is a dataclass over `Part`. Each field is one line:

    max_samples: Annotated[Positive, Key(22, optional=True)] = 0

The line says the name, the type, the limits, the key on the wire, and the default. The type says what stands on the
wire: a number, text, bytes, a `Literal` (as its position), a `Part`, a mapping or a tuple. Beside an array stands its
`Kind` (`contract/wire/tensors.py`). An optional field is left out where its value is the default; so it is with what
came later, and with what many messages have not. A field that is not optional is always sent.

- A value is checked when it is built, so a value that exists can be trusted. What its fields must be beside each
  other, a message says in `check_together`.
- `read_map` makes a value of a decoded map, and `write_map` makes the map.
- `tests/contract/wire/test_tables.py` compares each line with its line in `messages.cddl`.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from protofleet.contract.errors import WireError

__all__ = [
    "MAX_FLOAT",
    "MAX_PARTS",
    "MAX_TEXT",
    "MAX_UINT",
    "Fraction",
    "Key",
    "Keys",
    "Kind",
    "Limits",
    "Message",
    "MethodName",
    "Part",
    "PartCount",
    "PartIndex",
    "Positive",
    "Run",
    "Sha256",
    "ShortText",
    "Slot",
    "read_map",
    "table_of",
    "write_map",
]

WIRE_VERSION: Final = 2
MAX_UINT: Final = 2**32 - 1
MAX_PARTS: Final = 65_535  # in which a state, a contribution or an answer comes
MAX_TEXT: Final = 200  # characters of a reason
MAX_FLOAT: Final = sys.float_info.max
_ALWAYS: Final = object()
_WORDS: Final[dict[type, str]] = {
    bool: "a boolean",
    float: "a float",
    int: "an unsigned integer",
    bytes: "bytes",
    str: "text",
}
_UNITS: Final[dict[type, str]] = {bytes: "bytes", str: "characters"}


# ── what a line of the table says ───────────────────────────────────────────────────────────────────────────────────


class Key(NamedTuple):
    """The key of a field in the map, and whether the field is left out where its value is the default.

    The number is None where the value is not in the map: it is the key under which the map stands in another one.
    """

    number: int | None
    optional: bool = False


class Keys(NamedTuple):
    """The keys of a field that has several: of the attributes of a dataclass, or of the values of a tuple. A tuple may
    have fewer values."""

    numbers: tuple[int, ...]


class Limits(NamedTuple):
    """The least and the largest number, length (in bytes or characters) or count of entries; both are included.

    Attributes:
        above: the least number itself is not.
        unit: of the number, for errors.
    """

    low: float
    high: float = MAX_FLOAT
    above: bool = False
    unit: str = ""


Run = Annotated[bytes, Limits(4, 4)]
MethodName = Annotated[str, Limits(1, 32)]
Sha256 = Annotated[bytes, Limits(32, 32)]
Positive = Annotated[int, Limits(1, MAX_UINT)]
Fraction = Annotated[float, Limits(0, 1, above=True)]
ShortText = Annotated[str, Limits(0, MAX_TEXT)]
PartIndex = Annotated[int, Limits(0, MAX_PARTS - 1)]
PartCount = Annotated[int, Limits(1, MAX_PARTS)]


# ── what a value may be ─────────────────────────────────────────────────────────────────────────────────────────────


Writer = Callable[[Any, str], Any] | None


class Kind(NamedTuple):
    """What the values of a field may be. A function that is None has nothing to do.

    Attributes:
        cbor: the types that a decoded value may have; `what` says them in words.
        fits: whether a value in Python is within the limits, which `expected` says in words.
        got: what an error says of one that is not.
        read: the value in Python, of a decoded one with one of these types; its errors begin with the second argument.
        write: the value for CBOR, of one in Python and the encoding of tensors.
        read_again: for arrays, as `read`, where type and shape are those of an array that was read.
        limits, within: the limits, and the kinds, the names or the `Part` in it.
    """

    cbor: tuple[type, ...]
    what: str
    fits: Callable[[Any], bool] | None = None
    expected: str = ""
    got: Callable[[Any], object] = str
    read: Callable[[Any, str], Any] | None = None
    write: Writer = None
    read_again: Callable[[Any, str], Any] | None = None
    limits: Limits | None = None
    within: tuple[Any, ...] = ()


def kind_of(annotation: Any) -> Kind:
    """What the values of a type may be, with what is annotated beside it."""
    beside = getattr(annotation, "__metadata__", ())
    for kind in beside:
        if isinstance(kind, Kind):
            return kind
    limits = next((each for each in beside if isinstance(each, Limits)), Limits(0, MAX_UINT))
    bare = annotation.__origin__ if beside else annotation
    if NoneType in get_args(bare):
        (bare,) = (each for each in get_args(bare) if each is not NoneType)
    inner = get_args(bare)
    if get_origin(bare) is Literal:
        return _one_of(inner)
    if get_origin(bare) is tuple:
        return _parts_by_key(inner[0], limits) if _is_part(inner[0]) else _list_of(kind_of(inner[0]), limits)
    if get_origin(bare) is Mapping:
        return _map_of(kind_of(inner[0]), kind_of(inner[1]), limits)
    return _part(bare) if _is_part(bare) else _plain(bare, limits)


def _is_part(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Part)


def _plain(type_: type, limits: Limits) -> Kind:
    low, high, what, unit = limits.low, limits.high, _WORDS[type_], _UNITS.get(type_, limits.unit)
    if type_ is bool:
        return Kind((bool,), what)
    span = f"{low} or more" if high == MAX_FLOAT else f"{low}" if low == high else f"{low} to {high}"
    expected = f"{span} {unit}".rstrip()
    if type_ in _UNITS:
        return Kind((type_,), what, lambda value: low <= len(value) <= high, expected, len, limits=limits)
    if limits.above:
        return Kind((type_,), what, lambda value: low < value <= high, f"above {low}, up to {high}", limits=limits)
    write = (lambda value, _: float(value)) if type_ is float else None
    return Kind((type_,), what, lambda value: low <= value <= high, expected, write=write, limits=limits)


def _one_of(names: tuple[str, ...]) -> Kind:
    def read(value: int, label: str) -> str:
        if not 0 <= value < len(names):
            raise WireError(label, expected=f"0 to {len(names) - 1}", got=value)
        return names[value]

    def write(value: str, _: str) -> int:
        return names.index(value)

    return Kind((int,), _WORDS[int], names.__contains__, ", ".join(names), read=read, write=write, within=names)


def _list_of(each: Kind, limits: Limits) -> Kind:
    """A list of different values, which is a tuple in Python."""

    def fits(values: tuple[Any, ...]) -> bool:
        are = limits.low <= len(values) <= limits.high and all(_is_one(each, value) for value in values)
        return are and len(set(values)) == len(values)

    what, expected = f"a list of {each.what}", f"{limits.low} to {limits.high} different ones of {each.expected}"
    read, write = (lambda values, _: tuple(values)), (lambda values, _: list(values))
    return Kind((list, tuple), what, fits, expected, len, read, write, limits=limits, within=(each,))


def _map_of(name: Kind, value: Kind, limits: Limits) -> Kind:
    """A map of text to values. A sender may write a whole figure as an integer."""

    def odd(entries: Mapping[Any, Any]) -> list[Any]:
        return [key for key, entry in entries.items() if not (_is_one(name, key) and _is_one(value, entry))]

    def fits(entries: Mapping[Any, Any]) -> bool:
        return limits.low <= len(entries) <= limits.high and not odd(entries)

    def got(entries: Mapping[Any, Any]) -> object:
        return repr(odd(entries)[0])[:MAX_TEXT] if odd(entries) else len(entries)

    def read(entries: dict[Any, Any], _: str) -> dict[Any, Any]:
        return {key: float(entry) if type(entry) is int else entry for key, entry in entries.items()}

    expected = f"{limits.low} to {limits.high} entries, {name.expected} to {value.expected}"
    own_read, write = (read if float in value.cbor else None), (lambda entries, _: dict(entries))
    return Kind((dict,), "a map", fits, expected, got, own_read, write, limits=limits, within=(name, value))


def _is_one(kind: Kind, value: Any) -> bool:
    is_of_kind = isinstance(value, kind.cbor) and (type(value) is not bool or bool in kind.cbor)
    return is_of_kind and (kind.fits is None or kind.fits(value))


def _part(part: type[Part]) -> Kind:
    return Kind((dict,), "a map", read=lambda value, _: read_map(part, value), write=write_map, within=(part,))


def _parts_by_key(part: type[Part], limits: Limits) -> Kind:
    """A map of maps, each under the value of the part's field without a key; a tuple in rising order in Python."""
    name = next(slot.name for slot in table_of(part).slots if slot.key is None)
    key_of = operator.attrgetter(name)

    def fits(parts: tuple[Part, ...]) -> bool:
        keys = list(map(key_of, parts))
        return limits.low <= len(keys) <= limits.high and all(map(operator.lt, keys, keys[1:]))

    def read(value: dict[Any, Any], label: str) -> tuple[Part, ...]:
        if not all(type(key) is bytes and type(entry) is dict for key, entry in value.items()):
            raise WireError(label, expected="bytes to maps", got="others")
        return tuple(read_map(part, entry, **{name: key}) for key, entry in value.items())

    def write(parts: tuple[Part, ...], encoding: str) -> dict[bytes, Any]:
        return {key_of(each): write_map(each, encoding) for each in parts}

    expected = f"{limits.low} to {limits.high}, in rising order"
    return Kind((dict,), "a map of maps", fits, expected, len, read, write, limits=limits, within=(part,))


# ── the table ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Slot(NamedTuple):
    """One key of a map.

    Attributes:
        name: of the field; `field.attribute` or `field.position` where it has several keys.
        default: of an optional field, the value with which it is left out; else `_ALWAYS`.
        label: how errors begin: `announcement seed (field 9)`.
    """

    name: str
    key: int | None
    kind: Kind
    optional: bool
    default: Any
    label: str

    def is_one(self, value: Any) -> bool:
        """Whether a decoded value is within type and limits."""
        return type(value) in self.kind.cbor and (self.kind.fits is None or self.kind.fits(value))

    @property
    def field(self) -> str:
        """The name of the field."""
        return self.name.partition(".")[0]

    @property
    def is_plain(self) -> bool:
        """Whether the value is always sent, and as it is."""
        return not self.optional and self.kind.write is None

    def is_absent(self, value: Any) -> bool:
        """Whether the field is left out where it has this value."""
        default = self.default
        return value is default or (self.optional and default is not None and bool(value == default))


class Table:
    """The fields of a message, or of a map within one, in the forms that reading, writing and checking go through.

    Attributes:
        slots: each key of the map.
        apart: by field, the slots of those that have several keys, and what joins their values.
        tensor_fields: the names of fields that are arrays.
    """

    def __init__(self, part: type[Part]) -> None:
        self.slots: list[Slot] = []
        self.apart: dict[str, tuple[dict[str, Slot], Callable[[list[Any]], Any]]] = {}
        self.writing_apart: list[tuple[str, Callable[[Any], Iterable[Any]], list[tuple[int, Writer]]]] = []
        self._words = re.sub(r"(?<=.)([A-Z])", r" \1", part.__name__).lower()
        hints = get_type_hints(part, include_extras=True)
        for field in dataclasses.fields(part):  # type: ignore[arg-type]
            self._add(field, hints[field.name])
        header = {0: "number", 1: "wire_version"} if issubclass(part, Message) else {}
        own = [slot for slot in self.slots if slot.name in hints]
        sent = [(slot, slot.key) for slot in self.slots if slot.key is not None]
        plain = header | {key: slot.name for slot, key in sent if slot in own and slot.is_plain}
        self.known = {*header, *(key for _, key in sent)}
        self.plain_keys, self.plain = list(plain), _getter(*plain.values())
        self.checks = [(slot.name, slot.kind.fits, slot.default, slot) for slot in own if slot.kind.fits]
        self.reading = [(slot.name, key, slot.kind.cbor, slot.kind.read, slot) for slot, key in sent]
        self.writing = [(s.name, k, s.kind.write, s.default, s) for s, k in sent if s in own and not s.is_plain]
        self.tensors = [
            (slot.name, key, slot.kind.read_again, slot.label) for slot, key in sent if slot.kind.read_again
        ]
        self.tensor_fields = {slot.field for slot in self.slots if slot.kind.read_again}
        self._readers: dict[frozenset[int], Callable[[Mapping[int, Any]], dict[str, Any]]] = {}
        tensors = [slot for slot in self.slots if slot.kind.read_again and slot.optional]
        self.absent = {slot.field: () if slot.field in self.apart else slot.default for slot in tensors}

    def __getitem__(self, name: str) -> Slot:
        """The slot of this name."""
        return next(slot for slot in self.slots if slot.name == name)

    def _add(self, field: dataclasses.Field[Any], hint: Any) -> None:
        row = next(each for each in hint.__metadata__ if isinstance(each, Key | Keys))
        if isinstance(row, Key):
            self._slot(field.name, row.number, kind_of(hint), row.optional, field.default if row.optional else _ALWAYS)
            return
        whole = hint.__origin__
        join: Callable[[list[Any]], Any] = tuple
        split: Callable[[Any], Iterable[Any]] = iter
        if get_origin(whole) is tuple:
            within = {str(at): get_args(whole)[0] for at, _ in enumerate(row.numbers, 1)}
        else:
            within = get_type_hints(whole, include_extras=True)
            join, split = lambda values: whole(*values), _getter(*within)
        slots = [
            self._slot(f"{field.name}.{name}", number, kind_of(each), join is tuple, None)
            for (name, each), number in zip(within.items(), row.numbers, strict=True)
        ]
        self.apart[field.name] = {slot.name: slot for slot in slots}, join
        writers = [(number, slot.kind.write) for number, slot in zip(row.numbers, slots, strict=True)]
        self.writing_apart.append((field.name, split, writers))

    def _slot(self, name: str, key: int | None, kind: Kind, optional: bool, default: object) -> Slot:
        label = f"{self._words} {name}" + ("" if key is None else f" (field {key})")
        self.slots.append(Slot(name, key, kind, optional, default, label))
        return self.slots[-1]

    def joined(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values by field, of values by slot."""
        for field, (slots, join) in self.apart.items():
            there = [name for name in slots if name in values]
            if there:
                if there[-1] != list(slots)[len(there) - 1]:  # without the one before it
                    raise WireError("message", expected="no further fields", got=f"field {slots[there[-1]].key}")
                values[field] = join([values.pop(name) for name in there])
        return values

    def reader_again(self, keys: Iterable[int]) -> Callable[[Mapping[int, Any]], dict[str, Any]]:
        """From arrays by key to the fields that are arrays, by name: for a map that has these keys, and arrays of the
        types and shapes of those in a map that was read."""
        known = frozenset(keys)  # in whatever order a sender has them: there are few such sets
        if known not in self._readers:
            self._readers[known] = self._reader(known)
        return self._readers[known]

    def _reader(self, keys: frozenset[int]) -> Callable[[Mapping[int, Any]], dict[str, Any]]:
        steps = [step for step in self.tensors if step[1] in keys]
        there = {name for name, *_ in steps}
        all_joins = [
            (field, join, [name for name in slots if name in there]) for field, (slots, join) in self.apart.items()
        ]
        joins = [(field, join, names) for field, join, names in all_joins if names]

        def read(arrays: Mapping[int, Any]) -> dict[str, Any]:
            values = self.absent.copy()
            for name, key, again, label in steps:
                values[name] = again(arrays[key], label)
            for field, join, names in joins:
                values[field] = join([values.pop(name) for name in names])
            return values

        return read


def _getter(*names: str) -> Callable[[Any], Iterable[Any]]:
    """The values of these attributes, of an object."""
    if len(names) < 2:  # then `attrgetter` gives no tuple
        return lambda value: [getattr(value, name) for name in names]
    return operator.attrgetter(*names)


def table_of(part: type[Part]) -> Table:
    """The table of a message, or of a map within one. It is made when it is first asked for."""
    if part._table is None:
        part._table = Table(part)
    return part._table


class Part:
    """A map within a message, or a whole one. A value that exists is valid.

    Attributes:
        grows: whether a later release may add fields, which a reader then leaves out. So it is with what comes down;
            what goes up is closed (docs/decisions/084).
    """

    grows: ClassVar[bool] = False
    _table: ClassVar[Table | None] = None

    def __init_subclass__(cls, *, grows: bool = False) -> None:
        cls.grows, cls._table = grows, None

    def __post_init__(self) -> None:
        for name, fits, default, slot in table_of(type(self)).checks:
            value = getattr(self, name)
            if value is not default and not fits(value) and not slot.is_absent(value):
                expected = f"{slot.kind.expected} or none" if slot.optional else slot.kind.expected
                raise WireError(slot.label, expected=expected, got=slot.kind.got(value))
        self.check_together()

    def check_together(self) -> None:
        """Check what the fields must be beside each other.

        Raises:
            WireError: when they are not.
        """


class Message(Part):
    """A message: a map that says under key 0 which message it is, and under key 1 the version of the wire.

    Attributes:
        number, wire_version: what stands there.
        by_number: all messages.
    """

    number: ClassVar[int]
    wire_version: ClassVar[int] = WIRE_VERSION
    by_number: ClassVar[dict[int, type[Message]]] = {}

    def __init_subclass__(cls, *, number: int, grows: bool = False) -> None:
        super().__init_subclass__(grows=grows)
        cls.number = number
        Message.by_number[number] = cls


Made = TypeVar("Made", bound=Part)


def read_map(part: type[Made], raw: Mapping[Any, Any], **beside: Any) -> Made:
    """The value in a decoded map; `beside` are fields that do not stand in the map.

    Raises:
        WireError: when the map is none of this table.
    """
    table, values = table_of(part), beside
    for name, key, types, read, slot in table.reading:
        if key in raw:
            value = raw[key]
            if type(value) not in types:
                raise WireError(slot.label, expected=slot.kind.what, got=type(value).__name__)
            values[name] = made = value if read is None else read(value, slot.label)
            if slot.optional and slot.is_absent(made):  # then it is left out
                raise WireError(slot.label, expected=slot.kind.expected, got=slot.kind.got(made))
        elif not slot.optional:
            raise WireError(slot.label, expected=slot.kind.what, got="nothing")
    whole = part(**(table.joined(values) if table.apart else values))
    known, grows = table.known, part.grows
    for key in raw:
        if type(key) is not int or (key not in known and not (grows and 0 <= key <= MAX_UINT)):
            raise WireError("message", expected="no further fields", got=f"field {str(key)[:40]}")
    return whole


def write_map(part: Part, encoding: str) -> dict[int, Any]:
    """The map of a value, for CBOR. `encoding` is that of its tensors."""
    table = table_of(type(part))
    body: dict[int, Any] = dict(zip(table.plain_keys, table.plain(part), strict=True))
    for name, key, write, default, slot in table.writing:
        value = getattr(part, name)
        if value is not default and not slot.is_absent(value):
            body[key] = value if write is None else write(value, encoding)
    for field, split, writers in table.writing_apart:
        for (key, write), value in zip(writers, split(getattr(part, field)), strict=False):
            body[key] = value if write is None else write(value, encoding)
    return body
