"""Settings of every command that has them: where they come from, what is refused, what is printed."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import run, run_process
from hypothesis import given
from hypothesis import strategies as st

from protofleet.aggregator.helper.settings import HelperSettings
from protofleet.aggregator.settings import AggregateSettings, EmbeddedBrokerSettings, Settings
from protofleet.commands.predict import PredictSettings
from protofleet.contract.errors import UsageError
from protofleet.contract.settings.options import CommandSettings, fields_of
from protofleet.contract.settings.sources import prefix_of, read_settings, values_of
from protofleet.contract.settings.toml_text import toml_text
from protofleet.contract.wire.messages import MAX_ROUND
from protofleet.edge_client.settings import ClientSettings
from protofleet.gateway.settings import GatewaySettings

NEEDED: dict[type[CommandSettings], dict[str, Any]] = {
    AggregateSettings: {"bundle": ("f.bundle",), "broker": "mqtt://h", "store": "s.sqlite"},
    ClientSettings: {"bundle": "f.bundle", "broker": "mqtt://h", "id": "pi-1", "data": "d", "state": "s"},
    GatewaySettings: {
        "bundle": ("f.bundle",),
        "broker": "mqtt://h",
        "store": "s.sqlite",
        "above": "mqtt://above",
        "id": "site",
        "state": "s",
    },
    HelperSettings: {"key": "k", "store": "s.sqlite", "broker": "mqtt://h", "devices": "d.toml", "least": 3},
    EmbeddedBrokerSettings: {},
    PredictSettings: {"photos": ("a.png",)},
}
EVERY = pytest.mark.parametrize("settings", NEEDED, ids=lambda settings: settings.COMMAND)


@EVERY
def test_every_setting_has_its_help_once_and_is_an_option_of_the_command(settings: type[CommandSettings]) -> None:
    shown = run(settings.COMMAND, "--help").stdout
    for field in fields_of(settings).values():
        assert field.option.help.endswith("."), field
        assert (field.option.metavar if field.option.positional else field.flag) in shown
        assert (field.option.low is None) or field.default is None or field.default >= field.option.low


@EVERY
def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    settings: type[CommandSettings], tmp_path: Path
) -> None:
    name = next(name for name in ("fleet", "provider", "listen") if name in fields_of(settings))
    values = [f"127.0.0.1:{port}" for port in (1, 2, 3)] if name == "listen" else ["cpu", "cuda", "xnnpack"]
    file, variable = tmp_path / "c.toml", f"{prefix_of(settings)}{name.upper()}"
    file.write_text(f'{name} = "{values[0]}"')
    from_all = {"file": str(file), "environment": {variable: values[1]}}
    for given_here, expected in (({name: values[2]}, values[2]), ({}, values[1])):
        found = read_settings(settings, NEEDED[settings] | given_here, **from_all)  # type: ignore[arg-type]
        assert getattr(found, name) == expected
    assert getattr(read_settings(settings, NEEDED[settings], file=str(file)), name) == values[0]


@EVERY
def test_a_misspelt_name_is_one_line_with_the_nearest(settings: type[CommandSettings], tmp_path: Path) -> None:
    right = next(iter(fields_of(settings)))
    wrong, file = right[:-1] + "q", tmp_path / "c.toml"
    file.write_text(f"{wrong} = 1")
    hint = rf"expected an option's name, got {wrong}, try one of .*\b{right}\b"
    for source in ({"file": str(file)}, {"environment": {f"{prefix_of(settings)}{wrong.upper()}": "1"}}):
        with pytest.raises(UsageError, match=hint):
            read_settings(settings, NEEDED[settings], **source)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=hint):
        read_settings(settings, NEEDED[settings] | {wrong: 1})


@EVERY
@given(data=st.data())
def test_what_is_printed_gives_the_same_settings(
    settings: type[CommandSettings], tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Of any values, whatever characters are in them; secrets have to be given again."""
    given_here = dict(NEEDED[settings])
    texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
    for field in fields_of(settings).values():
        option = field.option
        free = option.check is None and not (option.secret or option.url or option.only_typed)
        if field.name in given_here or not free or field.name == "camera" or not data.draw(st.booleans()):
            continue
        low, high = option.low, option.high
        if field.kind is bool:
            given_here[field.name] = data.draw(st.booleans())
        elif field.kind is int:
            given_here[field.name] = data.draw(st.integers(int(low or 0), int(high or 10**6)))
        elif field.kind is float:
            given_here[field.name] = data.draw(st.floats(low or 0, high or 1e6))
        elif field.kind is str:
            given_here[field.name] = data.draw(texts)
        elif field.several:
            given_here[field.name] = tuple(data.draw(st.lists(texts, min_size=1, max_size=3)))
    try:
        first = values_of(settings, given_here)
        made = settings(**first)
    except UsageError:
        return  # two that exclude each other
    file = tmp_path_factory.mktemp("printed") / "c.toml"
    file.write_text(toml_text(settings, first), encoding="utf-8")
    assert read_settings(settings, {}, file=str(file)) == made


