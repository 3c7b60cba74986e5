"""scripts/plan.py: its predictions, compared with a training run and with known formulas."""

import json
import math
import re
import sys

import pytest
from harness import REPO, load, train

SCRIPT = REPO / "scripts/plan.py"
plan = load(SCRIPT)
LINKS = plan.Links(
    intra_latency=1e-6, intra_bandwidth=100e9, inter_latency=10e-6, inter_bandwidth=10e9
)


@pytest.fixture
def planned(capsys, monkeypatch):
    def run(*words) -> dict[str, str]:
        """The printed text by the name of the line; lines with the same name are joined."""
        monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, words)])
        assert plan.main() == 0
        printed: dict[str, str] = {}
        for line in capsys.readouterr().out.splitlines():
            printed[line[:11].strip()] = printed.get(line[:11].strip(), "") + line[12:] + "\n"
        return printed

    return run


@pytest.fixture
def refused(capsys, monkeypatch):
    def run(*words) -> str:
        monkeypatch.setattr(sys, "argv", ["plan.py", *map(str, words)])
        assert plan.main() == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    return run


def test_a_training_run_has_the_predicted_steps_and_checkpoint_size(tmp_path, tiny, planned):
    options = [*tiny, "--epochs=1", "--global-batch-size=48", "--samples=203"]
    printed = planned(*options, "--gpus-per-node=4")
    run = train(tmp_path / "run", 4, *options[:-1])
    assert printed["steps"].splitlines()[0] in run.out[0].splitlines()
    size = (tmp_path / "run/checkpoint_epoch_1.pt").stat().st_size
    megabytes = float(re.match(r"([\d.]+) MB", printed["checkpoint"])[1])
    assert "at the end of each epoch" in printed["checkpoint"]
    assert megabytes * 1e6 == pytest.approx(size, rel=0.02)


def test_the_ring_and_the_tree():
    # One node of two: 2 x 1/2 x (2 hops + n / B)
    assert plan.all_reduce_seconds(1e9, 1, 2, LINKS)["ring"] == pytest.approx(2e-6 + 0.01)
    # Four nodes of two: 2 x 7/8 x (4 hops between, 4 within, and the slower bandwidth)
    times = plan.all_reduce_seconds(1e9, 4, 2, LINKS)
    assert times["ring"] == pytest.approx(1.75 * (44e-6 + 0.1))
    assert times["tree"] == pytest.approx(2 * (21e-6 + 0.1))
    assert plan.all_reduce_seconds(1e9, 1, 1, LINKS) == {"ring": 0, "tree": 0}


def test_the_tree_wins_with_many_nodes_and_small_messages():
    times = plan.all_reduce_seconds(1e4, 1000, 8, LINKS)
    assert times["tree"] < times["ring"] / 50


def test_communication_overlaps_the_backward_pass_except_for_the_last_bucket():
    size = 4 * plan.BUCKET + plan.FIRST_BUCKET
    last = 0.001
    slow = plan.step_seconds(1.0, size, lambda n: last * n / plan.BUCKET)
    assert slow == pytest.approx(1.0 + last)
    # A step waits for links that take longer than the backward pass.
    held_up = plan.step_seconds(1.0, size, lambda n: n / plan.BUCKET)
    assert held_up > 4


def test_the_best_checkpoint_interval_is_that_of_daly_and_of_young_where_failures_are_rare():
    assert plan.checkpoint_interval(1, 1e6) == pytest.approx(math.sqrt(2e6), rel=1e-2)

    def lost(interval, save=60, between=3600):  # the exact share, Daly's equation 20
        return between * math.expm1((interval + save) / between) / interval

    best = plan.checkpoint_interval(60, 3600)
    assert lost(best) < lost(best * 1.2) and lost(best) < lost(best / 1.2)


def test_links_that_the_doctor_measured_are_used(tmp_path):
    def seconds(n, nodes, each):
        return min(plan.all_reduce_seconds(n, nodes, each, LINKS).values())

    measured = {f"{name} {n}": seconds(n, *shape) for n in (8192, 64 << 20)
                for name, shape in {"node": (1, 4), "all": (3, 4)}.items()}  # fmt: skip
    found = {"seconds": measured, "local": 4, "ranks": 12, "links": []}
    file = tmp_path / "job.out"  # of a launch, with other lines
    findings = json.dumps([{"check": "clocks"}, {"check": "all_reduce", "data": found}], indent=1)
    file.write_text(f"[rank check]\n$ python scripts/doctor.py --json\n{findings}\nnode01: done\n")
    links = plan.links_of(plan.build_parser().parse([f"--links={file}"]))
    assert links.intra_bandwidth == pytest.approx(100e9, rel=0.01)
    assert links.inter_bandwidth == pytest.approx(10e9, rel=0.01)
    assert links.inter_latency == pytest.approx(10e-6, rel=0.2)
    for n, shape in (8192, (1, 4)), (8192, (3, 4)), (64 << 20, (3, 4)):
        again = min(plan.all_reduce_seconds(n, *shape, links).values())
        assert again == pytest.approx(seconds(n, *shape), rel=0.02)


