"""What a task is told, what it may hand over, and what is refused before the first step."""

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from harness import assert_same_state, launch, train
from tasks import QUICK, small, task_of
from test_bad_input import refuse, refuse_here

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
TOLD += method("after_evaluation", "values", "print('after', *self.told(), flush=True)")
TOLD += method(
    "lr_factor", "cfg, step, total_steps", "return 0.5**step if self.step == step else 9"
)
TOLD += method(
    "data",
    "cfg",
    "class Curriculum(torch.utils.data.TensorDataset):\n"
    "    def seed_sample(self, seed, epoch):\n"
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
    assert [line for line in run.out[0].splitlines() if line.startswith("after")] == [
        "after 3 6 8",
        "after 6 6 8",
    ]
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
    assert run.status()["global_step"] == 5 and "step 5 of 5" in run.out[0]


def test_evaluations_and_saves_can_be_rare(tmp_path):
    options = [*EPOCHS, "--epochs=5", "--eval-every-epochs=2"]
    run = train(tmp_path / "run", 2, *options, **small())
    tested = [record["epoch"] for record in run.records("epoch") if "test_loss" in record]
    assert len(run.records("epoch")) == 5 and tested == [2, 4, 5]
    assert run.checkpoints() == {"checkpoint_epoch_2", "checkpoint_epoch_4", "checkpoint_epoch_5"}


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
    assert run.checkpoint("best")["state"]["step"] == 5


WEIGHTED = method(
    "order",
    "cfg, train_set, epoch, generator",
    "weights = torch.arange(len(train_set)) < 8\n"
    "sampler = torch.utils.data.WeightedRandomSampler\n"
    "return list(sampler(weights.double(), len(train_set), generator=generator))",
)


def test_the_order_of_samples_can_be_chosen_and_stays_exact(tmp_path):
    whole = train(tmp_path / "whole", 1, *EPOCHS, record=True, **small(WEIGHTED))
    used = {i for step in whole.samples().values() for micro in step.values() for i in micro}
    assert used == set(range(8))
    train(tmp_path / "run", 2, *EPOCHS, "--stop-at-step=4", record=True, **small(WEIGHTED))
    run = train(tmp_path / "run", 1, *EPOCHS, record=True, **small(WEIGHTED))
    assert run.samples() == whole.samples()


SPLITS = method(
    "data",
    "cfg",
    "train_set, rest = super().data(cfg)\n"
    "x, y = rest.tensors\n"
    "parts = trainer.InMemoryDataset(x[:8], y[:8]), trainer.InMemoryDataset(x[8:], y[8:])\n"
    "return (train_set, *parts)",
)


def test_a_validation_set_chooses_and_the_test_set_is_evaluated_once_at_the_end(tmp_path):
    options = [*EPOCHS, "--lr=0.3"]
    train(tmp_path / "run", 2, *options, "--stop-at-step=4", **small(SPLITS))
    run = train(tmp_path / "run", 1, *options, **small(SPLITS))
    assert all("validation_loss" in record for record in run.records("epoch"))
    (test,) = run.records("test")
    best = run.checkpoint("best")["model"]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=generator)[56:]
    error = x @ best["weight"].T + best["bias"] - x.sum(1, keepdim=True)
    assert test["test_loss"] == pytest.approx(error.square().mean().item(), rel=1e-5)


