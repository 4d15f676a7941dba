"""
train.py on several processes: who computes what, who writes and speaks, and that together they take
one's steps.
"""

import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import pytest
import torch
from test_train import MACHINE, TINY, corpus, leave_signals_alone, losses, no_gpu  # noqa: F401

import train
from checkpoint import load_checkpoint
from tokenizer import TokenizerError

CPU = torch.device("cpu")


def place(rank: int, world: int) -> train.Process:
    return train.Process(CPU, torch.float32, False, rank, world)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def processes(world: int, work, folder: Path):
    """
    Run `work` in so many processes, forked, with torchrun's environment; what each prints goes to
    `folder`/its rank. Fails where one does not return.
    """
    port, children = free_port(), []
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
def test_two_processes_take_the_steps_of_one(arch, corpus, tmp_path):  # noqa: F811
    """
    Gradients are averaged, so losses and weights are those of one process up to rounding; one
    writes and speaks.
    """
    flags = [*TINY, "--steps=4", "--dropout=0", "--eval_every=2", f"--data={corpus}"]
    flags += [f"--arch={arch}"]
    train.main([*flags, f"--out={tmp_path / 'one'}"])
    processes(2, lambda: train.main([*flags, f"--out={tmp_path / 'two'}"]), tmp_path)
    one, two = (
        load_checkpoint(tmp_path / "one").state_dict(),
        load_checkpoint(tmp_path / "two").state_dict(),
    )
    assert max((one[name] - two[name]).abs().max() for name in one) < 1e-4
    for alone, together in zip(losses(tmp_path / "one"), losses(tmp_path / "two"), strict=True):
        assert dict(together) == pytest.approx(dict(alone), abs=2e-4)
    told = (tmp_path / "0").read_text()
    assert "device: CPU, 1 thread x 2, float32" in told and "val loss:" in told
    assert (tmp_path / "1").read_text() == ""


@pytest.fixture
def joined(monkeypatch) -> list[str]:
    """Which backends would have been joined: nothing is."""
    backends = []
    monkeypatch.setattr(torch.distributed, "init_process_group", backends.append)
    return backends


def test_torchrun_says_which_process_this_is(monkeypatch, joined):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    args = train.parse_args(TINY)
    alone = train.init_process(args)
    assert (alone.rank, alone.world, alone.leads, joined) == (0, 1, True, [])
    for name, value in (("RANK", "5"), ("LOCAL_RANK", "1"), ("WORLD_SIZE", "8")):
        monkeypatch.setenv(name, value)
    one = train.init_process(args)
    assert (one.rank, one.world, one.leads, joined) == (5, 8, False, ["gloo"])


def test_each_process_of_a_host_takes_a_gpu_of_its_own(monkeypatch):
    """`--device cuda` has no index, which torch.cuda.set_device refuses."""
    assert train.pick_device("cuda:3") == torch.device("cuda:3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert train.pick_device("cuda") == torch.device("cuda:0")
    monkeypatch.setenv("RANK", "13")
    assert train.pick_device(None) == torch.device("cuda:0")
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert train.pick_device(None) == torch.device("cuda:5")
    assert train.pick_device("cuda") == torch.device("cuda:5")
    assert train.pick_device("cpu") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert train.pick_device(None) == CPU


@pytest.mark.parametrize(("bf16", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_gpu_computes_in_bfloat16_if_it_can_and_compiles(monkeypatch, joined, bf16, dtype):
    chosen = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: bf16 or including_emulation
    )
    monkeypatch.setattr(torch, "set_float32_matmul_precision", chosen.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    machine = train.init_process(train.parse_args(["--device=cuda:1"]))
    assert (machine.device, machine.dtype, machine.compile) == (torch.device("cuda:1"), dtype, True)
    assert chosen == [machine.device, "high"] and joined == ["nccl"]
    machine = train.init_process(
        train.parse_args(["--device=cuda:1", "--no-compile", "--dtype=float32"])
    )
    assert (machine.dtype, machine.compile) == (torch.float32, False)


def test_threads_are_those_asked_for_or_one_a_core_at_most(monkeypatch):
    set_to = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)), raising=False)
    assert not train.init_process(train.parse_args(["--device=cpu"])).compile
    assert train.init_process(
        train.parse_args(["--device=cpu", "--threads=5", "--compile"])
    ).compile
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    train.init_process(train.parse_args(["--device=cpu"]))
    assert set_to == [3, 5, 2]