def test_no_secret_is_printed() -> None:
    secrets = {"broker": "mqtt://me:hunter2@h", "token": "hunter2" * 8}
    with pytest.raises(UsageError) as refused:
        read_settings(ClientSettings, NEEDED[ClientSettings] | secrets)
    assert "hunter2" not in str(refused.value)
    store = {"store": "postgresql://me:hunter2@h/db", "broker": "mqtts://me:hunter2@h:8883"}
    values = values_of(AggregateSettings, NEEDED[AggregateSettings] | store)
    text = toml_text(AggregateSettings, values)
    assert "hunter2" not in text
    assert 'store = "postgresql://h/db"' in text
    assert 'broker = "mqtts://h:8883"' in text
    assert "PROTOFLEET_AGGREGATE_BROKER takes the whole URL" in text
    assert "hunter2" not in repr(AggregateSettings(**values))


def test_a_token_is_left_out_and_said_to_be_set() -> None:
    from protofleet.contract.identity.tokens import draw_token, token_text

    token = token_text(draw_token())
    values = values_of(ClientSettings, NEEDED[ClientSettings] | {"token": token})
    text = toml_text(ClientSettings, values)
    assert token not in text + repr(ClientSettings(**values))
    assert "# token is set, and left out: a secret; PROTOFLEET_CLIENT_TOKEN takes it" in text


