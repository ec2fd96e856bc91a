"""Several ranks: the step of their mean gradient, one end for all, and what becomes of them when one fails."""

from __future__ import annotations

import json
import os
import signal
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hypic_apps.train import __main__ as command
from hypic_apps.train import exam, fit, fitting, loader, replicas
from hypic_apps.train.corpus import Corpus
from hypic_apps.train.loader import Sources
from hypic_apps.train.model import Shape
from hypic_apps.train.render import Encoder
from hypic_apps.train.replicas import Replica
from hypic_apps.train.rows import STAGES, Rows
from hypic_apps.train.vocabulary import save
from tests.apps.train.test_scores import archive

SMALL = Shape(
    vocab_size=700, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=1,
    num_key_value_heads=1, linear_num_key_heads=1, linear_num_value_heads=1, linear_key_head_dim=16,
    linear_value_head_dim=16, head_dim=16,
)  # fmt: skip
SETTINGS = fit.Settings(
    minutes=1, total_minutes=1, learning_rate=1e-2, warmup_steps=1, num_workers=1, compiled=False, graphed=False
)
CPU = torch.device("cpu")


def batch(seed: int) -> tuple[Tensor, Tensor]:
    return torch.randint(0, SMALL.vocab_size, (2, 64), generator=torch.Generator().manual_seed(seed)), torch.ones(2, 64)


def weights_of(training: fit.Training) -> Tensor:
    return torch.cat([p.detach().flatten() for p in training.model.parameters()])


class Fixed:
    """A loader whose batches follow from its seed."""

    def __init__(self, sources: Sources, num_workers: int, seed: int, stage: int = 0) -> None:
        self.seed, self.stage = seed, SimpleNamespace(value=stage)

    def next(self) -> tuple[Tensor, ...]:
        self.seed += 1
        return batch(self.seed)

    def close(self) -> None:
        return


def everything(replica: Replica, folder: Path, options: Namespace) -> None:
    """What two ranks do for the tests below, in one start of them."""
    torch.set_num_threads(1)
    steps(replica, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "Loader", Fixed)
        # rank 1's clock runs six times as fast, so that by itself it would end sooner
        ahead = 1.0 + 5.0 * replica.rank
        patch.setattr(fit, "time", SimpleNamespace(monotonic=lambda: ahead * time.monotonic()))
        for name, spoilt in (("finite", -1), ("not-finite", 5)):
            unlike_clocks(replica, folder / name, spoilt)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "FAMILIES", {"gdn": lambda: SMALL})
        patch.setattr(fitting, "demo_items", lambda *_: [])
        made = exam.Papers.paper
        patch.setattr(exam.Papers, "all", lambda self, n: {"one_hop": made(self, self.worlds(2, "test", "1hop"), n, 0)})
        fitting.fit(replica, options)


def steps(replica: Replica, folder: Path) -> None:
    training = fit.Training(SMALL, SETTINGS, CPU, folder, replica)
    for number in range(3):
        training.step(*batch(10 * number + replica.rank), 1e-2)
    torch.save((weights_of(training), training.step.result), folder / f"{replica.rank}.pt")


def unlike_clocks(replica: Replica, folder: Path, spoilt: int) -> None:
    """Trains for 0.8 seconds of rank 0; the loss of step ``spoilt`` is no number on rank 1."""
    settings = replace(SETTINGS, minutes=0.8 / 60, total_minutes=1.0, log_every=2, exam_every_s=0.2)
    training = fit.Training(SMALL, settings, CPU, folder / "state", replica)
    loss = training.model.loss

    def spoiling(*inputs: Tensor) -> Tensor:
        is_spoilt = replica.rank == 1 and training.progress.step == spoilt and not training.progress.spoilt
        return loss(*inputs) * (float("nan") if is_spoilt else 1.0)

    training.model.loss = spoiling  # type: ignore
    sources = Sources(folder, folder, 128, (replace(STAGES[0], until=0.005), replace(STAGES[1], until=1.0)))
    folder.mkdir(exist_ok=True)
    training.run(sources, {}, fit.Log(folder / "log.jsonl", silent=replica.rank > 0))
    torch.save((weights_of(training), vars(training.progress)), folder / f"{replica.rank}.pt")


