"""What a task is told, what it may hand over, and what is refused before the first step."""

import itertools
import os
import re
import signal
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from harness import assert_same_state, launch, newest_in, train
from tasks import QUICK, small, task_of
from test_bad_input import refuse_here

import train_distributed as trainer

EPOCHS = [*QUICK, "--global-batch-size=16", "--epochs=2", "--log-every-steps=1"]


def method(name: str, arguments: str, body: str) -> str:
    return f"def {name}(self, {arguments}):\n" + "".join(f"  {line}\n" for line in body.split("\n"))


def loss_and(extra: str) -> str:
    """A loss() that also returns what this code makes of loss, x and y."""
    return method(
        "loss", "model, batch", f"x, y = batch\nloss = super().loss(model, batch)[0]\n{extra}"
    )


HISTOGRAM = loss_and(
    "counts = torch.histc(x, 10, -3, 3)\nreturn loss, {'histogram': counts, 'n': 3}"
)
HISTOGRAM += method(
    "report",
    "sums",
    "values = super().report(sums) | {'n': sums['n']}\n"
    "values |= {f'bin_{i}': n.item() for i, n in enumerate(sums['histogram'])}\n"
    "sums['histogram'] /= 2\n"  # changes nothing else
    "return values",
)
ROWS = loss_and("return loss, {}, {'x': x, 'y': y[:, 0]}")
ROWS += method(
    "report",
    "sums",
    "values = super().report(sums)\n"
    "if 'x' in sums:\n"
    "    expected = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))[48:]\n"
    "    values['in_order'] = torch.equal(sums['x'], expected)\n"
    "    values['median'] = sums['y'].median()\n"
    "return values",
)


@pytest.mark.parametrize(("ranks", "every"), [(1, 9), (2, 1)])
def test_sums_of_any_shape_are_added_element_by_element(tmp_path, ranks, every):
    run = train(tmp_path / "run", ranks, *EPOCHS, f"--log-every-steps={every}", **small(HISTOGRAM))
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    for epoch in run.records("epoch"):
        for part, prefix in ((x[:48], ""), (x[48:], "test_")):
            expected = torch.histc(part, 10, -3, 3).tolist()
            assert [epoch[f"{prefix}bin_{i}"] for i in range(10)] == expected
        assert epoch["n"] == 3 * 6  # micro-batches


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_rows_of_an_evaluation_are_gathered_in_the_order_of_the_data_set(tmp_path, ranks):
    options = ["--batch-size=3", "--global-batch-size=12", "--epochs=1", "--warmup-epochs=0"]
    (epoch,) = train(tmp_path / "run", ranks, *options, **small(ROWS)).records("epoch")
    y = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))[48:].sum(1)
    assert epoch["test_in_order"] == 1 and epoch["test_median"] == pytest.approx(y.median().item())


TOLD = method("told", "", "return (self.step, self.total_steps, self.cfg.batch_size)")
TOLD += loss_and("print('loss', model.training, *self.told(), flush=True)\nreturn loss, {}")
TOLD += method(
    "lr_factor", "cfg, step, total_steps", "return 0.5**step if self.step == step else 9"
)
TOLD += method(
    "data",
    "cfg",
    "class Curriculum(torch.utils.data.TensorDataset):\n"
    "    def set_epoch(self, epoch):\n"
    "        self.epoch = epoch\n"
    "    def __getitem__(self, index):\n"
    "        x, y = super().__getitem__(index)\n"
    "        return x, y + 100 * self.epoch\n"
    "train_set, test_set = super().data(cfg)\n"
    "return Curriculum(*train_set.tensors), test_set",
)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_task_is_told_the_step_the_epoch_and_the_options_also_after_a_resume(tmp_path, workers):
    options = [*EPOCHS, f"--num-workers={workers}", "--lr=0"]
    first = train(tmp_path / "run", 2, *options, "--stop-at-step=2", **small(TOLD))
    run = train(tmp_path / "run", 2, *options, **small(TOLD))
    assert [record["lr"] for record in run.records("train")] == [0] * 6
    for rank in (0, 1):
        lines = (first.out[rank] + run.out[rank]).splitlines()
        steps = [line for line in lines if line.startswith("loss True")]
        assert steps == [f"loss True {step} 6 8" for step in range(6)]
    first_epoch, second_epoch = (record["loss"] for record in run.records("epoch"))
    assert second_epoch > 5000 > 100 > first_epoch  # targets of the second epoch are 100 larger


