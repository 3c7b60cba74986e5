"""docs/TROUBLESHOOTING.md, as guard.py reads it for an error."""

import re

import explain
import pytest
from pages import without_code
from test_guard import run, write

PAGE = explain.PAGE.read_text()
NOTHING_TO_SAY = """\
Epoch 3: loss 0.084919, accuracy 0.97307, test_loss 0.092894
[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1
W1128 22:14:01.1 torch/distributed/run.py:803] Setting OMP_NUM_THREADS environment variable to be 1
UserWarning: Grad strides do not match bucket view strides. This may indicate grad was not created
UserWarning: This DataLoader will create 8 worker processes in total. Our suggested max number is 2
UserWarning: The given NumPy array is not writable
UserWarning: Detected call of `lr_scheduler.step()` before `optimizer.step()`
FutureWarning: `torch.cuda.amp.autocast(args...)` is deprecated
NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>
NCCL INFO NET/Plugin: Could not find: libnccl-net.so. Using internal network plugin.
[W] Address family not supported by protocol
[W] The IPv6 network addresses of (node01, 29500) cannot be retrieved
Found 12 labels, 0 of them out of range; memory: 3.1 of 80 GB; 0 errors
100%|##########| 938/938 [00:10<00:00, 91.21it/s, loss=0.31]
Downloading: "https://download.pytorch.org/models/resnet18.pth" to /home/me/.cache
wandb: Run data is saved locally in /home/me/wandb/run-20261128_221401-abc
wandb: Tracking run with wandb version 0.31.0
Using device: cuda:0; training on 8 GPUs with DDP; find_unused_parameters=False
Loaded checkpoint 'runs/a/last.pt' (epoch 4): <All keys matched successfully>
Saving model to runs/a/epoch_4.pt ... done; free space: 812 GB
Stopping: SIGTERM received, saved at step 1200
Retrying (attempt 1 of 5): the server is busy
ValueError: --epochs must be positive
AssertionError
KeyError: 'image'
FileNotFoundError: [Errno 2] No such file or directory: 'train.csv'
AttributeError: 'NoneType' object has no attribute 'shape'
TypeError: forward() missing 1 required positional argument: 'mask'
RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x5 and 3x4)
ZeroDivisionError: division by zero
IndexError: list index out of range
SystemExit: 2
usage: train.py [-h] [--lr LR]; train.py: error: argument --lr: invalid float value: 'fast'
"""


def test_each_message_of_the_page_is_found_and_its_remedy_is_a_sentence():
    headings = re.findall(r"(?m)^### (.*`.*)$", without_code(PAGE))
    messages = [
        (heading, text) for heading in headings for text in explain.MESSAGE.findall(heading)
    ]
    assert len(messages) > 150
    for heading, message in messages:
        text = f"Error: before {message.replace('...', ' 1 x ')} after\nmore"
        beginning, remedy = explain.find(PAGE, [text])
        assert heading.startswith(beginning), message
        assert re.match(r"[A-Z].*\.$", remedy) and "](" not in remedy, remedy


@pytest.mark.parametrize("text", NOTHING_TO_SAY.splitlines())
def test_healthy_or_other_output_finds_nothing(text):
    assert explain.find(PAGE, [text]) is None


def test_the_cause_and_the_most_specific_message_decide():
    page = "### `a b`\n\nFirst. More.\n\n### Title: `a`, `x ... y`\n\n[Second](b.md) one. More.\n"
    assert explain.find(page, ["none", "x 1\n x 2 y", "a b"]) == ("Title", "Second one.")
    assert explain.find(page, ["a b"]) == ("`a b`", "First.")
    with pytest.raises(SystemExit) as raised:
        try:
            try:
                raise KeyError("handled")
            except KeyError:
                raise ValueError("why") from OSError("cause")
        except ValueError:
            raise SystemExit(3)  # noqa: B904
    texts = ["SystemExit: 3\n", "ValueError: why\nOSError: cause\n"]
    assert list(explain.texts_of(raised.value)) == texts


LABELS = "if rank == 1: torch.nn.functional.cross_entropy(torch.ones(1, 2), torch.tensor([5]))"
USAGE = "print('unrecognized arguments: --local-rank=0'); sys.exit(2)"


@pytest.mark.parametrize("fault, remedy", [(LABELS, "Make each label"), (USAGE, "Read `os.env")])
def test_the_first_rank_that_fails_prints_one_line_below_its_traceback(tmp_path, fault, remedy):
    result = run(2, write(tmp_path, fault))
    lines = "".join(result.err).splitlines()
    (line,) = [line for line in lines if "TROUBLESHOOTING" in line]
    assert f": {remedy}" in line
    if fault == LABELS:
        own_lines = result.err[1].splitlines()
        assert "IndexError: Target 5" in own_lines[own_lines.index(line) - 1]
