"""Loss of the methods on the embedded corpus: Sign-Muon against Muon, Signum, a single worker, one iteration.

All logical workers of a run share one process and one model: their weights are equal in any case, so each has
only its own batches, its own optimizer (that is, momentum) and its own payload, and one of the optimizers
applies the reduced result. Proposals, reduction and update are those of a distributed run.
"""

from __future__ import annotations

import multiprocessing
import statistics
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.report import Report
from node.data import Dataset, DataSource, open_data
from node.model import LlamaShape, build_model
from optim.methods import MethodConfig, build_method
from optim.reduce import reduce_payloads
from optim.schedules import factor, set_learning_rates

MODEL = LlamaShape(d_model=64, layers=2, heads=2, context=64)
GLOBAL_BATCH = 16  # sequences of all workers together, in a step
VALIDATION = 384  # sequences held out
FINAL = 0.05
PROCESSES = 2


@dataclass(frozen=True)
class Method:
    """A method and how many workers share the global batch."""

    label: str
    config: MethodConfig
    workers: int = 4


SIGN_MUON = Method("sign-muon", MethodConfig(name="sign-muon"))
SIGN_MUON_ALONE = Method("sign-muon, one worker", MethodConfig(name="sign-muon"), workers=1)
# With one iteration the best learning rate is half that of five.
SIGN_MUON_NS1 = Method("sign-muon, one iteration", MethodConfig(name="sign-muon", lr=0.016, ns_steps=1))
SIGNUM = Method("signum", MethodConfig(name="signum"))
MUON = Method("ddp-muon", MethodConfig(name="ddp-muon"))
METHODS = (SIGN_MUON, SIGN_MUON_ALONE, SIGN_MUON_NS1, SIGNUM, MUON)


@dataclass(frozen=True)
class Outcome:
    """What a run ends with: held-out loss in nats per byte, and the payload a worker sent, in bytes."""

    loss: float
    payload: int


def train(method: Method, *, steps: int, seed: int, data: Dataset, warmup: int) -> Outcome:
    """Train :data:`MODEL` for ``steps`` rounds; equal seeds mean equal first weights and global batches."""
    model = build_model(MODEL, seed, vocab=data.vocab)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one Newton-Schulz step is too few is the point
        optimizers = [build_method(method.config, model) for _ in range(method.workers)]
    first = optimizers[0]
    payloads = [torch.empty(first.table.nbytes, dtype=torch.uint8) for _ in optimizers]
    batch = GLOBAL_BATCH // method.workers
    for step in range(steps):
        usable = []
        for worker, (optimizer, payload) in enumerate(zip(optimizers, payloads, strict=True)):
            model.zero_grad()
            tokens = data.batch(step * GLOBAL_BATCH + worker * batch, batch, seed)
            torch.autograd.backward(model.loss(tokens))
            if optimizer.propose(step, payload):
                usable.append(payload)
        set_learning_rates(first, factor(step, steps, warmup=warmup, final=FINAL))
        first.apply(step, reduce_payloads(first.table, usable, round_index=step))
    with torch.no_grad():
        loss = model.loss(data.validation(VALIDATION)).item()
    return Outcome(loss, steps * first.table.nbytes)


def _run(method: Method, steps: int, seed: int, warmup: int) -> Outcome:
    """One run in a process of its own pool, on one thread."""
    torch.set_num_threads(1)
    return train(method, steps=steps, seed=seed, data=open_data(DataSource(), MODEL.context), warmup=warmup)


def train_all(
    methods: Sequence[Method], *, steps: int, seeds: Sequence[int], warmup: int
) -> dict[str, list[Outcome]]:
    """All methods with all seeds, spread over :data:`PROCESSES` processes; outcomes in the order of seeds."""
    outcomes: dict[tuple[str, int], Outcome] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(PROCESSES, mp_context=spawn) as pool, _progress() as progress:
        task = progress.add_task("training", total=len(methods) * len(seeds))
        pending = {
            pool.submit(_run, method, steps, seed, warmup): (method.label, seed)
            for seed in seeds
            for method in methods
        }
        for future in as_completed(pending):
            label, seed = pending[future]
            outcomes[label, seed] = future.result()
            progress.console.print(f"{label}, seed {seed}: {outcomes[label, seed].loss:.4f} nats per byte")
            progress.advance(task)
    return {method.label: [outcomes[method.label, seed] for seed in seeds] for method in methods}


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True, highlight=False))


def run(quick: bool) -> Report:
    """The table of methods; quick: one seed and 120 steps instead of three and 512."""
    steps, seeds, warmup = (120, (0,), 12) if quick else (512, (0, 1, 2), 50)
    outcomes = train_all(METHODS, steps=steps, seeds=seeds, warmup=warmup)
    losses = {label: [outcome.loss for outcome in row] for label, row in outcomes.items()}

    def gap(worse: Method, better: Method) -> float:
        pairs = zip(losses[worse.label], losses[better.label], strict=True)
        return statistics.fmean(a - b for a, b in pairs)

    report = Report("methods")
    parity: dict[str, float] = {} if quick else {"floor": -0.03, "ceiling": 0.03}
    report.add("signmuon_minus_muon", gap(SIGN_MUON, MUON), ceiling=None if quick else 0.02)
    report.add("signum_minus_signmuon", gap(SIGNUM, SIGN_MUON), floor=0.08)
    report.add("m4_minus_m1", gap(SIGN_MUON, SIGN_MUON_ALONE), **parity)
    report.add("ns1_minus_ns5", gap(SIGN_MUON_NS1, SIGN_MUON), floor=0.05)
    payloads = {label: row[0].payload for label, row in outcomes.items()}
    report.add("muon_over_signmuon_bytes", payloads[MUON.label] / payloads[SIGN_MUON.label], floor=31)
    table = report.table(
        f"{steps} steps of {GLOBAL_BATCH * MODEL.context} bytes, {len(seeds)} seed(s)",
        "method",
        "workers",
        "lr",
        "loss",
        "std",
        "MB sent",
    )
    for method in METHODS:
        values = losses[method.label]
        mean, std = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        sent = payloads[method.label] / 1e6
        name = _figure_name(method.label)
        report.add(f"loss_{name}", mean)
        report.add(f"std_{name}", std)
        report.add(f"payload_mb_{name}", sent)
        lr = method.config.lr
        table.row(
            method.label, method.workers, "preset" if lr is None else lr, f"{mean:.4f}", f"{std:.4f}", sent
        )
    report.note(
        "loss: nats per held-out byte; gaps are means over seeds of paired runs (same weights and data)"
    )
    report.note("MB sent: payload of one worker over the run, embeddings and norms included")
    if quick:
        report.note("one seed, a short run: differences below 0.03 are noise, so these have no bar here")
    return report


def _figure_name(label: str) -> str:
    return label.replace(", ", "_").replace("-", "").replace(" ", "_")
