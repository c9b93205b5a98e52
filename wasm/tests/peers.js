// Compares the package with transformers.js in headless Chromium, on one thread and the same model:
//
//     node peers.js MODEL ONNX TEXTS [ROUNDS]
//
// MODEL is the folder of the model; ONNX has its model.onnx and, quantised, model_quantized.onnx; TEXTS
// is a file of sentences, one per line. Prints a table: sentences per second (the median of the
// rounds, in which the systems take turns), the time from opening a page to the first vector, the bytes
// of code that the page loads, and the lowest cosine with transformers.js in f32.

import { cp, mkdtemp, readFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";
import { ROOT, open } from "./browser.js";

const [model, onnx, texts, rounds = "5"] = process.argv.slice(2);
const sentences = (await readFile(texts, "utf8")).trimEnd().split("\n");
const BATCH = 32; // for transformers.js, which pads: sentences of similar lengths

// The layout of transformers.js.
const folder = await mkdtemp(join(tmpdir(), "encodle-"));
await cp(resolve(model), join(folder, "model"), { recursive: true });
await cp(resolve(onnx), join(folder, "model/onnx"), { recursive: true });
const modules = join(ROOT, "wasm/tests/node_modules");
const { page: first, address, served, close } = await open({
  "/": ROOT,
  "/package/": join(ROOT, "target/wasm/package"),
  "/models/": folder,
  "/transformers/": join(modules, "@huggingface/transformers/dist"),
  "/onnx/": join(modules, "onnxruntime-web/dist"),
});

const NAMES = ["modules.json", "1_Pooling/config.json", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "sentence_bert_config.json"];
const ours = (precision) => ({ system: `ours, ${precision}`, kind: "ours", precision });
const theirs = (dtype) => ({ system: `transformers.js, ${dtype}`, kind: "theirs", precision: dtype });
const SYSTEMS = [ours("f32"), ours("int8"), theirs("fp32"), theirs("q8")];

/** Opens a page with a system, which defines `embed`. */
const start = async ({ kind, precision }) => {
  const page = await first.context().newPage();
  served.clear();
  const begin = performance.now();
  await page.goto(`${address}/wasm/tests/empty.html`);
  await page.evaluate(
    async ({ kind, precision, names, batch }) => {
      const bytes = async (name) => new Uint8Array(await (await fetch(`/models/model/${name}`)).arrayBuffer());
      if (kind === "ours") {
        const { Encoder } = await import("/package/encodle.js");
        const files = Object.fromEntries(await Promise.all(names.map(async (name) => [name, await bytes(name)])));
        const encoder = await Encoder.load(files, { precision, worker: false });
        window.embed = (texts) => encoder.embed(texts);
      } else {
        const { env, pipeline } = await import("/transformers/transformers.min.js");
        Object.assign(env, { allowRemoteModels: false, allowLocalModels: true, localModelPath: "/models/", useBrowserCache: false });
        Object.assign(env.backends.onnx.wasm, { numThreads: 1, wasmPaths: "/onnx/" });
        const extract = await pipeline("feature-extraction", "model", { dtype: precision, device: "wasm" });
        window.embed = async (texts) => {
          const order = texts.map((_, i) => i).sort((a, b) => texts[b].length - texts[a].length);
          const vectors = [];
          for (let at = 0; at < order.length; at += batch) {
            const rows = order.slice(at, at + batch);
            const found = await extract(rows.map((row) => texts[row]), { pooling: "mean", normalize: true });
            found.tolist().forEach((vector, i) => (vectors[rows[i]] = vector));
          }
          return vectors;
        };
      }
      await window.embed(["A first text."]);
    },
    { kind, precision, names: NAMES, batch: BATCH },
  );
  const code = [...served].filter(([path]) => /\.(js|mjs|wasm)$/.test(path));
  return { page, ms: performance.now() - begin, code: code.reduce((sum, [, bytes]) => sum + bytes, 0) };
};
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];
const cosine = (a, b) => {
  const dot = (x, y) => x.reduce((sum, value, i) => sum + value * y[i], 0);
  return dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
};

const found = [];
for (const system of SYSTEMS) {
  const firsts = [];
  let started;
  for (let round = 0; round < 3; round += 1) {
    await started?.page.close();
    started = await start(system);
    firsts.push(started.ms);
  }
  const vectors = await started.page.evaluate(async (texts) => (await window.embed(texts)).map((vector) => [...vector]), sentences);
  found.push({ ...system, ...started, firsts, vectors, ms: [] });
}
for (let round = 0; round < Number(rounds); round += 1) {
  for (const { page, ms } of found) {
    ms.push(
      await page.evaluate(async (texts) => {
        const begin = performance.now();
        await window.embed(texts);
        return performance.now() - begin;
      }, sentences),
    );
  }
}
const reference = found.find(({ system }) => system === "transformers.js, fp32").vectors;
console.log("| system | sentences/s | start to first vector | code | lowest cosine |\n| --- | ---: | ---: | ---: | ---: |");
for (const { system, ms, firsts, code, vectors } of found) {
  const lowest = Math.min(...vectors.map((vector, row) => cosine(vector, reference[row])));
  const rate = (sentences.length / median(ms)) * 1e3;
  console.log(`| ${system} | ${rate.toFixed(1)} | ${(median(firsts) / 1e3).toFixed(2)} s | ${(code / 1e6).toFixed(1)} MB | ${lowest.toFixed(6)} |`);
}
await close();
