"""
The machine of a run: devices, dtypes, threads; and several processes, which together take one's
steps, of which one writes and prints.
"""

import os
import signal
import socket
import subprocess
import sys
import traceback
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
    cuda = [torch.device(f"cuda:{i}") for i in range(6)]
    assert (train.pick_device("cuda:3"), train.pick_device(None)) == (cuda[3], CPU)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert train.pick_device("cuda") == train.pick_device(None) == cuda[0]
    monkeypatch.setenv("RANK", "13")
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert train.pick_device("cuda") == train.pick_device(None) == cuda[5]
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
    assert machine.has_bfloat16(CPU) is answer
    args = train.parse_args(["--device=cpu", "--threads=1"])
    assert (args.n_layer, args.dtype) == (3 if answer else 2, None)
    assert train.init_process(args).dtype == (torch.bfloat16 if answer else torch.float32)
    args = train.parse_args(["--device=cpu", "--threads=1", "--dtype=float32", "--compile"])
    process = train.init_process(args)
    assert (args.n_layer, process.dtype, process.compile) == (
        3 if answer else 2,
        MACHINE.dtype,
        True,
    )


@pytest.mark.parametrize(("bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_gpu_computes_in_bfloat16_if_it_can_and_compiles(monkeypatch, bf16, dtype):
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
    for flags, expected in (
        (["--device=cuda:1"], (dtype, True)),
        (["--device=cuda:1", "--no-compile", "--dtype=float32"], (torch.float32, False)),
    ):
        calls.clear()
        process = train.init_process(train.parse_args(flags))
        assert (process.dtype, process.compile, process.device) == (*expected, gpu)
        assert calls == [gpu, "high", "nccl"]
    assert (process.rank, process.world, process.is_main) == (5, 8, False)


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
    def read(path: str) -> str:
        if path == "/sys/fs/cgroup/cpu.max":
            return quota
        cpu = int(path.removeprefix("/sys/devices/system/cpu/cpu").partition("/")[0])
        return siblings.split()[cpu] if siblings else ""

    monkeypatch.setattr(machine, "read", read)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    assert machine.count_cores() == threads
    started = []
    monkeypatch.setattr(torch, "set_num_threads", started.append)
    train.init_process(train.parse_args(["--device=cpu"]))
    train.init_process(train.parse_args(["--device=cpu", "--threads=5"]))
    monkeypatch.delattr(os, "sched_getaffinity")
    assert started == [threads, 5] and machine.count_cores() == 7


def test_files_of_the_system_are_read_where_there_are_any(tmp_path):
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.read(str(tmp_path / "cpu.max")) == "max 100000\n"
    assert machine.read(str(tmp_path / "none")) == ""


# --------------------------------------------------------------------------------------------------
# Several processes


def run_processes(world: int, work, folder: Path):
    """
    Run `work` in so many processes, forked, with torchrun's environment; what each prints goes to
    `folder`/its rank. Fails where one does not return.
    """
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            status = 1
            signal.alarm(200)  # one that waits for another for ever fails
            try:
                os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
                os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
                output = os.open(folder / str(rank), os.O_CREAT | os.O_WRONLY)
                os.dup2(output, 1)
                os.dup2(output, 2)
                sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
                work()
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert statuses == [0] * world, [(folder / str(rank)).read_text() for rank in range(world)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="autograd with a GPU cannot be forked")
@pytest.mark.parametrize("arch", ["gpt2", "llama"])
def test_two_processes_take_the_steps_of_one(arch, corpus, tmp_path):
    """Gradients are averaged, so losses and weights are those of one process up to rounding."""
    flags = [*TINY, "--steps=4", "--dropout=0", "--eval_every=2", f"--data={corpus}"]
    flags += [f"--arch={arch}"]
    one, two = tmp_path / "one", tmp_path / "two"
    train.main([*flags, f"--out={one}"])
    run_processes(2, lambda: train.main([*flags, f"--out={two}"]), tmp_path)
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


def test_evaluation_is_divided_among_processes(corpus, monkeypatch):
    """Together they score each token once; each learns the sum."""
    loaded = train.load_corpus(str(corpus), MACHINE)
    torch.manual_seed(0)
    model = train.GPT(train.GPTConfig(300, context_length=32, n_layer=1, n_head=2, n_embd=16))
    whole = train.evaluate(model, loaded, MACHINE)
    # the others found nothing
    monkeypatch.setattr(train.Process, "mean", lambda process, x: x / process.world)
    parts = [train.evaluate(model, loaded, place(rank, 3)) for rank in range(3)]
    assert sum(count for _, count in parts) == whole[1] == 1001
    assert sum(nats for nats, _ in parts) == pytest.approx(whole[0])
    assert len({nats for nats, _ in parts}) == 3


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


def test_only_one_process_writes_and_prints(corpus, tiny, out, capsys, monkeypatch):
    run = new_run(tiny, corpus, place(1, 2))
    run.record(step=4, loss=1.0)
    run.save()
    run.process.print("hello")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert train.progress_bar(run) is None
    assert run.log == [{"step": 4, "loss": 1.0}]
    assert not out.exists() and capsys.readouterr().out == ""
    place(0, 2).print("hello")
    assert capsys.readouterr().out == "hello\n"