@pytest.mark.parametrize(
    ("machine", "threads", "told"),
    [
        (place(0, 1), 1, "CPU, 1 thread, float32"),
        (place(1, 4), 2, "CPU, 2 threads x 4, float32"),
        (train.Process(CPU, torch.bfloat16, True), 2, "CPU, 2 threads, bfloat16, compiled"),
    ],
)
def test_a_machine_is_told_in_words(monkeypatch, machine, threads, told):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert str(machine) == told


def test_one_process_prepares_the_corpus_and_all_wait_for_it(tmp_path, monkeypatch):
    recipe = "from pathlib import Path\nfrom training.corpus import char_tokenizer, write_corpus\n"
    recipe += "def prepare():\n"
    recipe += "    write_corpus(Path(__file__).parent, char_tokenizer('ab'), [0, 1, 0], [1])\n"
    (tmp_path / "data" / "letters").mkdir(parents=True)
    (tmp_path / "data" / "letters" / "prepare.py").write_text(recipe)
    meta = tmp_path / "data" / "letters" / "meta.json"
    monkeypatch.setattr("training.corpus.ROOT", tmp_path)
    prepared_at_barrier = []
    monkeypatch.setattr(
        torch.distributed, "barrier", lambda: prepared_at_barrier.append(meta.exists())
    )
    with pytest.raises(TokenizerError):
        train.load_corpus("letters", place(1, 2))  # the other has not prepared it
    assert prepared_at_barrier == [False]
    corpus = train.load_corpus("letters", place(0, 2))  # noqa: F811
    assert prepared_at_barrier == [False, True]
    assert (corpus.train.tolist(), corpus.val.tolist(), corpus.tokenizer.vocab_size) == (
        [0, 1, 0],
        [1],
        2,
    )
    (meta.parent / "prepare.py").write_text("raise AssertionError('prepared twice')")
    assert train.load_corpus("letters", MACHINE).val.tolist() == [1]
    assert len(prepared_at_barrier) == 2  # who is alone waits for nobody


def test_evaluation_is_divided_among_processes(corpus, monkeypatch):  # noqa: F811
    """Together they score each token once; what each gets to know is the sum."""
    loaded = train.load_corpus(str(corpus), MACHINE)
    torch.manual_seed(0)
    model = train.GPT(train.GPTConfig(300, context_length=32, n_layer=1, n_head=2, n_embd=16))
    whole = train.evaluate(model, loaded, MACHINE)
    monkeypatch.setattr(
        train.Process, "mean", lambda machine, x: x / machine.world
    )  # the others found nothing
    parts = [train.evaluate(model, loaded, place(rank, 3)) for rank in range(3)]
    assert sum(count for _, count in parts) == whole[1] == 1001
    assert sum(nats for nats, _ in parts) == pytest.approx(whole[0])
    assert len({nats for nats, _ in parts}) == 3


def test_a_batch_that_does_not_divide_is_refused(corpus, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setattr(train, "init_process", lambda args: place(0, 3))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    with pytest.raises(
        SystemExit, match="--batch_size 4 does not divide among 3 processes: take a multiple"
    ):
        train.main([*TINY, f"--data={corpus}", f"--out={tmp_path / 'out'}"])


def test_all_stop_when_one_is_asked_to(corpus, tmp_path, monkeypatch):  # noqa: F811
    """Whoever stepped on alone would wait for the others' gradients for ever."""
    args = train.parse_args([*TINY, "--steps=9", f"--out={tmp_path}"])
    run = train.Run(args, train.load_corpus(str(corpus), MACHINE), place(1, 4))
    batches = train.Batches(run.corpus.train, args.batch_size, args.context_length, args.seed)
    monkeypatch.setattr(train.Run, "forward_module", lambda self: self.model)
    one_of_four = torch.tensor([0.25, 0.0], dtype=torch.float64)
    monkeypatch.setattr(
        train.Process, "mean", lambda machine, x: x + one_of_four if x.shape == (2,) else x
    )
    assert train.train(run, batches, caught=[], started=0.0) is False
    assert run.step == 1


def test_only_one_process_writes_and_speaks(corpus, tmp_path, capsys, monkeypatch):  # noqa: F811
    args = train.parse_args([*TINY, f"--out={tmp_path}", "--n_embd=16"])
    run = train.Run(args, train.load_corpus(str(corpus), MACHINE), place(1, 2))
    state = {"step": 3, "share": 0.5, "log": [{"step": 1}], "model": run.model.state_dict()}
    run.load(state | {"optimizers": [o.state_dict() for o in run.optimizers]})
    run.record(step=4, loss=1.0)
    run.save()
    run.process.print("hello")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert train.progress_bar(run) is None
    assert run.log == [{"step": 1}, {"step": 4, "loss": 1.0}] and run.saved == 3
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""
    place(0, 2).print("hello")
    assert capsys.readouterr().out == "hello\n"
