"""Messages, statistics and bundles that the contract's tests draw from: by hypothesis, or fixed and readable."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from protofleet.contract.bundle.bundle_file import SCHEMA, Manifest, StateTensor
from protofleet.contract.identity.signatures import Signer, enrolment_of
from protofleet.contract.methods import method
from protofleet.contract.privacy.blinding import share_digest
from protofleet.contract.sums.statistics import MAX_FIELDS
from protofleet.contract.wire.calibration_messages import AnnouncedCalibration, CalibrationReport
from protofleet.contract.wire.codec import encode
from protofleet.contract.wire.messages import (
    MAX_KIND,
    Announcement,
    Chunk,
    ClassRows,
    Contribution,
    Enrolment,
    GlobalPart,
    HelperTerms,
    Mark,
    Message,
    Offer,
    Opened,
    Opening,
    Piece,
    Receipt,
    Request,
    Rival,
    SealedSeed,
    Signed,
    Status,
)

ENCODINGS = ("f64", "f32", "f16", "int8", "int32")
U32 = st.integers(1, 2**32 - 1)
SIGNER = Signer(bytes(range(32)))
RUN = st.binary(min_size=4, max_size=4)
_SURPRISE = np.arange(115, dtype="<u2").tobytes()
_COUNTS = np.array([30, *[0] * 19, *[3] * 10, *[2] * 10, *[1_500] * 10], "<u4").tobytes()
METHOD = st.text(min_size=1, max_size=32)


def floats(limit: float = 1e3, width: int = 64) -> st.SearchStrategy[float]:
    """Finite numbers up to `limit` that every tensor encoding can hold."""
    return st.floats(-limit, limit, allow_nan=False, allow_infinity=False, width=width, allow_subnormal=False)


@st.composite
def class_rows(draw: st.DrawFn, width: int | None = None) -> ClassRows:
    classes = sorted(draw(st.sets(st.integers(0, 65_535), max_size=6)))
    width = draw(st.integers(1, 7)) if width is None else width
    rows = draw(hnp.arrays(np.float64, (len(classes), width), elements=floats()))
    return ClassRows(np.array(classes, dtype=np.uint16), rows)


@st.composite
def contributions(draw: st.DrawFn) -> Contribution:
    width = draw(st.integers(1, 6))
    body = draw(class_rows(width))
    counts = draw(hnp.arrays(np.uint64, len(body.classes), elements=st.integers(1, 2**32 - 1)))
    triangle = draw(st.none() | hnp.arrays(np.float64, width * (width + 1) // 2, elements=floats()))
    factor, bits = None, 0
    if triangle is None:
        drawn = hnp.arrays(np.int16, (draw(st.integers(0, width)), width))
        factor = draw(st.none() | drawn)
        bits = 0 if factor is None else draw(st.integers(0, 20))
    widths = draw(st.lists(st.integers(1, 6), max_size=MAX_FIELDS - 1))
    further = tuple(draw(hnp.arrays(np.float64, (len(body.classes), w), elements=floats())) for w in widths)
    extractor = draw(st.just(b"") | RUN)
    standing = draw(st.sampled_from([None, "present"]))
    class_list = draw(st.just(b"") | RUN)
    form = {"factor": factor, "factor_bits": bits, "class_list": class_list}
    own = draw(RUN), draw(U32), draw(METHOD), draw(RUN)
    return Contribution(*own, body, counts, triangle, further, extractor, standing, **form)


@st.composite
def chunks(draw: st.DrawFn) -> Chunk:
    count = draw(st.integers(1, 65_535))
    data = draw(st.binary(min_size=1, max_size=200))
    total = draw(st.integers(len(data), 2**32))
    digest = draw(st.binary(min_size=8, max_size=8))
    return Chunk(draw(RUN), draw(U32), draw(METHOD), draw(st.integers(0, count - 1)), count, total, digest, data)


@st.composite
def global_parts(draw: st.DrawFn) -> GlobalPart:
    parts = draw(st.integers(1, 65_535))
    kind = draw(st.text(min_size=1, max_size=MAX_KIND))
    part = draw(st.integers(0, parts - 1))
    return GlobalPart(draw(RUN), draw(U32), draw(U32), part, parts, kind, draw(class_rows()))


offers = st.builds(
    Offer,
    sha256=st.binary(min_size=32, max_size=32),
    version=U32,
    size_bytes=st.integers(1, 1 << 31),
    fraction=st.floats(0, 1, exclude_min=True),
    fleet=st.just("") | st.from_regex(r"[a-z0-9][a-z0-9-]{0,63}", fullmatch=True),
)
temperatures = st.floats(0, 1e6, exclude_min=True)
strengths = st.floats(0, 1)
surprises = st.lists(st.integers(0, 20 * 1024), min_size=115, max_size=115).map(lambda n: np.array(n, "<u2").tobytes())


@st.composite
def bins(draw: st.DrawFn, photos: int | None = None) -> bytes:
    """Counts of held-out photos, as they travel."""
    total = draw(st.integers(1, 60)) if photos is None else photos
    places = [draw(st.lists(st.integers(0, width - 1), min_size=total, max_size=total)) for width in (20, 10)]
    true, answered = (np.bincount(found, minlength=width) for found, width in zip(places, (20, 10), strict=True))
    right = np.minimum(draw(st.lists(st.integers(0, 60), min_size=10, max_size=10)), answered)
    return np.concatenate([true, answered, right, 500 * answered]).astype("<u4").tobytes()


@st.composite
def calibration_reports(draw: st.DrawFn) -> CalibrationReport:
    photos = draw(st.integers(1, 60))
    counts = draw(st.just(b"") | bins(photos))
    own = draw(temperatures), draw(strengths)
    return CalibrationReport(
        draw(RUN), draw(st.integers(0, 2**32 - 1)), draw(METHOD), photos, draw(surprises), *own, counts
    )


announced_calibrations = st.builds(
    AnnouncedCalibration,
    way=st.just("") | METHOD,
    temperature=temperatures,
    strength=strengths,
    photos=st.integers(0, 2**32 - 1),
    devices=st.integers(0, 2**32 - 1),
    counts=st.just(b"") | bins(),
)
announcements = st.builds(
    Announcement,
    run=RUN,
    round=st.integers(0, 2**32 - 1),
    phase=st.sampled_from(["open", "closed", "finished", "standing"]),
    method=METHOD,
    bundle=st.binary(min_size=32, max_size=32).filter(lambda sha256: sha256[0] < 255),
    others=st.sets(st.binary(min_size=31, max_size=31), max_size=4).map(
        lambda found: tuple(b"\xff" + o for o in found)
    ),
    deadline_s=st.floats(0, 1e9),
    fraction=st.floats(0, 1, exclude_min=True),
    seed=st.integers(0, 2**32 - 1),
    global_version=st.integers(0, 2**32 - 1),
    encoding=st.sampled_from(ENCODINGS),
    min_samples=U32,
    limit_bytes=st.integers(1024, 1 << 28),
    extractor=st.just(b"") | st.binary(min_size=32, max_size=32),
    class_lists=st.sets(st.binary(min_size=8, max_size=8), max_size=4).map(tuple),
    offer=st.none() | offers,
    withheld=st.sets(st.integers(0, 2**16 - 1), max_size=4).map(sorted).map(tuple),
    issued=st.just(0) | st.integers(1, 2**63 - 1),
    helper=st.none()
    | st.builds(HelperTerms, st.binary(min_size=32, max_size=32), st.integers(2, 2**32 - 1), st.integers(1, 62)),
    epoch=st.integers(0, 2**32 - 1),
    max_samples=st.integers(0, 2**32 - 1),
    proof=st.just(b"") | st.binary(min_size=64, max_size=64),
    calibration=st.none() | announced_calibrations,
    factors=st.booleans(),
    proposals=st.booleans(),
)
marks = st.builds(
    Mark, st.binary(min_size=8, max_size=8), st.integers(1, 2**63 - 1), st.binary(min_size=64, max_size=64)
)
receipts = st.builds(
    Receipt,
    run=RUN,
    round=U32,
    method=METHOD,
    status=st.sampled_from(["committed", "duplicate", "late", "rejected", "need-chunks"]),
    reason=st.text(max_size=200),
    missing=st.binary(max_size=64),
    digest=st.just(b"") | st.binary(min_size=8, max_size=8),
    held=st.integers(0, 2**32 - 1),
)
statuses = st.builds(
    Status,
    online=st.booleans(),
    instance=st.binary(min_size=8, max_size=8),
    boot=st.integers(0, 2**32 - 1),
    profile=st.text(max_size=200),
    versions=st.dictionaries(st.text(min_size=1, max_size=64), st.text(max_size=64), max_size=8),
    metrics=st.dictionaries(st.text(min_size=1, max_size=64), floats(1e12), max_size=8),
    issued=st.just(0) | st.integers(1, 2**63 - 1),
    heard=st.dictionaries(st.binary(min_size=8, max_size=8), marks, max_size=4).map(
        lambda found: tuple(replace(found[key], key_id=key) for key in sorted(found))
    ),
    rival=st.none()
    | st.builds(
        Rival,
        instance=st.binary(min_size=8, max_size=8),
        age_s=st.integers(0, 2**32 - 1),
        boot=st.integers(0, 2**32 - 1),
        board=st.text(max_size=200),
    ),
    calibration=st.none() | calibration_reports(),
    proposed=st.none()
    | st.dictionaries(st.text(min_size=1, max_size=64), st.integers(1, 2**32 - 1), min_size=1, max_size=16),
)
requests = st.builds(
    Request, run=RUN, bundle=st.binary(min_size=8, max_size=8), offset=st.integers(0, 2**32 - 1), wanted_bytes=U32
)
pieces = st.builds(
    Piece,
    run=RUN,
    bundle=st.binary(min_size=8, max_size=8),
    offset=st.integers(0, (1 << 31) - 200),
    data=st.binary(min_size=1, max_size=200),
)
enrolments = st.builds(Enrolment, key=st.binary(min_size=32, max_size=32), proof=st.binary(min_size=64, max_size=64))
WORDS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9).map(lambda w: np.array(w, np.uint64))
SEED_BYTES = st.binary(min_size=1, max_size=300)
DEVICE = st.text("abcdef-0123456789", min_size=1, max_size=64)
SHA256 = st.binary(min_size=32, max_size=32)


@st.composite
def shares(draw: st.DrawFn) -> Contribution:
    nothing = ClassRows(np.zeros(0, np.uint16), np.zeros((0, 0)))
    key = (draw(RUN), draw(U32), draw(METHOD), draw(RUN))
    share, seed = draw(WORDS), draw(SEED_BYTES)
    return Contribution(*key, nothing, np.zeros(0, np.uint64), extractor=draw(RUN), share=share, seed=seed)


@st.composite
def openings(draw: st.DrawFn) -> Opening:
    part = draw(st.integers(0, 3))
    seeds = draw(st.dictionaries(DEVICE, SEED_BYTES, min_size=1, max_size=4))
    return Opening(draw(RUN), draw(U32), draw(METHOD), draw(SHA256), part, part + draw(st.integers(1, 3)), seeds)


@st.composite
def opened(draw: st.DrawFn) -> Opened:
    key = (draw(RUN), draw(U32), draw(METHOD), draw(SHA256), 0, 1)
    if draw(st.booleans()):
        return Opened(*key, "opened", draw(WORDS))
    refused = draw(st.dictionaries(DEVICE, st.text(max_size=50), max_size=4))
    return Opened(*key, "refused", np.zeros(0, np.uint64), draw(st.text(max_size=50)), refused)


sealed_seeds = st.builds(
    SealedSeed,
    run=RUN,
    round=U32,
    method=METHOD,
    words=U32,
    share=SHA256,
    least=st.integers(2, 2**32 - 1),
    terms=SHA256,
    sealed=st.binary(min_size=80, max_size=80),
)
plain_messages = st.one_of(
    announcements,
    global_parts(),
    contributions(),
    chunks(),
    receipts,
    statuses,
    requests,
    pieces,
    enrolments,
    shares(),
    openings(),
    opened(),
    sealed_seeds,
)
signed_messages = st.builds(
    Signed,
    key_id=st.binary(min_size=8, max_size=8),
    payload=st.builds(encode, plain_messages, st.sampled_from(ENCODINGS)),
    signature=st.binary(min_size=64, max_size=64),
)
messages = plain_messages | signed_messages


def readable_messages() -> dict[str, Message]:
    """One message of each type, more of some: their bytes are frozen; a person finds the numbers in a hex dump."""
    run, bundle = bytes.fromhex("c0ffee01"), bytes(range(32))
    rows = ClassRows(np.array([0, 2, 300], np.uint16), np.array([[0.5, -1.0], [1.5, 2.0], [-0.25, 8.0]]))
    counts = np.array([4, 70, 1000], np.uint64)
    means = Contribution(run, 7, "fedproto", bundle[:4], rows, counts)
    gram = Contribution(
        run, 8, "ffc", bundle[:4], rows, counts, triangle=np.array([2.0, 0.5, 3.0]), extractor=bundle[::-1][:4]
    )
    receipt = encode(Receipt(run, 7, "fedproto", "committed"))
    nothing, none = ClassRows(np.zeros(0, np.uint16), np.zeros((0, 0))), np.zeros(0, np.uint64)
    words = np.array([0, 1 << 36, 2**64 - 1], np.uint64)
    seed = SealedSeed(run, 9, "ncm", 3, share_digest(words), 10, bundle, bytes(range(80)))
    signed_seed = SIGNER.sign("pf/v2/pets/up/cam-3", encode(seed))
    groups = ClassRows(np.array([1, 1, 4], np.uint16), np.array([[0.5, -1.0], [1.5, 2.0], [-0.25, 8.0]]))
    return {
        "announcement": Announcement(
            run, 7, "open", "fedproto", bundle, deadline_s=90.0, fraction=0.25, seed=42, global_version=6, min_samples=5
        ),
        "announcement-bundles": Announcement(run, 1, "open", "fedproto", bundle, others=(bundle[::-1], bytes(32))),
        "announcement-extractor": Announcement(run, 8, "open", "ffc", bundle, encoding="f64", extractor=bundle[::-1]),
        "announcement-standing": Announcement(
            run, 0, "standing", "ncm", bundle, global_version=6, min_samples=5, extractor=bundle[::-1]
        ),
        "announcement-class-lists": Announcement(
            run, 9, "open", "ncm", bundle, extractor=bundle[::-1], class_lists=(bundle[:8], bundle[8:16])
        ),
        "announcement-offer": Announcement(
            run, 9, "closed", "ncm", bundle, offer=Offer(bundle[::-1], 7, 300_000, fraction=0.25)
        ),
        "announcement-offer-fleet": Announcement(
            run, 0, "standing", "ncm", bundle, offer=Offer(bundle[::-1], 8, 1 << 31, fraction=1.0, fleet="pets2")
        ),
        "announcement-withheld": Announcement(
            run, 0, "standing", "ncm", bundle, extractor=bundle[::-1], withheld=(0, 300)
        ),
        "announcement-issued": Announcement(run, 7, "open", "fedproto", bundle, issued=1_795_000_000_000),
        "announcement-proof": Announcement(
            run, 7, "open", "fedproto", bundle, issued=1_795_000_000_000, proof=bytes(64)
        ),
        "announcement-helper": Announcement(
            run, 7, "open", "ffc", bundle, extractor=bundle[::-1], helper=HelperTerms(bundle, 10, 36)
        ),
        "announcement-calibration": Announcement(
            run,
            7,
            "open",
            "ffc",
            bundle,
            calibration=AnnouncedCalibration("linear", 0.5, 0.75, 30, 2, _COUNTS),
        ),
        "announcement-factors": Announcement(run, 8, "open", "ffc", bundle, extractor=bundle[::-1], factors=True),
        "announcement-proposals": Announcement(run, 7, "open", "fedproto", bundle, proposals=True),
        "announcement-epoch": Announcement(run, 7, "open", "fedproto", bundle, epoch=3),
        "announcement-max-samples": Announcement(run, 7, "open", "fedproto", bundle, max_samples=1_000_000),
        "global-part": GlobalPart(run, 6, 6, 0, 2, "prototypes", rows),
        "contribution-means": means,
        "contribution-gram": gram,
        "contribution-factor": Contribution(
            run,
            8,
            "ffc",
            bundle[:4],
            rows,
            counts,
            extractor=bundle[::-1][:4],
            factor=np.array([[-16384, 256]], np.int16),
            factor_bits=14,
        ),
        "contribution-soft": Contribution(
            run, 7, "fedhkd", bundle[:4], rows, counts, further=(np.array([[0.75, 0.25], [0.5, 0.5], [0.0, 1.0]]),)
        ),
        "contribution-noised": Contribution(
            run,
            7,
            "ffc-dp",
            bundle[:4],
            rows,
            np.ones(3, np.uint64),
            triangle=np.array([-2.0, 0.5, 3.0]),
            further=(np.array([[4.5], [-1.25], [1000.0]]),),
            extractor=bundle[::-1][:4],
        ),
        "contribution-empty": Contribution(run, 7, "spherefed", bundle[:4], nothing, np.zeros(0, np.uint64)),
        "contribution-groups": Contribution(run, 7, "fedcof", bundle[:4], groups, counts, extractor=bundle[::-1][:4]),
        "contribution-standing": Contribution(
            run, 9, "ncm", bundle[:4], rows, counts, extractor=bundle[::-1][:4], standing="present"
        ),
        "contribution-gateway": Contribution(
            run,
            9,
            "ffc",
            bundle[:4],
            ClassRows(np.array([0, 2], np.uint16), np.array([[1 << 39, -(1 << 40)], [3 << 39, 1]])),
            np.array([4, 70], np.uint64),
            triangle=np.array([1 << 41, 1 << 39, 3 << 40]),
            extractor=bundle[::-1][:4],
            standing="present",
            devices=12,
        ),
        "contribution-class-list": Contribution(
            run, 9, "ncm", bundle[:4], rows, counts, extractor=bundle[::-1][:4], class_list=bundle[:4]
        ),
        "contribution-withdrawn": Contribution.withdrawal(
            run=run, round=10, method="ncm", bundle=bundle, extractor=bundle[::-1]
        ),
        "contribution-share": Contribution(
            run, 9, "ncm", bundle[:4], nothing, none, extractor=bundle[::-1][:4], share=words, seed=signed_seed
        ),
        "chunk": Chunk(run, 8, "ffc", 1, 3, 20, bytes.fromhex("0123456789abcdef"), b"slice"),
        "receipt": Receipt(run, 7, "fedproto", "committed"),
        "receipt-chunks": Receipt(run, 8, "ffc", "need-chunks", missing=bytes([0b00000110])),
        "receipt-rejected": Receipt(run, 7, "fedproto", "rejected", "no, 4 expected", digest=bytes(range(8))),
        "receipt-late": Receipt(run, 3, "ncm", "late", held=9),
        "receipt-left-out": Receipt(run, 7, "ncm", "duplicate", counts=False, why="contradicted by 7 of 9 devices"),
        "status": Status(
            True, bytes(range(8)), 3, "Raspberry Pi Zero 2 W", {"protofleet": "0.1.0"}, {"peak_rss_bytes": 98e6}
        ),
        "status-issued": Status(True, bytes(range(8)), 3, issued=1_795_000_000_000),
        "status-rival": Status(True, bytes(range(8)), 3, rival=Rival(b"newcomer", 90, 4, "Raspberry Pi 4")),
        "status-calibration": Status(
            True,
            bytes(range(8)),
            3,
            calibration=CalibrationReport(run, 4, "linear", 30, _SURPRISE, 0.5, 1.0, _COUNTS),
        ),
        "status-proposed": Status(
            True, bytes(range(8)), 3, metrics={"unknown_share": 0.25}, proposed={"barn owl": 7, "Käuzchen": 1}
        ),
        "status-heard": Status(
            True, bytes(range(8)), 3, issued=7, heard=(Mark(b"key-id-1", 1_795_000_000_000, bytes(64)),)
        ),
        "request": Request(run, bundle[::-1][:8], 65_536, 1_000_000),
        "piece": Piece(run, bundle[::-1][:8], 65_536, b"bytes of a bundle"),
        "signed": Signed(SIGNER.key_id, receipt, SIGNER.signature("pf/v2/pets/down/cam-3", receipt)),
        "enrolment": enrolment_of("pets", "cam-3", SIGNER.public_key, bytes(range(20))),
        "opening": Opening(run, 9, "ncm", bundle[::-1], 0, 1, {"cam-3": signed_seed}),
        "opened": Opened(run, 9, "ncm", bundle[::-1], 0, 1, "opened", words),
        "opened-refused": Opened(
            run, 9, "ncm", bundle[::-1], 0, 1, "refused", none, "1 device of 12 cannot be summed now", {"cam-3": "why"}
        ),
        "sealed-seed": seed,
    }


def small_parts(*, trainable: bool = True) -> dict:
    """Arguments for `write_bundle`: a FedProto bundle of a few kilobytes whose graphs are empty."""
    row = method("fedproto")
    state = (
        StateTensor(name="backbone.weight", shape=(2, 3), role="param"),
        StateTensor(name="backbone.running_mean", shape=(2,), role="buffer"),
        StateTensor(name="head.weight", shape=(3, 2), role="param"),
        StateTensor(name="momentum.backbone.weight", shape=(2, 3), role="optimizer"),
    )
    rng = np.random.default_rng(7)
    params = {t.name: rng.standard_normal(t.shape).astype(np.float32) for t in state if t.role != "optimizer"}
    manifest = Manifest(
        schema=SCHEMA,
        version=2,
        protofleet="0.1.0",
        backbone="small_cnn",
        provenance="random initialisation, seed 7",
        method="fedproto",
        head="local",
        hyper=row.resolve({"lr": 0.05}),
        labels=("cat", "dog", "bird"),
        features=2,
        input_shape=(4, 4, 1),
        mean=(0.5,),
        std=(0.25,),
        batch=8,
        opset=18,
        state=state,
        members={},
    )
    step = empty_graph(b"a training step") if trainable else None
    return {"manifest": manifest, "features": empty_graph(b"a features graph"), "train_step": step, "params": params}


def empty_graph(words: bytes = b"") -> bytes:
    """An ONNX model with a documentation string and a graph without a node, spelt out in protobuf."""
    return b"\x32" + bytes([len(words)]) + words + b"\x3a\x00"
