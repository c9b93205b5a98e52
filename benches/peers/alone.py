"""Runs a command by itself: python -S alone.py OUTPUT COMMAND...

Prints its wall time in ms and its peak memory in MB as JSON; its own output goes to the file
OUTPUT. Linux hands the peak memory of a process on to what it starts, so this one stays small.
"""

import json
import os
import sys
import time

start = time.perf_counter()
file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
child = os.posix_spawnp(
    sys.argv[2], sys.argv[2:], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, file, 1)]
)
_, status, usage = os.wait4(child, 0)
ms = (time.perf_counter() - start) * 1e3
print(json.dumps({"ms": ms, "peak_mb": usage.ru_maxrss / 1e3}))
sys.exit(os.waitstatus_to_exitcode(status) != 0)
