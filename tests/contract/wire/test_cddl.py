"""`messages.cddl` is what is sent, and it has no room for weights, gradients or samples.

Real messages are checked against the file by an independent CDDL implementation (cddl-verifier), and the uplink policy
is proven on the file's syntax tree (cddlparser): from `message`, every rule that can be reached is walked, and wherever
numbers or bytes of no fixed small size could stand, the place must be one of those listed here.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import cbor2
import cddlparser
import pytest
from cddl_verifier import Validator, schema_diagnostics
from cddlparser import ast
from cddlparser.tokens import Tokens
from contract_samples import ENCODINGS, messages, readable_messages
from hypothesis import given, settings

from protofleet import contract
from protofleet.contract.errors import WireError
from protofleet.contract.wire.codec import decode, encode
from protofleet.contract.wire.messages import Signed
from tests.contract.wire.test_hostile import VALID, mutate

CDDL = (Path(contract.__file__).parent / "wire" / "messages.cddl").read_text()
VALIDATOR = Validator(CDDL)
RULES = {rule.name.name: rule for rule in cddlparser.parse(CDDL).rules}
TYPES = {int(n): name for name, n in re.findall(r"^([a-z-]+) = {\n  0: (\d+),\n  1: 2,\n", CDDL, re.MULTILINE)}


def fits(payload: bytes, root: str | None = None) -> bool:
    """Whether the file takes it. What names a message's type can be taken by the rule of that type alone: no other is
    asked; what names none is held against all of them, unless `root` says which."""
    named = cbor2.loads(payload).get(0)
    root = TYPES.get(named, root) if type(named) is int else root
    return VALIDATOR.validate(payload, root_type=root or "message").valid


# ── it is what is sent ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_file_is_valid_cddl_with_every_rule_in_use():
    assert not list(schema_diagnostics(CDDL))
    assert VALIDATOR.default_root_type == "message"
    assert reachable("message") == set(RULES)


def test_each_message_demands_a_number_of_its_own_in_its_first_field():
    assert list(TYPES) == list(range(1, 14))
    assert set(TYPES.values()) == set(alternatives("message"))


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=60, deadline=None)
@given(message=messages)
def test_every_message_in_every_encoding_is_what_the_file_says(encoding, message):
    assert fits(encode(message, encoding))


def test_the_golden_messages_of_each_type_are_what_the_file_says():
    first: dict[int, bytes] = {}
    for payload in VALID:
        assert fits(payload)
        first.setdefault(cbor2.loads(payload)[0], payload)
    for number, payload in first.items():  # one of each against every rule: all demand the number of their own
        matching = [name for name in alternatives("message") if VALIDATOR.validate(payload, root_type=name).valid]
        assert matching == [TYPES[number]]
    assert {TYPES[number] for number in first} == set(alternatives("message"))


OPTIONAL = {
    ("announcement-bundles", 14),
    ("announcement-extractor", 15),
    ("contribution-gram", 9),
    ("contribution-gram", 13),
    ("contribution-groups", 13),
    ("receipt-rejected", 8),
    ("receipt-late", 9),
    ("receipt-left-out", 10),
    ("receipt-left-out", 11),
    ("announcement-standing", 15),
    ("contribution-standing", 13),
    ("contribution-standing", 15),
    ("contribution-gateway", 9),
    ("contribution-gateway", 13),
    ("contribution-gateway", 15),
    ("contribution-gateway", 19),
    ("contribution-withdrawn", 13),
    ("contribution-withdrawn", 15),
    ("announcement-class-lists", 15),
    ("announcement-class-lists", 16),
    ("announcement-withheld", 15),
    ("announcement-withheld", 18),
    ("announcement-issued", 19),
    ("announcement-helper", 15),
    ("announcement-helper", 20),
    ("contribution-share", 13),
    ("contribution-class-list", 13),
    ("contribution-class-list", 16),
    ("contribution-soft", 10),
    ("contribution-noised", 10),
    ("contribution-noised", 9),
    ("contribution-noised", 13),
    ("announcement-offer", 17),
    ("announcement-offer-fleet", 17),
    ("announcement-epoch", 21),
    ("announcement-max-samples", 22),
    ("announcement-calibration", 26),
    ("announcement-factors", 15),
    ("announcement-factors", 27),
    ("announcement-proposals", 28),
    ("contribution-factor", 13),
    ("contribution-factor", 20),
    ("contribution-factor", 21),
    ("status-issued", 8),
    ("announcement-proof", 19),
    ("announcement-proof", 24),
    ("status-heard", 8),
    ("status-rival", 10),
    ("status-calibration", 11),
    ("status-proposed", 12),
    ("status-heard", 9),
}


CLOSED_TYPES = (3, 4, 6, 7, 9, 10, 11, 12, 13)


def wrong_structures() -> Iterator[tuple[str, dict, str]]:
    """What it is called, itself, and the rule that must refuse it where it names no type: for one message of each type
    any rule, for its variants that type's."""
    seen: set[int] = set()
    for name, message in readable_messages().items():
        whole = cbor2.loads(encode(message))
        root = TYPES[whole[0]] if whole[0] in seen else "message"
        seen.add(whole[0])
        yield from ((called, structure, root) for called, structure in _departures(name, whole))


