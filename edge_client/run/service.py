"""One device, from its files to its end. The command and programs that embed a device both start here.

1. A `Service` reads the bundle and the data, opens the state directory, and restores the weights.
2. It runs the client until `stop` is called, or until the run is finished where the client is to end with it.
3. When a roll-out brings another bundle, or is rolled back, the client ends. Then steps 1 and 2 are done again with
   that bundle, in the same process.

If they cannot be done with a bundle on probation, that bundle is given up (`probation.py`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofleet.contract.bundle.bundle_file import Bundle, Manifest
from protofleet.contract.bundle.native_kernels import runnable_forms
from protofleet.contract.console.logs import about
from protofleet.contract.console.service_manager import ServiceManager
from protofleet.contract.errors import UsageError
from protofleet.contract.identity.signing_keys import read_public_keys
from protofleet.contract.identity.tokens import read_token
from protofleet.contract.methods import load_method, method
from protofleet.contract.mqtt.link import Address
from protofleet.contract.printable import counted
from protofleet.contract.privacy.sealing import read_helper_public
from protofleet.edge_client.cameras.sources import camera_of
from protofleet.edge_client.data import LocalData
from protofleet.edge_client.data.activations import ActivationStore
from protofleet.edge_client.device.device import Device
from protofleet.edge_client.device.drift_watch import DriftWatch
from protofleet.edge_client.device.own_samples import OwnSamples
from protofleet.edge_client.hardware import process_metrics
from protofleet.edge_client.hardware.mapped_weights import laid_aside
from protofleet.edge_client.hardware.profile_record import measured_metrics
from protofleet.edge_client.identity.signing_identity import Identity, identity_of
from protofleet.edge_client.journal.journal import FILE as JOURNAL
from protofleet.edge_client.messages.membership import Membership
from protofleet.edge_client.privacy.blinded_shares import Blinding
from protofleet.edge_client.privacy.ledger import Ledger
from protofleet.edge_client.privacy.policy import Figure, Policy, read_policy
from protofleet.edge_client.privacy.releases import Releases, ledger_path
from protofleet.edge_client.rollout.active_bundle import ActiveBundle, find_active_bundle
from protofleet.edge_client.rollout.probation import ProbationWatch
from protofleet.edge_client.rollout.rollout_file import RolloutFile
from protofleet.edge_client.rollout.rollout_work import RolloutWork
from protofleet.edge_client.run.client import Client, Figures
from protofleet.edge_client.run.round_work import Own
from protofleet.edge_client.settings import FLEETS_BROKER, ClientSettings
from protofleet.edge_client.training.compiled_graphs import CompiledGraphs
from protofleet.edge_client.training.onnx_session import Providers
from protofleet.edge_client.trials.memory_limit import fitting_forms, trains_in_parts
from protofleet.edge_client.trials.provider_trials import choose_providers
from protofleet.edge_client.trials.step_forms import choose_step_form

__all__ = ["Service"]

logger = logging.getLogger(__name__)

_PATIENCE_S = 60.0  # of a client that ends with its run

OnSummary = Callable[[dict[str, Any], bool], None]
"""Takes what the device has done so far, and whether it has ended."""


class Service:
    """A device of one fleet.

    Args:
        settings: as the command takes them.
        arrays: images (N, H, W, c) and class numbers (N,) in memory, instead of what `settings.data` names.
    """

    def __init__(self, settings: ClientSettings, arrays: tuple[NDArray[Any], NDArray[Any]] | None = None) -> None:
        if arrays is None and not settings.data and settings.camera is None:
            raise UsageError("protofleet client", expected="--data, or --camera", got="none", hint="--help")
        self._settings, self._arrays = settings, arrays
        self._stopping = threading.Event()
        self._client: Client | None = None
        self._is_look_due = False
        self._has_started = False
        self._manager = ServiceManager()

    def run(self, on_summary: OnSummary) -> dict[str, Any]:
        """Take part until `stop`, or until the run is finished; returns what the device has done.

        Args:
            on_summary: called at the beginning, so that a path that cannot be written is known then, and at the end.

        Raises:
            ProtofleetError: each with its exit code.
        """
        settings = self._settings
        if settings.method is not None:
            load_method(settings.method)
        policy = Policy() if settings.policy is None else read_policy(settings.policy)
        if policy.blinded and settings.helper_key is None:
            raise UsageError(f"--policy {settings.policy}: blinded", expected="--helper-key beside it", got="none")
        if settings.camera is not None:
            camera_of(settings.camera)  # so that a mistake in it is known now
            if not policy.keep_photos:
                got = "keep_photos = false"
                raise UsageError("--camera", expected="a --policy that lets photos be kept", got=got)
        if settings.page is not None and not policy.page:
            raise UsageError("--page", expected="a --policy with page = true", got="none that allows it")
        if settings.home_assistant is not None:
            _check_house(settings, policy)
        keys = () if settings.trust is None else read_public_keys(settings.trust)
        of_us = about(fleet=settings.fleet, device=settings.id)
        with of_us, RolloutFile(Path(settings.state), make=bool(keys)) as file:
            identity = identity_of(settings)
            if settings.helper_key is not None and identity.signer is None:
                got, hint = "none", "client --identity, or --token"
                raise UsageError("--helper-key", expected="a key to sign with", got=got, hint=hint)
            while True:
                self._has_started = False
                seats = [find_active_bundle(settings, file, keys, budget=policy.is_private)]  # popped: see `_light`
                watch = ProbationWatch(file)
                try:
                    summary, is_over = self._run_with(seats.pop(), identity, file, policy, on_summary)
                except BaseException as error:
                    watch.ended(error, at_start=not self._has_started)
                    if not watch.is_over:
                        raise
                else:
                    if not is_over:
                        watch.ended(None)
                        return summary
                process_metrics.rest_memory()

    def _run_with(
        self,
        active: ActiveBundle,
        identity: Identity,
        file: RolloutFile,
        policy: Policy,
        on_summary: OnSummary,
    ) -> tuple[dict[str, Any], bool]:
        """Run with one bundle; what the device has done, and whether another one has to run now."""
        settings, bundle, m = active.settings, active.bundle, active.bundle.manifest
        address = Address.parse(settings.broker, ca_file=settings.ca, cert_file=settings.cert, key_file=settings.key)
        state = active.directory
        in_parts = trains_in_parts(settings, m, bundle.sha256, active.path, state)
        of_it = about(fleet=settings.fleet, bundle=bundle.sha256.hex())
        with (
            of_it,
            active.journal() as journal,
            Ledger(ledger_path(file.state, policy)) as ledger,
            contextlib.ExitStack() as parts,
        ):
            active = _light(active)
            bundle = active.bundle
            own_method = method(m.method)
            releases = Releases(policy, ledger, fleet=settings.fleet, own=own_method, hyper=m.hyper)
            journals = (*file.state.glob(JOURNAL), *file.state.glob(f"fleets/*/{JOURNAL}"))
            others = [path.parent for path in journals if path.parent != state]
            releases.begin(journal, others=others, accepts_looser=settings.accept_looser_policy)
            own = OwnSamples(
                settings,
                m,
                state,
                self._arrays if self._arrays is not None or settings.data else _no_arrays(m),
                learned=Path(settings.state),
                draw_key=journal.draw_key(),
                rule=releases.hold_out(),
            )
            samples = own.read()
            data, test = samples.data, samples.test
            providers = _providers(settings, active)
            trained = _with_fastest_step(settings, active, providers, in_parts=in_parts)
            graphs = CompiledGraphs(
                trained,
                settings.threads,
                providers=providers,
                in_parts=in_parts,
                keeps_shared=settings.camera is not None,
            )
            device = Device(
                bundle,
                data,
                settings.id,
                test=test,
                held=samples.held,
                activations=ActivationStore(state / "activations", settings.activations * 10**6),
                graphs=graphs,
                secret=journal.secret(),
                on_batch=self._manager.alive,
            )
            device.restore(journal.weights())
            active.runs(file)
            beside = f", {len(own.learned):,} of them learned" if len(own.learned) else ""
            beside += f", {len(test):,} {self._photos}" if test is not None else ""
            classes = counted(int(device.own_classes.sum()), "class", "classes")
            logger.info(f"{counted(len(data), 'sample')} of {classes}{beside}, bundle {bundle.sha256.hex()[:12]}")
            if releases.warning():
                logger.warning(releases.warning())
            tells = _tells(releases, "accuracy", _unblinded(settings, settings.report_accuracy), "--report-accuracy")
            calibrates = _tells(
                releases,
                "calibration",
                _unblinded(settings, settings.report_calibration),
                "--report-calibration",
            )
            drifts = _tells(releases, "drift", _unblinded(settings, settings.tell_drift), "--tell-drift")
            if test is not None and not tells and settings.report_accuracy is None:
                logger.info(f"accuracy stays on this device: {_why_untold(releases, settings)}")
            rollout = RolloutWork(
                file,
                active.installed,
                bundle,
                active.path,
                device_id=settings.id,
                terms=active.terms,
                samples=lambda: _no_samples_like(device.samples) if releases.is_private else device.samples,
                manager=self._manager,
                stopping=self._stopping,
            )
            photos = None
            if settings.camera is not None:
                from protofleet.edge_client.run.camera_work import start_camera

                photos = start_camera(
                    settings,
                    policy,
                    bundle,
                    graphs,
                    directory=state,
                    learned=own.learned,
                    ledger=(ledger, ledger_path(file.state, policy)),
                    look=self.look,
                    tells_proposed=policy.proposals and not releases.is_private,
                    tells_unknown=_tells(
                        releases, "unknown", _unblinded(settings, settings.tell_unknown), "--tell-unknown"
                    ),
                    parts=parts,
                )
            client = self._client = Client(
                Membership(
                    address,
                    settings.fleet,
                    settings.id,
                    bundle,
                    trusted=active.terms.public_keys,
                    identity=identity,
                    token=None if settings.token is None else read_token(settings.token),
                    keepalive_s=settings.keepalive,
                    stays=not settings.until_finished,
                ),
                journal,
                Own(device, releases, _blinding(settings, m, identity), own, self._photos),
                rollout=rollout,
                figures=Figures(
                    measured_metrics(state, bundle.sha256, *m.extended),
                    tells_accuracy=tells and test is not None,
                    drift=DriftWatch(device, state) if drifts else None,
                    tells_calibration=calibrates and test is not None,
                ),
                patience_s=settings.patience or (_PATIENCE_S if settings.until_finished else None),
                stopping=self._stopping,
                manager=self._manager,
                photos=photos,
            )
            if self._is_look_due:
                self.look()
            on_summary(client.summary(), False)
            process_metrics.rest_memory()  # what only the start needed
            self._manager.ready()
            self._has_started = True
            try:
                client.run()
            except BaseException as error:
                rollout.probation.ended(error)
                if not rollout.is_over:
                    raise
            finally:
                self._client = None
                if not rollout.is_over:
                    self._manager.stopping()
                    on_summary(client.summary(), True)
            if not rollout.is_over:
                ended = journal.outcomes()
                logger.info(f"done: {counted(ended['sent'], 'contribution')}, {ended['committed']} committed")
            return client.summary(), rollout.is_over

    @property
    def _photos(self) -> str:
        """What the device tests with, in words."""
        return "held-out photos" if self._settings.test is None else "test photos"

    def stop(self) -> None:
        """End `run` as soon as the device waits again; a round under way is finished first.

        May be called from any thread.
        """
        self._stopping.set()
        if self._client is not None:
            self._client.wake()

    def look(self) -> None:
        """Look at the photos now instead of within ten minutes, or as soon as a client runs.

        May be called from any thread, and from a signal handler.
        """
        self._is_look_due = (client := self._client) is None
        if client is not None:
            client.look()


def _check_house(settings: ClientSettings, policy: Policy) -> None:
    """Whether answers may leave, and for where; so that a mistake in the address is known at the start."""
    from protofleet.edge_client.home_assistant.removal import address_of

    if not policy.answers:
        raise UsageError("--home-assistant", expected="a --policy with answers = true", got="none that allows it")
    if policy.is_private and settings.home_assistant == FLEETS_BROKER:
        expected = "a broker of your own, since answers have no noise and the policy has epsilon"
        raise UsageError("--home-assistant", expected=expected, got=FLEETS_BROKER)
    address_of(settings)


def _no_arrays(manifest: Manifest) -> tuple[NDArray[Any], NDArray[Any]]:
    """The samples of a device that has a camera alone: what it was taught is beside them."""
    return np.empty((0, *manifest.input_shape), np.uint8), np.empty(0, np.int64)


def _light(active: ActiveBundle) -> ActiveBundle:
    """The same bundle, with its weights in a mapped file, out of this process's memory while nobody reads them.

    Nobody else may hold the former weights.
    """
    weights = laid_aside(active.bundle.params, active.directory)
    return replace(active, bundle=replace(active.bundle, params=weights))


def _blinding(settings: ClientSettings, manifest: Manifest, identity: Identity) -> Blinding:
    """What it asks of blinded rounds."""
    helper = None if settings.helper_key is None else read_helper_public(settings.helper_key, "--helper-key")
    return Blinding(manifest, helper=helper, signer=identity.signer, fleet=settings.fleet, device=settings.id)


def _providers(settings: ClientSettings, active: ActiveBundle) -> Providers:
    """Where this device computes."""
    state, wanted, threads = active.directory, settings.provider, settings.threads
    providers = choose_providers(active.bundle, active.path, wanted=wanted, threads=threads, state=state)
    logger.info(providers.choice.line)
    return providers


def _with_fastest_step(
    settings: ClientSettings, active: ActiveBundle, providers: Providers, *, in_parts: bool
) -> Bundle:
    """The bundle, with the form of its training step that this device is fastest with; parts of a batch have none."""
    if settings.portable_step or in_parts or providers.choice.training != "cpu":
        return replace(active.bundle, forms={})
    state = active.directory
    bundle = replace(active.bundle, forms=runnable_forms(active.bundle.forms))
    bundle = replace(bundle, forms=fitting_forms(settings, bundle, active.path, state))
    return choose_step_form(bundle, active.path, threads=settings.threads, state=state)


def _no_samples_like(samples: LocalData) -> LocalData:
    """What a bundle is tried with where nothing may follow from samples: none of them, but their shape."""
    return LocalData(samples.x[:0], samples.y[:0])


def _unblinded(settings: ClientSettings, wanted: bool | None) -> bool | None:
    """Beside a sum that hides it, a figure is told only where it is asked for."""
    return False if wanted is None and settings.helper_key is not None else wanted


def _why_untold(releases: Releases, settings: ClientSettings) -> str:
    """Why accuracy is not told where nobody has asked for it, nor against it."""
    if releases.is_private:
        return "no noise is added to it"
    if settings.helper_key is not None and releases.policy.allows_figure("accuracy"):
        return "beside sums that are blinded it is told with --report-accuracy alone"
    return "its policy does not name it"


def _tells(releases: Releases, figure: Figure, wanted: bool | None, option: str) -> bool:
    """Whether a figure that is computed from samples goes into the status.

    It does not where noise protects what is sent, because no noise is added to the figure. It does not where the
    owner's policy forbids it.
    """
    allowed = not releases.is_private and releases.policy.allows_figure(figure)
    if wanted and not allowed:
        if releases.policy.is_private or not releases.is_private:
            raise UsageError(option, expected=f"a --policy that lets {figure} be told", got="one that does not")
        raise UsageError(option, expected="a device that has sent nothing with noise", got="one that has, or will")
    return allowed and wanted is not False
