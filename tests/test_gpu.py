"""The trainer on a real GPU; skipped without one."""

import os
import subprocess
import sys

import pytest
from harness import (
    HAS_NVIDIA_DRIVER,
    REPO,
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
        not GPUS["CUDA_VISIBLE_DEVICES"], reason="needs a CUDA GPU: fp16 and NCCL cannot run here"
    ),
]


@pytest.mark.parametrize("options", [["--amp=fp16"], ["--amp=bf16"], ["--compile"], []])
def test_a_run_resumes_bitwise(tmp_path, tiny, options):
    options = [*tiny, "--epochs=1", "--deterministic", *options]
    untouched = train(tmp_path / "untouched", 1, *options, env=GPUS, timeout=400)
    train(tmp_path / "run", 1, *options, "--stop-at-step=5", env=GPUS, timeout=400)
    resumed = train(tmp_path / "run", 1, *options, env=GPUS, timeout=400)
    assert "nccl" in untouched.out[0], "the run did not use the GPU"
    assert_same_state(resumed.newest(), untouched.newest())


def on_one_gpu(directory, ranks: int, *options):
    """Several ranks of NCCL on a single GPU: each takes the others for those of other nodes."""

    def env(rank):
        return GPUS | {"NCCL_HOSTID": f"node{rank}"}

    command = [REPO / "train_distributed.py", f"--checkpoint-dir={directory}", *options]
    run = run_ranks(ranks, *command, directory=directory, env=env, timeout=400)
    assert run.codes == [0] * ranks, run.err
    assert "nccl" in run.out[0]
    return run


def test_ranks_that_share_a_gpu_resume_bitwise_and_reproducibly(tmp_path, tiny):
    options = [*tiny, "--epochs=1", "--deterministic", "--global-batch-size=24"]
    untouched = on_one_gpu(tmp_path / "untouched", 2, *options)
    on_one_gpu(tmp_path / "run", 2, *options, "--stop-at-step=5")
    resumed = on_one_gpu(tmp_path / "run", 2, *options)
    assert_same_state(resumed.newest(), untouched.newest())
    options += ["--reproducible"]
    one, three = (on_one_gpu(tmp_path / str(n), n, *options) for n in (1, 3))
    assert_same_state(one.newest(), three.newest())
    test_loss = untouched.records("epoch")[0]["test_loss"]
    assert three.records("epoch")[0]["test_loss"] == pytest.approx(test_loss, rel=1e-2)


WARN_OF_WAITS = """if True:
    import torch
    import train_distributed as trainer

    def train_step(*arguments, inner=trainer.train_step):
        torch.cuda.set_sync_debug_mode("warn" if arguments[-2] > 2 else "default")  # the step
        inner(*arguments)
        torch.cuda.set_sync_debug_mode("default")

    class NotFused(trainer.Task):
        def optimizer(self, cfg, model):
            return torch.optim.AdamW(model.parameters(), lr=1e-3)

    trainer.train_step = train_step
    task = NotFused()
"""


def test_a_step_waits_for_the_gpu_only_at_an_exchange(tmp_path, tiny):
    """PyTorch warns of each operation that waits."""
    run = train(tmp_path / "run", 1, *tiny, "--stop-at-step=9", before=WARN_OF_WAITS, env=GPUS)
    assert "called a synchronizing" not in run.err[0], run.err[0]