LOADED = "t = super().data(cfg)\nreturn torch.utils.data.DataLoader(t[0]), None"
STREAM = "class Stream(torch.utils.data.IterableDataset):\n  def __iter__(self): return iter([1])\n"
STREAM += "return Stream(), None"
REFUSED = {
    "one set": (method("data", "cfg", "return super().data(cfg)[0]"), "Task.data() must return"),
    "splits": (method("data", "cfg", "return {'train': [1]}"), "not dict"),
    "a loader": (method("data", "cfg", LOADED), "Task.loader_options()"),
    "no index": (method("data", "cfg", "return iter([1]), None"), "has no index"),
    "a stream": (method("data", "cfg", STREAM), "has no index"),
    "nothing": (method("data", "cfg", "return [], None"), "a data set has no samples"),
    "no tests": (method("data", "cfg", "return [1], []"), "a data set has no samples"),
    "no sums": (loss_and("return loss"), "Task.loss() must return the mean loss"),
    "unreduced": (loss_and("return (model(x) - y).square(), {}"), "(Tensor [4, 1], dict)"),
    "a number": (loss_and("return loss.item(), {}"), "(float, dict)"),
    "a tuple": (loss_and("return (loss, loss), {}"), "(tuple of 2, dict)"),
    "detached": (loss_and("return loss.detach(), {}"), "the loss has no gradient"),
    "loss twice": (loss_and("return loss, {'loss': loss}"), "need names of their own"),
    "a row twice": (loss_and("return loss, {'a': 1}, {'a': x}"), "need names of their own"),
    "counts": (loss_and("return loss, {'count': torch.ones(2)}"), '"count" is one number'),
    "other sums": (
        loss_and("self.n = getattr(self, 'n', 0) + 1\nreturn loss, {f'sum_{self.n}': 1}"),
        "must return the same sums",
    ),
    "sum of None": (loss_and("return loss, {'a': None}"), "sums must be numbers or tensors"),
    "rows of a list": (loss_and("return loss, {}, [1]"), "rows a dict of tensors"),
    "not DDP": ("def wrap(self, loss): return loss", "Task.wrap(loss) must return"),
    "a typo": (method("loader_options", "", "return {'colate_fn': 1}\n"), "'colate_fn'"),
    "no metrics": ("def report(self, sums): pass", "Task.report() must return a dict"),
    "no factor": ("def lr_factor(self, cfg, step, total_steps): pass", "must return a number"),
    "lazy": ("def model(self, cfg): return torch.nn.LazyLinear(1)", "lazy modules"),
    "metric of None": (
        "def report(self, sums): return {'a': None}",
        "Task.report(): a is NoneType",
    ),
    "metric of a list": ("def report(self, sums): return {'a': [1, 2]}", "a is list of 2"),
    "frozen": ("def model(self, cfg): return super().model(cfg).requires_grad_(False)", "trained"),
    "no model": ("def model(self, cfg): return None", "Task.model() must return"),
    "closure": (
        "def optimizer(self, cfg, model): return torch.optim.LBFGS(model.parameters())",
        "LBFGS computes the loss several times",
    ),
    "scheduler": (
        method(
            "optimizer",
            "cfg, model",
            "optimizer = super().optimizer(cfg, model)\n"
            "torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, 10)\n"
            "return optimizer",
        ),
        "Task.lr_factor()",
    ),
    "old schedule": ("def lr_factor(self, cfg, epoch): return 1", "(cfg, step, total_steps)"),
    "sampler": (method("loader_options", "", "return {'sampler': 1}\n"), "Task.order()"),
    "any order": (method("loader_options", "", "return {'in_order': False}\n"), "Task.order()"),
    "mask": (method("order", "c, t, e, g", "return torch.ones(48) > 0"), "48 indices"),
    "elsewhere": (
        method("optimizer", "c, m", "return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])"),
        "not in the model",
    ),
    "state of the first step": (
        method(
            "optimizer",
            "cfg, model",
            "optimizer = super().optimizer(cfg, model)\n"
            "count = lambda *_: optimizer.state[model.weight].update(n=np.float64(1))\n"
            "optimizer.register_step_post_hook(count)\n"
            "return optimizer",
        ),
        "a checkpoint cannot hold numpy",
    ),
    "order": (method("order", "cfg, train_set, epoch, generator", "return [1, 2]"), "48 indices"),
    "floats": (method("order", "c, t, e, g", "return torch.rand(48)"), "48 indices"),
    "numpy": (
        method("data", "cfg", "self.spec = {'a': np.int64(3)}\nreturn super().data(cfg)"),
        "a checkpoint cannot hold numpy",
    ),
    "function": (
        method("data", "cfg", "self.spec = {'a': lambda: 1}\nreturn super().data(cfg)"),
        "cannot be saved",
    ),
    "type": ("def add_options(self, p): p.add_argument('--fast', type=bool)", "type=bool"),
    "no way back": (
        "def add_options(self, p): p.add_argument('--dtype', type=lambda t: getattr(torch, t),"
        " default='half')",
        "could not be read from a checkpoint again",
    ),
}
IN_FILES = """
def data(self, cfg):
    train_set, test_set = super().data(cfg)
    return torch.utils.data.TensorDataset(*train_set.tensors), test_set
"""


