"""Any number of ranks: the same samples, the same losses; with --reproducible, the same bits."""

import itertools
import math

import pytest
from harness import assert_same_state, train
from tasks import QUICK, small

from train_distributed import SampleStream, Task, World, parse_config

BATCH = "--global-batch-size=32"  # four micro-batches of 8, for up to four ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny):
    """One epoch of 203 samples, and the beginning of a second, on 1, 2, 3 and 4 ranks."""
    base = tmp_path_factory.mktemp("sizes")
    options = [*tiny, BATCH, "--epochs=2", "--stop-at-step=9"]
    return {n: train(base / str(n), n, *options, record=True) for n in (1, 2, 3, 4)}


def in_order(run) -> list[int]:
    """The samples of all steps."""
    steps = sorted(run.samples().items())
    return [i for _, step in steps for micro in sorted(step) for i in step[micro]]


def losses(run) -> list[float]:
    return [record["loss"] for record in run.records("train")]


def test_every_step_has_the_same_samples_and_losses_on_any_number_of_ranks(runs):
    for run in runs.values():
        assert run.samples() == runs[1].samples()
        assert losses(run) == pytest.approx(losses(runs[1]), abs=1e-5)


def test_an_epoch_has_every_sample_once_and_the_next_in_another_order(runs):
    order = in_order(runs[1])
    assert len(order) == 9 * 32, "all steps are equally large"
    first, second = order[:203], order[203:]
    assert sorted(first) == list(range(203)) and first != sorted(first)
    assert len(set(second)) == len(second) and second != first[: len(second)]
    assert [record["step"] for record in runs[1].records("epoch")] == [7]


def test_records_do_not_depend_on_when_the_ranks_exchange_them(tmp_path, tiny):
    """About once a second; here also after each step, as each is saved."""
    options = [*tiny, "--epochs=1", "--log-every-steps=5"]
    found = []
    for every in (0, 1):
        run = train(tmp_path / f"{every}", 2, *options, f"--checkpoint-every-steps={every}")
        found.append([*run.records("train"), *run.records("epoch")])
    timed = {"time", "samples_per_second", "data_wait", "seconds_left"}
    often, rarely = ([[(k, r[k]) for k in r if k not in timed] for r in part] for part in found)
    assert often == rarely
    assert [record["step"] for record in found[0]] == [5, 10, 13, 13]


def test_resuming_on_other_numbers_of_ranks_loses_and_repeats_no_sample(tmp_path, tiny, runs):
    """Without --global-batch-size, that of the checkpoint applies."""
    options = [*tiny, "--epochs=2", "--stop-at-step"]
    for ranks, step in ((4, "3"), (2, "5"), (3, "9")):
        run = train(tmp_path / "run", ranks, *options, step, record=True)
    assert run.samples() == runs[1].samples()
    assert losses(run) == pytest.approx(losses(runs[1]), abs=1e-5)


@pytest.mark.parametrize("samples", [7, 24, 50])
def test_ranks_share_the_endless_stream(samples):
    for batch, per_step in ((1, 1), (1, 7), (2, 3), (3, 2)):
        words = [f"--batch-size={batch}", f"--global-batch-size={batch * per_step}"]
        cfg = parse_config(words)

        def stream(*rank, cfg=cfg):
            return SampleStream(Task(), cfg, World(*rank), range(samples))

        def first(share, count, begin=0):
            """[indices] of so many micro-batches, from this step on."""
            parts = itertools.islice(share.micro_batches_from(begin, "cpu"), count)
            return [[key % samples for key in part[-1].tolist()] for part in parts]

        whole = stream()
        steps = math.ceil(3 * samples / (batch * per_step))
        parts = first(whole, steps * per_step)
        used = [index for part in parts for index in part]
        for epoch in range(3):
            assert sorted(used[epoch * samples : (epoch + 1) * samples]) == list(range(samples))
        ends = [step for step in range(steps + 1) if whole.ends_epoch(step)]
        assert ends == [math.ceil(e * samples / (batch * per_step)) for e in (1, 2, 3)]
        for ranks in range(1, per_step + 1):
            for begin in (0, steps // 2):
                shares = [stream(rank, ranks) for rank in range(ranks)]
                found = [first(share, len(share.micro_batches), begin) for share in shares]
                expected = parts[begin * per_step : (begin + 1) * per_step]
                assert [part for own in found for part in own] == expected


# Five micro-batches, which 2, 3 and 4 ranks cannot share evenly.
REPRODUCIBLE = ["--reproducible", "--global-batch-size=40", "--epochs=2"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, tiny):
    return train(tmp_path_factory.mktemp("one") / "run", 1, *tiny, *REPRODUCIBLE)


def assert_same_bits(run, other) -> None:
    assert run.saved() == other.saved() == [6, 11]
    for step in run.saved():
        assert_same_state(run.checkpoint(step), other.checkpoint(step))
    kinds = {"train": ("loss", "accuracy", "lr"), "epoch": ("test_loss", "test_accuracy")}
    for kind, names in kinds.items():
        ours, theirs = (
            {r["step"]: [r[name] for name in names] for r in x.records(kind)}  # the last counts
            for x in (run, other)
        )
        assert ours == theirs


def test_reproducible_ends_with_the_same_bits_when_the_number_of_ranks_changes(
    tmp_path, tiny, one_rank
):
    options = [*tiny, *REPRODUCIBLE, "--stop-at-step"]
    for ranks, step in ((5, "6"), (3, "9"), (4, "11")):
        run = train(tmp_path / "run", ranks, *options, step)
    run.directory.joinpath("checkpoint_step_9.pt").unlink()
    assert_same_bits(run, one_rank)


# A number of items in each micro-batch, up to as many as photos have pixels.
COUNTED = """
def loss(self, model, batch):
    loss, sums = super().loss(model, batch)
    return loss, {"count": 2**22 * (batch[1] > 0).sum()}
"""


@pytest.mark.parametrize("option", ["--amp=fp16", "--amp=off"])
def test_reproducible_works_with_loss_scaling_and_counted_items_too(tmp_path, option):
    options = [*QUICK, "--reproducible", "--global-batch-size=24", "--epochs=2", option]
    one, three = (train(tmp_path / str(n), n, *options, **small(COUNTED)) for n in (1, 3))
    assert_same_state(one.newest(), three.newest())