def test_the_schedule_is_a_function_of_the_step_and_total_steps_sets_the_length(tmp_path):
    code = method("lr_factor", "cfg, step, total_steps", "return 1 - step / total_steps")
    options = [*EPOCHS, "--total-steps=5", "--lr=0.01"]
    run = train(tmp_path / "run", 1, *options, **small(code))
    assert [record["lr"] for record in run.records("train")] == pytest.approx(
        [0.01, 0.008, 0.006, 0.004, 0.002]
    )
    assert [record["step"] for record in run.records("evaluation")] == [5]  # in epoch 2
    assert run.status()["global_step"] == 5


def test_an_epoch_that_is_not_evaluated_counts_once_also_if_the_run_stops_at_its_end(tmp_path):
    options = [*EPOCHS, "--epochs=4", "--eval-every-epochs=2"]
    whole = train(tmp_path / "whole", 1, *options, **small())
    train(tmp_path / "run", 2, *options, "--stop-at-step=3", **small())
    run = train(tmp_path / "run", 1, *options, **small())
    ours, theirs = ([r["loss"] for r in x.records("epoch")][-4:] for x in (run, whole))
    assert ours == pytest.approx(theirs, rel=1e-5) and len(ours) == 4


def test_the_evaluation_at_the_end_of_a_run_that_is_extended_still_counts(tmp_path):
    code = "def report(self, sums): return {'loss': 0.1 if self.step == 5 else 1}"
    train(tmp_path / "run", 1, *EPOCHS, "--total-steps=5", **small(code))
    run = train(tmp_path / "run", 1, *EPOCHS, "--total-steps=9", **small(code))
    assert run.checkpoint("best")["step"] == 5


SPLITS = method(
    "data",
    "cfg",
    "train_set, rest = super().data(cfg)\n"
    "x, y = rest.tensors\n"
    "parts = trainer.InMemoryDataset(x[:8], y[:8]), trainer.InMemoryDataset(x[8:], y[8:])\n"
    "return (train_set, *parts)",
)


def test_a_validation_set_chooses_and_the_test_set_is_for_evaluate(tmp_path):
    train(tmp_path / "run", 2, *EPOCHS, "--stop-at-step=4", **small(SPLITS))
    run = train(tmp_path / "run", 1, *EPOCHS, **small(SPLITS))
    assert all("validation_loss" in record for record in run.records("epoch"))
    word = f"--evaluate={run.directory}/best.pt"
    evaluated = launch(tmp_path / "none", 2, word, **small(SPLITS))
    assert evaluated.codes == [0, 0], evaluated.err
    best = run.checkpoint("best")["model"]
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))[56:]
    error = x @ best["weight"].T + best["bias"] - x.sum(1, keepdim=True)
    loss = float(re.search(r"best.pt: loss (\S+)", evaluated.out[0])[1])
    assert loss == pytest.approx(error.square().mean().item(), rel=1e-4)


# What would train wrongly in silence: (code, what is named).
REFUSED = {
    "scheduler": (
        method(
            "optimizer",
            "cfg, model",
            "optimizer = super().optimizer(cfg, model)\n"
            "self.scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)\n"
            "return optimizer",
        )
        + loss_and("self.scheduler.step(1.0)\nreturn loss, {}"),
        "Task.lr_factor()",
    ),
    "order": (method("order", "cfg, train_set, epoch, generator", "return [1, 2]"), "Task.order()"),
    "mask": (method("order", "c, t, e, g", "return torch.ones(48) > 0"), "Task.order()"),
}


def test_parameters_that_no_checkpoint_would_have_are_refused():
    elsewhere = "return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])"
    task = task_of(method("optimizer", "cfg, model", elsewhere))
    with pytest.raises(KeyError):
        trainer.build_state(task, trainer.parse_config([]), trainer.World())