@pytest.mark.parametrize(("code", "expected"), REFUSED.values(), ids=REFUSED)
def test_the_first_mistakes_of_a_task_are_one_sentence_before_anything_is_saved(
    tmp_path, capfd, code, expected
):
    if "loader_options" in code:
        code += IN_FILES
    options = [*EPOCHS, "--batch-size=4", "--num-workers=0"]
    if "wrap" in code:
        assert expected in refuse(tmp_path / "run", *options, ranks=2, **small(code))
    else:
        assert expected in refuse_here(capfd, tmp_path / "run", *options, task=task_of(code))
    assert not [*tmp_path.glob("run/*.pt"), *tmp_path.glob("run/.*.tmp")]


DROPS = IN_FILES + method(
    "loader_options",
    "",
    "collate = torch.utils.data.default_collate\n"
    "return {'collate_fn': lambda rows: collate([row for row in rows if row[0][0] > 0]),"
    " 'prefetch_factor': 4, 'persistent_workers': True}",
)
COUNTED = loss_and("return loss, {'count': torch.tensor(len(x))}")


def test_a_collate_fn_that_drops_samples_needs_a_count(tmp_path, capfd):
    options = [*EPOCHS, "--num-workers=0"]  # which prefetch_factor would not allow
    message = refuse_here(capfd, tmp_path / "refused", *options, task=task_of(DROPS))
    assert 'the sum "count"' in message
    counting = small(DROPS + COUNTED + "\ndef report(self, sums): return {'count': sums['count']}")
    run = train(tmp_path / "run", 1, *options, **counting)
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))[:48]
    assert run.records("epoch")[0]["count"] == (x[:, 0] > 0).sum()


def train_here(directory: Path, code: str, *options: str) -> dict:
    """The last checkpoint of a run in this process."""
    trainer.main(task_of(code), [*EPOCHS, f"--checkpoint-dir={directory}", *options])
    return torch.load(directory / "checkpoint_epoch_2.pt", weights_only=True)


LISTS = IN_FILES + method(  # as for detection: images of several sizes
    "loader_options", "", "return {'collate_fn': lambda rows: [list(part) for part in zip(*rows)]}"
)
LISTS += method(
    "loss",
    "model, batch",
    "if isinstance(batch[0], list): batch = [torch.stack(part) for part in batch]\n"
    "return super().loss(model, batch)",
)


def test_a_batch_of_lists_of_tensors_is_as_good_as_one_of_tensors(tmp_path):
    lists = train_here(tmp_path / "lists", LISTS, "--num-workers=0")
    assert_same_state(lists, train_here(tmp_path / "usual", "pass"))


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
BATCHES = [x, [x, y], {"x": x, "y": y}, [x.expand(5, 8, 3), y], [x.T, x.T], [x.T] * 8, [[y], "a"]]
BATCHES += [None, [x, torch.ones(21, 6)]]
DROPPED = [x[:5], [x[:5], y[:5]], {"x": torch.ones(5, 8), "y": y[:5]}]


@pytest.mark.parametrize("batch", BATCHES + DROPPED)
def test_a_batch_that_lacks_samples_is_known_by_its_tensors(batch):
    lacks = any(batch is each for each in DROPPED)
    with pytest.raises(trainer.UserError) if lacks else nullcontext():
        trainer.Sums().add(0, torch.tensor(1.0), {}, batch, 8)


APPEARS = method(
    "model", "cfg", "model = super().model(cfg)\nmodel.register_buffer('n', None)\nreturn model"
)
APPEARS += loss_and("model.n = x.mean(0)\nreturn loss, {}")


def test_buffers_that_appear_in_the_first_step_are_resumed(tmp_path):
    whole = train_here(tmp_path / "whole", APPEARS)
    options = [*EPOCHS, f"--checkpoint-dir={tmp_path}/run", "--stop-at-step=2"]
    trainer.main(task_of(APPEARS), options)
    assert_same_state(train_here(tmp_path / "run", APPEARS), whole)


def test_data_may_be_arrays_and_a_task_its_class(tmp_path):
    of_arrays = "lambda s: trainer.InMemoryDataset(*map(np.array, s.tensors))"
    task = task_of(method("data", "cfg", f"return [*map({of_arrays}, super().data(cfg))]"))
    trainer.main(type(task), [*EPOCHS, f"--checkpoint-dir={tmp_path}/run"])
    usual = train_here(tmp_path / "usual", "pass")
    assert_same_state(torch.load(tmp_path / "run/checkpoint_epoch_2.pt", weights_only=True), usual)


