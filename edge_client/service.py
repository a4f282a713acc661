"""One device, from its files to its end: the one way in for the command and for a program that holds one.

A `Service` reads the bundle and the data, opens the state directory, restores the weights, and runs the client until
`stop` is called, or its run is finished where that was asked for. When a roll-out brings another bundle, or its end
brings back the one before, the client ends, and all of this is done once more with that bundle, in the same process. A
bundle on probation with which it cannot be done is given up (`probation.py`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from contract.bundle import Bundle, Manifest
from contract.errors import UsageError
from contract.link import Address
from contract.methods import load_method, method
from contract.sealing import read_helper_public
from contract.service_manager import ServiceManager
from contract.signing_keys import read_public_keys
from contract.terminal import counted
from contract.tokens import read_token
from edge_client import process_metrics
from edge_client.blinded import Blinding
from edge_client.client import Client
from edge_client.compiled_graphs import CompiledGraphs
from edge_client.config import ClientConfig
from edge_client.data import LocalData
from edge_client.data.activations import ActivationStore
from edge_client.device import Device
from edge_client.drift import DriftWatch
from edge_client.identity import Identity, identity_of
from edge_client.journal import FILE as JOURNAL
from edge_client.laid_aside import laid_aside
from edge_client.ledger import Ledger
from edge_client.memory_limit import fitting_forms, trains_in_parts
from edge_client.own_samples import OwnSamples
from edge_client.policy import Figure, Policy, read_policy
from edge_client.probation import ProbationWatch
from edge_client.profile_record import measured_metrics
from edge_client.provider_trials import Providers, settle_providers
from edge_client.releases import Releases, ledger_path
from edge_client.rollout_file import RolloutFile
from edge_client.rollout_work import RolloutWork
from edge_client.seated import Seated, settle
from edge_client.step_forms import settle_step

__all__ = ["Service"]

_PATIENCE_S = 60.0  # of a client that ends with its run

Log = Callable[[str], None]
OnSummary = Callable[[dict[str, Any], bool], None]
"""Takes what the device has done so far, and whether it has ended."""


class Service:
    """A device of one fleet.

    Args:
        settings: as the command takes them.
        arrays: images (N, H, W, c) and class numbers (N,) in memory, instead of what `settings.data` names.
    """

    def __init__(self, settings: ClientConfig, arrays: tuple[NDArray[Any], NDArray[Any]] | None = None) -> None:
        self._settings, self._arrays = settings, arrays
        self._stopping = threading.Event()
        self._client: Client | None = None
        self._is_look_due = False
        self._has_started = False
        self._manager = ServiceManager()

    def run(self, log: Log, on_summary: OnSummary) -> dict[str, Any]:
        """Take part until `stop`, or until the run is finished; returns what the device has done.

        Args:
            log: takes one line for a person.
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
        keys = () if settings.trust is None else read_public_keys(settings.trust)
        with RolloutFile(Path(settings.state), make=bool(keys)) as file:
            identity = identity_of(settings)
            if settings.helper_key is not None and identity.signer is None:
                got, hint = "none", "client --identity, or --token"
                raise UsageError("--helper-key", expected="a key to sign with", got=got, hint=hint)
            while True:
                self._has_started = False
                seats = [settle(settings, file, keys, log, budget=policy.is_private)]  # popped: see `_light`
                watch = ProbationWatch(file, log)
                try:
                    summary, is_over = self._run_with(seats.pop(), identity, file, policy, log, on_summary)
                except BaseException as error:
                    watch.ended(error, at_start=not self._has_started)
                    if not watch.is_over:
                        raise
                else:
                    if not is_over:
                        watch.ended(None)
                        return summary
                process_metrics.release_memory()

    def _run_with(
        self, seated: Seated, identity: Identity, file: RolloutFile, policy: Policy, log: Log, on_summary: OnSummary
    ) -> tuple[dict[str, Any], bool]:
        """Run with one bundle; what the device has done, and whether another one has to run now."""
        settings, bundle, m = seated.settings, seated.bundle, seated.bundle.manifest
        address = Address.parse(settings.broker, ca_file=settings.ca, cert_file=settings.cert, key_file=settings.key)
        state = seated.directory
        in_parts = trains_in_parts(settings, m, bundle.sha256, seated.path, state, log)
        with seated.journal() as journal, Ledger(ledger_path(file.state, policy)) as ledger:
            seated = _light(seated)
            bundle = seated.bundle
            own_method = method(m.method)
            releases = Releases(policy, ledger, fleet=settings.fleet, own=own_method, hyper=m.hyper)
            journals = (*file.state.glob(JOURNAL), *file.state.glob(f"fleets/*/{JOURNAL}"))
            others = [path.parent for path in journals if path.parent != state]
            releases.begin(journal, others=others, accepts_looser=settings.accept_looser_policy)
            own = OwnSamples(
                settings,
                m,
                state,
                log,
                self._arrays,
                learned=Path(settings.state),
                draw_key=journal.draw_key(),
                rule=releases.hold_out(),
            )
            found = own.read()
            data, test = found.data, found.test
            providers = _providers(settings, seated, log)
            trained = _with_fastest_step(settings, seated, providers, log, in_parts=in_parts)
            graphs = CompiledGraphs(trained, settings.threads, providers=providers, in_parts=in_parts)
            device = Device(
                bundle,
                data,
                settings.id,
                test=test,
                held=found.held,
                activations=ActivationStore(state / "activations", settings.activations * 10**6, log),
                graphs=graphs,
                secret=journal.secret(),
                on_batch=self._manager.alive,
            )
            device.restore(journal.weights())
            seated.runs(file)
            beside = f", {len(test):,} {self._photos}" if test is not None else ""
            beside += f", {len(own.learned):,} of them learned" if len(own.learned) else ""
            classes = counted(int(device.own_classes.sum()), "class", "classes")
            log(f"{counted(len(data), 'sample')} of {classes}{beside}, bundle {bundle.sha256.hex()[:12]}")
            if releases.warning():
                log(releases.warning())
            tells = _tells(releases, "accuracy", _unblinded(settings, settings.report_accuracy), "--report-accuracy")
            drifts = _tells(releases, "drift", _unblinded(settings, settings.tell_drift), "--tell-drift")
            if test is not None and not tells and settings.report_accuracy is None:
                log(f"accuracy stays on this device: {_why_untold(releases, settings)}")
            rollout = RolloutWork(
                file,
                seated.seat,
                bundle,
                seated.path,
                device_id=settings.id,
                terms=seated.terms,
                samples=lambda: _none_of(device.samples) if releases.is_private else device.samples,
                manager=self._manager,
                stopping=self._stopping,
                log=log,
            )
            client = self._client = Client(
                device=device,
                rollout=rollout,
                releases=releases,
                samples=own,
                journal=journal,
                bundle=bundle,
                address=address,
                fleet=settings.fleet,
                device_id=settings.id,
                trusted=seated.terms.public_keys,
                identity=identity,
                token=None if settings.token is None else read_token(settings.token),
                until_finished=settings.until_finished,
                patience_s=settings.patience or (_PATIENCE_S if settings.until_finished else None),
                keepalive_s=settings.keepalive,
                measured=measured_metrics(state, bundle.sha256, *m.extended),
                blinding=_blinding(settings, m, identity),
                photos=self._photos,
                tells_accuracy=tells and test is not None,
                drift=DriftWatch(device, state) if drifts else None,
                log=log,
                detail=log if settings.verbose else None,
                stopping=self._stopping,
                manager=self._manager,
            )
            if self._is_look_due:
                self.look()
            on_summary(client.summary(), False)
            process_metrics.release_memory()  # what only the start needed
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
                log(f"done: {counted(ended['sent'], 'contribution')}, {ended['committed']} committed")
            return client.summary(), rollout.is_over

    @property
    def _photos(self) -> str:
        """What the device tests with, in words."""
        return "held-out photos" if self._settings.test is None else "test photos"

    def stop(self) -> None:
        """End `run` as soon as the device waits again, from any thread: a round under way is finished first."""
        self._stopping.set()
        if self._client is not None:
            self._client.wake()

    def look(self) -> None:
        """Look at the photos now instead of within ten minutes, or as soon as there is a client that can, from any
        thread, and from a signal handler."""
        self._is_look_due = (client := self._client) is None
        if client is not None:
            client.look()


