"""PyTorch's distributed engines: two processes on CPU, started by torchrun, talking by Gloo.

The checks themselves are in ``distributed_checks.py``, which every process runs once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import distributed_checks
import pytest
import torch
import torch.distributed.checkpoint as dcp
from conftest import SEED

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import distributed
from benchmarks.cases import CASES

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = 2
TIMEOUT_S = 200
GRACE_S = 20


def torchrun(log: Path, *arguments: str) -> tuple[int, str]:
    """Runs it in two processes; its exit status, -1 if it took too long, and all they printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(PROCESSES), *arguments]
    # Threads of two processes on few cores get in each other's way; names may not resolve in CI.
    environment = {
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "CONVNORMPOOL_TEST_SEED": str(SEED),
    }
    with log.open("w") as file:
        agent = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        try:
            status = agent.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            agent.terminate()  # it stops the processes that it has started
            status = -1
            try:
                agent.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                agent.kill()
    return status, log.read_text()


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the processes wrote what became of each check."""
    folder = tmp_path_factory.mktemp("checks")
    script = str(Path(distributed_checks.__file__))
    status, _ = torchrun(folder / "output", script, str(folder))
    (folder / "status").write_text(str(status))
    return folder


NAMES = [check.__name__ for check in distributed_checks.CHECKS]


@pytest.mark.parametrize("check", NAMES)
def test_on_two_processes(check: str, checked: Path) -> None:
    """One of ``distributed_checks.CHECKS`` in every process."""

    def problems(name: str) -> list[str]:
        found = [checked / f"{name}.{rank}" for rank in range(PROCESSES)]
        return [path.read_text() for path in found if path.exists()]

    if any(problems(check)):
        pytest.fail("\n".join(problems(check)), pytrace=False)
    if len(problems(check)) < PROCESSES:
        last = next(n for n in NAMES if any(problems(n)) or len(problems(n)) < PROCESSES)
        output = (checked / "output").read_text()[-4000:]
        pytest.fail(output if last == check else f"not reached after {last}", pytrace=False)


def test_nothing_was_warned_of(checked: Path) -> None:
    """All processes ended well, and the reducer's warning about strides is not in their output."""
    output = (checked / "output").read_text()
    assert (checked / "status").read_text() == "0", output[-4000:]
    assert "stride" not in output


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_checkpoint_of_two_processes_loads_in_one(kind: str, checked: Path) -> None:
    """Without a process group, into a model of other values: the values that were saved."""
    assert (checked / kind / ".metadata").exists(), "nothing was saved"
    model = distributed_checks.classifier()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = model.state_dict()
    dcp.load(state, checkpoint_id=checked / kind, no_dist=True)
    assert state.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(model.state_dict()[name], value), name


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_script_resumes_with_another_number_of_processes(
    tmp_path: Path,
    one_thread: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two processes with sharded parameters, then one without: the losses of one throughout."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    run = tmp_path / "run"
    few = ["--device", "cpu", "--batch", "4", "--steps"]
    status, output = torchrun(
        tmp_path / "output", "-m", "benchmarks.distributed", *few, "2", "--mode", "fsdp",
        "--checkpoint", str(run),
    )  # fmt: skip
    assert status == 0, output[-4000:]
    assert f"fsdp on {PROCESSES} x cpu (gloo): steps 1 to 2" in output
    assert distributed.main([*few, "4", "--checkpoint", str(run)]) == 0
    resumed = capsys.readouterr().out
    assert "ddp on 1 x cpu (gloo): steps 3 to 4" in resumed
    case, device = CASES["ref"].with_batch(4), torch.device("cpu")
    with distributed.process_group(device):
        whole = distributed.train(case, "ddp", 4, device, None)
    lines = [line for text in (output, resumed) for line in text.splitlines()]
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step ")]
    # Adam divides by gradients' sizes, so that their rounding can be a step's; three digits stay.
    assert losses == pytest.approx(whole.losses, rel=1e-3)
    assert not torch.distributed.is_initialized()