def _departures(name: str, whole: dict) -> Iterator[tuple[str, dict]]:
    for key, value in whole.items():
        if (name, key) not in OPTIONAL:
            yield f"{name} without {key}", {k: v for k, v in whole.items() if k != key}
        wrong = "text" if not isinstance(value, str) else 7
        yield f"{name} with {key} of another type", whole | {key: wrong}
        yield f"{name} with {key} null", whole | {key: None}
        if isinstance(value, bytes) and len(value) in (4, 8, 32):
            yield f"{name} with {key} one byte longer", whole | {key: value + b"x"}
        if isinstance(value, int) and not isinstance(value, bool):
            yield f"{name} with {key} negative", whole | {key: -1}
    if whole[0] in CLOSED_TYPES:
        yield f"{name} with a field more", whole | {99: 1}
        yield f"{name} with weights", whole | {99: cbor2.CBORTag(85, bytes(400))}
    else:
        yield f"{name} with a text for a key", whole | {"x": 1}
        yield f"{name} with a negative key", whole | {-1: 1}
        yield f"{name} with a key of 33 bits", whole | {1 << 32: 1}
    yield f"{name} of version 1", whole | {1: 1}
    yield f"{name} of version 3", whole | {1: 3}
    yield f"{name} of no type", whole | {0: 0}


@pytest.mark.parametrize(("structure", "root"), [pytest.param(*given, id=name) for name, *given in wrong_structures()])
def test_a_structure_that_departs_from_the_file_is_refused_by_it_and_by_the_decoder(structure, root):
    payload = cbor2.dumps(structure, canonical=True)
    assert not fits(payload, root)
    with pytest.raises(WireError):
        decode(payload)


ADDITIONS = {41: 1, 42: "text", 43: [1.5, None, {"a": b"b"}], 2**32 - 1: cbor2.CBORTag(85, bytes(8))}


@pytest.mark.parametrize("name", readable_messages())
def test_what_comes_down_may_gain_fields_and_what_goes_up_may_not(name):
    """A 0.2 device reads what a later aggregator writes; the frozen grammar allows it; the uplink gains nothing."""
    message = readable_messages()[name]
    plain = encode(message, "f64")
    more = cbor2.dumps(cbor2.loads(plain) | ADDITIONS, canonical=True)
    assert fits(more) is (cbor2.loads(plain)[0] not in CLOSED_TYPES)
    if fits(more):
        assert encode(decode(more), "f64") == plain
    else:
        with pytest.raises(WireError, match="no further fields"):
            decode(more)


