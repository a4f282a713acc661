"""Which of ONNX Runtime's execution providers is used for what on this device: trials in, a choice and its reasons out.

No I/O: `provider_trials.py` runs the trials, and remembers them. How the choice is made:

1. The CPU is the reference, and always a candidate. Another provider is a candidate for a use where it ran that use: an
   inference, and for training a step.
2. What is sent is summed with what others send. So features for it come from a provider that reproduces the bundle's
   test vectors within `protofleet.contract.bundle.test_vectors.TOLERANCE`. Without vectors that is the CPU alone.
3. Answers leave no device, so 1 % is near enough for them. A training step has to be as near to the CPU's.
4. The fastest candidate is taken. A provider other than the CPU is taken only where it saves a tenth of the time. A
   provider that a person names is taken wherever it is a candidate, however slow.
5. A provider that compiles weights into an engine takes minutes for it. So it is not used with weights that training
   changes. TensorRT does so.

A further provider is its line in `PROVIDERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from protofleet.contract.bundle.test_vectors import TOLERANCE
from protofleet.contract.names import known, listed, named

__all__ = [
    "CHOICES",
    "PROVIDERS",
    "PROVIDER_HELP",
    "Choice",
    "ExecutionProvider",
    "Trial",
    "check_provider",
    "choose",
    "wanted_trials",
]

Options = dict[str, str]


@dataclass(frozen=True)
class ExecutionProvider:
    """One of ONNX Runtime's execution providers.

    Attributes:
        runtime_name: what ONNX Runtime calls it.
        options: what it is told, given a number of threads and the folder for what it compiles: float32 throughout,
            memory as it is needed.
        below: who takes the nodes that it cannot run, by our names, in order.
        compiles: whether it makes an engine of graph and weights, for minutes.
    """

    runtime_name: str
    options: Callable[[int, Path | None], Options] = lambda threads, engines: {}
    below: tuple[str, ...] = ()
    compiles: bool = False


def _cuda_options(threads: int, engines: Path | None) -> Options:
    return {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested", "cudnn_conv_algo_search": "HEURISTIC"}


def _tensorrt_options(threads: int, engines: Path | None) -> Options:
    options = {"trt_fp16_enable": "0", "trt_int8_enable": "0"}  # TF32 is off by contract/bundle/onnx_runtime.py
    kept = {} if engines is None else {"trt_engine_cache_enable": "1", "trt_engine_cache_path": str(engines)}
    return options | kept


PROVIDERS: Mapping[str, ExecutionProvider] = MappingProxyType(
    {
        "cpu": ExecutionProvider("CPUExecutionProvider"),
        "xnnpack": ExecutionProvider(
            "XnnpackExecutionProvider", lambda threads, engines: {"intra_op_num_threads": str(threads)}, ("cpu",)
        ),
        "cuda": ExecutionProvider("CUDAExecutionProvider", _cuda_options, ("cpu",)),
        "tensorrt": ExecutionProvider("TensorrtExecutionProvider", _tensorrt_options, ("cuda", "cpu"), compiles=True),
    }
)
CHOICES = ("auto", *PROVIDERS)
PROVIDER_HELP = f"Where graphs run: auto (the fastest of those tried), {listed(PROVIDERS)}."
NEAR = 1e-2  # how far answers, and a step's change of the weights, may be from the CPU's
_GAIN = 0.9  # of the CPU's time; what saves less is not worth another provider


@dataclass(frozen=True)
class Trial:
    """What came of trying a provider with a bundle.

    Attributes:
        image_ms: an inference of one image; None where none succeeded.
        block_ms: an image among as many as the bundle's batch.
        error: largest relative distance of the features from the bundle's test vectors, or, where it has none, from
            what this device's CPU says.
        failed: why no inference succeeded; empty where one did.
        step_ms: a training step; None where none succeeded or none was tried.
        step_error: relative distance of the step's change of the weights from the CPU's.
        step_failed: why no step succeeded; empty where one did or none was tried.
    """

    provider: str
    image_ms: float | None = None
    block_ms: float | None = None
    error: float | None = None
    failed: str = ""
    step_ms: float | None = None
    step_error: float | None = None
    step_failed: str = ""


@dataclass(frozen=True)
class Choice:
    """The provider for each use, by name, and why.

    Attributes:
        shared: features by the bundle's weights, to be summed.
        own: features by the device's own weights, to be summed.
        training: training steps.
        answers, own_answers: features for answers, by the bundle's weights and by the device's own.
        line: which provider is used, and why, for a person.
    """

    shared: str = "cpu"
    own: str = "cpu"
    training: str = "cpu"
    answers: str = "cpu"
    own_answers: str = "cpu"
    line: str = "runs on cpu"


def check_provider(name: str) -> str:
    """The name, if it is one of `CHOICES`.

    Raises:
        UsageError: it is none.
    """
    return known(CHOICES, name, "--provider")


def wanted_trials(wanted: str, built: Sequence[str]) -> tuple[str, ...]:
    """Which providers are to be tried, the CPU first, of those that this build of ONNX Runtime has."""
    able = ("cpu", *built)
    asked = PROVIDERS if wanted == "auto" else (*named(PROVIDERS, wanted, "--provider").below, wanted)
    return tuple(name for name in PROVIDERS if name in asked and name in able)


def choose(trials: Sequence[Trial], wanted: str, *, has_vectors: bool, build: str = "") -> Choice:
    """A provider for each use.

    Args:
        trials: one for each of `wanted_trials`, that of the CPU among them.
        wanted: one of `CHOICES`.
        has_vectors: whether errors are distances from the bundle's test vectors.
        build: which ONNX Runtime this is, in words.
    """
    cpu = next(trial for trial in trials if trial.provider == "cpu")

    def best(is_able: Callable[[Trial], bool], time_ms: Callable[[Trial], float | None]) -> str:
        able = [trial for trial in trials if trial is cpu or is_able(trial)]
        if wanted != "auto":
            order = (wanted, *PROVIDERS[wanted].below)
            return next(name for name in order if name in [trial.provider for trial in able])
        fastest = min(able, key=lambda trial: _or_never(time_ms(trial)))
        enough = _or_never(time_ms(fastest)) < _GAIN * _or_never(time_ms(cpu))
        return fastest.provider if enough else "cpu"

    def sums(trial: Trial) -> bool:
        return has_vectors and not trial.failed and _or_never(trial.error) <= TOLERANCE

    def answers(trial: Trial) -> bool:
        return not trial.failed and _or_never(trial.error) <= NEAR

    def changing(is_able: Callable[[Trial], bool]) -> Callable[[Trial], bool]:
        return lambda trial: not PROVIDERS[trial.provider].compiles and is_able(trial)

    choice = Choice(
        shared=best(sums, lambda trial: trial.block_ms),
        own=best(changing(sums), lambda trial: trial.block_ms),
        training=best(changing(_trains), lambda trial: trial.step_ms),
        answers=best(answers, lambda trial: trial.image_ms),
        own_answers=best(changing(answers), lambda trial: trial.image_ms),
    )
    return replace(choice, line=_line(choice, trials, wanted, has_vectors, build))


def _trains(trial: Trial) -> bool:
    return trial.step_ms is not None and _or_never(trial.step_error) <= NEAR


def _or_never(value: float | None) -> float:
    return float("inf") if value is None else value


# ── in words ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _line(choice: Choice, trials: Sequence[Trial], wanted: str, has_vectors: bool, build: str) -> str:
    uses = {"statistics": choice.shared, "training": choice.training, "answers": choice.answers}
    if not any(trial.step_ms is not None for trial in trials):
        del uses["training"]  # nothing was to choose
    names = list(dict.fromkeys(uses.values()))
    parts = [f"{_listed([use for use, name in uses.items() if name == provider])} on {provider}" for provider in names]
    summary = f"runs on {names[0]}" if len(names) == 1 else ", ".join(parts)
    others = [trial for trial in trials if trial.provider != "cpu"]
    reasons = [_reason(trial, trials[0], choice, has_vectors) for trial in others]
    if wanted not in ("auto", *(trial.provider for trial in trials)):
        reasons.append(f"{wanted} is not in this {build or 'onnxruntime'}")
    elif wanted == "auto" and not others:
        reasons.append(f"{build or 'this onnxruntime'} has no other provider")
    return "; ".join([summary, *(reason for reason in reasons if reason)])


def _reason(trial: Trial, cpu: Trial, choice: Choice, has_vectors: bool) -> str:
    """Why a provider is used or not."""
    name, error = trial.provider, _or_never(trial.error)
    if trial.failed:
        return f"{name} cannot be used: {trial.failed}"
    times = f"{name} {_or_never(trial.image_ms):.3g} ms a photo, cpu {_or_never(cpu.image_ms):.3g}"
    if error > NEAR:
        return f"{name} is wrong: its features are off by {error:.1g}"
    parts = [times]
    if has_vectors and error > TOLERANCE:
        parts.append(f"off the bundle's test vectors by {error:.1g}, allowed {TOLERANCE:g}: for answers only")
    if not has_vectors:
        parts.append("the bundle has no test vectors: for answers only")
    if trial.step_failed:
        parts.append(f"no training step: {trial.step_failed}")
    elif trial.step_ms is not None and not _trains(trial):
        parts.append(f"its training step is off by {_or_never(trial.step_error):.1g}")
    elif trial.step_ms is not None:
        parts.append(f"a step {trial.step_ms:.3g} ms, cpu {_or_never(cpu.step_ms):.3g}")
    return ", ".join(parts)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
