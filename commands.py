"""
What the commands train.py, serve.py and bench.py have in common: how a flag is made and --help
shows its default, how often Python collects garbage, and how long the threads of OpenMP spin, to be
set before torch is loaded (so nothing here loads it).

    os.environ.setdefault("GOMP_SPINCOUNT", SPINS_SERVING)
    parser = argparse.ArgumentParser(formatter_class=Help)
    add_flag(parser, "--port", "port to listen at; 0: any free one", 8000, at_least(0))
"""

import argparse
import gc
from collections.abc import Callable

# Values of GOMP_SPINCOUNT: for how many rounds a thread of OpenMP that waits for the others spins
# before it sleeps. Without a limit, one other busy process on two cores can make a training step of
# 0.2 s take 2 s, and a decode step of 10 ms take 500.
SPINS_TRAINING = "10000"  # sleeping at once would make every training step a third slower
SPINS_SERVING = "100000"  # with a tenth of it a token that is generated alone takes 15% longer


COLLECT_AFTER = 50_000  # objects; Python's own threshold is 700


def collect_garbage_rarely():
    """
    Have Python look for garbage seldom. With none of it an H200 made 1.4% more tokens a second, and
    2.4% more with --record; a body of a million lists was parsed in 0.2 s, not 0.6, in which no
    other client is served.
    """
    gc.set_threshold(COLLECT_AFTER)


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """
    Adds "(default: 8000)" to the help of a flag whose default is worth naming: not of a switch, and
    not None or [], where the help itself says what happens without the flag.
    """

    def _get_help_string(self, action: argparse.Action) -> str:
        is_switch = action.nargs == 0
        if is_switch or action.default is None or action.default == []:
            return action.help
        return super()._get_help_string(action)


def at_least(
    least: float, number: type = int, below: float | None = None
) -> Callable[[str], float]:
    """
    The type of a flag, for argparse: numbers from `least` on and less than `below`. Without `below`
    whole numbers are less than 2**31, as no tensor is larger. NaN is an error.
    """
    if below is None and number is int:
        below = 2**31

    def parse(text: str):
        value = number(text)
        if not value >= least:  # "not", so that NaN is refused, too
            raise argparse.ArgumentTypeError(f"{text} is too small, wanted at least {least}")
        if below is not None and value >= below:
            raise argparse.ArgumentTypeError(f"{text} is too large, wanted less than {below}")
        return value

    parse.__name__ = number.__name__  # argparse: "invalid int value"
    return parse


positive = at_least(1)
not_negative = at_least(0, float)


def add_flag(group, flag: str, help: str, default=None, kind: Callable | None = None, **options):
    """
    One flag. `kind` makes a value of the text; not given, it is the default's type: for an int
    whole numbers from 1 on, for a float numbers from 0 on. A default of False or True makes a
    switch, unless `action` is given.
    """
    if isinstance(default, bool):
        options.setdefault("action", "store_false" if default else "store_true")
    elif "action" not in options:
        kinds = {int: positive, float: not_negative}
        options["type"] = kind or kinds.get(type(default), str)
    group.add_argument(flag, default=default, help=help, **options)