def test_what_the_decoder_accepts_the_file_accepts():
    rng, accepted = random.Random(5), 0
    while accepted < 300:
        payload = mutate(rng.choice(VALID), rng)
        try:
            message = decode(payload)
            if isinstance(message, Signed):  # what is inside is decoded once the signature holds
                decode(message.payload)
        except WireError:
            continue
        accepted += 1
        if not fits(payload):  # a sender may write a number longer than it need be; what it means must still fit
            assert fits(encode(message, "f64")), payload.hex()


# ── what cannot be said cannot be sent ──────────────────────────────────────────────────────────────────────────────

# Only what a device sends is held to this: what the aggregator sends down may gain fields.
# Where numbers may stand in quantity, and in which messages: a row for each class, a count for each class, the numbers
# of those classes, one triangle. A slice is a piece of an encoded contribution, and is hashed and decoded as one.
BULK = {
    # at most 256 of 32 and 8 bytes, and each class's number once; the aggregator sends them
    "announcement": {"bundle-hashes", "list-digests", "class-numbers"},
    "global-part": {"class-numbers", "class-rows"},
    "contribution": {"class-numbers", "class-counts", "class-rows", "triangle", "factor", "share"},
    "chunk": {"contribution-slice"},
    "receipt": set(),
    "status": set(),
    "request": set(),
    "piece": {"bundle-slice"},  # the aggregator sends it
    "enrolment": set(),
    "signed": {"plain"},  # any of the others
    "opening": set(),  # of at most 1,024 devices
    "opened": {"sum-words"},  # the helper sends it to the aggregator
    "sealed-seed": set(),
}
DOWNLINK = {"announcement", "announced-calibration", "helper-terms", "offer", "global-part", "receipt", "piece"}
SMALL_BYTES = 8192  # a receipt's bitmap of missing chunks, sent by the aggregator to one device
SMALL_TEXT = 800
SMALL_ENTRIES = 32
ENTRIES = {"opening": 1024, "opened": 64}  # between aggregator and helper


def names_in(node: ast.CDDLNode) -> Iterator[str]:
    if isinstance(node, ast.Typename):
        yield node.name
    for child in node.getChildren():
        yield from names_in(child)


def reachable(root: str) -> set[str]:
    seen, left = set(), [root]
    while left:
        name = left.pop()
        if name in RULES and name not in seen:
            seen.add(name)
            left += list(names_in(RULES[name].type))
    return seen


def is_addition(node: ast.CDDLNode) -> bool:
    """`* u32 => any`: what a later release may add to a message that comes down. A key that the message has comes first
    (RFC 8610, section 3.5.4: a colon cuts)."""
    words = re.sub(r";[^\n]*", "", node.serialize()).replace(",", " ").split()
    return isinstance(node, ast.GroupEntry) and words == ["*", "u32", "=>", "any"]


def alternatives(rule: str) -> list[str]:
    names = [alternative.name for alternative in RULES[rule].type.types]
    return [inner for name in names for inner in (alternatives(name) if name == "plain" else [name])]


def largest(control: ast.Operator) -> int:
    """The upper bound of a `.size`."""
    assert control.name.literal == "size", control.name.literal
    bound = control.controller
    while not isinstance(bound, ast.Value):
        bound = bound.max if isinstance(bound, ast.Range) else bound.getChildren()[0]
    return int(bound.value)


def bulk_of(node: ast.CDDLNode, rule: str, rules: dict[str, ast.Rule] = RULES) -> set[str]:
    """The rules under `node` in which an unbounded amount of data can stand; anything else unbounded fails here."""
    if isinstance(node, ast.Operator):
        target = node.type.name
        if node.name.literal == "cbor":
            assert target == "bstr", target
            assert set(names_in(rules[node.controller.name].type)) <= set(BULK) - {"signed"}, rule
            return {node.controller.name}
        assert target in ("uint", "bstr", "tstr"), target
        assert largest(node) <= {"uint": 4, "bstr": SMALL_BYTES, "tstr": SMALL_TEXT}[target], rule
        return set()
    if rule in DOWNLINK and is_addition(node):
        return set()
    if isinstance(node, ast.GroupEntry) and node.occurrence is not None:
        optional = any(token.type == Tokens.QUEST for token in node.occurrence.tokens)
        assert optional or node.occurrence.m <= ENTRIES.get(rule, SMALL_ENTRIES), f"{rule}: entries without end"
    if isinstance(node, ast.Tag | ast.Array):
        return {rule}  # a typed array, or an array of them
    if isinstance(node, ast.Typename):
        if node.name in rules:
            inside = bulk_of(rules[node.name].type, node.name, rules)
            return {node.name} if inside and node.name in set.union(*BULK.values()) else inside
        if node.name in ("bstr", "bytes", "tstr", "text", "any"):
            return {rule}
        assert node.name in ("uint", "int", "bool", "float"), f"{rule}: {node.name}"
        return set()
    found: set[str] = set()
    for child in node.getChildren():
        found |= bulk_of(child, rule, rules)
    return found


