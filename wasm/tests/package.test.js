// The package of `scripts/wasm-build` and its page in headless Chromium: node --test

import assert from "node:assert/strict";
import { readFile, mkdtemp, cp } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";
import { ROOT, filesOf, open } from "./browser.js";

const MODEL = "weights/all-MiniLM-L6-v2";
let browser;
let names;

before(async () => {
  browser = await open({ "/": join(ROOT, "target/wasm/package"), "/files/": ROOT });
  names = (await filesOf(MODEL)).map((path) => path.slice(MODEL.length + 1));
  await browser.page.goto(`${browser.address}/index.html`);
  await browser.page.evaluate(
    async ({ names, model }) => {
      const { Encoder } = await import("./encodle.js");
      const bytes = async (name) => new Uint8Array(await (await fetch(`files/${model}/${name}`)).arrayBuffer());
      window.Encoder = Encoder;
      window.files = Object.fromEntries(await Promise.all(names.map(async (name) => [name, await bytes(name)])));
      window.encoder = await Encoder.load(window.files);
    },
    { names, model: MODEL },
  );
});
after(() => browser.close());

/** The golden sentences and their vectors by sentence-transformers. */
const golden = async () => {
  const text = await readFile(join(ROOT, "tests/golden/sentences.txt"), "utf8");
  const bytes = await readFile(join(ROOT, "tests/golden/sentences.safetensors"));
  const length = Number(bytes.readBigUInt64LE(0));
  const header = JSON.parse(bytes.subarray(8, 8 + length));
  const { data_offsets: [start, end], shape: [count, width], dtype } = header.pooled;
  assert.equal(dtype, "F32");
  const values = new Float32Array(bytes.buffer.slice(bytes.byteOffset + 8 + length + start, bytes.byteOffset + 8 + length + end));
  return { sentences: text.trimEnd().split("\n"), rows: Array.from({ length: count }, (_, row) => values.subarray(row * width, (row + 1) * width)) };
};
const difference = (a, b) => Math.max(...a.map((x, i) => Math.abs(x - b[i])));
const cosine = (a, b) => a.reduce((sum, x, i) => sum + x * b[i], 0);

for (const worker of [true, false]) {
  for (const precision of ["f32", "bf16", "int8"]) {
    test(`vectors in ${precision} are those of sentence-transformers, worker: ${worker}`, async () => {
      const { sentences, rows } = await golden();
      const found = await browser.page.evaluate(
        async ({ sentences, options }) => {
          const encoder = await window.Encoder.load(window.files, options);
          const vectors = await encoder.embed(sentences);
          const alone = await encoder.embed([sentences[1]]);
          encoder.close();
          return { vectors: vectors.map((vector) => [...vector]), alone: [...alone[0]], dimension: encoder.dimension };
        },
        { sentences, options: { precision, worker } },
      );
      assert.equal(found.dimension, 384);
      assert.equal(found.vectors.length, rows.length);
      assert.deepEqual(found.alone, found.vectors[1]);
      for (const [row, vector] of found.vectors.entries()) {
        if (precision === "f32") assert.ok(difference(vector, rows[row]) <= 1e-6, `${row}`);
        else assert.ok(cosine(vector, rows[row]) >= (precision === "bf16" ? 0.9999 : 0.998), `${row}`);
      }
    });
  }
}

