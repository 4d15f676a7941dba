"""
The machine of a run: devices, dtypes, threads; and several processes, which together take one's
steps, of which one writes and prints.
"""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import MACHINE, ROOT, TINY, losses, new_run

import train
from checkpoint import load_checkpoint
from tokenizer import TokenizerError
from training import machine

CPU = torch.device("cpu")


def place(rank: int, world: int) -> train.Process:
    return replace(MACHINE, rank=rank, world=world)


# --------------------------------------------------------------------------------------------------
# Devices


def test_each_process_of_a_host_takes_a_gpu_of_its_own(monkeypatch):
    """`--device cuda` has no index, which torch.cuda.set_device refuses."""
    assert train.pick_device("cuda:3") == torch.device("cuda:3")
    assert train.pick_device(None) == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert train.pick_device("cuda") == train.pick_device(None) == torch.device("cuda:0")
    monkeypatch.setenv("RANK", "13")
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert train.pick_device("cuda") == train.pick_device(None) == torch.device("cuda:5")
    assert train.pick_device("cpu") == CPU


FULL = {"avx512_bf16": True, "amx_bf16": True}


@pytest.mark.parametrize(
    ("features", "onednn", "answer"),
    [
        (FULL, True, True),
        ({"avx512_bf16": True, "amx_bf16": False}, True, True),
        ({"architecture": "aarch64", "bf16": True}, True, True),
        ({"avx512_bf16": False, "amx_bf16": False, "avx2": True}, True, False),  # emulated
        (FULL, False, False),  # limited by ONEDNN_MAX_CPU_ISA
    ],
)
def test_bfloat16_where_a_cpu_has_it(monkeypatch, features, onednn, answer):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    args = train.parse_args(["--device=cpu", "--threads=1"])
    process = train.init_process(args)
    expected = (3, torch.bfloat16, False) if answer else (2, torch.float32, False)
    assert (args.n_layer, process.dtype, process.compile) == expected


@pytest.mark.parametrize(
    ("bf16", "flags", "dtype", "compiled"),
    [
        (True, [], torch.bfloat16, True),
        (False, [], torch.float32, True),
        (True, ["--no-compile", "--dtype=float32"], torch.float32, False),
    ],
)
def test_a_gpu_computes_in_bfloat16_if_it_can_and_compiles(
    monkeypatch, bf16, flags, dtype, compiled
):
    calls = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation
    )
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", calls.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", calls.append)
    gpu = torch.device("cuda:1")
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    process = train.init_process(train.parse_args(["--device=cuda:1", *flags]))
    assert calls == [gpu, "high", "nccl"]
    operators = machine.training_ops(gpu)
    assert process == train.Process(gpu, dtype, compiled, rank=5, world=8, ops=operators)


# CPUs that may be used, siblings of each core, a container's share, OMP_NUM_THREADS -> threads
THREADS = [
    (2, "0-1 0-1", "max 100000", None, 2),  # two hyperthreads of one core are both taken
    (4, "0-1 0-1 2-3 2-3", "max 100000", None, 2),
    (6, "0,8 1,9 2,10 3,11 4,12 5,13", "", None, 6),
    (4, "0 1 2 3", "250000 100000", None, 2),
    (4, "0 1 2 3", "50000 100000", None, 1),
    (3, "", "", None, 3),  # a system that does not say
    (4, "0 1 2 3", "max 100000", "7", 7),
]


@pytest.mark.parametrize(("cpus", "siblings", "quota", "omp", "threads"), THREADS)
def test_a_thread_for_each_core_that_may_be_used(monkeypatch, cpus, siblings, quota, omp, threads):
    assert machine.read("/no/such/file") == ""

    def read(path: str) -> str:
        if path == "/sys/fs/cgroup/cpu.max":
            return quota
        cpu = int(path.removeprefix("/sys/devices/system/cpu/cpu").partition("/")[0])
        return siblings.split()[cpu] if siblings else ""

    started = []
    monkeypatch.setattr(machine, "read", read)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", started.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    train.init_process(train.parse_args(["--device=cpu"]))
    train.init_process(train.parse_args(["--device=cpu", "--threads=5"]))
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert started == [threads, 5] and machine.count_cores() == 7