@pytest.mark.parametrize(
    ("command", "text", "line"),
    [
        ("aggregate", "min_clients = 0", "--min-clients in {file}, expected 1 or more, got 0"),
        ("aggregate", 'min_clients = "2"', "--min-clients in {file}, expected a whole number, got the text 2"),
        ("aggregate", "[aggregate]\nmin_clients = 2", "expected NAME = VALUE lines, got the table [aggregate]"),
        ("aggregate", "take_over = true", "expected --take-over on the command line, once, got take_over in the file"),
        ("aggregate", "standing = true\nrounds = 3", "--rounds with --standing, expected one of them, got both"),
        ("aggregate", 'encoding = "f33"', "--encoding in {file}, expected f64, f32, f16"),
        ("aggregate", 'every = "soon"', "--every in {file}, expected a duration such as 90s, 10m, 6h or 7d, got soon"),
        ("gateway", 'above = "mqtt://h"\nid = "g"\nstate = "s"', "--broker and --above, expected two brokers"),
        ("helper", "least = 1", "--least, expected 2 to"),
        ("broker", "quiet = 1", "--quiet in {file}, expected true or false, got 1"),
        ("predict", "top = 0", "--top in {file}, expected 1 or more, got 0"),
        ("client", "broker = 1", "--broker in {file}, expected text, got a value of type int"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, command: str, text: str, line: str) -> None:
    settings = next(each for each in NEEDED if command == each.COMMAND)
    named = {name: value for name, value in NEEDED[settings].items() if f"{name} =" not in text}
    file = tmp_path / "c.toml"
    file.write_text(toml_text(settings, {}).partition("\n")[0] + "\n" + text)
    words = [word for name, value in named.items() for word in _words(name, value)]
    done = run(command, *words, "--config", str(file))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    (said,) = done.stderr.splitlines()
    assert line.format(file=file) in said


def _words(name: str, value: Any) -> list[str]:
    if name == "photos":
        return list(value)
    values = value if isinstance(value, tuple) else (value,)
    return [word for each in values for word in (f"--{name}", str(each))]


def test_a_wrong_variable_is_one_line() -> None:
    environment = {**os.environ, "PROTOFLEET_CLIENT_THREDS": "2"}
    words = [word for name, value in NEEDED[ClientSettings].items() for word in _words(name, value)]
    command = [sys.executable, "-m", "protofleet", "client", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: PROTOFLEET_CLIENT_THREDS: unknown variable, expected an option's name, got")
    assert "threads" in done.stderr


def test_a_variable_of_a_command_that_is_nearly_this_one_is_refused() -> None:
    def values(name: str) -> dict[str, Any]:
        return values_of(AggregateSettings, NEEDED[AggregateSettings], environment={name: "3"})

    with pytest.raises(UsageError, match="got AGGREGATOR, try PROTOFLEET_AGGREGATE_ROUNDS"):
        values("PROTOFLEET_AGGREGATOR_ROUNDS")
    assert "rounds" in values("PROTOFLEET_AGGREGATE_ROUNDS")
    with pytest.raises(UsageError, match="PROTOFLEET_AGGREGATE_MIN_CLIENTS, expected a whole number, got two"):
        values_of(AggregateSettings, {}, environment={"PROTOFLEET_AGGREGATE_MIN_CLIENTS": "two"})
    for other in ("PROTOFLEET_CLIENT_THREADS", "PROTOFLEET_AGGREGATORS", "PROTOFLEET_KERNELS", "OTHER_AGGREGATOR_X"):
        assert "rounds" not in values(other)


def test_a_printed_file_is_taken_by_the_command_that_printed_it(tmp_path: Path) -> None:
    words = [word for name, value in NEEDED[AggregateSettings].items() for word in _words(name, value)]
    printed = run_process("aggregate", *words, "--every", "6h", "--vouch", "hall", "--print-config")
    assert printed.returncode == 0
    file = tmp_path / "a.toml"
    file.write_text(printed.stdout)
    again = run("aggregate", "--config", str(file), "--print-config")
    assert again.stdout == printed.stdout
    assert 'every = "6h"' in again.stdout
    assert list(tmp_path.iterdir()) == [file]  # nothing ran


def test_settings_are_kept_as_what_they_mean() -> None:
    made = AggregateSettings(**NEEDED[AggregateSettings], every="10m", method="ncm", vouch=["b", "a", "b"])
    assert (made.every, made.method, made.vouch, made.store) == (600.0, "ncm", ("b", "a"), Path("s.sqlite"))
    assert replace(made, every=None).policy.every_s == 0.0
    one, other = Settings(every="60m"), AggregateSettings(**NEEDED[AggregateSettings], every="1h")
    assert one.digest() == other.digest() != made.digest()  # of what decides what is taken, not of how it is served


def test_a_gateway_is_an_aggregator_below_and_a_member_above() -> None:
    made = GatewaySettings(**NEEDED[GatewaySettings], min_clients=3, max_samples=7, trust="k.pub", above_fleet="city")
    assert (made.of_site.standing, made.of_site.max_samples, made.of_site.min_clients) == (True, 7, 1)
    assert (made.of_member.broker, made.of_member.fleet, made.of_member.trust) == ("mqtt://above", "city", ("k.pub",))


def test_how_a_head_is_solved_may_stand_in_a_file_and_in_the_environment(tmp_path: Path) -> None:
    (tmp_path / "ridge.toml").write_text('bundle = "b"\nbroker = "mqtt://x"\nstore = "s"\nform = "discriminant"\n')
    words = ("aggregate", "--config", str(tmp_path / "ridge.toml"), "--print-config")
    done = run(*words, PROTOFLEET_AGGREGATE_RIDGE="0.5")
    assert 'form = "discriminant"' in done.stdout.splitlines(), done.stderr
    assert "ridge = " in done.stdout


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rounds", 3),
        ("rule", "median"),
        ("fraction", 0.5),
        ("max_share", 0.5),
        ("min_clients", 2),
        ("suspects", "name"),
        ("vouch", ("hall",)),
        ("when_new", 5),
        ("window", "30m"),
        ("deadline", 10.0),
        ("seed", 1),
        ("calibrate", False),
        ("open_clients", 2),
        ("max_clients", 3),
    ],
)
def test_what_is_of_rounds_is_refused_where_sums_stand(name: str, value: Any) -> None:
    flag = f"--{name.replace('_', '-')}"
    typed = f"--no-{name}" if value is False else flag
    with pytest.raises(UsageError, match=f"^{typed} with --standing, expected one of them, got both: there are no"):
        Settings(standing=True, **{name: value})


def test_when_rounds_open_and_close_where_an_aggregator_stays() -> None:
    once, often, rarely = Settings(min_clients=3).policy, Settings(every="10m").policy, Settings(every="2h").policy
    assert (once.stays, once.open_clients, once.window_s, once.min_clients) == (False, None, 0.0, 3)
    assert (often.stays, often.open_clients, often.window_s) == (True, 1, 600.0)
    assert (rarely.window_s, Settings(when_new=5).policy.window_s) == (3600.0, 3600.0)
    assert Settings(every="10m", open_clients=4).policy.open_clients == 4
    assert Settings(every="1h", window="1h", min_clients=3, max_clients=3).policy.window_s == 3600.0
    with pytest.raises(UsageError, match="--max-clients, expected 3 or more, got 2"):
        Settings(every="1h", min_clients=3, max_clients=2)
    with pytest.raises(UsageError, match="--window, expected above 0, up to --every"):
        Settings(every="1h", window="61m")
    for beside in ({"window": "1h"}, {"max_clients": 3}):
        with pytest.raises(UsageError, match="expected --every or --when-new beside it, got neither"):
            Settings(**beside)  # type: ignore[arg-type]


def test_processes_on_one_store_differ_in_whatever_decides_what_is_taken() -> None:
    """Of gateways the announcement tells the limit, as far as a field of the wire holds it."""
    plain, changed = Settings(), {"max_samples": 9, "min_samples": 2, "gateway": ("g",), "limit_bytes": 9_999}
    digests = {replace(plain, **{name: value}).digest() for name, value in changed.items()}  # type: ignore[arg-type]
    assert len(digests | {plain.digest()}) == len(changed) + 1
    told = [Settings(max_samples=2**32 - 1, gateway=each).samples_told for each in ((), ("g",))]
    assert told == [0, MAX_ROUND]


def test_above_a_gateway_has_its_own_certificates_and_below_its_brokers() -> None:
    above = {"above_ca": "a.ca", "above_cert": "a.crt", "above_key": "a.key", "keepalive": 30, "identity": "id.key"}
    below = {"ca": "b.ca", "cert": "b.crt", "key": "b.key"}
    made = GatewaySettings(**NEEDED[GatewaySettings], **above, **below, method="ncm")  # type: ignore[arg-type]
    member, site = made.of_member, made.of_site
    assert (member.ca, member.cert, member.key, member.keepalive) == ("a.ca", "a.crt", "a.key", 30)
    assert (member.identity, member.method, member.bundle) == ("id.key", "ncm", "f.bundle")
    assert (site.ca, site.cert, site.key, site.method, site.gateway) == ("b.ca", "b.crt", "b.key", "ncm", ())
    both = NEEDED[GatewaySettings] | {"above": "mqtt://h"}
    assert GatewaySettings(**both, above_fleet="city").of_member.fleet == "city"  # two fleets of one broker
    with pytest.raises(UsageError, match="expected two brokers, or two fleets"):
        GatewaySettings(**both)


def test_an_empty_key_to_trust_is_none_and_a_share_of_zero_is_beside_a_test_set() -> None:
    for trust in ((), ("",), ("k.pub", "")):
        with pytest.raises(UsageError, match="--trust, expected a public key file, or several, got none"):
            ClientSettings(**NEEDED[ClientSettings], trust=trust)
    assert ClientSettings(**NEEDED[ClientSettings], test="t", hold_out=0.0).hold_out == 0.0
    with pytest.raises(UsageError, match="--hold-out with --test"):
        ClientSettings(**NEEDED[ClientSettings], test="t", hold_out=0.1)


def test_the_environment_has_lists_and_numbers_as_text_and_a_file_has_them_as_they_are() -> None:
    environment = {"PROTOFLEET_AGGREGATE_VOUCH": "a,b", "PROTOFLEET_AGGREGATE_STANDING": "true"}
    with pytest.raises(UsageError, match="--vouch with --standing"):
        read_settings(AggregateSettings, NEEDED[AggregateSettings], environment=environment)
    made = values_of(AggregateSettings, NEEDED[AggregateSettings], environment=environment)
    assert (made["vouch"], made["standing"]) == (("a", "b"), True)
    with pytest.raises(UsageError, match="PROTOFLEET_AGGREGATE_TAKE_OVER, expected --take-over on the command line"):
        values_of(AggregateSettings, NEEDED[AggregateSettings], environment={"PROTOFLEET_AGGREGATE_TAKE_OVER": "true"})
    with pytest.raises(UsageError, match="--vouch, expected"):
        Settings(vouch=("hall", "NOT AN ID"))


def test_what_is_no_url_is_printed_whole_and_an_empty_list_is_not_set() -> None:
    assert 'data = "odd://name@folder"' in toml_text(ClientSettings, {"data": "odd://name@folder"})
    several = [field.name for field in fields_of(AggregateSettings).values() if field.several and field.default == ()]
    assert several
    printed = toml_text(AggregateSettings, {})
    assert all(f"# {name} is not set" in printed for name in several)


def test_a_password_with_an_at_sign_is_left_out_whole() -> None:
    printed = toml_text(ClientSettings, {"broker": "mqtt://me:s3@cret@broker.example:1883"})
    assert 'broker = "mqtt://broker.example:1883"' in printed
    assert "cret" not in printed
    assert "s3" not in printed