def test_the_spec_of_one_task_is_not_that_of_the_next(tmp_path):
    code = method("data", "cfg", "self.spec['n'] = 1\nreturn super().data(cfg)")
    assert train_here(tmp_path / "one", code)["spec"] == {"n": 1}
    assert train_here(tmp_path / "two", "pass")["spec"] == {}


def test_the_best_loss_is_the_lowest_one(tmp_path):
    last = train_here(tmp_path, "best_is_lowest = False")
    assert_same_state(torch.load(tmp_path / "best.pt", weights_only=True), last)


def test_another_optimizer_in_a_resumed_run_is_refused(tmp_path, capfd):
    options = [*EPOCHS, "--stop-at-step=2"]
    trainer.main(task_of(), [*options, f"--checkpoint-dir={tmp_path}"])
    code = method(
        "optimizer",
        "cfg, model",
        "groups = [{'params': [p]} for p in model.parameters()]\n"
        "return torch.optim.SGD(groups, cfg.lr)",
    )
    message = refuse_here(capfd, tmp_path, *options, task=task_of(code))
    assert message.startswith("the optimizer is not that of the checkpoint")


OTHER_NAMES = loss_and("rank = os.environ['RANK']\nreturn loss, {f'seen_by_{rank}': 1}")
OTHER_SHAPES = loss_and(
    "rank = int(os.environ['RANK'])\nreturn loss, {'seen': torch.ones(2 + rank)}"
)


@pytest.mark.parametrize("code", [OTHER_NAMES, OTHER_SHAPES], ids=["names", "shapes"])
def test_sums_that_differ_between_ranks_are_one_sentence(tmp_path, code):
    message = refuse(tmp_path / "run", *EPOCHS, ranks=2, **small(code))
    assert message.startswith("Task.loss() must return the same sums on all ranks, also seen")


FAILS = method(
    "report",
    "sums",
    "values = super().report(sums)\n"
    "if sums['count'] == 16 and self.step == 3: int(sums['count']) / 0\n"
    "return values",
)


def test_a_metric_that_fails_is_nan_with_one_warning_and_the_run_goes_on(tmp_path):
    run = train(tmp_path / "run", 2, *EPOCHS, "--log-every-steps=9", **small(FAILS))
    first, second = run.records("epoch")
    assert run.err[0].count("WARNING: Task.report() has failed") == 1 and run.err[1] == ""
    assert first["test_loss"] > 0 and second["test_loss"] > 0 and len(run.checkpoints()) == 2


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
        self.register_buffer("expanded", torch.ones(1).expand(4))
        self.register_buffer("cache", torch.zeros(1))

    def forward(self, x):
        if self.training:
            self.view += x[:4].detach()
            if len(self.cache) == 1:
                self.cache = torch.arange(5 + int(os.environ.get("RANK", 0)))
        return self.linear(x * self.expanded) + 0.1 * self.view.mean()

def model(self, cfg):
    return self.Odd()
"""


def test_buffers_that_are_views_expanded_or_grow_are_those_of_rank_0(tmp_path):
    code = BUFFERS + loss_and("return loss, {'view': model.view.double()}")
    code += "\ndef report(self, sums): return super().report(sums) | {'view': sums['view'].std()}"
    whole = train(tmp_path / "whole", 2, *EPOCHS, **small(code))
    train(tmp_path / "run", 2, *EPOCHS, "--stop-at-step=3", **small(code))
    run = train(tmp_path / "run", 2, *EPOCHS, **small(code))
    assert run.newest()["model"]["cache"].tolist() == [0, 1, 2, 3, 4]
    buffer = whole.newest()["model"]["view"]
    # Of the two micro-batches of the test set, each rank evaluates one, with the same buffer.
    assert whole.records("epoch")[-1]["test_view"] == pytest.approx(2 * buffer.std().item())
    assert_same_state(run.checkpoint("checkpoint_epoch_1"), whole.checkpoint("checkpoint_epoch_1"))


OWN_DDP = method(
    "wrap", "loss", "return torch.nn.parallel.DistributedDataParallel(loss, broadcast_buffers=True)"
)


def test_a_ddp_of_the_user_broadcasts_buffers_if_it_was_asked_to(tmp_path):
    code = BUFFERS + OWN_DDP + loss_and("print('view', model.view.sum().item())\nreturn loss, {}")
    run = train(tmp_path / "run", 2, *EPOCHS, "--stop-at-step=3", **small(code))
    seen = [[line for line in out.splitlines() if line.startswith("view")] for out in run.out]
    assert len(seen[0]) == 4 and seen[0] != seen[1]  # after the forward pass, their own


MODES = """
class Averaging(torch.optim.SGD):
    def train(self):
        print("optimizer train", flush=True)

    def eval(self):
        print("optimizer eval", flush=True)