def _light(seated: Seated) -> Seated:
    """The same, with its bundle's weights out of this process's memory while nobody reads them.

    Nobody else may hold the former ones.
    """
    weights = laid_aside(seated.bundle.params, seated.directory)
    return replace(seated, bundle=replace(seated.bundle, params=weights))


def _blinding(settings: ClientConfig, manifest: Manifest, identity: Identity) -> Blinding:
    """What it asks of blinded rounds."""
    helper = None if settings.helper_key is None else read_helper_public(settings.helper_key, "--helper-key")
    return Blinding(manifest, helper=helper, signer=identity.signer, fleet=settings.fleet, device=settings.id)


def _providers(settings: ClientConfig, seated: Seated, log: Log) -> Providers:
    """Where this device computes."""
    state, wanted, threads = seated.directory, settings.provider, settings.threads
    found = settle_providers(seated.bundle, seated.path, wanted=wanted, threads=threads, state=state, log=log)
    log(found.choice.words)
    return found


def _with_fastest_step(
    settings: ClientConfig, seated: Seated, providers: Providers, log: Log, *, in_parts: bool
) -> Bundle:
    """The bundle, with the form of its training step that this device is fastest with; parts of a batch have none."""
    if settings.portable_step or in_parts or providers.choice.training != "cpu":
        return replace(seated.bundle, forms={})
    state = seated.directory
    bundle = replace(seated.bundle, forms=fitting_forms(settings, seated.bundle, seated.path, state, log))
    return settle_step(bundle, seated.path, threads=settings.threads, state=state, log=log)


def _none_of(samples: LocalData) -> LocalData:
    """What a bundle is tried with where nothing may follow from samples: none of them, but their shape."""
    return LocalData(samples.x[:0], samples.y[:0])


def _unblinded(settings: ClientConfig, wanted: bool | None) -> bool | None:
    """Beside a sum that hides it, a figure is told only where it is asked for."""
    return False if wanted is None and settings.helper_key is not None else wanted


def _why_untold(releases: Releases, settings: ClientConfig) -> str:
    """Why accuracy is not told where nobody has asked for it, nor against it."""
    if releases.is_private:
        return "no noise is added to it"
    if settings.helper_key is not None and releases.policy.allows_figure("accuracy"):
        return "beside sums that are blinded it is told with --report-accuracy alone"
    return "its policy does not name it"


def _tells(releases: Releases, figure: Figure, wanted: bool | None, option: str) -> bool:
    """Whether a figure that is computed from samples goes into the status: not where noise protects what is sent, since
    none is added to it, nor against the owner's policy."""
    allowed = not releases.is_private and releases.policy.allows_figure(figure)
    if wanted and not allowed:
        if releases.policy.is_private or not releases.is_private:
            raise UsageError(option, expected=f"a --policy that lets {figure} be told", got="one that does not")
        raise UsageError(option, expected="a device that has sent nothing with noise", got="one that has, or will")
    return allowed and wanted is not False
