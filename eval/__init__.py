"""Programs that read runs or measure the library and print one JSON object each."""

import os

# GNU OpenMP reads this when torch is loaded. A thread that waits for another one gives its core up
# after some microseconds, and not after milliseconds in which, where other programs use the cores
# too, the other one cannot run: up to 28 times as fast there, and no slower on two idle cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
