"""CHECK_FINITE=1: which step, rank and layer made a gradient that is not finite."""

import re

import check_finite
import pytest
import torch
from test_guard import run

SCRIPT = """
import os, torch
from torch.nn.parallel import DistributedDataParallel

torch.distributed.init_process_group("gloo")
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
body, head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x, is_bad):
        hidden = body(x)
        if is_bad:
            hidden = (hidden * 0).sqrt()  # 0 has the gradient inf * 0
        return head(hidden)


model = DistributedDataParallel(Network())
weights = [p for p in model.parameters() if p.dim() > 1]
others = [p for p in model.parameters() if p.dim() == 1]
optimizer = torch.optim.AdamW([{"params": others}, {"params": weights}])
for step in range(1, 31):
    is_bad = rank == 1 and step == 24
    loss = model(torch.randn(8, 4), is_bad and FAULT == "layer").square().mean()
    if is_bad and FAULT == "loss":
        loss = loss * float("inf")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
torch.distributed.destroy_process_group()
"""
LAYER = "2 of 4 gradients of rank 1 are not finite; look at the layers from body.* to head.*"


def lines_of(tmp_path, fault: str, **env) -> list[str]:
    script = tmp_path / "my_train.py"
    script.write_text(SCRIPT.replace("FAULT", repr(fault)))
    result = run(2, script, env=env)
    assert result.codes == [0, 0], result.err
    return re.findall("guard.py: (?!rank)(.*)", "".join(result.err))


@pytest.mark.parametrize("fault, text", [("layer", LAYER), ("loss", "4 of 4 .* from the loss on")])
def test_the_step_the_rank_and_the_layer_are_named(tmp_path, fault, text):
    lines = lines_of(tmp_path, fault, CHECK_FINITE="1")
    (line,) = [line for line in lines if "rank 1" in line]
    assert re.match(f"step 24: {text}", line)
    assert all("step 24: " in line for line in lines) and len(lines) == 2


def test_unasked_the_weights_are_looked_at_once_at_the_end(tmp_path):
    (line,) = lines_of(tmp_path, "layer")
    assert "CHECK_FINITE=1" in line and "step 24" not in line
    assert lines_of(tmp_path, "none") == []


def test_a_step_that_grad_scaler_leaves_out_is_not_reported(monkeypatch, capsys):
    monkeypatch.setenv("CHECK_FINITE", "1")
    for name in ("after", "register_optimizer_step_pre_hook"):  # for the whole process
        monkeypatch.setattr(check_finite, name, lambda *_: None)
    check = check_finite.FiniteCheck(rank=0)
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    check.on_optimizer(None, optimizer)
    optimizer.register_step_pre_hook(check.on_step)
    scaler = torch.amp.GradScaler("cpu")
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(parameter.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    check.end()
    assert capsys.readouterr().err == ""
    (parameter.sum() * float("inf")).backward()
    optimizer.step()
    check.end()
    assert "1 of 1 gradients of rank 0 are not finite" in capsys.readouterr().err
