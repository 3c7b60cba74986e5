"""The trainer on a real GPU; skipped without one."""

import json
import os
import subprocess
import sys

import pytest
import torch
from harness import (
    HAS_NVIDIA_DRIVER,
    REPO,
    TORCHRUN,
    VISIBLE_GPUS,
    assert_same_state,
    run_ranks,
    train,
)

COUNT = "import torch; print(*range(torch.cuda.device_count()), sep=',')"


def visible_gpus() -> str:
    """CUDA_VISIBLE_DEVICES for these tests; empty without a GPU."""
    if not HAS_NVIDIA_DRIVER:
        return ""
    if VISIBLE_GPUS is not None:
        return VISIBLE_GPUS
    env = dict(os.environ)
    del env["CUDA_VISIBLE_DEVICES"]
    result = subprocess.run([sys.executable, "-c", COUNT], env=env, capture_output=True, text=True)
    return result.stdout.strip()


GPUS = {"CUDA_VISIBLE_DEVICES": visible_gpus()}
pytestmark = [
    pytest.mark.timeout(1200),  # --compile
    pytest.mark.skipif(
        not GPUS["CUDA_VISIBLE_DEVICES"],
        reason="needs a CUDA GPU: fp16 and NCCL cannot run here",
    ),
]


@pytest.mark.parametrize("options", [["--amp=fp16"], ["--amp=bf16"], ["--compile"], []])
def test_a_run_resumes_bitwise(tmp_path, tiny, options):
    options = [*tiny, "--epochs=1", "--deterministic", *options]
    untouched = train(tmp_path / "untouched", 1, *options, env=GPUS, timeout=400)
    train(tmp_path / "run", 1, *options, "--stop-at-step=5", env=GPUS, timeout=400)
    resumed = train(tmp_path / "run", 1, *options, env=GPUS, timeout=400)
    assert "nccl" in untouched.out[0], "the run did not use the GPU"
    assert_same_state(resumed.checkpoint("checkpoint_epoch_1"), untouched.newest())


# A single rank has neither a process group nor DDP, unless this adds them.
WITH_NCCL = """if True:
    import torch.distributed as dist, train_distributed as trainer

    def setup_distributed(cfg, inner=trainer.setup_distributed):
        world = inner(cfg)
        dist.init_process_group("nccl", device_id=world.device)
        return world

    def open_run(task, cfg, world, inner=trainer.open_run):
        run = inner(task, cfg, world)
        trainer.wrap_ddp(run)
        return run

    def all_reduce(self, world, flags=(), inner=trainer.ExactSums.all_reduce):
        dist.all_reduce(self.digits)
        return inner(self, world, flags)

    trainer.setup_distributed, trainer.open_run = setup_distributed, open_run
    trainer.ExactSums.all_reduce = all_reduce
"""


def test_one_rank_with_ddp_over_nccl_ends_with_the_weights_of_a_plain_process(tmp_path, tiny):
    """But for rounding: fused optimizers round differently if DDP's buckets misalign gradients."""
    options = [*tiny, "--epochs=1", "--deterministic"]
    plain = train(tmp_path / "plain", 1, *options, env=GPUS)
    run = tmp_path / "nccl"
    command = [REPO / "train_distributed.py", f"--checkpoint-dir={run}", *options]
    launched = run_ranks(1, *command, before=WITH_NCCL, directory=run, env=lambda rank: GPUS)
    assert launched.codes == [0], launched.err[0]
    ours = launched.checkpoint("checkpoint_epoch_1")
    theirs = plain.checkpoint("checkpoint_epoch_1")
    assert ours["global_step"] == theirs["global_step"]
    torch.testing.assert_close(ours["model"], theirs["model"], rtol=1e-4, atol=1e-6)
    test_loss = plain.records("epoch")[0]["test_loss"]
    assert launched.records("epoch")[0]["test_loss"] == pytest.approx(test_loss, rel=1e-4)


def test_two_ranks_that_share_a_gpu_end_with_the_weights_of_one(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--reproducible", "--global-batch-size=16"]
    one = train(tmp_path / "one", 1, *options, env=GPUS)
    options += ["--distributed-backend=gloo"]
    two = train(tmp_path / "two", 2, *options, env=GPUS)
    assert_same_state(two.newest(), one.newest())


SAME_GPU = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(1, device="cuda:0"))
"""


def test_two_ranks_on_one_gpu_are_a_user_error_with_the_remedy(tmp_path):
    script = tmp_path / "my_train.py"
    script.write_text(SAME_GPU)
    env = os.environ | GPUS | {"FAILURE_FILE": str(tmp_path / "failure.json")}
    command = [*TORCHRUN, REPO / "scripts/guard.py", script]
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode != 0
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["cause"] == "configuration", result.stderr
    assert f"guard.py: error: {failure['reason']}\n" in result.stderr
    assert (
        failure["reason"].startswith("ranks 0 and 1 on ") and "NPROC_PER_NODE" in failure["reason"]
    )


def test_out_of_memory_is_recorded_as_the_cause(tmp_path):
    options = ["--dataset=synthetic", "--model=resnet152", "--image-size=448", "--batch-size=1280"]
    command = [*TORCHRUN[:-1], "--nproc-per-node=1", REPO / "scripts/guard.py"]
    command += [REPO / "train_distributed.py", f"--checkpoint-dir={tmp_path}", *options]
    env = os.environ | GPUS | {"FAILURE_FILE": str(tmp_path / "failure.json")}
    result = subprocess.run(command, env=env, capture_output=True, text=True)
    assert result.returncode != 0
    failure = json.loads((tmp_path / "failure.json").read_text())
    assert failure["cause"] == "out of memory"
