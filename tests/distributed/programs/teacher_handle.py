"""Two ranks train on a teacher's samples while the model is switched and processes die; results go under their names.

Rank 0 runs the broker and the workers, each in a process of its own, and kills them.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import numbered_teacher
import torch
import torch.nn.functional as F
from numbered_teacher import TOKENS, VECTORS, VOCAB
from torch import nn
from torchrun import error_of, report

from mixle import seq_estimate, seq_initialize
from mixle.models.distillation import DistillationEstimator, DistillationLeaf, HiddenStates
from mixle.models.streaming_transformer_leaf import StreamingTransformerLeafEstimator
from mixle.models.transformer import CausalLM
from mixle.training import TrainingOptions
from mixle.training.taught_tokens import TaughtTokens
from mixle.utils.parallel.process_group import join
from mixle.utils.parallel.teacher import TeacherEncodedData

BATCH, STEPS, RATE = 4, 8, 0.05
job = join()
rank = job.rank
results: dict[str, object] = {}
folder = job.exchange("folder", tempfile.mkdtemp(prefix="mx"))[0]
os.environ["MIXLE_TEACHER_DIR"] = f"{folder}/run"
ENDPOINTS = {name: f"ipc://{folder}/{letter}" for name, letter in zip(("front", "control", "pub"), "fcp", strict=True)}
processes: list[subprocess.Popen[bytes]] = []

BROKER = """
import sys
from mixle.data.teacher.broker import Broker
folder = sys.argv[1]
Broker(*(f"ipc://{folder}/{letter}" for letter in "fbcp"), heartbeat_s=0.05).run()
"""


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def start(*command: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, *command], preexec_fn=die_with_parent)
    processes.append(process)
    return process


def start_broker() -> subprocess.Popen[bytes]:
    return start("-c", BROKER, folder)


def start_worker(index: int, seconds: float) -> subprocess.Popen[bytes]:
    process, until = start(numbered_teacher.__file__, folder, str(index), str(seconds)), time.monotonic() + 60
    while not Path(folder, f"worker-{index}").exists():
        assert time.monotonic() < until, f"worker {index} did not register"
        time.sleep(0.01)
    return process


def stop(*chosen: subprocess.Popen[bytes]) -> None:
    for process in chosen:
        process.kill()
        process.wait()
        processes.remove(process)


class Recorded:
    """The squared error of the first two numbers; keeps the number and the model of every sample that it saw."""

    def __init__(self) -> None:
        self.seen: list[list[tuple[int, int]]] = []

    def losses(self, predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if wanted[:, 2].all():  # not the blank batch with which a module is checked
            self.seen.append([(int(number), int(model)) for number, model in wanted[:, 2:].tolist()])
        return (predicted - wanted)[:, :2].square().mean(-1)


def net() -> nn.Module:
    torch.manual_seed(rank)  # training begins with rank 0's
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def handle_on(config: object = VECTORS, **options: object) -> TeacherEncodedData:
    chosen = {"batch_size": BATCH, "steps": STEPS, "deadline_s": 20.0, **options}
    return TeacherEncodedData(
        ENDPOINTS["front"], batch_config=config, control_endpoint=ENDPOINTS["control"],
        control_pub_endpoint=ENDPOINTS["pub"], **chosen,
    )  # fmt: skip


def estimator(module: nn.Module, loss: object) -> DistillationEstimator:
    return DistillationEstimator(module, RATE, loss=loss, inputs="x", targets="y", optimizer="sgd")


def everyones(seen: list[list[tuple[int, int]]]) -> list[list[list[tuple[int, int]]]]:
    return [json.loads(text) for text in job.exchange("seen", json.dumps(seen))]


def as_one_process(start_at: dict[str, torch.Tensor], steps: list[list[tuple[int, int]]]) -> dict[str, torch.Tensor]:
    """Train on the samples of all ranks in one process, by a plain loop."""
    module = net()
    module.load_state_dict(start_at)
    optimizer = torch.optim.SGD(module.parameters(), RATE)
    for step in steps:
        samples = [numbered_teacher.vectors(number, model) for number, model in step]
        x, y = (torch.stack([torch.from_numpy(sample[name]) for sample in samples]) for name in "xy")
        optimizer.zero_grad()
        (module(x) - y)[:, :2].square().mean().backward()
        optimizer.step()
    return module.state_dict()


def fit(name: str, handle: TeacherEncodedData, module: nn.Module, accumulation: int = 1) -> DistillationLeaf:
    """Train, and report what each step was trained on and how far its result is from one process's."""
    loss = Recorded()
    before = seq_initialize(handle, estimator(module, HiddenStates()), None).unshard()
    start_at = {key: value.clone() for key, value in before.module.state_dict().items()}
    leaf = seq_estimate(handle, estimator(module, loss))
    ranks = everyones(loss.seen)
    steps = [[s for one in ranks for batch in one[i : i + accumulation] for s in batch] for i in
             range(0, len(loss.seen), accumulation)]  # fmt: skip
    expected, found = as_one_process(start_at, [[tuple(s) for s in step] for step in steps]), leaf.unshard().module
    results[name] = {
        "models": [sorted({model for _, model in step}) for step in steps],
        "numbers": [number for step in steps for number, _ in step],
        "deviation": max(float((found.state_dict()[key] - value).abs().max()) for key, value in expected.items()),
        "losses": [float(record) for record in leaf.history],
        "receipt": {key: value for key, value in handle.schedule_receipt.items() if not isinstance(value, dict)},
        "by generation": [[*row] for row in handle.schedule_receipt["samples_by_generation"].items()],
        "first steps": [[*row] for row in handle.schedule_receipt["first_step_of_generation"].items()],
        "generation": handle.generation,
    }
    return leaf


