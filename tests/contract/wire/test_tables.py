"""A field of a message is said twice: in a line of Python, and in a line of `messages.cddl`. They say the same."""

from __future__ import annotations

import itertools
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import cbor2
import pytest
from cddl_verifier import Validator, schema_diagnostics
from contract_samples import ENCODINGS, readable_messages

from protofleet import contract
from protofleet.contract.errors import WireError
from protofleet.contract.wire import tensors
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration, CalibrationReport
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.fields import (
    MAX_FLOAT,
    Fraction,
    Key,
    Kind,
    Limits,
    Message,
    Part,
    Positive,
    Run,
    read_map,
    table_of,
    write_map,
)
from protofleet.contract.wire.messages import Announcement, HelperTerms, Mark, Offer, Receipt, Rival
from tests.contract.wire.test_cddl import CDDL, RULES, TYPES
from tests.contract.wire.test_hostile import VALID

WITHIN: list[type[Part]] = [HelperTerms, Mark, Offer, Rival, AnnouncedCalibration, CalibrationReport]
PARTS: list[type[Part]] = [*Message.by_number.values(), *WITHIN]
ARRAYS = {
    id(tensors.CLASS_NUMBERS): ["class-numbers"],
    id(tensors.RISING_CLASSES): ["class-numbers"],
    id(tensors.COUNTS): ["class-counts"],
    id(tensors.ROWS): ["class-rows"],
    id(tensors.TRIANGLE): ["triangle"],
    id(tensors.FACTOR): ["factor"],
    id(tensors.WORDS): ["share", "sum-words"],
}
BYTES_OF_A_CHARACTER = 4  # in UTF-8, at most: `.size` counts bytes, and ours counts characters


def rule_of(part: type[Part]) -> str:
    return re.sub(r"(?<=.)([A-Z])", r"-\1", part.__name__).lower()


NAMED = {*map(rule_of, PARTS), *itertools.chain(*ARRAYS.values())}  # rules that a field may name, and that end there


def lines_of(part: type[Part], cddl: str) -> dict[int, tuple[str, bool, str]]:
    """By key: the name of the field, whether it may be left out, and the text of its type."""
    inside = re.search(rf"^{rule_of(part)} = {{\n(.*?)^}}", cddl, re.MULTILINE | re.DOTALL)
    assert inside is not None, f"no rule {rule_of(part)}"
    found, is_group = {}, False
    for line in inside[1].splitlines():
        if match := re.fullmatch(r" +(\? )?(\d+): (.*?),? *(?:; ([a-z0-9_.]+)(?:: .*)?)?", line):
            found[int(match[2])] = match[4] or "", bool(match[1]) or is_group, match[3]
        else:
            assert line.strip().startswith(("? (", ")", "* u32 => any")), line
            is_group = line.strip() == "? ("
    return found


def in_cddl(text: str) -> Any:
    """What a type in the file allows, as one of the forms of `in_python`."""
    text = " ".join(re.sub(r";[^\n]*", "", text).split())
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        return "integer", int(match[1]), int(match[2])
    if match := re.fullmatch(r"(uint|bstr|tstr) \.size (?:(\d+)|\((\d+)\.\.(\d+)\))", text):
        low, high = int(match[2] or match[3]), int(match[2] or match[4])
        return ("integer", 0, 256**high - 1) if match[1] == "uint" else (match[1], low, high)
    if match := re.fullmatch(r"\{ (\d+)\*(\d+) (\S+) => (.*) \}", text):
        return "map", int(match[1]), int(match[2]), in_cddl(match[3]), in_cddl(match[4])
    if match := re.fullmatch(r"\[ ?(\d+)\*(\d+) (.*?) ?\]", text):
        return "list", int(match[1]), int(match[2]), in_cddl(match[3])
    names = text.split(" / ")
    if all(name in RULES and _meaning(name).isdigit() for name in names):
        return "one of", [(name, int(_meaning(name))) for name in names]
    return in_cddl(_meaning(text)) if text in RULES and text not in NAMED else text


def _meaning(rule: str) -> str:
    return RULES[rule].type.serialize().strip()


def in_python(kind: Kind) -> list[Any]:
    """The forms in which the file may say what this allows."""
    if id(kind) in ARRAYS:
        return ARRAYS[id(kind)]
    low, high = (kind.limits.low, kind.limits.high) if kind.limits else (0, MAX_FLOAT)
    names = [name for name in kind.within if isinstance(name, str)]
    parts = [part for part in kind.within if isinstance(part, type)]
    kinds = [table_of(part).slots[0].kind for part in parts if kind.limits] + [
        k for k in kind.within if isinstance(k, Kind)
    ]
    inner = [*map(in_python, kinds), *([rule_of(part)] for part in parts)]
    if names:
        return [("one of", names)]
    if dict in kind.cbor and kind.limits is None:
        return inner[0]
    if dict in kind.cbor or list in kind.cbor:
        return [("map" if dict in kind.cbor else "list", low, high, *each) for each in itertools.product(*inner)]
    if str in kind.cbor:
        return [("tstr", low, high * BYTES_OF_A_CHARACTER)]
    if bytes in kind.cbor:
        return [("bstr", low, high)] if high < MAX_FLOAT else ["bstr", "bstr .cbor plain"]
    return {bool: ["bool"], float: ["float", "float / int"], int: [("integer", low, high)]}[kind.cbor[0]]


