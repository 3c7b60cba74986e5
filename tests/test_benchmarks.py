"""The benchmarks run: a few steps of each, without a check of the figures."""

import math
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress

import pytest
import torch.distributed.fsdp
from harness import REPO, load, processes_with


def run(tmp_path, script: str, *words: str) -> str:
    command = [sys.executable, REPO / "benchmarks" / script, *words]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.long
def test_speed_compares_with_the_limit(tmp_path):
    words = "--ranks 1 --rounds 1 --steps 40 --only limit ours bare"
    out = run(tmp_path, "speed.py", *words.split())
    assert re.search(r"^\| limit \| \d+ \| 1\.000 ", out, re.M), out
    assert re.findall(r"^\| (ours|bare) \| \d+ \| \d\.\d{3} ", out, re.M) == ["ours", "bare"], out
    assert (tmp_path / "speed.png").stat().st_size > 5000


@pytest.mark.long
def test_speed_runs_all_contestants_on_two_ranks(tmp_path):
    out = run(tmp_path, "speed.py", *"--ranks 2 --rounds 1 --steps 40".split())
    names = re.findall(r"^\| (\S+) \| \d+ ", out, re.M)
    peers = ["template", "examples", "lightning", "accelerate", "timm"]
    expected = ["limit", "sums", "ours", "bare", "reproducible", *peers]
    assert names == expected + [f"{peer}+guard" for peer in peers]


@pytest.mark.long
def test_speed_takes_other_networks_and_data(tmp_path):
    words = "--ranks 1 --rounds 1 --steps 20 --model resnet18 --dataset synthetic --size 32"
    words += " --batch 2 --amp --only limit ours template"
    out = run(tmp_path, "speed.py", *words.split())
    assert re.findall(r"^\| (\w+) \| \d+ ", out, re.M) == ["limit", "ours", "template"]


@pytest.mark.long
def test_speed_compares_with_another_checkout(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for name in ("train_distributed.py", "scripts", "benchmarks", "data"):
        (other / name).symlink_to(REPO / name)
    words = f"--ranks 1 --rounds 1 --steps 40 --only ours --before {other}"
    out = run(tmp_path, "speed.py", *words.split())
    assert re.findall(r"^\| (\w+) \| \d+ ", out, re.M) == ["before", "ours"]


@pytest.mark.long
def test_loader_is_compared_with_decoding_alone(tmp_path):
    words = "--files 128 --rounds 1 --workers 0 1 --alternatives"
    out = run(tmp_path, "loader.py", *words.split())
    assert "imagefolder: an epoch opens 128 files" in out
    for name in ("torchvision.io.decode_jpeg", "batches of 256", "Parquet"):
        assert re.search(rf"^\| .*{name} \| \d+ \| \d\.\d{{3}} ", out, re.M), out
    assert re.search(r"^\| decoding alone, the limit \| \d+ \| 1\.000 ", out, re.M), out
    assert re.search(r"^\| ours, 1 workers \| \d+ \| \d\.\d{3} ", out, re.M), out


def test_ctrl_c_ends_the_loader_benchmark_and_its_workers(tmp_path):
    files = max(8, len(os.sched_getaffinity(0)))
    words = f"benchmarks/loader.py --files {files} --rounds 10000 --workers 1".split()
    options = {"stderr": subprocess.PIPE, "start_new_session": True, "cwd": REPO, "text": True}
    with subprocess.Popen([sys.executable, *words], **options) as process:
        first = process.stderr.read(1)  # a dot per measurement
        os.killpg(process.pid, signal.SIGINT)
        try:
            error = first + process.communicate(timeout=60)[1]
        except subprocess.TimeoutExpired:
            error = "it hangs"
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"processes of the benchmark were left: {error}")
    assert process.returncode == 130 and first == "." and "Traceback" not in error, error


