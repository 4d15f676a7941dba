"""
The README's pictures. Each function draws what one command of bench.py has measured:

    python bench.py blockmap --out assets/blockmap.png      # block_map
    python bench.py batching --out assets/batching.png      # ended_requests
    python bench.py memory --out assets/memory.png          # memory_use
    python bench.py phases --out assets/phases.png          # phases

matplotlib is imported when a picture is drawn, so the other commands run without it.
"""

from operator import add
from pathlib import Path

Owners = list[list[int]]  # for each block, ids of the requests whose block tables hold it
Figures = dict[str, dict]  # name of a row -> its figures
COLOURS = [f"C{i}" for i in range(10) if i != 7]  # matplotlib's cycle, but C7, which is grey
SHARES = ("tokens, %", "waste inside, %", "waste outside, %")  # of a pool; in a bar, from below


def new_figure():
    """An empty figure. It draws into memory, so no display is needed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(9, 4.2), layout="constrained")


def save(figure, path: Path) -> dict:
    """
    Write the figure. Returns the path, or why it could not be written: the figures of a long run
    are printed all the same.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not know the file's ending
        return {"picture": f"not written to {path} ({error}): choose another --out"}
    return {"picture": str(path)}


def block_map(owners: list[Owners], idle: list[set[int]], path: Path) -> dict:
    """
    The owners of all blocks after each step, and which blocks were in the prefix cache and in no
    table. A block that several requests share shows their colours in turn.
    """
    from matplotlib.colors import to_rgb

    columns = []
    for step, blocks in enumerate(owners):
        column = []
        for block, ids in enumerate(blocks):
            colour = "lightgrey" if block in idle[step] else "white"
            if ids:
                turn = step % len(ids)
                colour = COLOURS[ids[turn]]
            column.append(to_rgb(colour))
        columns.append(column)
    image = list(zip(*columns, strict=True))  # [block][step]
    figure = new_figure()
    axes = figure.subplots()
    axes.imshow(image, aspect="auto", interpolation="nearest", origin="lower")
    pool = f"a pool of {len(image)} blocks"
    axes.set_title(f"9 requests in {pool}: a colour is a request, grey is cached and idle")
    axes.set(xlabel="step", ylabel="block")
    return save(figure, path)


def ended_requests(runs: dict[str, list[float]], path: Path) -> dict:
    """runs: the label of a curve -> seconds from the start at which each request ended, sorted."""
    figure = new_figure()
    axes = figure.subplots()
    for label, ended in runs.items():
        count = range(len(ended) + 1)
        axes.step([0, *ended], count, where="post", label=label)
    axes.set_title("96 requests, the same model, kernels and KV memory")
    axes.set(xlabel="seconds", ylabel="requests ended")
    axes.legend()
    return save(figure, path)


def memory_use(pools: Figures, appends: dict[int, dict], path: Path) -> dict:
    """
    pools: the name of a block size -> its `SHARES` of the pool, and the requests "at once".
    appends: context length -> {way to append a token: microseconds}.
    """
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    draw_shares(left, pools)
    draw_appends(right, appends)
    return save(figure, path)


def draw_shares(axes, pools: Figures):
    """Stacked bars, one a pool; in the lowest part, the number of requests that run at once."""
    ticks = [name.replace(" of ", "\n") for name in pools]
    bottom = [0.0] * len(pools)
    for share in SHARES:
        heights = [row[share] for row in pools.values()]
        bars = axes.bar(ticks, heights, bottom=bottom, label=share)
        if share == SHARES[0]:
            counts = [f"{row['at once']:.0f}" for row in pools.values()]
            axes.bar_label(bars, counts, label_type="center", color="w")
        bottom = list(map(add, bottom, heights))
    axes.set_title("KV memory while others wait;\nin white: requests at once")
    axes.legend(loc="lower right")


def draw_appends(axes, appends: dict[int, dict]):
    """One line for each way to append a token."""
    contexts = [str(context) for context in appends]
    for way in ("torch.cat", "store_kv"):
        us = [row[way] for row in appends.values()]
        axes.plot(contexts, us, "o-", label=way)
    axes.set_title("microseconds of a layer\nto append a token")
    axes.set(xlabel="tokens so far", yscale="log")
    axes.legend()


def phases(kinds: dict[str, Figures], path: Path) -> dict:
    """kinds: a prompt, or decodes -> number of tokens in the step -> its figures."""
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    for colour, (kind, rows) in zip(COLOURS, kinds.items(), strict=False):
        rates = [row["tok/s"] for row in rows.values()]
        left.plot(list(rows), rates, "o-", color=colour, label=kind)
        for share, style in ("% of products", "o-"), ("% of memory", "s--"):
            heights = [row[share] for row in rows.values()]
            right.plot(list(rows), heights, style, color=colour, label=f"{kind}: {share}")
    left.set_title("tokens per second")
    left.set_yscale("log")
    left.legend()
    right.set_title("share of the machine's speed, %")
    right.set_ylim(0, 115)
    right.legend(loc="upper right")
    for axes in left, right:
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_xlabel("tokens in the step")
    return save(figure, path)