# --------------------------------------------------------------------------------------------------
# Several processes


def train_as(rank: int, port: int, flags: list[str], folder: Path):
    """One of two processes with torchrun's environment; its output goes to the file `rank`."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with open(folder / str(rank), "w") as sys.stdout:
        train.main(flags)


@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd with a GPU cannot be forked")
def test_two_processes_take_the_steps_of_one(corpus, tmp_path):
    """Gradients are averaged, so losses and weights are those of one process up to rounding."""
    flags = [*TINY, "--steps=4", "--dropout=0", "--eval_every=2", f"--data={corpus}"]
    one, two = tmp_path / "one", tmp_path / "two"
    train.main([*flags, f"--out={one}"])
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    work = (port, [*flags, f"--out={two}"], tmp_path)
    torch.multiprocessing.start_processes(train_as, work, nprocs=2, start_method="fork")
    weights = [load_checkpoint(out).state_dict() for out in (one, two)]
    assert max((weights[0][name] - w).abs().max() for name, w in weights[1].items()) < 1e-4
    for alone, together in zip(losses(one), losses(two), strict=True):
        assert together == pytest.approx(alone, abs=2e-4)
    printed = (tmp_path / "0").read_text()
    assert "device: CPU, 1 thread x 2, float32" in printed and "val loss:" in printed
    assert (tmp_path / "1").read_text() == ""


@pytest.mark.slow
def test_torchrun_starts_it(tiny, out):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    subprocess.run([*command, str(ROOT / "train.py"), *tiny, "--steps=2"], check=True, timeout=120)
    assert (out / "loss.png").exists()


def test_one_process_prepares_the_corpus_and_all_wait_for_it(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "letters"
    folder.mkdir(parents=True)
    (folder / "prepare.py").write_text("""
from pathlib import Path
from training.corpus import char_tokenizer, write_corpus
def prepare():
    write_corpus(Path(__file__).parent, char_tokenizer("ab"), [0, 1, 0], [1])
""")
    is_prepared = []

    def barrier():
        is_prepared.append((folder / "meta.json").exists())

    monkeypatch.setattr("training.corpus.ROOT", tmp_path)
    monkeypatch.setattr(torch.distributed, "barrier", barrier)
    with pytest.raises(TokenizerError):
        train.load_corpus("letters", place(1, 2))  # the other has not prepared it
    corpus = train.load_corpus("letters", place(0, 2))
    assert is_prepared == [False, True]
    assert (corpus.train.tolist(), corpus.val.tolist()) == ([0, 1, 0], [1])
    (folder / "prepare.py").write_text("raise AssertionError('prepared twice')")
    assert train.load_corpus("letters", MACHINE).val.tolist() == [1]
    assert len(is_prepared) == 2  # a process that is alone waits for nobody


def test_a_batch_that_does_not_divide_is_refused(tiny, monkeypatch):
    monkeypatch.setattr(train, "init_process", lambda args: place(0, 3))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    with pytest.raises(SystemExit, match="--batch_size 4 does not divide among 3 processes: take"):
        train.main([*tiny, "--steps=2"])


def test_all_stop_when_one_is_asked_to(corpus, tiny, out, monkeypatch):
    """One that stepped on alone would wait for the others' gradients for ever."""
    run = new_run([*tiny, "--steps=9"], corpus, place(1, 4))
    one_of_four = torch.tensor([0.25, 0.0], dtype=torch.float64)
    monkeypatch.setattr(train.Run, "forward_module", lambda self: self.model)
    monkeypatch.setattr(
        train.Process, "mean", lambda process, x: x + one_of_four if x.shape == (2,) else x
    )
    assert train.train(run, caught=[], started=0.0) is False
    assert run.step == 1