def agree(text: str, kind: Kind) -> bool:
    said, forms = in_cddl(text), in_python(kind)
    if said[0] == "one of" == forms[0][0]:  # `phase-open = 0` is the first of the names, `open`
        pairs = itertools.zip_longest(said[1], enumerate(forms[0][1]), fillvalue=("", ""))
        return all(name.endswith(f"-{ours}") and number == at for (name, number), (at, ours) in pairs)
    return said in forms


def differences(part: type[Part], cddl: str) -> list[str]:
    """What the file says otherwise than the table."""
    lines, slots = lines_of(part, cddl), {slot.key: slot for slot in table_of(part).slots if slot.key is not None}
    found = []
    if issubclass(part, Message):
        found += [] if lines.pop(0, None) == ("", False, str(part.number)) else ["number"]
        found += [] if lines.pop(1, None) == ("", False, str(part.wire_version)) else ["version"]
    found += [f"key {key} is in one of them" for key in lines.keys() ^ slots.keys()]
    for key in lines.keys() & slots.keys():
        (name, optional, text), slot = lines[key], slots[key]
        if (name, optional) != (slot.name, slot.optional) or not agree(text, slot.kind):
            found.append(f"{slot.label}: {lines[key]}, {in_python(slot.kind)}")
    grows = re.search(rf"^{rule_of(part)} = {{\n[^}}]*^  \* u32 => any", cddl, re.MULTILINE) is not None
    return found + ([] if grows == part.grows else ["grows"])


@pytest.mark.parametrize("part", PARTS, ids=rule_of)
def test_each_field_is_the_same_in_python_and_in_the_file(part: type[Part]) -> None:
    assert differences(part, CDDL) == []


def test_every_map_of_the_file_has_a_table() -> None:
    assert set(re.findall(r"^([a-z-]+) = {$", CDDL, re.MULTILINE)) == set(map(rule_of, PARTS))
    assert sorted(Message.by_number) == list(range(1, 14))


@pytest.mark.parametrize(
    ("part", "old", "new"),
    [
        (Announcement, "  ? 22: positive, ", "  ? 23: positive, "),
        (Announcement, "  ? 22: positive, ", "  ? 22: u32, "),
        (Announcement, "  ? 22: positive, ", "  22: positive, "),
        (Announcement, "; max_samples", "; most_samples"),
        (Announcement, "  12: positive, ", "  12: 2..4294967295, "),
        (Announcement, "13: 1024..", "13: 1025.."),
        (Announcement, "  7: float, ", "  7: u32, "),
        (Announcement, "? 14: bundle-hashes", "? 14: list-digests"),
        (Announcement, "  4: phase, ", "  4: encoding, "),
        (Announcement, "  ? 17: offer, ", "  ? 17: helper-terms, "),
        (Announcement, "  0: 1,", "  0: 2,"),
        (HelperTerms, "  2: 1..62, ", "  2: 1..63, "),
        (Receipt, "tstr .size (1..800)", "tstr .size (0..800)"),
        (Receipt, "  ? 9: positive, ", "  ? 9: bstr .size 8, "),
        (Receipt, "  * u32 => any", "  * 13..14 => any"),
        (Message.by_number[3], "  ? 9: triangle, ", "  ? 9: class-rows, "),
        (Message.by_number[3], "    18: seed-bytes ", "    18: sha256 "),
        (Message.by_number[6], "{ 0*32 entry-name => float", "{ 0*33 entry-name => float"),
        (Message.by_number[6], "{ 1*4 key-id => mark }", "{ 1*4 run => mark }"),
        (Message.by_number[6], "  ? 10: rival,", "  ? 10: mark,"),
    ],
)
def test_a_line_that_says_otherwise_is_found(part: type[Part], old: str, new: str) -> None:
    assert old in CDDL
    try:
        found = differences(part, CDDL.replace(old, new))
    except AssertionError:
        return
    assert found


@dataclass(frozen=True)
class Grown(Part, grows=True):
    """As a later release might have it: an offer with a field more."""

    run: Annotated[Run, Key(0)]
    pause_s: Annotated[Positive, Key(1, optional=True)] = 0


@dataclass(frozen=True)
class Grows(Part, grows=True):
    run: Annotated[Run, Key(0)]


@dataclass(frozen=True)
class Closed(Part):
    run: Annotated[Run, Key(0)]


