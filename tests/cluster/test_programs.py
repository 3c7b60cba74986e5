"""The Slurm lines of docs/RECIPES.md: a job asked to stop saves, is requeued once, and resumes."""

import re
import shlex

import pytest
from harness import wait_until
from test_recipes import RECIPES, lines_of, require

FEW = ["--nodes=2", "--gpus-per-node=1", "--cpus-per-task=1"]


@pytest.mark.long
@pytest.mark.parametrize("heading", ["Hugging Face Trainer", "Lightning"])
def test_a_job_asked_to_stop_is_requeued_once_and_resumes(cluster, repo, heading):
    recipe = RECIPES[heading]
    require(recipe.module)
    _, line = lines_of(heading)
    before, after = line.split("sbatch ")
    env = dict(word.split("=", 1) for word in shlex.split(before))
    words = ["sbatch", "--parsable", *FEW, *shlex.split(after)]
    code, text = cluster.on("login", *words, cwd=repo, **env)
    assert code == 0, text
    job = text.strip()
    output = repo / f"logs/slurm-{job}.out"
    wait_until(
        lambda: output.exists() and re.search(recipe.under_way, output.read_text()), text, 600
    )
    cluster.on("login", "scancel", "--batch", "--signal=USR1", job)
    start_soon = ["scontrol", "update", f"JobId={job}", "StartTime=now+3"]  # not in minutes
    wait_until(lambda: "requeued" in output.read_text(), "not requeued")
    wait_until(lambda: cluster.on("login", *start_soon)[0] == 0, "not pending")
    code, text = cluster.end_of_job(job)
    assert code == 0, text
    assert text.count("The job is requeued") == 1 and "requeing job" not in text
    assert len(re.findall("from step 0", text)) == 1
    assert re.search(recipe.resumes, text) and re.search(recipe.end, text), text
