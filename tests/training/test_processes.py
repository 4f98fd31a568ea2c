"""Two processes with half of the batches each do what one process does with all of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

SCRIPT = """
import sys
import torch
from safetensors.torch import save_file
from xmac_cli.training.loop import train
from xmac_cli.training.options import TrainingOptions

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))

def batch(index):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(index))

def loss(model, x):
    return (model(x) - x.flip(1)).square().mean()

out, accumulation = sys.argv[1], int(sys.argv[2])
options = TrainingOptions(steps=6, lr=0.01, device="cpu", gradient_accumulation=accumulation, save_every=3)
from pathlib import Path
train(model, batch, loss, options, directory=Path(out + ".run"))
import os
if os.environ.get("RANK", "0") == "0":
    save_file(model.state_dict(), out)
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.slow
def test_two_processes_equal_one_process_that_accumulates(tmp_path: Path) -> None:
    base = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    one = [sys.executable, "-c", SCRIPT, str(tmp_path / "one"), "2"]
    subprocess.run(one, check=True, env=base)
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group["ACCELERATE_USE_CPU"] = "true"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path / "two"), "1"],
            env={**base, **group, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    single, double = load_file(tmp_path / "one"), load_file(tmp_path / "two")
    for name, tensor in single.items():
        torch.testing.assert_close(double[name], tensor, atol=1e-6, rtol=1e-5)
    states = [sorted(p.name for p in (tmp_path / f"{run}.run").iterdir()) for run in ("one", "two")]
    assert states == [["metrics.jsonl", "state-00000006"]] * 2
