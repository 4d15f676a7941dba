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

# for each block, ids of the requests whose tables hold it; which are cached and idle; and how many
# requests have which status
Column = tuple[list[list[int]], set[int], dict[str, int]]
STATUSES = ("active", "ending", "prefilling", "waiting")
Figures = dict[str, dict]  # name of a row -> its figures
COLOURS = [f"C{i}" for i in range(10) if i != 7]  # matplotlib's cycle, but C7, which is grey
GREYS = ["0.35", "0.5", "0.7", "0.9"]  # no request's colour
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


def block_map(columns: list[Column], size: tuple[int, int], title: str, path: Path) -> dict:
    """
    Who held which block after some of the steps, and below it the requests in each status; `size`:
    how many steps and blocks there are. A block that several requests share is split among them.
    """
    from matplotlib.colors import to_rgb

    image = []  # [step][block and part]
    for owners, idle, _ in columns:
        parts = max(1, 480 // len(owners))  # of a block
        column = []
        for row, ids in enumerate(owners):
            unused = "lightgrey" if row in idle else "white"
            colours = [COLOURS[id % len(COLOURS)] for id in ids] or [unused]
            column += [to_rgb(colours[part * len(colours) // parts]) for part in range(parts)]
        image.append(column)
    figure = new_figure()
    axes, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps, blocks = size
    options = {"aspect": "auto", "interpolation": "nearest", "origin": "lower"}
    turned = list(zip(*image, strict=True))
    axes.imshow(turned, extent=(0, steps, 0, blocks), **options)
    axes.set_title(f"{title}: a colour is a request, grey is cached and idle")
    axes.set_ylabel("block")
    counts = [[statuses.get(name, 0) for *_, statuses in columns] for name in STATUSES]
    middles = [steps * (i + 0.5) / len(columns) for i in range(len(columns))]
    below.stackplot(middles, counts, labels=STATUSES, step="mid", colors=GREYS)
    below.set(xlabel="step", ylabel="requests")
    below.legend(loc="upper right", ncols=len(STATUSES), fontsize="small")
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