def test_the_thirteen_messages_are_all_there_are():
    assert set(alternatives("message")) == set(BULK)


@pytest.mark.parametrize("message", BULK)
def test_no_message_has_room_for_weights_gradients_or_samples(message):
    assert bulk_of(RULES[message].type, message) == BULK[message]


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        ("status", "3: bstr .size 8,                           ; instance: of the process\n", "3: bstr,\n"),
        ("status", "4: u32,                                    ; boot: counter", "4: u32, * u32 => any,"),
        ("chunk", "9: contribution-slice", "9: contribution-slice, * u32 => any"),
        ("contribution", "? 9: triangle,", "* u32 => any,"),
        ("status", "{ 0*32 entry-name => float / int }", "{ * tstr => float }"),
        ("receipt", "7: bstr .size (0..8192),", "7: any,"),
        ("request", "3: bstr .size 8,                           ; bundle: first", "3: bstr, ; bundle: first"),
        ("signed", "3: bstr .cbor plain,", "3: bstr,"),
        ("signed", "piece / enrolment", "piece / enrolment / signed"),
        ("signed", "4: bstr .size 64                           ; signature", "4: bstr ; signature"),
        ("enrolment", "2: bstr .size 32,                          ; key: the device", "2: bstr, ; key: the device"),
        ("contribution", "18: seed-bytes ", "18: bstr "),
        ("sealed-seed", "9: bstr .size 80", "9: bstr"),
        ("opening", "{ 1*1024 device-name", "{ * device-name"),
        (
            "request",
            "5: positive                                ; wanted_bytes",
            "5: positive, * u32 => any ; wanted_bytes",
        ),
        ("announcement", "9: u32, ", "9: real-array, "),
        ("announcement", "? 14: bundle-hashes,", "? 14: class-rows,"),
        ("contribution", "? 12: class-rows,", "? 12: [* real-array],"),
    ],
)
def test_the_proof_would_notice_a_message_that_gained_room(rule, old, new):
    assert old in CDDL
    changed = {r.name.name: r for r in cddlparser.parse(CDDL.replace(old, new)).rules}
    try:
        found = bulk_of(changed[rule].type, rule, changed)
    except AssertionError:
        return
    assert found != BULK[rule]


def test_class_rows_and_triangles_hold_floats_and_scaled_integers_alone():
    tags = {
        rule: {tag for node in walk(RULES[rule].type) if isinstance(node, ast.Tag) for tag in [tag_number(node)]}
        for rule in ("class-numbers", "class-counts", "class-rows", "triangle", "factor", "real-array")
    }
    assert tags == {
        "class-numbers": {64, 69},
        "class-counts": {64, 69, 70},
        "class-rows": {40, 72, 78},
        "triangle": {72, 78},
        "factor": {40, 77},
        "real-array": {79, 84, 85, 86},  # int64: sums of a gateway
    }


def walk(node: ast.CDDLNode) -> Iterator[ast.CDDLNode]:
    yield node
    for child in node.getChildren():
        yield from walk(child)


def tag_number(node: ast.Tag) -> int:
    return int(
        str(node.numericPart.literal if hasattr(node.numericPart, "literal") else node.numericPart).split(".")[-1]
    )