def optimizer(self, cfg, model):
    return self.Averaging(model.parameters(), lr=0.1)

def after_evaluation(self, values):
    print("evaluated", flush=True)
"""


def test_an_optimizer_with_modes_is_in_eval_for_saves_and_evaluations(tmp_path):
    run = train(tmp_path / "run", 1, *EPOCHS, "--epochs=1", **small(MODES))
    words = ("optimizer", "evaluated")
    lines = [line for line in run.out[0].splitlines() if line.startswith(words)]
    assert lines[:2] == ["optimizer train", "optimizer eval"]
    assert lines[lines.index("evaluated") - 1] == "optimizer eval"


GAN = """
def model(self, cfg):
    parts = {"one": torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout()),
             "two": torch.nn.Linear(4, 1)}
    return torch.nn.ModuleDict(parts)

def loss(self, model, batch):
    x, y = batch
    model["one"].requires_grad_(self.step % 2 == 0)
    assert model["one"].training == model.training, "dropout was turned off"
    return (model["two"](model["one"](x)) - y).square().mean(), {}
"""


def test_parts_that_a_loss_freezes_and_thaws_stay_in_training_mode(tmp_path):
    train(tmp_path / "run", 1, *EPOCHS, "--stop-at-step=4", "--epochs=3", **small(GAN))
    run = train(tmp_path / "run", 1, *EPOCHS, "--epochs=3", **small(GAN))
    whole = train(tmp_path / "whole", 1, *EPOCHS, "--epochs=3", **small(GAN))
    assert_same_state(run.newest(), whole.newest())


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


OWN_ORDER = method("order", "cfg, train_set, epoch, generator", "return np.random.permutation(48)")


def test_an_order_that_ignores_the_generator_is_the_same_on_all_ranks_and_after_a_resume(tmp_path):
    options = [*EPOCHS, "--batch-size=5", "--global-batch-size=10"]  # steps in two epochs
    whole = train(tmp_path / "whole", 1, *options, record=True, **small(OWN_ORDER))
    train(tmp_path / "run", 2, *options, "--stop-at-step=5", record=True, **small(OWN_ORDER))
    run = train(tmp_path / "run", 2, *options, record=True, **small(OWN_ORDER))
    assert run.samples() == whole.samples()
    used = [
        i
        for _, step in sorted(whole.samples().items())
        for micro in sorted(step)
        for i in step[micro]
    ]
    assert sorted(used[:48]) == list(range(48))


def test_a_set_inside_of_another_one_gets_its_seeds():
    class Inner:
        calls = []

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return index

        def seed_sample(self, seed, epoch):
            self.calls.append(epoch)

    subset = torch.utils.data.Subset(Inner(), [0, 1])
    both = torch.utils.data.ConcatDataset([subset, torch.utils.data.Subset(Inner(), [3])])
    seeded = trainer.SeededDataset(both, 1)
    assert seeded.__getitems__([2, 4]) == [3, 1] and Inner.calls == [0, 0]
    seeded.__getitems__([5])
    assert Inner.calls == [0, 0, 1, 1]


def test_trained_parameters_that_the_optimizer_does_not_have_are_named_once(tmp_path):
    code = "def optimizer(self, cfg, model): return torch.optim.SGD([model.bias], lr=0.1)"
    run = train(tmp_path / "run", 2, *EPOCHS, **small(code))
    text = "WARNING: not in the optimizer, and not frozen: 1 parameters (weight ...)"
    assert run.err == [f"{text}\n", ""]


def load_initial(model: torch.nn.Module, weights: dict, file: Path) -> None:
    torch.save(weights, file)
    trainer.load_initial_weights(trainer.parse_config([f"--init={file}"]), model)


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "network.", "module.network."])
def test_initial_weights_may_be_a_plain_state_dict(tmp_path, prefix):
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 2))
    model = trainer.Normalized(network, mean=[0.0], std=[1.0])
    weights = {f"{prefix}1.weight": torch.full((2, 64), 0.25), f"{prefix}1.bias": torch.zeros(2)}
    old = {"model": "linear", "state_dict": weights}  # as others save it
    load_initial(model, weights if prefix else old, tmp_path / "weights.pt")
    assert (network[1].weight == 0.25).all()
    with pytest.raises(trainer.UserError, match="no weight fits .*other.weight"):
        load_initial(model, {"other.weight": torch.ones(2, 64)}, tmp_path / "other.pt")


def test_of_two_places_that_fit_initial_weights_take_the_one_that_is_trained(tmp_path, capfd):
    average = torch.nn.Linear(4, 1).requires_grad_(False)
    model = torch.nn.ModuleDict({"average": average, "net": torch.nn.Linear(4, 1)})
    weights = {"weight": torch.full((1, 4), 0.25), "bias": torch.zeros(1)}
    load_initial(model, weights, tmp_path / "weights.pt")
    assert (model["net"].weight == 0.25).all() and not (average.weight == 0.25).any()
    assert "new in the model: average.bias, average.weight" in capfd.readouterr().out


OPTIONS = """
import enum, os
from pathlib import Path

