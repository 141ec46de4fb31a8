"""Test that the commands of the page on clusters run, with an S3 server and a Ray cluster on this machine."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gradcam
from gradcam.cli import cli
from tests.docs.pages import ROOT, read_blocks

BLOCKS = read_blocks(ROOT / "docs/howto/cluster.md")
SEVERAL_MACHINES, SLURM, KUBERNETES = (block.code for block in BLOCKS if block.mark == "elsewhere")


@pytest.mark.slow
def test_the_commands_for_more_than_one_machine_run(workspace: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec
    from ray.cluster_utils import Cluster

    # One core per process, as in the Ray actor, so that the last digits agree.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    store = fsspec.filesystem("s3")
    for name in ("coffee.jpg", "rocket.jpg"):
        store.put(f"photos/{name}", f"{s3}/photos/{name}")
    lines = SEVERAL_MACHINES.splitlines()
    assert len(lines) == 5
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        for line in lines:
            command = line.replace("s3://bucket", s3).replace("127.0.0.1:6379", cluster.address)
            arguments = shlex.split(command, comments=True)
            code = f"import sys; from gradcam.cli import main; sys.argv = {arguments}; main()"
            # Use a separate process per command, because a process that has left one Ray cluster cannot reliably join
            # another.
            process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
            assert (process.returncode, process.stderr) == (0, ""), line
    finally:
        cluster.shutdown()
    expected = gradcam.read_manifest("explained")
    assert [record.image for record in expected] == ["coffee.jpg", "rocket.jpg"]
    assert gradcam.read_manifest(f"{s3}/explained") == gradcam.read_manifest(f"{s3}/with-ray") == expected
    assert store.cat(f"{s3}/explained/rocket-gradcam.jpg") == Path("explained/rocket-gradcam.jpg").read_bytes()
    assert store.exists(f"{s3}/explained/index.html")
    assert [record.tar for record in gradcam.read_manifest(f"{s3}/tars")] == ["results-000001.tar"] * 2


def test_the_job_arrays_take_shares(workspace: Path) -> None:
    import yaml

    (slurm,) = [line for line in SLURM.splitlines() if line.startswith("gradcam ")]
    job = yaml.safe_load(KUBERNETES)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert job["spec"]["completions"] == 8
    assert container["command"] == ["sh", "-c"]
    (kubernetes,) = container["args"]
    variables = {**os.environ, "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "8", "JOB_COMPLETION_INDEX": "0"}
    for line, pictures in ((slurm, "photos/"), (kubernetes, "s3://bucket/photos/")):
        typed = subprocess.run(
            ["sh", "-c", f"echo {line}"], env=variables, capture_output=True, text=True, check=True
        ).stdout
        assert "--shard 1/8 --resume" in typed
        shutil.rmtree("photos", ignore_errors=True)
        shutil.copytree("assets", "photos", ignore=shutil.ignore_patterns("[!c]*"))
        local = typed.replace(pictures, "photos/").replace("s3://bucket/", "")
        assert cli.main(shlex.split(local)[1:], standalone_mode=False) == 0
        shutil.rmtree("explained")
