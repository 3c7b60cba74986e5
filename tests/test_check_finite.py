"""CHECK_FINITE=1: which step, rank and layer made a gradient that is not finite."""

import re

import check_finite
import pytest
import torch
from test_guard import run, write

NETWORK = "torch.nn.Sequential(torch.nn.Linear(10, 4), torch.nn.Linear(4, 5))"
# A hook of a layer: 0 has the gradient inf * 0.
LAYER = "model.module[0].register_forward_hook(lambda module, x, y: (y * 0).sqrt())"
LOSS = "model.module[1].register_forward_hook(lambda module, x, y: y * float('inf'))"
BETWEEN = "2 of 4 gradients of rank 1 are not finite; look at the layers from 0.* to 1.*"


def lines_of(directory, fault: str, **env) -> list[str]:
    script = write(directory, f"step == 12 and rank == 1 and {fault}")
    script.write_text(script.read_text().replace("torch.nn.Linear(10, 5)", NETWORK))
    result = run(2, script, env=env)
    assert result.codes == [0, 0], result.err
    return re.findall("guard.py: (?!rank)(.*)", "".join(result.err))


@pytest.mark.parametrize("fault, text", [(LAYER, BETWEEN), (LOSS, "4 of 4 .* from the loss on")])
def test_the_step_the_rank_and_the_layer_are_named(tmp_path, fault, text):
    lines = lines_of(tmp_path, fault, CHECK_FINITE="1")
    (line,) = [line for line in lines if "rank 1" in line]
    assert re.match(f"step 13: {text}", line)
    assert all("step 13: " in line for line in lines) and len(lines) == 2


def test_unasked_the_weights_are_looked_at_once_at_the_end(tmp_path):
    (line,) = lines_of(tmp_path, LAYER)
    assert "CHECK_FINITE=1" in line and "step 13" not in line
    assert lines_of(tmp_path, "False") == []


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