def test_all_that_a_field_needs_is_its_line() -> None:
    assert write_map(Grown(b"run1"), "f32") == {0: b"run1"}
    assert write_map(Grown(b"run1", 30), "f32") == {0: b"run1", 1: 30}
    assert read_map(Grown, {0: b"run1", 1: 30}) == Grown(b"run1", 30)
    assert read_map(Grown, {0: b"run1"}) == Grown(b"run1")
    assert read_map(Grows, {0: b"run1", 1: 30}) == Grows(b"run1")
    with pytest.raises(WireError, match="no further fields, got field 1"):
        read_map(Closed, {0: b"run1", 1: 30})
    with pytest.raises(WireError, match=r"grown pause_s \(field 1\), expected 1 to 4294967295 or none, got -1"):
        Grown(b"run1", -1)
    with pytest.raises(WireError, match=r"grown pause_s \(field 1\), expected an unsigned integer, got str"):
        read_map(Grown, {0: b"run1", 1: "30"})
    with pytest.raises(WireError, match=r"grown run \(field 0\), expected bytes, got nothing"):
        read_map(Grown, {1: 30})


@dataclass(frozen=True)
class Bounded(Part, grows=True):
    share: Annotated[Fraction, Key(0)]
    names: Annotated[tuple[Annotated[str, Limits(1, 3)], ...], Limits(1, 2), Key(1)]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ({0: 0.0}, "above 0, up to 1, got 0.0"),
        ({0: 1.1}, "above 0, up to 1, got 1.1"),
        ({0: float("nan")}, "above 0, up to 1, got nan"),
        ({0: True}, "a float, got bool"),
        ({1: ["a", "a"]}, "1 to 2 different ones of 1 to 3 characters"),
        ({1: ["a", "b", "c"]}, "1 to 2 different ones"),
        ({1: [""]}, "1 to 2 different ones"),
        ({1: ["abcd"]}, "1 to 2 different ones"),
        ({1: []}, "1 to 2 different ones"),
        ({-1: 0}, "no further fields, got field -1"),
        ({2**32: 0}, "no further fields, got field 4294967296"),
    ],
)
def test_a_value_just_beyond_its_bounds_is_refused(raw: dict[int, object], expected: str) -> None:
    least = {0: 5e-324, 1: ["a"]}
    assert read_map(Bounded, least) == Bounded(5e-324, ("a",))
    assert read_map(Bounded, {0: 1.0, 1: ["a", "abc"], 2: 0, 2**32 - 1: 0}) == Bounded(1.0, ("a", "abc"))
    with pytest.raises(WireError, match=expected):
        read_map(Bounded, least | raw)


@dataclass(frozen=True)
class Entry(Part):
    run: Annotated[Run, Key(None)]
    number: Annotated[Positive, Key(0)]


@dataclass(frozen=True)
class Entries(Part):
    entries: Annotated[tuple[Entry, ...], Limits(0, 2), Key(0)]


def test_entries_under_keys_are_in_rising_order_each_once() -> None:
    one, two = Entry(b"run1", 1), Entry(b"run2", 2)
    assert read_map(Entries, write_map(Entries((one, two)), "f32")) == Entries((one, two))
    for entries in ((two, one), (one, one), (one, two, Entry(b"run3", 3))):
        with pytest.raises(WireError, match="expected 0 to 2, in rising order"):
            Entries(entries)


@pytest.mark.parametrize(("key", "default"), [(14, []), (15, b""), (19, 0), (21, 0), (22, 0), (24, b"")])
def test_an_optional_field_is_left_out_or_within_its_limits(key: int, default: object) -> None:
    plain = cbor2.loads(encode(Announcement(b"run1", 1, "open", "ncm", bytes(32))))
    assert key not in plain
    with pytest.raises(WireError, match=rf"\(field {key}\), expected .*, got 0"):
        decode(cbor2.dumps(plain | {key: default}, canonical=True))


def test_the_order_in_which_a_sender_has_its_keys_costs_no_memory() -> None:
    whole = cbor2.loads(encode(readable_messages()["contribution-gram"]))
    table = table_of(Message.by_number[3])
    decode(cbor2.dumps(whole))
    before = len(table._readers)
    for order in itertools.islice(itertools.permutations(whole), 0, 3_000, 100):
        decode(cbor2.dumps({key: whole[key] for key in order}))
    assert len(table._readers) == before


def test_the_file_with_a_name_for_each_key_says_the_same() -> None:
    """For code generators that call a field by the rule of its key, as zcbor."""
    wire = Path(contract.__file__).parent / "wire" / "messages.cddl"
    script = Path(__file__).parents[3] / "scripts" / "name-cddl-keys"
    named = subprocess.run([script, wire], capture_output=True, text=True, check=True).stdout
    assert not list(schema_diagnostics(named))
    assert "  ? announcement-max-samples => positive," in named
    assert "\nannouncement-max-samples = 22\n" in named
    whole = Validator(named)
    for payload in VALID[:: len(ENCODINGS)]:
        assert whole.validate(payload, root_type=TYPES[cbor2.loads(payload)[0]]).valid
    assert not whole.validate(cbor2.dumps(cbor2.loads(VALID[0]) | {6: b""}), root_type="announcement").valid
