"""A run that is stopped and resumed at any step ends with the same weights."""

import pytest
from harness import assert_same_state, launch, train

EPOCHS = "--epochs=2"  # of 9 steps: 203 samples in global batches of 24
BATCH = "--global-batch-size=24"  # three micro-batches of 8
RANKS = 3  # with two, the order of adding gradients would make no difference


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, tiny):
    """Two epochs, with dropout, which is on by default."""
    directory = tmp_path_factory.mktemp("untouched") / "run"
    return train(directory, RANKS, *tiny, EPOCHS, BATCH)


def losses(run) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in run.records("train")]


def assert_same_end(run, untouched) -> None:
    end = "checkpoint_epoch_2"
    assert_same_state(run.checkpoint(end), untouched.checkpoint(end))
    assert losses(run) == losses(untouched)
    for ours, theirs in zip(run.records("epoch"), untouched.records("epoch"), strict=True):
        for name in ("epoch", "step", "loss", "accuracy", "test_loss", "test_accuracy"):
            assert ours[name] == theirs[name]


def test_two_runs_with_the_same_seed_end_bitwise_equal(tmp_path, tiny, untouched):
    assert_same_end(train(tmp_path / "run", RANKS, *tiny, EPOCHS, BATCH), untouched)


def test_another_seed_ends_differently(tmp_path, tiny, untouched):
    other = train(tmp_path / "run", RANKS, *tiny, EPOCHS, BATCH, "--seed=43")
    assert losses(other) != losses(untouched)


@pytest.mark.parametrize("step", [4, 9])  # in an epoch; at its end
def test_stopped_and_resumed_ends_bitwise_equal(tmp_path, tiny, untouched, step):
    options = [*tiny, EPOCHS, BATCH]
    stopped = train(tmp_path / "run", RANKS, *options, f"--stop-at-step={step}")
    assert f"Stopped at step {step} of 18, saved in {tmp_path / 'run'}\n" in stopped.out[0]
    resumed = train(tmp_path / "run", RANKS, *options, record=True)
    assert min(resumed.samples()) == step, "training should resume at the step where it stopped"
    assert_same_end(resumed, untouched)


@pytest.mark.long  # two of these steps are tried above
def test_stopped_after_every_single_step_ends_bitwise_equal(tmp_path, tiny, untouched):
    for step in range(1, 19):
        run = train(tmp_path / "run", RANKS, *tiny, EPOCHS, BATCH, f"--stop-at-step={step}")
    assert_same_end(run, untouched)


def test_uneven_ranks_resume_bitwise_too(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--global-batch-size=48"]  # 1 or 2 micro-batches on 4 ranks
    untouched = train(tmp_path / "untouched", 4, *options)
    train(tmp_path / "run", 4, *options, "--stop-at-step=2")
    resumed = train(tmp_path / "run", 4, *options)
    end = "checkpoint_epoch_1"
    assert_same_state(resumed.checkpoint(end), untouched.checkpoint(end))


def test_an_epoch_whose_evaluation_was_interrupted_is_evaluated_later(tmp_path, tiny, untouched):
    cut = "import os, train_distributed; train_distributed.evaluate = lambda *_: os._exit(9)"
    options = [*tiny, EPOCHS, BATCH]
    for epoch in (1, 2):
        assert launch(tmp_path / "run", RANKS, *options, before=cut).codes == [9] * RANKS
        assert (tmp_path / "run" / f"checkpoint_epoch_{epoch}.pt").exists()
        run = train(tmp_path / "run", RANKS, *options, f"--stop-at-step={9 * epoch}")
    assert "Finished at step 18 of 18" in run.out[0]
    assert_same_end(run, untouched)


def test_a_stop_between_two_records_does_not_show_in_the_metrics(tmp_path, tiny):
    options = [*tiny, EPOCHS, BATCH, "--log-every-steps=5"]
    untouched = train(tmp_path / "untouched", 1, *options)
    train(tmp_path / "run", 1, *options, "--stop-at-step=7")
    assert_same_end(train(tmp_path / "run", 1, *options), untouched)


# Each rank reports the checkpoints that it reads.
READERS = """if True:
    import os, sys

    def report(event, arguments):
        path, mode, _ = arguments if event == "open" else ("", "", 0)
        if str(path).endswith(".pt") and "w" not in (mode or ""):
            os.write(1, f"{path} was read\\n".encode())

    sys.addaudithook(report)
"""


def test_only_rank_0_reads_the_checkpoint(tmp_path, tiny, untouched):
    options = [*tiny, EPOCHS, BATCH]
    train(tmp_path / "run", RANKS, *options, "--stop-at-step=4")
    resumed = train(tmp_path / "run", RANKS, *options, before=READERS)
    line = f"{tmp_path / 'run'}/checkpoint_step_4.pt was read\n"
    assert [line in out for out in resumed.out] == [True, False, False]
    assert_same_end(resumed, untouched)
