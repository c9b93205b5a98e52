// Runs a WASI program, the golden tests, in headless Chromium: golden.js PROGRAM [ARGUMENT...]
// The files of the repository that it reads are in the memory of the page.

import { dirname, basename, join, resolve } from "node:path";
import { ROOT, filesOf, open } from "./browser.js";

const [program, ...args] = process.argv.slice(2);
const { page, address, close } = await open({
  "/": ROOT,
  "/program/": dirname(resolve(program)),
  "/shim/": join(ROOT, "wasm/tests/node_modules/@bjorn3/browser_wasi_shim/dist"),
});
page.on("console", (message) => console.log(message.text()));
await page.goto(`${address}/wasm/tests/empty.html`);
const status = await page.evaluate(
  async ({ program, args, files }) => {
    const { ConsoleStdout, Directory, File, OpenFile, PreopenDirectory, WASI } = await import("/shim/index.js");
    const bytes = async (path) => new Uint8Array(await (await fetch(path)).arrayBuffer());
    const root = new Map();
    for (const path of files) {
      let folder = root;
      const names = path.split("/");
      const file = names.pop();
      for (const name of names) {
        if (!folder.has(name)) folder.set(name, new Directory(new Map()));
        folder = folder.get(name).contents;
      }
      folder.set(file, new File(await bytes(`/${path}`)));
    }
    const line = () => ConsoleStdout.lineBuffered((text) => console.log(text));
    const folders = [new PreopenDirectory(".", root), new PreopenDirectory("/tmp", new Map())];
    const wasi = new WASI([program, ...args], [], [new OpenFile(new File([])), line(), line(), ...folders]);
    const { instance } = await WebAssembly.instantiate(await bytes(`/program/${program}`), {
      wasi_snapshot_preview1: wasi.wasiImport,
    });
    return wasi.start(instance);
  },
  { program: basename(program), args, files: await filesOf("tests/golden", "weights") },
);
await close();
process.exitCode = status;
