"""The settings of a device: of `protofleet client`, and of what it does in a program (`protofleet.Device`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from protofleet.contract.console.sizes import read_size
from protofleet.contract.errors import UsageError
from protofleet.contract.files.json_output import JSON_HELP
from protofleet.contract.identity.tokens import read_token
from protofleet.contract.methods import LOAD_HELP
from protofleet.contract.page.page_address import check_page_files, checked_page
from protofleet.contract.printable import undisclosed
from protofleet.contract.settings.common import BrokerSettings, SpokenSettings, checked_device
from protofleet.contract.settings.options import Option
from protofleet.edge_client.cameras.camera import checked_crop, read_every
from protofleet.edge_client.cameras.sources import CAMERA_HELP, ON_MOTION_HELP
from protofleet.edge_client.hardware.providers import PROVIDER_HELP, check_provider

__all__ = ["FLEETS_BROKER", "ClientSettings"]

FLEETS_BROKER = "fleet"  # of --home-assistant


def _provider(label: str, value: str) -> str:
    check_provider(value)
    return value


def _size(label: str, value: str) -> str:
    read_size(value, label)
    return value


def _house(label: str, value: str) -> str:
    if value != FLEETS_BROKER and re.match(r"(?i)mqtts?://", value) is None:
        expected = f"mqtt://HOST, or {FLEETS_BROKER}"
        raise UsageError(label, expected=expected, got=undisclosed(value), hint="mqtt://homeassistant.local")
    return value


def _token(label: str, value: str) -> str:
    read_token(value)
    return value


@dataclass(frozen=True, kw_only=True, repr=False)
class ClientSettings(BrokerSettings, SpokenSettings, command="client"):
    """One device's settings."""

    bundle: Annotated[str, Option("The fleet's bundle file.")]
    id: Annotated[str, Option("This device's id: a-z, 0-9 and -, unique in the fleet.", check=checked_device)]
    state: Annotated[str, Option("Directory for weights and outbox; survives restarts.")]
    data: Annotated[
        str,
        Option(
            "Labelled images: a folder per class, a .csv of path,label, a .npz of x and y, parquet. "
            "Required, but with --camera or --withdraw."
        ),
    ] = ""
    camera: Annotated[
        str | None,
        Option(f"Answer about it, and keep its photos here to be named. {CAMERA_HELP}", metavar="SOURCE", url=True),
    ] = None
    every: Annotated[
        str | float, Option("Time between two pictures of the camera.", check=read_every, metavar="DURATION")
    ] = 5.0
    crop: Annotated[
        str | None,
        Option("The part of the camera's pictures that counts, in pixels.", check=checked_crop, metavar="X,Y,W,H"),
    ] = None
    on_motion: Annotated[bool, Option(ON_MOTION_HELP)] = False
    keep_photos: Annotated[
        str, Option("Disk for photos of the camera; the oldest leave.", check=_size, metavar="SIZE")
    ] = "64MiB"
    test: Annotated[str | None, Option("Labelled images to test with after each round.")] = None
    hold_out: Annotated[
        float | None,
        Option(
            "Share of --data kept from training to test with, 0 for none.",
            low=0.0,
            high=0.5,
            absent="0.1; 0 with --test",
        ),
    ] = None
    report_accuracy: Annotated[
        bool | None,
        Option("Tell the aggregator how many are named right.", absent="without noise or helper"),
    ] = None
    report_calibration: Annotated[
        bool | None,
        Option("Tell the aggregator how sure answers were of photos held out.", absent="without noise or helper"),
    ] = None
    tell_drift: Annotated[
        bool | None,
        Option("Tell the aggregator how unlike earlier photos new ones are.", absent="without noise or helper"),
    ] = None
    tell_unknown: Annotated[
        bool | None,
        Option("Tell the aggregator which share of the camera's photos is unknown.", absent="without noise or helper"),
    ] = None
    activations: Annotated[
        int,
        Option(
            "Disk for what a frozen trunk makes of the photos, where only the tail is trained.",
            low=0,
            high=1e9,
            metavar="MB",
        ),
    ] = 1024
    page: Annotated[
        str | None,
        Option(
            "Show the camera's photos in a browser, to be named, if the policy allows it; 0.0.0.0:8080 for a network.",
            check=checked_page,
            metavar="[ADDRESS:]PORT",
        ),
    ] = None
    page_cert: Annotated[str | None, Option("PEM file of a certificate of the page's, for https.")] = None
    page_key: Annotated[str | None, Option("PEM file of its private key.")] = None
    home_assistant: Annotated[
        str | None,
        Option(
            "Show answers in Home Assistant, and be taught there, if the policy allows it. Its broker, "
            "mqtt[s]://[user:password@]host[:port], or `fleet` for the fleet's.",
            check=_house,
            metavar="BROKER",
            url=True,
        ),
    ] = None
    home_assistant_ca: Annotated[
        str | None,
        Option("PEM file of the authority that signed that broker.", absent="--ca, or the system's"),
    ] = None
    home_assistant_photo: Annotated[bool, Option("Publish the last photo there, too: it leaves this device.")] = False
    equal_answers: Annotated[
        int, Option("Photos in a row that must agree before the answer there changes.", low=1, high=100)
    ] = 1
    remove_home_assistant: Annotated[
        bool, Option("Take this device out of --home-assistant, and end; no --data.", only_typed=True)
    ] = False
    threads: Annotated[int, Option("Threads for training.", low=1, high=256)] = 1
    memory_limit: Annotated[
        str | None,
        Option(
            "Memory for this process, e.g. 400MB: train in parts where that fits, or refuse the bundle.",
            check=_size,
            metavar="SIZE",
        ),
    ] = None
    micro_batch: Annotated[
        int | None,
        Option(
            "Train each batch in parts of N, as the bundle was exported.",
            low=1,
            high=4095,
            metavar="N",
            absent="only where memory asks",
        ),
    ] = None
    provider: Annotated[str, Option(PROVIDER_HELP, check=_provider)] = "auto"
    portable_step: Annotated[bool, Option("Try no other form of the training step.")] = False
    until_finished: Annotated[bool, Option("End with the run, instead of waiting for the next one.")] = False
    patience: Annotated[
        float | None,
        Option(
            "Seconds to wait for a broker at the start.", low=0.1, high=1e6, absent="for ever; 60 with --until-finished"
        ),
    ] = None
    keepalive: Annotated[
        int,
        Option(
            "Seconds between signs of life; the broker misses this device after half as many more.",
            low=10,
            high=3600,
        ),
    ] = 60
    trust: Annotated[
        tuple[str, ...] | None,
        Option("Ed25519 public key file, repeatable: refuse bundles and messages that none of them signed."),
    ] = None
    identity: Annotated[
        str | None,
        Option(
            "Ed25519 private key file that this device signs with.",
            metavar="KEY",
            absent="its own, once --token made one",
        ),
    ] = None
    token: Annotated[
        str | None,
        Option("One-time token of protofleet fleet invite: enrol this device with its key.", check=_token, secret=True),
    ] = None
    helper_key: Annotated[
        str | None,
        Option("Public key file of a helper; take part only in rounds whose sums it opens."),
    ] = None
    rollout: Annotated[
        bool,
        Option("Go over to bundles that the aggregator rolls out.", absent="where a key is trusted"),
    ] = True
    policy: Annotated[
        str | None,
        Option("TOML file of what this device may release, whatever the fleet asks for.", metavar="FILE"),
    ] = None
    accept_looser_policy: Annotated[
        bool,
        Option(
            "Start although the policy is looser than at the last start, and remember its terms.",
            only_typed=True,
        ),
    ] = False
    method: Annotated[str | None, Option(LOAD_HELP)] = None
    withdraw: Annotated[
        bool, Option("Take this device's sums out of the standing ones, and end; no --data.", only_typed=True)
    ] = False
    json: Annotated[str | None, Option(JSON_HELP.format("a summary at the end"))] = None

    def check(self) -> None:
        super().check()
        if self.trust is not None and not (self.trust and all(self.trust)):  # which would be to believe everybody
            raise UsageError("--trust", expected="a public key file, or several", got="none", hint="no --trust at all")
        if self.crop is not None and self.camera is None:
            raise UsageError("--crop", expected="--camera, whose pictures it is of", got="none")
        if self.on_motion and self.camera is None:
            raise UsageError("--on-motion", expected="--camera, whose pictures it is about", got="none")
        if self.page is not None and self.camera is None:
            hint = "--camera folder:DIR, for pictures that something else writes there"
            raise UsageError("--page", expected="--camera, whose photos it shows", got="none", hint=hint)
        if self.home_assistant is not None and self.camera is None and not self.remove_home_assistant:
            raise UsageError("--home-assistant", expected="--camera, whose answers it shows", got="none")
        if self.home_assistant is None and (
            self.remove_home_assistant
            or self.home_assistant_ca is not None
            or self.home_assistant_photo
            or self.equal_answers > 1
        ):
            option = "--remove-home-assistant" if self.remove_home_assistant else "an option for Home Assistant"
            raise UsageError(option, expected="--home-assistant, its broker", got="none")
        if self.home_assistant == FLEETS_BROKER and self.home_assistant_ca is not None:
            expected = "a broker of your own, mqtts://HOST, in --home-assistant"
            raise UsageError("--home-assistant-ca", expected=expected, got=FLEETS_BROKER, hint="--ca")
        check_page_files(self.page, self.page_cert, self.page_key)
        if self.test is not None and self.hold_out:
            raise UsageError(
                "--hold-out with --test", expected="one of them", got="both", hint="--test alone holds none out"
            )