class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"

def add_options(self, parser):
    add = parser.add_argument
    add("--hidden_dim", type=int, default=16)
    add("--decay-rate", dest="decay", type=float, default=0.1)
    add("--no-mixup", dest="mixup", action="store_false")
    add("--tag", action="append")
    add("--crop", default=(3, 4))
    add("--widths", type=lambda text: [int(n) for n in text.split(",")], default=[1])
    add("--images", type=self.Path, default=self.Path("photos"))
    add("--color", type=self.Color, default=self.Color.RED)
    add("--needed", required=True)

def model(self, cfg):
    names = [cfg.images.name, cfg.color.name, cfg.needed]
    numbers = [cfg.hidden_dim, cfg.decay, cfg.widths]
    print("seen", [*numbers, cfg.mixup, cfg.tag, *names], flush=True)
    return super().model(cfg)
"""
GIVEN = [
    "--hidden_dim=3",
    "--decay-rate=0.5",
    "--widths=2,3",
    "--no-mixup",
    "--tag=x",
    "--tag=y",
    "--color=blue",
    "--needed=n",
]


def test_options_of_any_type_survive_config_yaml_and_a_checkpoint(tmp_path):
    expected = "seen [3, 0.5, [2, 3], False, ['x', 'y'], 'photos', 'BLUE', 'n']"
    one = ["--epochs=1", "--batch-size=8"]
    first = train(tmp_path / "run", 1, *one, *GIVEN, **small(OPTIONS))
    assert expected in first.out[0]
    config = f"--config={tmp_path}/run/config.yaml"
    again = train(tmp_path / "again", 1, config, **small(OPTIONS))
    assert expected in again.out[0]
    words = [f"--evaluate={tmp_path}/run/checkpoint_epoch_1.pt"]
    evaluated = launch(tmp_path / "none", 1, *words, **small(OPTIONS))
    assert evaluated.codes == [0] and expected in evaluated.out[0], evaluated.err
    flags = tmp_path / "flags.yaml"
    flags.write_text(
        "hidden-dim: 3\ndecay_rate: 0.5\nwidths: 2,3\nno_mixup: true\ntag: [x, y]\ncolor: blue\n"
    )
    by_flags = [f"--config={flags}", *one, "--needed=n"]
    assert expected in train(tmp_path / "flags", 1, *by_flags, **small(OPTIONS)).out[0]


@pytest.mark.parametrize(
    ("text", "mode", "loud"),
    [
        ("mode: true", True, 0),
        ("mode: False", False, 0),
        ("fast: true\nloud: 3", True, 3),
        ("no_fast: True", False, 0),
        ("no-fast: false", True, 0),
        ("mode: null\nloud: 0\ntags: []\nlimit: .inf", True, 0),
    ],
)
def test_a_config_file_sets_switches_by_their_flags_and_by_where_they_are_stored(
    tmp_path, text, mode, loud
):
    class Task(trainer.Task):
        def add_options(self, parser):
            parser.add_argument("--fast", dest="mode", action="store_true", default=True)
            parser.add_argument("--no-fast", dest="mode", action="store_false")
            parser.add_argument("--loud", action="count", default=0)

            parser.add_argument("--tags", action="append", default=[])
            parser.add_argument("--limit", type=float, default=float("inf"))

    (tmp_path / "options.yaml").write_text(text)
    cfg = trainer.parse_config([f"--config={tmp_path}/options.yaml"], Task())
    assert (cfg.mode, cfg.loud, cfg.tags, cfg.limit) == (mode, loud, [], float("inf"))


def test_a_spec_may_hold_tensors_and_nan(tmp_path):
    spec = "self.spec = {'std': torch.ones(3), 'nan': [float('nan')]}\nreturn super().data(cfg)"
    code = method("data", "cfg", spec)
    train(tmp_path / "run", 2, *EPOCHS, "--stop-at-step=2", **small(code))
    run = train(tmp_path / "run", 2, *EPOCHS, **small(code))
    assert "Changed since" not in run.out[0]
    other = small(code.replace("ones", "zeros"))
    assert "spec" in refuse(tmp_path / "run", *EPOCHS, "--epochs=3", ranks=2, **other)


SLOW = loss_and("import time\ntime.sleep(self.SECONDS)\nreturn loss, {}")


def test_slow_micro_batches_are_no_hang_and_one_process_is_only_warned(tmp_path):
    options = ["--batch-size=4", "--global-batch-size=16", "--stop-at-step=1", "--hang-timeout=3"]
    slow = small(SLOW + "\nSECONDS = 1.2")
    assert train(tmp_path / "two", 2, *options, **slow).err == ["", ""]
    stuck = small(SLOW + "\nSECONDS = 5")
    run = train(tmp_path / "one", 1, "--batch-size=16", "--stop-at-step=1", options[-1], **stuck)
    assert "no progress in 3 s" in run.err[0] and "in loss" in run.err[0]


def test_suspended_ranks_do_not_hang(tmp_path):
    options = [*EPOCHS, "--epochs=1000", "--hang-timeout=3", "--stop-at-step=30"]

    def suspend(processes):
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            os.sched_yield()
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for process in processes:
                os.kill(process.pid, number)
            subprocess.run(["sleep", "6"] if number == signal.SIGSTOP else ["true"])

    slow = small(SLOW + "\nSECONDS = 0.05")
    run = train(tmp_path / "run", 2, *options, during=suspend, **slow)
    assert run.status()["global_step"] == 30


# Replaces the one call of main().
NOTEBOOK = """
import multiprocessing, signal, threading, time
import torch, train_distributed as trainer
class Task(trainer.Task):
    width = 5  # does not fit
    def data(self, cfg):
        return trainer.InMemoryDataset(torch.ones(32, 4), torch.arange(32) % 2), None
    def model(self, cfg):
        return torch.nn.Linear(self.width, 2)
