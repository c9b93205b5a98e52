"""Measures a command: python -S alone.py OUTPUT COMMAND...

Prints the wall time in ms and the peak memory in MB as JSON, and writes the command's output to the
file OUTPUT. On Linux a child process inherits the peak memory of its parent, so this script imports
little.
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
print(json.dumps({"ms": ms, "peak_mb": usage.ru_maxrss * 1024 / 1e6}))
sys.exit(os.waitstatus_to_exitcode(status) != 0)
