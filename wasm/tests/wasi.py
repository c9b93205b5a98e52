"""Runs a WASI program in wasmtime: wasi.py PROGRAM FOLDER [ARGUMENT...]

The program sees FOLDER as its working directory, and a temporary folder as /tmp. Exit status: that of
the program.
"""

import os
import sys
import tempfile

from wasmtime import Engine, ExitTrap, Linker, Module, Store, WasiConfig

program, folder, *arguments = sys.argv[1:]
engine = Engine()
linker = Linker(engine)
linker.define_wasi()
wasi = WasiConfig()
wasi.argv = [program, *arguments]
wasi.env = [(name, os.environ[name]) for name in ("RESULT_DIGESTS", "MHA_ISA") if name in os.environ]
wasi.inherit_stdout()
wasi.inherit_stderr()
with tempfile.TemporaryDirectory() as temporary:
    wasi.preopen_dir(folder, ".")
    wasi.preopen_dir(temporary, "/tmp")
    store = Store(engine)
    store.set_wasi(wasi)
    instance = linker.instantiate(store, Module.from_file(engine, program))
    try:
        instance.exports(store)["_start"](store)
    except ExitTrap as exit:
        sys.exit(exit.code)