def test_the_loader_benchmark_names_a_file_that_cannot_be_read(tmp_path):
    loader = load(REPO / "benchmarks/loader.py")
    files = max(4, loader.CORES)
    loader.make_files(tmp_path, files)
    bad = tmp_path / "train/class_1/3_0.jpg"
    bad.write_bytes(bad.read_bytes()[:5000])
    words = ["benchmarks/loader.py", f"--data-dir={tmp_path}", f"--files={files}"]
    result = subprocess.run([sys.executable, *words], cwd=REPO, capture_output=True, text=True)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.startswith(f"loader.py: error: cannot read {bad}: "), result.stderr


@pytest.mark.long
def test_the_parts_of_the_startup_add_up(tmp_path):
    out = run(tmp_path, "startup.py", "--ranks", "1", "2", "--rounds", "1")
    for ranks in (1, 2):
        row = re.search(rf"^\| {ranks} \| (.*) \|$", out, re.M)[1]
        *parts, whole, _beyond = map(float, row.split(" | "))
        assert 0.7 * whole < sum(parts) < 1.1 * whole


@pytest.mark.long
def test_the_parts_of_a_recovery_add_up(tmp_path, monkeypatch):
    monkeypatch.setenv("OF_RECOVERY", str(tmp_path))
    out = run(tmp_path, "recovery.py", "--ranks=2", "--rounds=1", f"--directory={tmp_path}")
    row = re.search(r"^\| 2 \| now \| (.*) \|$", out, re.M)[1]
    *parts, whole = map(float, row.split(" | "))
    assert len(parts) == 10 and min(parts) >= 0
    assert sum(parts) == pytest.approx(whole, abs=0.06)
    assert not list(tmp_path.iterdir()) and not processes_with("OF_RECOVERY", tmp_path)


@pytest.mark.long
def test_checkpoints_are_written_in_both_ways(tmp_path):
    out = run(tmp_path, "checkpoints.py", "--saves=2", f"--directory={tmp_path}")
    assert "resnet18: 94 MB" in out and "stall, async_checkpoint / as it is" in out


@pytest.mark.long
def test_overhead_of_the_trainer_and_of_the_guard(tmp_path):
    out = run(tmp_path, "overhead.py", "--ranks=2", "--turns=4")
    assert re.search(r"^2 rank\(s\): step [\d.]+ ms; with fault tolerance [\d.]+ \+- ", out, re.M)
    costs = re.search(r"hook ([\d.]+) us per step, threads (\d+) us per second", out)
    assert 0 < float(costs[1]) < 1000 and 0 < int(costs[2]) < 100_000


@pytest.mark.long
def test_slow_ranks_are_counted(tmp_path):
    out = run(tmp_path, "slow_rank.py", *"--only optimizer healthy --shares 0.5".split())
    assert re.search(r"^\| optimizer \| [01] of 1 right \|$", out, re.M), out
    assert "recall " in out and re.search("^false alarms [012] of 2 trainings", out, re.M)
    assert "bytes in the store" in run(tmp_path, "slow_rank.py", "--dump")


@pytest.mark.long
def test_accuracy_reads_what_both_reach(tmp_path, tiny):
    words = [tiny[1], "--accuracy=1", "--rounds=1", "--cpu"]
    assert re.search(r"^template / ours: \d", run(tmp_path, "accuracy.py", *words), re.M)


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_scaling_compares_predictions_with_measurements(tmp_path):
    out = run(tmp_path, "scaling.py", *"--mbits 200 --hosts 3 --processes 2".split())
    assert out.count("| 200 Mbit/s |") == 6 and "one host: median error" in out
    assert (tmp_path / "scaling.png").stat().st_size > 5000


def test_each_rank_sends_little_in_the_rank_check_and_in_a_hang(tmp_path):
    """Of 16 ranks; if each read what all others write, 5 kB and 30 kB."""
    out = run(tmp_path, "ranks_at_scale.py", "--ranks", "16", "--output=")
    row = r"^\| now \| 16 \| .* \| ([\d.]+) kB \| [\d,]+ \| (.*) \|$"
    check, hang = re.findall(row, out, re.M)
    assert float(check[0]) < 3 and check[1] == ""
    assert float(hang[0]) < 8 and hang[1] == "16", out


