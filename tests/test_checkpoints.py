"""Damaged checkpoints are named and skipped; nothing that was saved is lost."""

import os
import shutil
import signal

import pytest
import torch
from harness import (
    FAULT_IN_STEP,
    FOREVER,
    assert_same_state,
    launch,
    train,
    wait_for_step,
    wait_until,
)

import train_distributed


def damage(path):
    """Flip a bit in a weight: PyTorch loads the file without an error."""
    content = bytearray(path.read_bytes())
    weight = load(path)["model"]["network.fc1.weight"].numpy().tobytes()
    content[content.index(weight) + 1000] ^= 1
    path.write_bytes(content)


def load(path) -> dict:
    return torch.load(path, weights_only=True)


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tiny):
    return train(tmp_path_factory.mktemp("straight") / "run", 2, *tiny, "--epochs=3")


def test_the_newest_intact_checkpoint_is_used_and_the_run_ends_the_same(tmp_path, tiny, straight):
    """faults/test_damage.py tries other kinds of damage."""
    options = [*tiny, "--epochs=3", "--checkpoint-every-steps=6", "--keep=9"]
    run = train(tmp_path / "run", 2, *options, "--stop-at-step=24").directory
    damage(run / "checkpoint_step_24.pt")
    cut_off = run / "checkpoint_step_18.pt"
    cut_off.write_bytes(cut_off.read_bytes()[:-1000])
    (run / "checkpoint_epoch_1.pt").unlink()
    (run / ".checkpoint_step_30.pt.tmp").write_text("half written when it was killed")
    result = train(run, 2, *options)
    warnings = result.err[0].splitlines()
    assert len(warnings) == 2
    assert warnings[0].startswith(f"WARNING: skipped: {cut_off} is damaged, or of another ")
    text = f"WARNING: skipped: {run}/checkpoint_step_24.pt is damaged, or"
    assert warnings[1].startswith(text) and "a tensor is not as it was saved" in warnings[1]
    assert f"Resuming from {run}/checkpoint_step_12.pt at step 12" in result.out[0]
    assert_same_state(result.checkpoint("checkpoint_epoch_3"), straight.newest())
    assert not list(run.glob(".*.tmp"))


def test_a_copy_of_a_checkpoint_under_another_name_is_left_alone(tmp_path, tiny):
    options = [*tiny, "--checkpoint-every-steps=3", "--keep=1"]
    run = train(tmp_path / "run", 1, *options, "--stop-at-step=3")
    shutil.copy(run.directory / "checkpoint_step_3.pt", run.directory / "checkpoint_step_3_good.pt")
    run = train(tmp_path / "run", 1, *options, "--stop-at-step=9")
    assert run.checkpoints() == {"checkpoint_step_9", "checkpoint_step_3_good"}


def test_timed_saves_and_a_crash_loses_little(tmp_path, tiny, straight):
    options = [*tiny, "--epochs=3", "--save-minutes=0", "--keep=2"]
    before = FAULT_IN_STEP.format(step=22, rank=0, fault="os._exit(1)")
    before += "trainer.Exchange.SECONDS = 0"
    crashed = launch(tmp_path / "run", 2, *options, before=before)
    assert crashed.codes[0] == 1
    assert crashed.checkpoints() == {"checkpoint_step_21", "checkpoint_step_22"}
    resumed = train(tmp_path / "run", 2, *options)
    assert "Resuming from " in resumed.out[0]
    assert_same_state(resumed.newest(), straight.newest())


def test_a_file_save_saves_and_training_continues(tmp_path):
    run = tmp_path / "run"

    def save_then_stop(processes):
        wait_for_step(run, 5)
        (run / "SAVE").touch()
        wait_until(lambda: not (run / "SAVE").exists(), "nothing was saved")
        assert len(list(run.glob("checkpoint_step_*.pt"))) == 1
        (run / "STOP").touch()

    long_epoch = ["--batch-size=1", "--log-every-steps=1"]
    result = train(run, 2, *long_epoch, during=save_then_stop)
    saved, last = sorted(load(path)["state"]["step"] for path in run.glob("checkpoint_step_*.pt"))
    assert saved < last == result.status()["saved_step"]
    assert f"Saved checkpoint_step_{saved}.pt" in result.out[0]
    assert "(STOP file), saved in" in result.out[0]


FAILING_DISK = """if True:
    import os
    failures = [1] * {count}

    def fsync(file, inner=os.fsync):
        if failures and ".checkpoint_step_" in os.readlink(f"/proc/self/fd/{{file}}"):
            failures.pop()
            raise OSError(28, "No space left on device")
        inner(file)

    os.fsync = fsync
"""


@pytest.mark.parametrize("failures", [1, 2])
def test_a_failed_save_is_a_warning_once_and_an_error_the_second_time(tmp_path, tiny, failures):
    options = [*tiny, "--checkpoint-every-steps=5", "--keep=1"]
    train(tmp_path / "run", 1, *options, "--stop-at-step=5")
    before = FAILING_DISK.format(count=failures)
    run = launch(tmp_path / "run", 1, *options, "--stop-at-step=18", before=before)
    text = f"cannot write {run.directory}/checkpoint_step_{{}}.pt; is the disk full? "
    text += "([Errno 28] No space left on device)"
    warning, *rest = run.err[0].splitlines()
    assert warning == f"WARNING: {text.format(10)}"
    if failures == 1:
        assert (run.codes, rest, run.checkpoints()) == ([0], [], {"checkpoint_step_18"})
    else:
        assert (run.codes, run.checkpoints()) == ([2], {"checkpoint_step_5"})
        assert rest == [f"train_distributed.py: error: {text.format(15)}"]
    assert not list(run.directory.glob(".*.tmp"))


class NotFinite(train_distributed.Task):
    calls = 0

    def model(self, cfg):
        model = super().model(cfg)
        model.unused = torch.nn.Parameter(torch.ones(3))
        return model

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 7:
            model.unused.data[1] = float("inf")
        return super().loss(model, batch)


def test_weights_that_are_not_finite_are_never_saved(tmp_path, tiny):
    options = [*tiny, "--checkpoint-every-steps=5"]
    run = launch(tmp_path / "run", 1, *options, task=NotFinite)
    assert run.codes == [2] and run.checkpoints() == {"checkpoint_step_5"}
    text = "error: checkpoint_step_10.pt not saved: the weights are not finite; lower --lr\n"
    assert run.err[0].endswith(text)


def test_a_second_process_is_refused_and_the_first_is_named(tmp_path, tiny):
    seen = []

    def during(processes):
        wait_for_step(tmp_path / "run", 3)
        seen.append(launch(tmp_path / "run", 2, *tiny, "--epochs=1"))
        seen.append(processes[0].pid)
        os.kill(processes[1].pid, signal.SIGTERM)

    first = train(tmp_path / "run", 2, *tiny, FOREVER, during=during)
    second, pid = seen
    assert second.codes[0] == 2 and first.status()["state"] == "stopped"
    owner = f"{tmp_path}/run is in use by process {pid} on {os.uname().nodename}: "
    remedy = "stop that process, or set another --checkpoint-dir"
    assert second.err[0] == f"train_distributed.py: error: {owner}{remedy}\n"


def test_a_checkpoint_holds_plain_types_and_its_position(straight):
    content = straight.newest()  # with weights_only
    assert content["state"]["step"] == 39 and content["config"]["global_batch_size"] == 16
    assert (content["task"], content["samples"]) == ("Task", 203)
    assert len(content["spec"]["classes"]) == 10
    momenta = content["optimizer"]["state"]
    assert len(content["digests"]) == len(content["model"]) + len(momenta)