options = ["--epochs=1", "--batch-size=8", argv[1]]
other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
other.start()
before = {number: signal.getsignal(number) for number in trainer.STOP_SIGNALS}
try:
    trainer.main(Task(), options)
except RuntimeError:
    pass
Task.width = 4
trainer.main(Task(), options)
assert {number: signal.getsignal(number) for number in trainer.STOP_SIGNALS} == before
thread = threading.Thread(target=trainer.main, args=(Task(), [*options, "--epochs=2"]))
thread.start()
thread.join()
print("alive", other.is_alive())
other.kill()
raise SystemExit
"""


def test_main_can_be_called_again_also_after_an_error_and_in_a_thread(tmp_path):
    (out,) = train(tmp_path / "run", 1, before=NOTEBOOK).out
    assert out.count("Finished at step") == 2 and "alive True" in out


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
    loader = trainer.get_dataloader(Task(), cfg, trainer.World(), Rows(), [[0, 1]])
    assert [column.tolist() for column in next(iter(loader))] == [[1, 1], [1, 1]]


def test_no_more_loader_workers_are_started_than_there_is_work():
    cfg = trainer.parse_config(["--num-workers=9"])
    arguments = (trainer.Task(), cfg, trainer.World(), torch.ones(8), [])
    assert trainer.get_dataloader(*arguments, count=2).num_workers == 2


def test_a_status_file_of_another_host_is_one_warning(tmp_path):
    run = train(tmp_path / "run", 2, *EPOCHS, env={"STATUS_FILE": f"{tmp_path}/no/file"}, **small())
    assert run.err[0].count("WARNING: cannot write") == 1 and "LOG_DIR" in run.err[0]


def test_a_missing_package_is_named_before_the_start(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    message = refuse_here(capfd, tmp_path / "run", *EPOCHS, "--wandb", task=task_of("pass"))
    assert "--wandb" in message and "pip install" in message