test("similarity, prompts and attention", async () => {
  const found = await browser.page.evaluate(async () => {
    const [query, ...texts] = await encoder.embed(["A man is eating food.", "A man is eating a piece of bread.", "The new movie is awesome."]);
    const [scores] = await encoder.similarity([query], texts);
    const none = await encoder.similarity([], texts);
    const same = (await encoder.embed(["A man is eating food."], { prompt: "query" }))[0];
    const { tokens, layers, heads, weights, truncated } = await encoder.attention("I love AI");
    const picture = await encoder.attentionPicture("I love AI", { layer: 1, head: 8 });
    const empty = await encoder.embed([]);
    return {
      scores: [...scores], none: none.length, same: same.every((x, i) => x === query[i]), tokens, layers, heads,
      of_love: [...weights.subarray(10, 15)], count: weights.length, truncated, picture, empty: empty.length,
    };
  });
  assert.deepEqual(found.scores.map((score) => score.toFixed(3)), ["0.755", "-0.046"]);
  assert.deepEqual([found.none, found.same, found.empty, found.truncated], [0, true, 0, 0]);
  assert.deepEqual(found.tokens, ["[CLS]", "i", "love", "ai", "[SEP]"]);
  assert.deepEqual([found.layers, found.heads, found.count], [6, 12, 6 * 12 * 5 * 5]);
  assert.ok(Math.abs(found.of_love.reduce((a, b) => a + b) - 1) < 1e-5);
  assert.match(found.picture, /^<svg[^]*layer 1, head 8/);
});

test("errors name what was expected, and the encoder goes on", async () => {
  const errors = await browser.page.evaluate(async () => {
    const message = (promise) => promise.then(() => "no error", (error) => `${error.name}: ${error.message}`);
    const { "config.json": _, ...incomplete } = window.files;
    const errors = {
      incomplete: await message(Encoder.load(incomplete)),
      text: await message(Encoder.load({ "config.json": "{}" })),
      precision: await message(Encoder.load(window.files, { precision: "f64" })),
      prompt: await message(encoder.embed(["a"], { prompt: "other" })),
      long: await message(encoder.embed(["and ".repeat(300)], { longTexts: "refuse" })),
      width: await message(encoder.similarity([new Float32Array(3)], [])),
      layer: await message(encoder.attentionPicture("a", { layer: 6 })),
    };
    const closed = await Encoder.load(window.files);
    const waiting = message(closed.embed(["a"]));
    closed.close();
    errors.closed = await waiting;
    errors.later = await message(closed.embed(["a"]));
    errors.after = await message(encoder.embed(["a"]));
    return errors;
  });
  assert.match(errors.incomplete, /^Error: the model\/config.json not found/);
  assert.equal(errors.text, "Error: config.json: expected the file's bytes as a Uint8Array");
  assert.match(errors.precision, /f64.*f32/);
  assert.match(errors.prompt, /other/);
  assert.match(errors.long, /302 tokens/);
  assert.equal(errors.width, "Error: expected vectors of 384 values, got 3");
  assert.match(errors.layer, /layer 6/);
  assert.equal(errors.closed, "Error: the encoder was closed");
  assert.equal(errors.later, "Error: the encoder was closed");
  assert.equal(errors.after, "no error");
});

test("the page searches its lines and shows the attention of a line", async () => {
  const { page, address, requests } = browser;
  await page.goto(`${address}/index.html`);
  requests.length = 0;
  const folder = await mkdtemp(join(tmpdir(), "encodle-"));
  await cp(join(ROOT, MODEL), join(folder, "model"), { recursive: true });
  await page.setInputFiles("#folder", join(folder, "model"));
  await page.waitForSelector("#picture svg");
  const lines = await page.locator("#hits button").allTextContents();
  assert.match(lines[0], /A man is eating a piece of bread\.$/);
  assert.equal(lines.length, 7);
  await page.fill("#query", "an instrument");
  await page.waitForFunction(() => document.querySelector("#hits button").textContent.includes("violin"));
  await page.fill("#lines", "The band plays a guitar.\nThe sea is cold.");
  await page.waitForFunction(() => document.querySelectorAll("#hits button").length === 2);
  assert.match(await page.locator("#hits button").first().textContent(), /guitar/);
  await page.locator("#hits button").nth(1).click();
  await page.selectOption("#layer", "2");
  await page.selectOption("#head", "3");
  await page.waitForFunction(() => document.querySelector("#picture").textContent.includes("layer 2, head 3"));
  assert.match(await page.textContent("#picture"), /sea/);
  await page.setViewportSize({ width: 1000, height: 1500 });
  await page.screenshot({ path: join(ROOT, "target/wasm/page.png") });
  assert.ok(requests.every((url) => url.startsWith(`${address}/`)), `${requests}`);
});
