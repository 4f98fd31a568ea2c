"""`accelerate launch`: two processes share the evaluations and end with the scores of one."""

import os
import socket
import subprocess
from pathlib import Path

from safetensors.numpy import load_file
from support.command_line import XMAC, Trained, xmac


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_two_processes_end_with_the_scores_of_one(trained: Trained, tmp_path: Path) -> None:
    game = ["--value", "nll", "-M", "4", "--calib-samples=6", "--calib-seqlen=48", trained.calib[0], "--device", "cpu"]
    arguments = ["prune-moe", trained.model, "--stage", "score", *game]
    xmac(*arguments, "-o", tmp_path / "one")
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [*XMAC, *map(str, [*arguments, "-o", tmp_path / "two"])]
    processes = [
        subprocess.Popen(
            command,
            env={**os.environ, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    assert [out for out, _ in answers] == [f"{tmp_path / 'two'}\n", ""]
    one, two = (load_file(tmp_path / name / "scores.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name in one:
        # float32 sums of differently composed batches differ in the last bits
        assert abs(one[name] - two[name]).max() < 1e-7, name
    assert any(name.startswith("phi.") and one[name].std() > 0 for name in one)
