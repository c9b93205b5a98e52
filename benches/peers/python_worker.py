"""The worker process for a package of python_package.py. The requests are those of worker.py; `run`
makes one call, and ignores `warm_ups` and `seconds`.

    python python_worker.py CODE

CODE defines `encode`, from a list of texts to an array `(B, E)`. This file runs in the package's
virtual environment, so it imports only the standard library and NumPy.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np


def main() -> None:
    # Redirect stdout to stderr, so that libraries cannot print into the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    names: dict[str, Any] = {}
    inputs: dict[str, list[str]] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if request["op"] == "load":
                inputs = json.loads(Path(request["folder"], "hf/cases.json").read_text())
                exec(sys.argv[1], names)
            elif request["op"] == "run":
                start = time.perf_counter()
                names["encode"](inputs[request["case"]])
                answer["ms"] = [(time.perf_counter() - start) * 1e3]
            else:
                np.save(request["path"], names["encode"](inputs[request["case"]]))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
