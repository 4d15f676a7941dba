"""
The machine of a run: devices and dtypes. And several processes, which together take the steps of a
single one; one of them writes and prints.
"""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from runs import MACHINE, ROOT, new_run, read_log, resume

import train
from checkpoint import load_checkpoint
from tokenizer import TokenizerError
from training import machine

# --------------------------------------------------------------------------------------------------
# Devices


def test_a_gpu_is_taken_where_there_is_one(monkeypatch):
    """`--device cuda` has no index, which torch.cuda.set_device refuses."""
    pick = train.pick_device
    assert pick(None) == pick("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick("cpu") == torch.device("cpu")
    assert pick("cuda") == pick(None) == torch.device("cuda", 0)


# with avx2 it would be emulated; oneDNN is limited by ONEDNN_MAX_CPU_ISA
CPUS = [("avx512_bf16", True), ("amx_bf16", True), ("bf16", True), ("avx2", True), ("bf16", False)]


@pytest.mark.parametrize(("feature", "onednn"), CPUS)
def test_bfloat16_where_a_cpu_has_it(monkeypatch, feature, onednn):
    features = {"avx512_bf16": False, "amx_tile": True, feature: True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: onednn)
    process = train.init_process(train.parse_args(["--device=cpu"]))
    has_it = onednn and feature != "avx2"
    assert process.dtype == (torch.bfloat16 if has_it else torch.float32)
    assert process.compile is False


def test_a_torch_without_onednn_trains_in_float32(monkeypatch):
    """Previously training could not start there: only oneDNN has the function that was called."""

    def missing():
        raise AttributeError("'_OpNamespace' 'mkldnn' object has no such attribute")

    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"bf16": True})
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", missing)
    process = train.init_process(train.parse_args(["--device=cpu"]))
    assert process.dtype == torch.float32


GPUS = [
    (True, [], torch.bfloat16, True),
    (False, [], torch.float32, True),
    (True, ["--no-compile", "--dtype=float32"], torch.float32, False),
]


@pytest.mark.parametrize(("bf16", "flags", "dtype", "compiled"), GPUS)
def test_a_gpu_computes_in_bfloat16_if_it_can_and_compiles(
    monkeypatch, bf16, flags, dtype, compiled
):
    """
    Each process of a host has its own GPU. Processes restarted by torchrun find no addresses of
    dead ones. torchrun's store keeps these, and previously a restarted process could wait for ever
    (pytorch issue 135712).
    """
    calls = []
    kept = torch.distributed.HashStore()
    stream = "a stream that can be captured"
    functions = {
        "torch.cuda.device_count": lambda: 2,
        "torch.cuda.is_bf16_supported": lambda including_emulation: bf16,
        "torch.cuda.set_device": calls.append,
        "torch.cuda.Stream": lambda: stream,
        "torch.cuda.set_stream": calls.append,
        "torch.set_float32_matmul_precision": calls.append,
        "torch.distributed.init_process_group": lambda **named: calls.append(named),
        "torch.distributed.rendezvous": lambda address: iter([(kept, 5, 8)]),
        "training.machine.training_ops": lambda *place: place,
    }
    for name, function in functions.items():
        monkeypatch.setattr(name, function)
    for variable in "RANK=5", "LOCAL_RANK=1", "WORLD_SIZE=8", "TORCHELASTIC_RESTART_COUNT=3":
        monkeypatch.setenv(*variable.split("="))
    gpu = torch.device("cuda:1")
    process = train.init_process(train.parse_args(["--device=cuda", *flags]))
    calls[-1].pop("store").set("address", "new")
    assert kept.check(["3/address"])
    named = {"backend": "nccl", "device_id": gpu, "rank": 5, "world_size": 8}
    assert calls == [gpu, stream, "high", named]
    assert process == train.Process(gpu, dtype, compiled, 5, 8, (gpu, compiled))


# CPUs that may be used, siblings of each core, a container's share, OMP_NUM_THREADS -> threads. Two
# hyperthreads of one core are both used; the fifth row is a system that does not say
THREADS = """
2 | 0-1 0-1                         | max 100000    |   | 2
4 | 0-1 0-1 2-3 2-3                 | 900000 100000 |   | 2
6 | 0,8 1,9 2,10 3,11 4,12 5,13     |               |   | 6
4 | 0 1 2 3                         | 250000 100000 |   | 2
3 |                                 |               |   | 3
4 | 0 1 2 3                         | 50000 100000  |   | 1
4 | 0 1 2 3                         | max 100000    | 7 | 7
"""