@pytest.mark.parametrize(("code", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_would_be_wrong_in_silence_is_refused(tmp_path, capfd, code, expected):
    options = [*EPOCHS, "--batch-size=4", "--num-workers=0"]
    assert expected in refuse_here(capfd, tmp_path / "run", *options, task=task_of(code))
    assert not [*tmp_path.glob("run/*.pt")]


def train_here(directory: Path, code: str, *options: str) -> dict:
    """The last checkpoint of a run in this process."""
    trainer.main(task_of(code), [*EPOCHS, f"--checkpoint-dir={directory}", *options])
    return newest_in(directory)


def test_counts_may_be_weights_below_one_and_a_mean_stays_a_mean(tmp_path):
    for more in ([], ["--reproducible"]):
        weights = []
        for number, count in enumerate(["1", "0.25", "4e4, dtype=torch.float16"]):
            code = loss_and(f"return loss, {{'count': torch.tensor({count})}}")
            run = train_here(tmp_path / f"{number}{len(more)}", code, *more)
            weights.append(run["model"]["weight"])
        for weight in weights[1:]:
            assert torch.allclose(weight, weights[0])


x, y = torch.ones(8, 3), torch.ones(8)
WHOLE = [x, [x, y], {"x": x, "y": y}]
OTHERS = [x[:5], [x[:5], y[:5]], {"x": torch.ones(5, 8), "y": y[:5]}, [x.T] * 8, [[y], "a"], None]


@pytest.mark.parametrize("batch", WHOLE + OTHERS)
def test_a_batch_that_may_lack_samples_needs_a_count(batch):
    is_whole = any(batch is each for each in WHOLE)
    with nullcontext() if is_whole else pytest.raises(trainer.UserError):
        trainer.add_sums(Counter(), torch.tensor(1.0), {}, batch, 8)
    trainer.add_sums(Counter(), torch.tensor(1.0), {"count": 5}, batch, 8)


def test_the_best_loss_is_the_lowest_one(tmp_path):
    last = train_here(tmp_path, "best_is_lowest = False")
    assert_same_state(torch.load(tmp_path / "best.pt", weights_only=True), last)


DRAWS = """
import random

class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p += 0.01 * torch.randn_like(p) + 0.01 * np.random.rand()
"""
DRAWS += method(
    "optimizer",
    "cfg, model",
    "return self.Noisy([{'params': [p]} for p in model.parameters()], 0.1)",
)
DRAWS += loss_and("import random\nreturn loss * (np.random.beta(1, 1) + random.random()), {}")


def test_all_random_numbers_of_a_loss_and_an_optimizer_depend_on_the_step_alone(tmp_path):
    options = [*EPOCHS, "--reproducible"]
    whole = train(tmp_path / "whole", 1, *options, **small(DRAWS))
    train(tmp_path / "run", 2, *options, "--stop-at-step=2", **small(DRAWS))
    run = train(tmp_path / "run", 1, *options, **small(DRAWS))
    assert_same_state(run.newest(), whole.newest())


BUFFERS = """
class Odd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.register_buffer("view", torch.zeros(4, 8)[:, ::2])

    def forward(self, x):
        if self.training:
            self.view += x[:4].detach()
        return self.linear(x) + 0.1 * self.view.mean()

def model(self, cfg):
    return self.Odd()
"""


def test_buffers_that_are_views_are_those_of_rank_0(tmp_path):
    code = BUFFERS + loss_and("return loss, {'view': model.view.double()}")
    code += "\ndef report(self, sums): return super().report(sums) | {'view': sums['view'].std()}"
    whole = train(tmp_path / "whole", 2, *EPOCHS, **small(code))
    train(tmp_path / "run", 2, *EPOCHS, "--stop-at-step=2", **small(code))
    run = train(tmp_path / "run", 2, *EPOCHS, **small(code))
    buffer = whole.newest()["model"]["view"]
    # Of the two micro-batches of the test set, each rank evaluates one, with the same buffer.
    assert whole.records("epoch")[-1]["test_view"] == pytest.approx(2 * buffer.std().item())
    assert_same_state(run.newest(), whole.newest())


def test_an_optimizer_with_modes_follows_the_model():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Dropout())
    state = SimpleNamespace(model=model, optimizer=mock.Mock())
    for mode in ("train", "eval"):
        trainer.set_mode(state, [model[1]], mode)
        assert state.optimizer.mock_calls == [getattr(mock.call, mode)()]
        assert (model[0].training, model[1].training) == (mode == "train", False)
        state.optimizer.reset_mock()


SPARSE = """
def data(self, cfg):
    words = torch.arange(48 * 3).view(48, 3) % 7
    return trainer.InMemoryDataset(words, words.sum(1, keepdim=True).float()), None

def model(self, cfg):
    return torch.nn.Sequential(torch.nn.EmbeddingBag(7, 4, sparse=True), torch.nn.Linear(4, 1))

def optimizer(self, cfg, model):
    return torch.optim.SGD(model.parameters(), lr=0.01)
"""


def test_sparse_gradients_are_trained_on_any_number_of_ranks(tmp_path):
    options = [*EPOCHS, "--log-every-steps=100", "--epochs=1"]
    one, two = (train(tmp_path / str(n), n, *options, **small(SPARSE)).newest() for n in (1, 2))
    for name, weight in one["model"].items():
        torch.testing.assert_close(two["model"][name], weight, atol=2e-6, rtol=0, msg=name)


SPARSE_BUFFER = """
def model(self, cfg):
    model = super().model(cfg)
    model.register_buffer("graph", torch.eye(4).to_sparse())
    return model
"""


def test_a_sparse_buffer_is_saved_and_resumed(tmp_path):
    train(tmp_path / "run", 1, *EPOCHS, "--stop-at-step=2", **small(SPARSE_BUFFER))
    run = train(tmp_path / "run", 1, *EPOCHS, **small(SPARSE_BUFFER))
    assert torch.equal(run.newest()["model"]["graph"].to_dense(), torch.eye(4))


IN_TURN = """
def model(self, cfg):
    return torch.nn.ModuleList([torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)])

def optimizer(self, cfg, model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

def loss(self, model, batch):
    x, y = batch
    head = model[self.step % 2]
    model[1 - self.step % 2].requires_grad_(FREEZES == 0)
    head.requires_grad_(True)
    assert head.training == model.training  # though it was frozen when the last epoch ended
    return (head(x) - y).square().mean(), {}

def wrap(self, loss):
    return torch.nn.parallel.DistributedDataParallel(loss, find_unused_parameters=True)
"""


@pytest.mark.parametrize("freezes", [0, 1])
def test_reproducible_leaves_parameters_without_a_gradient_alone(tmp_path, freezes):
    code = small(IN_TURN.replace("FREEZES", str(freezes)))
    plain = train(tmp_path / "plain", 1, *EPOCHS, **code).newest()
    one, two = (train(tmp_path / str(n), n, *EPOCHS, "--reproducible", **code) for n in (1, 2))
    assert_same_state(one.newest(), two.newest())
    for name, weight in plain["model"].items():
        torch.testing.assert_close(one.newest()["model"][name], weight, atol=2e-6, rtol=0, msg=name)


OWN_ORDER = method("order", "cfg, data, epoch, generator", "return np.random.randint(8, size=48)")


def test_an_order_that_ignores_the_generator_is_the_same_on_all_ranks_and_after_a_resume(tmp_path):
    options = [*EPOCHS, "--batch-size=5", "--global-batch-size=10"]  # steps in two epochs
    whole = train(tmp_path / "whole", 1, *options, record=True, **small(OWN_ORDER))
    train(tmp_path / "run", 2, *options, "--stop-at-step=5", record=True, **small(OWN_ORDER))
    run = train(tmp_path / "run", 1, *options, record=True, **small(OWN_ORDER))
    assert run.samples() == whole.samples()
    used = {i for step in whole.samples().values() for micro in step.values() for i in micro}
    assert used == set(range(8))


def test_trained_parameters_that_the_optimizer_does_not_have_are_named_once(tmp_path):
    code = "def optimizer(self, cfg, model): return torch.optim.SGD([model.bias], lr=0.1)"
    run = train(tmp_path / "run", 2, *EPOCHS, **small(code))
    lines = [line for line in "".join(run.out + run.err).splitlines() if "WARNING" in line]
    assert len(lines) == 1 and "weight" in lines[0]


def test_loader_workers_keep_the_users_function_and_our_safeguards(tmp_path):
    class Rows:
        def __len__(self):
            return 8

        def __getitem__(self, index):
            masked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
            return float(signal.SIGTERM in masked), float(os.environ.get("OPENED", 0))

    class Task(trainer.Task):
        def loader_options(self):
            return {"worker_init_fn": lambda worker: os.environ.update(OPENED="1")}

    cfg = trainer.parse_config(["--num-workers=1"])
    parts = [trainer.MicroBatch(1, 0, [0, 1])]
    loader = trainer.get_dataloader(Task(), cfg, trainer.World(), Rows(), parts)
    assert [column.tolist() for column in next(iter(loader))] == [[1, 1], [1, 1]]


# What would otherwise depend on an order that Python does not promise, or be None or a tensor.
RATES = {
    "set": "torch.optim.SGD(list(set(model.parameters())), lr=0.1, momentum=0.9)",
    "tensor": "torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), capturable=False)",
    "none": "torch.optim.Adafactor(model.parameters(), lr=0.1)",
}
LAYERS = """
def model(self, cfg):
    return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(4)], torch.nn.Linear(4, 1))

def optimizer(self, cfg, model):
    optimizer = {}
    if NONE:
        inner = type(optimizer).step
        optimizer.param_groups[0]["lr"] = None
        def step(self, closure=None):
            self.param_groups[0]["lr"] = 0.01
            inner(self)
            self.param_groups[0]["lr"] = None
        type(optimizer).step = step
    return optimizer
"""


@pytest.mark.parametrize("name", RATES)
def test_groups_from_a_set_and_rates_that_are_tensors_or_none_resume_bitwise(tmp_path, name):
    if name == "none" and not hasattr(torch.optim, "Adafactor"):
        pytest.skip("PyTorch < 2.5")
    code = LAYERS.replace("{}", RATES[name]).replace("NONE", str(name == "none"))
    whole = train(tmp_path / "whole", 1, *EPOCHS, **small(code))
    for step in ("2", "4", "6"):
        run = train(tmp_path / "run", 1, *EPOCHS, "--stop-at-step", step, **small(code))
    assert_same_state(run.newest(), whole.newest())
    rates = [record["lr"] for record in whole.records("train")]
    assert rates == [None] * 6 if name == "none" else rates[0] > rates[-1]


COLLECTIVE = method(
    "report",
    "sums",
    "total = torch.ones(1)\n"
    "torch.distributed.all_reduce(total)\n"
    "return super().report(sums) | {'ranks': total.item()}",
)


def test_report_is_called_on_all_ranks(tmp_path):
    run = train(tmp_path / "run", 2, *EPOCHS, **small(COLLECTIVE))
    for record in run.records("train") + run.records("epoch"):
        assert record["ranks"] == 2


def test_each_repetition_of_a_sample_is_augmented_anew():
    """By the step and the micro-batch, not by the sample."""

    class Drawn(torch.utils.data.Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return torch.rand(1).item()

    cfg = trainer.parse_config(["--batch-size=1", "--global-batch-size=2"])
    task = trainer.Task()
    task.order = lambda cfg, data, epoch, generator: torch.zeros(3, dtype=torch.int64)
    stream = trainer.SampleStream(task, cfg, trainer.World(), Drawn())
    parts = itertools.islice(stream.micro_batches_from(0, "cpu"), 4)
    lists = [part._replace(indices=part.indices.tolist()) for part in parts]
    seeded = trainer.SeededDataset(Drawn(), range(3))
    drawn = [seeded.__getitems__(part)[0] for part in lists]
    assert len(set(drawn)) == 4 and seeded.__getitems__(lists[2])[0] == drawn[2]
