"""
What the commands train.py, serve.py and bench.py have in common: how --help shows defaults, and
how long the threads of OpenMP spin, to be set before torch is loaded (so nothing here loads it).

    os.environ.setdefault("GOMP_SPINCOUNT", SPINS_SERVING)
    parser = argparse.ArgumentParser(formatter_class=Help)
"""

import argparse

# Values of GOMP_SPINCOUNT: for how many rounds a thread of OpenMP that waits for the others spins
# before it sleeps. Without a limit, one other busy process on two cores can make a training step of
# 0.2 s take 2 s, and a decode step of 10 ms take 500.
SPINS_TRAINING = "10000"  # sleeping at once would make every training step a third slower
SPINS_SERVING = "100000"  # with a tenth of it a token that is generated alone takes 15% longer


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