@pytest.mark.parametrize("row", THREADS.strip().splitlines())
def test_a_thread_for_each_core_that_may_be_used(monkeypatch, row):
    cpus, siblings, quota, omp, threads = map(str.strip, row.split("|"))
    assert machine.read("/no/such/file") == ""
    files = {"/sys/fs/cgroup/cpu.max": quota}
    for cpu, numbers in enumerate(siblings.split()):
        files[f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"] = numbers
    started = []
    monkeypatch.setattr(machine, "read", lambda path: files.get(path, ""))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    monkeypatch.setattr(torch, "set_num_threads", started.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(int(cpus))), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    train.init_process(train.parse_args(["--device=cpu"]))
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert started == [int(threads)]
    assert machine.count_cores() == 7


# --------------------------------------------------------------------------------------------------
# Several processes


DIES_AND_IS_STOPPED = """
import os, signal, sys
sys.path.insert(0, os.environ["ROOT"])
import train
signals = {"0": (3, signal.SIGKILL), "1": (4, signal.SIGTERM)}
step, number = signals[os.environ["TORCHELASTIC_RESTART_COUNT"]]
update = train.Run.update
def update_and_die(self, x, y):
    result = update(self, x, y)
    if self.step == step and os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)
    return result
train.Run.update = update_and_die
train.main()
"""


@pytest.mark.slow
def test_two_processes_take_the_steps_of_one_also_when_one_dies_or_is_left(tiny, out, tmp_path):
    """
    Gradients are averaged, so losses and weights are those of one process, up to rounding. This
    needs a run without cautious decay, which depends on the signs of updates, even of those near 0.
    One process is killed at step 3, and torchrun restarts both. One is asked to stop at step 4. A
    single process does the rest.
    """
    flags = [*tiny, "--steps=6", "--dropout=0", "--eval_every=1", "--matrix_decay=0"]
    one = tmp_path / "one"
    train.main([*flags, f"--out={one}"])
    script = tmp_path / "dies_and_is_stopped.py"
    script.write_text(DIES_AND_IS_STOPPED)
    # a machine may have fewer than two GPUs
    environment = os.environ | {"ROOT": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    # no port is chosen in advance: --standalone asks the system for one
    start = "-m torch.distributed.run --nproc_per_node=2 --standalone --max-restarts=1"
    command = [sys.executable, *start.split(), script, *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert printed.startswith("device: 2 x CPU, 1 thread, float32")
    assert printed.count("6 steps, from step 2, 33% done") == printed.count("saved at step 4") == 1
    assert "Warning" not in done.stderr  # torch's, about a name that it has replaced
    resume(out)
    assert (out / "loss.png").exists()
    expected = [line for line in read_log(one) if line["step"] != 4 or "loss" in line]
    for alone, together in zip(expected, read_log(out), strict=True):
        assert together == pytest.approx(alone, abs=2e-4)
    expected = load_checkpoint(one).state_dict()
    for name, w in load_checkpoint(out).state_dict().items():
        assert (expected[name] - w).abs().max() < 1e-4


@pytest.mark.parametrize("rank", ["x", "1"])
def test_a_rank_that_torchrun_did_not_set_is_named(rank, train_tiny, monkeypatch):
    """Previously one ended in a message about int(), and the other in a traceback."""
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit, match=f"^RANK={rank} and WORLD_SIZE=1 are not torchrun's"):
        train_tiny("--steps=2")


RECIPE = """
from training.corpus import char_tokenizer, write_corpus
def prepare(folder, tokenizer=None):
    write_corpus(folder, [[0, 1, 0]], [[1, 1]], tokenizer or char_tokenizer("ab"))
"""


def test_one_process_prepares_the_corpus_and_all_wait_for_it(tmp_path, monkeypatch):
    folder = tmp_path / "data" / "letters"
    folder.mkdir(parents=True)
    (folder / "prepare.py").write_text(RECIPE)
    is_prepared = []
    monkeypatch.setattr("training.corpus.ROOT", tmp_path)

    def barrier():
        is_prepared.append((folder / "meta.json").exists())

    monkeypatch.setattr(torch.distributed, "barrier", barrier)
    with pytest.raises(TokenizerError):
        # the other process has not prepared it
        train.load_corpus("letters", replace(MACHINE, rank=1, world=2))
    corpus = train.load_corpus("letters", replace(MACHINE, world=2))
    assert is_prepared == [False, True]
    (folder / "prepare.py").write_text("raise AssertionError('prepared twice')")
    assert train.load_corpus("letters", MACHINE).val.tolist() == corpus.val.tolist() == [1, 1]
    assert len(is_prepared) == 2  # a single process does not wait


def test_a_batch_that_does_not_divide_is_refused_and_leaves_no_directory(
    train_tiny, out, monkeypatch
):
    monkeypatch.setattr(train, "init_process", lambda args: replace(MACHINE, world=3))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    message = "--batch_size 4 is not divisible by 3, the number of processes"
    with pytest.raises(SystemExit, match=message):
        train_tiny("--steps=2")
    assert not out.exists()


def test_all_stop_when_one_is_asked_to(tiny, out, monkeypatch):
    """If one went on by itself, it would wait for the others' gradients for ever."""
    out.mkdir()
    run = new_run([*tiny, "--steps=9"])

    def mean(process, x):
        return x + torch.tensor([0.25, 0.0]) if x.shape == (2,) else x

    monkeypatch.setattr(train.Process, "mean", mean)
    assert train.train(run, [], train.Clock(run, 0.0)) is False
    assert run.step == 1