def measured(*options: str) -> dict[str, float]:
    args = plan.build_parser().parse(["--samples=10", *options])
    task = plan.trainer.Task()
    plan.describe_data(task, args)
    return plan.measure_model(task, args)


def test_activations_grow_with_the_batch_and_shrink_when_recomputed():
    options = ["--dataset=synthetic", "--model=resnet18", "--image-size=64"]

    def bytes_of(*more):
        return measured(*options, *more)["activations"]

    whole = bytes_of()
    # By hand: 64 channels of 32 x 32 four bytes wide are 256 KiB, and ReLU, BatchNorm, convolution
    # and pooling keep about ten times as much of a ResNet-18.
    assert 1e6 < whole < 6e6
    assert bytes_of("--amp=bf16") < 0.75 * whole
    assert bytes_of("--activation-checkpointing") < 0.6 * whole


def test_a_recomputed_layer_of_a_transformer_keeps_only_its_input():
    options = ["--dataset=synthetic", "--model=vit_b_32"]
    layer = (1 + 7 * 7) * 768 * 4  # bytes: patches and the class token, 768 channels wide
    whole = measured(*options)["activations"]
    recomputed = measured(*options, "--activation-checkpointing")["activations"]
    image = 3 * 224 * 224 * 4
    # 12 layers; before and after them: the patches, dropout and the last norm.
    assert 12 * layer + image < recomputed < 16 * layer + image
    assert recomputed < whole / 5


def test_floating_point_operations_are_counted():
    operations = measured()["operations"]
    forward = 2 * (26**2 * 32 * 9 + 24**2 * 64 * 32 * 9 + 9216 * 128 + 128 * 10)
    assert operations == pytest.approx(3 * forward, rel=0.05)


def test_it_plans_for_data_and_gpus_that_this_machine_lacks(planned):
    printed = planned(
        *"--dataset imagefolder --data-dir /nowhere --samples 1281167 --classes 1000".split(),
        *"--model resnet18 --batch-size 128 --nodes 64 --samples-per-second 5000".split(),
    )
    assert "65536 = 512 micro-batches of 128; 20 steps" in printed["steps"]
    assert "46.8 MB per step" in printed["gradients"]
    assert "docs/SCALING.md" in printed["WARN"] and "cores of each node" in printed["WARN"]


def test_ranks_that_wait_for_others_count_against_linear_scaling(planned):
    words = ["--samples=64000", "--samples-per-second=1000", "--gpus-per-node=8"]
    printed = planned(*words, "--global-batch-size=640")  # 10 micro-batches: two ranks have two
    share, speed = (
        float(re.search(p, printed["step"])[1]) for p in (r"([\d.]+) %", r"(\d+) samples")
    )
    assert share == pytest.approx(100 * speed / 8000, abs=0.1) and 60 < share <= 62.5
    assert "10 micro-batches on 8 ranks" in printed["WARN"]
    assert "--global-batch-size 1024 keeps all busy" in printed["WARN"]
    assert "WARN" not in planned(*words, "--global-batch-size=1024")


def test_a_colour_model_may_train_on_digits(planned):
    assert planned("--dataset=mnist", "--model=resnet18")["Plan"].startswith("resnet18 on 8 ranks")


def test_it_refuses_what_cannot_be_planned(tmp_path, refused):
    assert "did you mean --nodes?" in refused("--nodez=3")
    assert "0 is not a number from 1e-06 to 1e+12" in refused("--tflops=0")
    assert "1000001 is not a whole number" in refused("--classes=1000001")
    missing = refused("--samples=9", "--links", tmp_path / "none")
    assert "cannot use --links" in missing and "No such file" in missing
    (tmp_path / "empty").write_text("[]")
    assert "TRAIN_SCRIPT=scripts/doctor.py" in refused("--samples=9", "--links", tmp_path / "empty")
    assert "200 samples for 800 ranks" in refused("--samples=200", "--nodes=100")
    assert "leaves no time" in refused("--time-limit-hours=0.01")
    assert "lower --batch-size" in refused("--global-batch-size=64", "--gpus-per-node=4")
    message = refused("--dataset=imagefolder", "--data-dir", tmp_path)
    assert "--samples" in message or "train" in message


def test_nothing_is_computed(planned):
    """Images too large for any memory, in bf16, which kills the process on a CPU that lists AMX but
    traps it."""
    words = "--dataset=synthetic --model=resnet18 --amp=bf16 --image-size=40000 --samples=999"
    printed = planned(*words.split())
    assert re.match(r"\d+\.?\d* TB of 80 GB on each GPU", printed["memory"])
    assert "out of memory" in printed["WARN"]
