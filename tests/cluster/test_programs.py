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
    words = ["sbatch", "--parsable", *FEW, *shlex.split(f"{after} {recipe.more}")]
    code, text = cluster.on("login", *words, cwd=repo, **env)
    assert code == 0, text
    job = text.strip()
    output = repo / f"logs/slurm-{job}.out"

    def wait_for(pattern):
        wait_until(lambda: output.exists() and re.search(pattern, output.read_text()), pattern, 600)

    wait_for(recipe.under_way)
    cluster.on("login", "scancel", "--batch", "--signal=USR1", job)
    wait_for("The job is requeued")
    start_soon = ["scontrol", "update", f"JobId={job}", "StartTime=now+3"]  # not in minutes
    wait_until(lambda: cluster.on("login", *start_soon)[0] == 0, "not pending")
    wait_for(recipe.resumes)
    cluster.on("login", "scancel", job)
    _, text = cluster.end_of_job(job)
    assert text.count("The job is requeued") == 1 and "requeing job" not in text, text
    assert len(re.findall("from step 0", text)) == 1 and "guard.py: WARNING" not in text, text