@pytest.mark.long
def test_what_a_rank_sends_does_not_grow_with_the_number_of_ranks(tmp_path):
    out = run(tmp_path, "ranks_at_scale.py", "--ranks", "16", "64", "--output=growth.png")
    rows = re.findall(r"^\| now \| (\d+) \| .* \| ([\d.]+) kB \| ", out, re.M)
    assert [size for size, _ in rows] == ["16", "64", "16", "64"]
    check_16, check_64, hang_16, hang_64 = [float(kilobytes) for _, kilobytes in rows]
    assert check_64 < 1.5 * check_16 and hang_64 < 1.5 * hang_16
    assert out.count("| now, extrapolated | 10,000 | ") == 2
    assert (tmp_path / "growth.png").stat().st_size > 5000


ON_GPU = [REPO / "benchmarks/on_gpu.sh", "--cpu"]


def on_gpu(tmp_path, *words: str, **env: str):
    """A rehearsal of on_gpu.sh on the CPU. Returns (the process, its report)."""
    command = [*ON_GPU, f"--output={tmp_path}/report.md", *words]
    env = os.environ | {"PYTHON": sys.executable, "MARK": str(tmp_path)} | env
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    return done, (tmp_path / "report.md").read_text()


def test_on_gpu_goes_on_after_a_part_that_fails_or_cannot_be_measured(tmp_path):
    words = ["--only", "mnist", "tests", "doctor", f"--data-dir={tmp_path}"]
    done, report = on_gpu(tmp_path, *words, PYTEST_ADDOPTS="--absent")
    assert done.returncode == 1, done.stderr
    title = "Tests that need a GPU (fp16, bf16, NCCL)"
    assert f"| {title} | failed (exit code 4) " in report
    assert f"| Time to 80 % on MNIST | not measured (no {tmp_path}/MNIST/raw/train-" in report
    assert re.search(r"^\| The machine \| measured in \d+ s \|$", report, re.M), report
    section = r"^### The machine\n\n    python scripts/doctor.py\n\n    OK +GPUs "
    assert re.search(section, report, re.M), report
    assert "unrecognized arguments: --absent" in (tmp_path / "report.md.log").read_text()


def test_on_gpu_does_not_report_skipped_tests_as_measured(tmp_path):
    done, report = on_gpu(tmp_path, "--only", "tests")
    assert done.returncode == 0, done.stderr
    assert "NCCL) | not measured (all tests were skipped) |\n" in report


def test_on_gpu_names_a_missing_package_and_stops_a_part_at_its_time_limit(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import subprocess, sys; sys.modules['pytest'] = None\n"
        "if 'benchmarks/startup.py' in sys.orig_argv: subprocess.run(['sleep', '600'])\n"
    )
    words = ["--only", "tests", "startup", "--minutes=0.1"]
    done, report = on_gpu(tmp_path, *words, PYTHONPATH=str(tmp_path))
    assert "NCCL) | not measured (not installed: pytest) |" in report
    # It depends on the speed of this machine whether any time is left for it.
    late = r"failed \(stopped after \d+ s\)|not measured \(the 0.1 minutes were over\)"
    assert re.search(rf"^\| Start-up \| ({late}) \|$", report, re.M), report + done.stderr
    assert not processes_with("MARK", tmp_path)


