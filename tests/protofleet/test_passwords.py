"""No password is printed or written: every command that takes a URL, given some that cannot be read.

The password of each URL holds three words. None of them may occur in what a command prints, nor in a file that it
leaves: not in an error, and not as a host that was looked up because a piece of the password looked like one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
from aggregator_samples import bundle_file
from commands import run
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from protofleet.aggregator.database import place_of
from protofleet.contract.errors import ProtofleetError, UsageError
from protofleet.contract.mqtt.address import Address
from protofleet.contract.privacy.sealing import make_helper_key
from protofleet.edge_client.answers.answer_publisher import Target
from protofleet.edge_client.cameras.sources import camera_of

WORDS = ("qzxcan", "vbqary", "jwqhid")
ONE, TWO, THREE = WORDS
_PASSWORDS = (  # what people choose, not written as %XX
    f"{ONE}/{TWO}",
    f"{ONE}#{TWO}",
    f"{ONE}?{TWO}",
    f"{ONE}@{TWO}/{THREE}",
    f"{ONE}@{TWO}#{THREE}",
    f"{ONE}@{TWO}?{THREE}",
    f"{ONE}:{TWO}/{THREE}",
    f"{ONE}[{TWO}/{THREE}",
    f"{ONE}]{TWO}#{THREE}",
    f"{ONE} {TWO}",
    f"{ONE}\t{TWO}",
    f"{ONE}\n{TWO}",
    f"{ONE}\\{TWO}/{THREE}",
    f"1883/{TWO}",
    f"1883?{TWO}",
    f"1883#{TWO}",
    f"%2F{ONE}/{TWO}",
    f"{ONE}%/{TWO}",
    f"//{ONE}",
    f"@{ONE}/@{TWO}",
    f"{ONE}/{TWO}@{THREE}",
)
_SCHEMES = ("", "mqtt", "mqtt:", "mqtt:/", "mqtt//", "mqt://", "http://", "mqtt+tls://", " mqtt://", "tcp://", "ws://")
_ENDS = (":port", ":99999", ":1883:1", ":-1", "/topic", "?tls=1", "#x", " ", "\n", ".example..com", "%zz", "\\x")
BROKERS = (
    *(f"mqtt://me:{password}@broker.example:1883" for password in _PASSWORDS),
    *(f"mqtts://{password}@broker.example" for password in _PASSWORDS[:8]),
    *(f"{scheme}me:{ONE}@broker.example" for scheme in _SCHEMES),
    *(f"mqtt://me:{ONE}@{TWO}@broker.example{end}" for end in _ENDS),
    *(f"mqtt://me:{ONE}{end}" for end in ("", "@", "@/", "@:1883", "@ host", "@[::1", "@[x]", "/@h", "@h@")),
    *(f"{ONE}://me:{TWO}@{THREE}/x", f"mqtt://{ONE}/{TWO}@h", f"://{ONE}", f"//me:{ONE}@h", f"mqtt://me:{ONE}@h,h"),
)
TOPICS = (
    *(f"mqtt://me:{password}@broker.example/a/b" for password in _PASSWORDS if "\t" not in password),
    *(f"{scheme}me:{ONE}@broker.example/a/b" for scheme in _SCHEMES),
    *(f"mqtt://me:{ONE}@broker.example{end}" for end in ("", "/", "?x", "/a?b", "/a#b", "/a@b", ":port/a")),
    *(f"mqtt://me:1883/{ONE}@{TWO}/a", f"mqtt://me:{ONE}/a", f"mqtt://me:{ONE}@/a", f"mqtt://me:{ONE}@[/a"),
)
STORES = (
    *(f"postgresql://me:{password}@127.0.0.1:1/pets" for password in _PASSWORDS),
    *(f"postgres://{password}@127.0.0.1:1/pets" for password in _PASSWORDS if "/" in password),
    *(f"{scheme}me:{ONE}@127.0.0.1:1/pets" for scheme in ("", *(s.replace("mqtt", "postgresql") for s in _SCHEMES))),
    *(f"postgresql://me:{ONE}@127.0.0.1{end}" for end in (":1:2/p", ":x/p", "/p@q", "?x", "/p?x", "/p?x=1&y", "?=1")),
    *(f"postgresql://me:{ONE}{end}" for end in ("", "/pets", "@[/pets", "@[::1/pets", "@a b/pets", "@h/p q")),
    *(f"postgresql://me@corp.example:{ONE}@127.0.0.1:1/pets", f"postgresql://127.0.0.1:{ONE}@127.0.0.1:1/pets"),
    *(f"host=127.0.0.1 port=1 {word}={ONE}" for word in ("password", "passwd", "PGPASSWORD", "pass ")),
    *(f"postgresql://127.0.0.1:1/pets?user=me&password={ONE}@{TWO}", f"Postgresql://me:{ONE}@127.0.0.1/p"),
    f"jdbc:postgresql://127.0.0.1:1/pets?user=me&pwd={ONE}",
)  # fmt: skip


CAMERAS = (
    *(url.replace("mqtt", scheme, 1) for scheme in ("rtsp", "http") for url in TOPICS if "//" in url[:9]),
    *(f"{word}:me:{ONE}@h/x" for word in ("v4l2", "picamera2", "rtsp", "http")),
)


@pytest.fixture
def made(tmp_path: Path) -> dict[str, str]:
    """Files that the commands want before they look at a URL, by what stands for them in a command."""
    given, left = tmp_path / "given", tmp_path / "left"
    left.mkdir()
    (given / "photos" / "class-0").mkdir(parents=True)
    Image.new("L", (4, 4)).save(given / "photos" / "class-0" / "a.png")
    bundle_file(given / "a.bundle", name="ncm")
    make_helper_key(given / "helper.key")
    (given / "devices.toml").write_text("[devices]\n")
    names = {"PHOTOS": "photos", "BUNDLE": "a.bundle", "KEY": "helper.key", "DEVICES": "devices.toml"}
    return {each: str(given / name) for each, name in names.items()} | {"LEFT": str(left), "CONFIG": str(given / "c")}


_CLIENT = (
    "client",
    "--bundle",
    "BUNDLE",
    "--id",
    "pi-1",
    "--data",
    "PHOTOS",
    "--state",
    "LEFT/state",
    "--until-finished",
)
_GATEWAY = ("gateway", "--bundle", "BUNDLE", "--store", "LEFT/site", "--id", "gw", "--state", "LEFT/state")
_HELPER = ("helper", "--key", "KEY", "--devices", "DEVICES", "--least", "2")
WITH_BROKER: dict[str, tuple[str, ...]] = {
    "doctor": ("doctor", "--broker", "URL", "--json", "LEFT/doctor.json"),
    "client": (*_CLIENT, "--patience", "0.1", "--broker", "URL"),
    "client --config": (*_CLIENT, "--patience", "0.1", "--config", "CONFIG"),
    "client --withdraw": (*_CLIENT[:5], *_CLIENT[7:9], "--withdraw", "--patience", "0.1", "--broker", "URL"),
    "aggregate": ("aggregate", "--bundle", "BUNDLE", "--store", "LEFT/store", "--patience", "0.1", "--broker", "URL"),
    "gateway": (*_GATEWAY, "--above", "mqtt://127.0.0.1:1", "--broker", "URL"),
    "gateway --above": (*_GATEWAY, "--above", "URL", "--broker", "mqtt://127.0.0.1:1"),
    "helper": (*_HELPER, "--store", "LEFT/helper", "--broker", "URL"),
    "an argument too many": ("doctor", "URL"),
    "instead of a command": ("URL",),
    "instead of a subcommand": ("fleet", "URL"),
    "instead of a number": ("aggregate", "--rounds", "URL"),
    "instead of an id": (*_CLIENT[:3], "--id", "URL", *_CLIENT[5:9], "--broker", "mqtt://127.0.0.1:1"),
    "an unknown option": ("doctor", "--brokr=URL"),
}  # fmt: skip
WITH_CAMERA = {"predict": ("predict", "--bundle", "BUNDLE", "--camera", "URL")}
WITH_TOPIC = {"predict": ("predict", "PHOTOS", "--bundle", "BUNDLE", "--publish", "URL")}
WITH_STORE: dict[str, tuple[str, ...]] = {
    "fleet": ("fleet", "list", "--store", "URL"),
    "forget": ("forget", "pi-1", "--store", "URL"),
    "rollout": ("rollout", "--store", "URL"),
    "backup": ("fleet", "backup", "LEFT/backup", "--store", "URL"),
    "predict": ("predict", "PHOTOS", "--bundle", "BUNDLE", "--store", "URL"),
    "model": ("model", "LEFT/model.onnx", "--bundle", "BUNDLE", "--store", "URL"),
    "aggregate": ("aggregate", "--bundle", "BUNDLE", "--broker", "mqtt://127.0.0.1:1", "--store", "URL"),
    "helper": (*_HELPER, "--broker", "mqtt://127.0.0.1:1", "--store", "URL"),
}


def _shown(words: tuple[str, ...], url: str, made: dict[str, str]) -> str:
    """All that a command prints, and all that it leaves, for one URL; it must have failed."""
    config = f'broker = """{url}"""'.replace("\\", "\\\\")
    Path(made["CONFIG"]).write_text(config, encoding="utf-8")
    named = [re.sub("|".join(made), lambda found: made[found[0]], word).replace("URL", url) for word in words]
    done = run(*named)
    assert done.returncode, (url, done.stdout)
    left = [path.read_bytes().decode("latin-1") for path in Path(made["LEFT"]).rglob("*") if path.is_file()]
    names = [str(path) for path in Path(made["LEFT"]).rglob("*")]
    return "\n".join((done.stdout, done.stderr, *left, *names))


def _told(shown: str) -> list[str]:
    return [word for word in WORDS if word in shown.lower()]


def test_the_attacks_are_many() -> None:
    assert len({*BROKERS, *TOPICS}) >= 90
    assert len(set(STORES)) >= 60
    assert all(_told(url) for url in (*BROKERS, *TOPICS, *STORES))


def _leaks(commands: Mapping[str, tuple[str, ...]], urls: Sequence[str], share: int, made: dict[str, str]) -> object:
    """What is shown of each URL by each command; of `share` URLs a command takes one, each another."""
    tried = [(name, url) for at, name in enumerate(commands) for url in urls[at % share :: share]]
    told = {(name, url): _told(_shown(commands[name], url, made)) for name, url in tried}
    return {about: words for about, words in told.items() if words}


SHARES = [pytest.param(12, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]


@pytest.mark.parametrize("share", SHARES)
def test_a_brokers_url_that_cannot_be_read_is_not_shown(share: int, made: dict[str, str]) -> None:
    assert not _leaks(WITH_BROKER, BROKERS, share, made)


@pytest.mark.parametrize("share", SHARES)
def test_nor_is_one_with_a_topic(share: int, made: dict[str, str]) -> None:
    assert not _leaks(WITH_TOPIC, TOPICS, share, made)


@pytest.mark.parametrize("share", SHARES)
def test_nor_is_a_cameras(share: int, made: dict[str, str]) -> None:
    unread = [url for url in CAMERAS if not _is_read(url)]
    assert len(unread) >= 60
    assert not _leaks(WITH_CAMERA, unread, share, made)


def _is_read(url: str) -> bool:
    """Whether a camera is found by it, which would be tried for ever."""
    try:
        return bool(camera_of(url))
    except ProtofleetError:
        return False


@pytest.mark.parametrize("share", SHARES)
def test_nor_is_a_stores(share: int, made: dict[str, str]) -> None:
    assert not _leaks(WITH_STORE, STORES, share, made)


@pytest.mark.parametrize("password", [f"{ONE}%2F{TWO}", f"{ONE}%40{TWO}%23", f"{ONE}:{TWO}@{THREE}", f"{ONE}%3A%"])
def test_one_that_is_read_is_shown_without_its_password(password: str, made: dict[str, str]) -> None:
    shown = _shown(WITH_BROKER["client"], f"mqtt://me:{password}@127.0.0.1:1", made)
    assert "no broker at mqtt://127.0.0.1:1 within 0.1 s" in shown
    assert not _told(shown)


def test_a_line_of_a_configuration_is_not_shown(made: dict[str, str]) -> None:
    words, config = WITH_BROKER["client --config"], Path(made["CONFIG"])
    for line in (
        f"broker = mqtt://me:{ONE}@h",
        f'"mqtt://me:{ONE}@h" = 1',
        f"mqtt://me:{ONE}@h",
        f'broker = ["{ONE}"]',
    ):
        config.write_text(line)
        done = run(*(made.get(word, word) for word in words))
        assert done.returncode == 2
        assert not _told(done.stdout + done.stderr)
    config.write_bytes(b'broker = "mqtt://me:\xff@h"')
    assert "got bytes that are no UTF-8 at 20" in run(*(made.get(word, word) for word in words)).stderr


def test_nor_is_a_url_in_another_options_place(made: dict[str, str]) -> None:
    for option in ("--bundle", "--ca", "--trust", "--identity", "--policy", "--config", "--helper-key"):
        shown = _shown((*_CLIENT, "--broker", "mqtt://127.0.0.1:1", option, "URL"), f"mqtt://me:{ONE}@h", made)
        assert not _told(shown), option


@pytest.mark.parametrize("url", [f"mqt://me:{ONE}@h", f"me:{ONE}@h", f"http://me:{ONE}@h/x", f"mqtt:/me:{ONE}@h"])
def test_nor_is_what_looks_like_one_in_a_files_place(made: dict[str, str], url: str) -> None:
    for words in (
        ("inspect", "URL"),
        ("predict", "--state", "URL", "x.png"),
        ("advise", "--bundle", "URL", "--data", "x"),
    ):
        shown = _shown(words, url, made)
        assert "expected" in shown
        assert not _told(shown), words


_READ = ["mqtt://", "mqtts://", "postgresql://", "postgres://", "rtsp://", "https://", ""]
_NOISE = st.text(st.sampled_from("@/?#:[]%&=,; \t\n\\.0é"), max_size=4)
_ENDING = st.sampled_from(["broker.example", "127.0.0.1:1", "[::1]:1883", "h:port", "h/x/y", "", "h?a=b", "h#c", "h h"])


@given(_NOISE, _NOISE, _NOISE, _ENDING, st.sampled_from(_READ))
@example("", "@", "/", "h", "mqtt://")
def test_no_piece_of_what_stands_before_the_last_at_is_shown(
    first: str, between: str, last: str, ending: str, scheme: str
) -> None:
    """Whatever the password is made of, in errors, in what stands for the URL, and in its parts."""
    url = f"{scheme}me:{first}{ONE}{between}{TWO}{last}@{ending}"
    readers: list[Callable[[str], object]] = [Address.parse, Target.parse, place_of, lambda url: camera_of(url).shown]
    for read in readers:
        try:
            shown = str(read(url))
        except ProtofleetError as error:
            shown = str(error)
        assert not _told(shown), url


def test_a_password_is_not_in_what_debuggers_show() -> None:
    assert not _told(repr(Address.parse(f"mqtt://me:{ONE}@h")))


@pytest.mark.parametrize("wrong", ["/", "?", "#", " ", "\t", "\n", "\x7f"])
def test_no_broker_is_read_with_what_may_end_a_user_or_a_password(wrong: str) -> None:
    """It would be looked up, and waited for, instead of being refused at once."""
    for url in (f"mqtt://me:{ONE}{wrong}{TWO}@h", f"mqtt://{ONE}{wrong}{TWO}@h"):
        with pytest.raises(UsageError, match=r"as %XX, got [0-9]+ characters"):
            Address.parse(url)


def test_what_is_read_is_what_was_meant() -> None:
    """The strict pattern takes what the URL's standard allows, and people write."""
    assert Address.parse("mqtt://me@corp:p@ss:word@H.example") == Address(
        "h.example", 1883, user="me@corp", password="p@ss:word"
    )
    assert Address.parse("MQTTS://h_1.local./").port == 8883
    assert Address.parse("mqtt://me:%2F%3F%23%20@[fe80::1%eth0]:") == Address(
        "fe80::1%eth0", 1883, user="me", password="/?# "
    )
    assert Target.parse("mqtt://me:a@b@h/x%40y").topic == "x@y"
    for url in (
        "postgresql:///pets",
        "postgresql://me:x#y:z@a:1,b:2/pets?sslmode=require",
        "postgres://%2Frun%2Fpg/pets",
    ):
        assert str(place_of(url)).startswith("postgres")
    for name in ("./a:b@c", "/srv/a:b@c.sqlite", "~/a:b@c", "a@b.sqlite"):
        assert place_of(name) == Path(name)
    with pytest.raises(UsageError):
        place_of("a:b@c")