# ---- before there is a broker

with handle_on(deadline_s=1.0) as handle:
    started = time.monotonic()
    results["no broker"] = error_of(seq_estimate, handle, estimator(net(), HiddenStates()))
    results["no broker, seconds"] = time.monotonic() - started

if rank == 0:
    broker = start_broker()
    workers = [start_worker(1, 0.0), start_worker(2, 0.02)]

# ---- the leader switches in a callback, and in another thread

switched_at: list[int] = []


def switch_in_callback(record: object) -> None:
    if rank == 0 and record.step == 3:
        handle.set_model("m", {"number": 2})


with handle_on(
    model_id="m", model_cfg={"number": 1}, training=TrainingOptions(callbacks=[switch_in_callback])
) as handle:
    leaf = fit("switched in a callback", handle, net())
    results["set_model on rank 1"] = error_of(handle.set_model, "m") if rank else "LeaderRefused"
    again = seq_estimate(handle, estimator(leaf.module, HiddenStates()), leaf)
    results["goes on"] = [len(leaf.history), len(again.history), again.revision]

reached = threading.Event()


def switch_from_thread() -> None:
    reached.wait(60)
    handle.set_model("m", {"number": 3})


def tell_thread(record: object) -> None:
    if record.step == 3:
        reached.set()
    if record.step >= 5 and rank == 0:
        leading.join(60)


leading = threading.Thread(target=switch_from_thread)
with handle_on(
    model_id="m", model_cfg={"number": 2}, training=TrainingOptions(callbacks=[tell_thread], gradient_accumulation=2)
) as handle:
    if rank == 0:
        leading.start()
    fit("switched from a thread", handle, net(), accumulation=2)

with handle_on(parallel="fsdp") as handle:
    fit("sharded", handle, net())

# ---- what is refused

with handle_on() as handle:
    asked = handle.schedule_receipt["samples_asked"]
    unknown = DistillationEstimator(net(), inputs="x", targets="logits")
    results["unknown tensor"] = error_of(seq_estimate, handle, unknown)
    results["other shape"] = error_of(seq_estimate, handle, estimator(nn.Linear(4, 5), HiddenStates()))
    results["asked meanwhile"] = handle.schedule_receipt["samples_asked"] - asked