@pytest.fixture(scope="module")
def ran(corpus: Corpus, encoder: Encoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what two ranks made."""
    folder = tmp_path_factory.mktemp("ranks")
    archive(corpus, folder / "corpus.tar.xz")
    save(encoder.tokenizer, folder / "tokenizer", 2048)
    flags = "--plain --reuse --workers 1 --batch-tokens 4096 --exam-items 2 --minutes 0.001 --gpus 2"
    places = ["--data", str(folder), "fit", "--out", str(folder / "out")]
    replicas.launch(2, "cpu", everything, folder, command._parser().parse_args([*places, *flags.split()]))
    return folder


def alone(folder: Path, ranks: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Weights and the last loss and norm of one process whose gradients are the mean of those of ``ranks``' batches."""
    training = fit.Training(SMALL, SETTINGS, CPU, folder)
    for group in training.optimiser.param_groups:
        group["lr"] = 1e-2
    for number in range(3):
        losses = torch.stack([training.model.loss(*batch(10 * number + rank)) for rank in ranks])
        losses.mean().backward()
        norm = torch.nn.utils.clip_grad_norm_(training.model.parameters(), SETTINGS.clip)
        training.optimiser.step()
        training.optimiser.zero_grad()
    return weights_of(training), torch.stack([losses.mean().detach(), norm])


def test_two_ranks_step_as_one_process_does_with_their_mean_gradient(ran: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    (first, result), (second, same) = (torch.load(ran / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second) and torch.equal(result, same)
    expected, told = alone(tmp_path, (0, 1))
    assert (first - expected).norm() / expected.norm() < 1e-5 and torch.allclose(result, told, rtol=1e-5)
    for rank in range(2):  # a control: either rank's gradient by itself leads elsewhere
        other, _ = alone(tmp_path, (rank,))
        assert (other - expected).norm() / expected.norm() > 1e-3


@pytest.mark.parametrize(("name", "spoilt"), [("finite", 0), ("not-finite", 1)], ids=["finite", "not-finite"])
def test_ranks_end_at_one_step_with_the_same_weights_though_their_clocks_differ(
    ran: Path, name: str, spoilt: int
) -> None:
    (first, progress), (second, theirs) = (torch.load(ran / name / f"{rank}.pt") for rank in range(2))
    assert torch.equal(first, second) and progress == theirs
    assert bool(first.isfinite().all()) and progress["spoilt"] == spoilt
    assert progress["step"] > 6 and progress["tokens"] == 2 * 128 * progress["step"]
    assert 0.3 < progress["trained_s"] < 1.6, "rank 0's clock counts"
    lines = [json.loads(line) for line in (ran / name / "log.jsonl").read_text().splitlines()]
    assert [line["resumed"] for line in lines if line.get("event") == "not finite"] == [True] * spoilt
    assert [line["number"] for line in lines if line.get("event") == "stage"] == [1]
    assert [line["step"] for line in lines if "loss" in line][-1] == progress["step"]


def test_the_command_counts_the_tokens_of_all_ranks(ran: Path) -> None:
    report = json.loads((ran / "out" / "evaluation.json").read_text())
    assert (report["gpus"], report["step"], report["tokens"]) == (2, 4, 4 * 2 * 4096)
    assert {"one_hop", "one_hop_segments"} <= set(report["grades"])
    lines = [json.loads(line) for line in (ran / "out" / "log.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines if "event" in line] == ["start", "ready", "ranks", "end"]
    assert lines[-2]["same_weights"] is True
    assert torch.load(ran / "state-reuse" / "state.pt")["progress"]["step"] == 4


class Endless(Sources):
    """Whoever makes rows of these says so in a file, and does not end by itself."""

    def rows(self) -> Rows:
        self.corpus.touch()
        time.sleep(600)
        raise AssertionError("nobody ended this worker")


def dying(replica: Replica, folder: Path) -> None:
    """Rank 1 is killed while rank 0 waits for its gradients; both have a worker, which is at work."""
    begun = folder / f"{replica.rank}.begun"
    feeding = loader.Loader(Endless(begun, begun, 4096), 1, 1)
    pids = [os.getpid(), *(worker.pid for worker in feeding._workers)]
    (folder / f"{replica.rank}.pids").write_text(json.dumps(pids))
    while not begun.exists():
        time.sleep(0.05)
    replica.meet()
    if replica.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    replica.averaged(torch.zeros(()), [torch.zeros(3)])


def failing(replica: Replica, error: BaseException) -> None:
    raise error


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux tells of them")
def test_a_rank_that_dies_ends_the_command_and_all_processes(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        replicas.launch(2, "cpu", dying, tmp_path)
    said = str(ended.value.code)
    assert said == "the process of rank 1 was ended (exit code -9); training stopped." or said.startswith("rank 0 fail")
    pids = [pid for rank in range(2) for pid in json.loads((tmp_path / f"{rank}.pids").read_text())]
    assert len(pids) == 4
    until = time.monotonic() + 30.0
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("no batch"), "rank 0 failed, and training with it: RuntimeError: no batch"),
        (SystemExit("--start s is of another model."), "--start s is of another model."),
    ],
    ids=["fails", "refuses"],
)
def test_a_rank_says_in_one_sentence_why_it_ended(error: BaseException, message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        replicas.launch(1, "cpu", failing, error)
    assert str(ended.value.code) == message


@pytest.mark.parametrize("found", [0, 2])
def test_more_gpus_than_there_are_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    message = f"^--gpus 3 asks for more GPUs than the {found} there are; name fewer, or leave it out.$"
    with pytest.raises(SystemExit, match=message):
        command.main(["fit", "--out", str(tmp_path / "out"), "--gpus", "3"])
    assert not (tmp_path / "out").exists()
    replicas.check_gpus(max(1, found))