def test_on_gpu_goes_on_with_the_parts_that_the_report_lacks(tmp_path):
    words = ["--only", "doctor", "resnet50-4"]
    done, report = on_gpu(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "4 rank(s) | not measured (needs 4 GPUs) |" in report
    assert "| SimpleConvNet on MNIST | not measured yet |" in report
    done, report = on_gpu(tmp_path, "--minutes=0")
    assert re.search(r"^\| The machine \| measured in \d+ s \|$", report, re.M), report
    assert "\n### The machine\n" in report
    assert "| SimpleConvNet on MNIST | not measured (the 0 minutes were over) |" in report
    (tmp_path / "report.md.json").write_text("{}")  # for example, of another machine
    _, report = on_gpu(tmp_path, "--minutes=0")
    assert "| The machine | not measured (the 0 minutes were over) |" in report


def test_on_gpu_without_a_gpu_is_a_user_error():
    env = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(ON_GPU[:1], capture_output=True, text=True, env=env)
    text = "on_gpu.sh: error: PyTorch finds no GPU here; --cpu is a rehearsal without one\n"
    assert (done.returncode, done.stderr) == (2, text)


def test_on_gpu_refuses_a_mistyped_option_in_one_sentence():
    env = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run([*ON_GPU, "--minute=5s"], capture_output=True, text=True, env=env)
    text = "on_gpu.sh: error: argument --minutes: invalid float value: '5s'\n"
    assert (done.returncode, done.stderr) == (2, text)


@pytest.mark.long
def test_on_gpu_measures_every_part(tmp_path):
    done, report = on_gpu(tmp_path)
    assert done.returncode == 0, report
    left = re.findall(r"^\| ([^|]+) \| (?!measured in \d+ s \|$)", report, re.M)
    not_here = [row for row in left if "4 rank(s)" in row or "8 rank(s)" in row]
    assert len(not_here) == 2 and len(left) == 3, report  # and the tests that need a GPU
    assert "\n\n| ranks | interpreter |" in report and "| decoding alone, the limit | " in report
    assert re.search(
        r"^\| cuda_graphs \|( [\d.() to]+ \|){2} [\d.]+ s \| \d+ MB \| [\d.]+ % \|$", report, re.M
    )


@pytest.mark.long
def test_speed_goes_on_after_a_contestant_that_fails(tmp_path, monkeypatch):
    (tmp_path / "accelerate.py").write_text("raise ImportError('of a library')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    words = "--ranks 1 --rounds 1 --steps 20 --output= --only limit accelerate".split()
    command = [sys.executable, REPO / "benchmarks/speed.py", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and "ImportError: of a library" in done.stderr
    assert re.search(r"^\| limit \| \d+ \| 1\.000 ", done.stdout, re.M), done.stdout
    assert "\n| accelerate | failed | | | |\n" in done.stdout


def test_idle_share_counts_the_time_between_overlapping_kernels_once():
    idle_share = load(REPO / "benchmarks/contestants.py").idle_share
    assert idle_share([(30, 40), (0, 10), (5, 20), (6, 7)]) == 10 / 40
    assert idle_share([(0, 10), (10, 20)]) == 0
    assert math.isnan(idle_share([]))  # without permission to profile the GPU


@pytest.mark.long
@pytest.mark.skipif(torch.__version__ < "2.9", reason="PyTorch < 2.9")
def test_fsdp_halves_what_two_ranks_hold(tmp_path):
    words = "--model resnet18 --ranks 2 --steps 1 --rounds 1"
    out = run(tmp_path, "recipes.py", *words.split())
    assert re.search(r"^\| 2 \| 187\.0 MB \| 93\.5 MB \| 0\.500 \| \d\.\d\d ", out, re.M), out


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_slow_links_compares_ways_to_exchange_gradients(tmp_path):
    words = "--mbits 200 --rounds 1 --steps 8 --seeds 1 --epochs 1 --ways plain bf16".split()
    out = run(tmp_path, "slow_links.py", *words, "powersgd 4", "local 4")
    for way in ("plain", "bf16", "powersgd 4", "local 4"):
        assert re.search(rf"^\| {way} \| [\d.]+ MB \| \d+ \| [\d.]+ \(", out, re.M), out
        assert re.search(rf"^\| {way} \| \d\.\d{{3}} .* % \|$", out, re.M), out