results["other arguments"] = error_of(handle_on, steps=STEPS + rank)


class FailingOnRank1(Recorded):
    def losses(self, predicted: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        if rank == 1 and len(self.seen) == 2 and wanted.any():
            raise ArithmeticError("a loss of rank 1")
        return super().losses(predicted, wanted)


with handle_on() as handle:
    results["loss of rank 1"] = error_of(seq_estimate, handle, estimator(net(), FailingOnRank1()))
    fit("after an error", handle, net())

# ---- what dies


def kill_broker(record: object) -> None:
    global broker
    if rank == 0 and record.step == 3:
        stop(broker)
        broker = start_broker()


with handle_on(training=TrainingOptions(callbacks=[kill_broker])) as handle:
    fit("broker killed", handle, net())


def kill_workers(record: object) -> None:
    if rank == 0 and record.step == 3:
        stop(*doomed)
        doomed.clear()


doomed = list(workers) if rank == 0 else []
with handle_on(deadline_s=2.0, steps=50, training=TrainingOptions(callbacks=[kill_workers])) as handle:
    student = net()
    started = time.monotonic()
    results["workers killed"] = error_of(seq_estimate, handle, estimator(student, HiddenStates()))
    results["workers killed, seconds"] = time.monotonic() - started
    if rank == 0:
        start_worker(3, 0.0)
    job.meet("a worker is back", deadline_s=60.0)
    fit("workers back", handle, net())

# ---- a plan: one rank asks, both train


def recording(rows: list[list[list[int]]]) -> object:
    batch = TaughtTokens.batch

    def record(self: TaughtTokens, tensors: dict[str, torch.Tensor], device: torch.device) -> object:
        rows.append(tensors["ids"].tolist())
        return batch(self, tensors, device)

    return record


for axes in ({"tp_size": 2}, {"pp_size": 2, "microbatches": 2}, {"cp_size": 2}):
    with handle_on(TOKENS, model_id="tokens", steps=3, **axes) as handle:
        torch.manual_seed(0)
        module = CausalLM(VOCAB, 16, 2, 2, numbered_teacher.LENGTH)
        plain, rows = copy.deepcopy(module), []
        with mock.patch.object(TaughtTokens, "batch", recording(rows)):
            leaf = seq_estimate(handle, StreamingTransformerLeafEstimator(module, RATE, optimizer="sgd"))
        trained = leaf.unshard().module.state_dict()
        everyones_rows = json.loads(job.exchange("rows", json.dumps(rows))[0])
        assert len(everyones_rows) == 3
        optimizer = torch.optim.SGD(plain.parameters(), RATE)
        for ids in map(torch.tensor, everyones_rows):
            optimizer.zero_grad()
            F.cross_entropy(plain(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
            optimizer.step()
        deviations = [float((trained[key] - value).abs().max()) for key, value in plain.state_dict().items()]
        results[f"{next(iter(axes))}, deviation"] = max(deviations)
        losses = [float(record) for record in leaf.history]
        name = next(iter(axes))
        results[name] = {
            "losses": losses,
            "served": handle.schedule_receipt["samples_served"],
            "asks": handle.generation > 0,
        }
with handle_on(TOKENS, tp_size=2) as handle:
    odd = CausalLM(VOCAB, 16, 1, 1, numbered_teacher.LENGTH)
    results["plan that does not fit"] = error_of(seq_estimate, handle, StreamingTransformerLeafEstimator(odd))

# ---- a model that fails

with handle_on(model_id="broken", max_retries=1) as handle:
    results["broken"] = error_of(seq_estimate, handle, estimator(net(), HiddenStates()))

job.meet("done")
if rank == 0:
    stop(*list(processes))
results["left behind"] = sorted(path.name for path in Path("/dev/shm").glob(f"mx*-{os.getpid():x}-*"))
report(results)
job.close()
