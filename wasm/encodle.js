// Text embeddings in the browser. `encodle.d.ts` documents the interface.

// A module with an instruction of relaxed SIMD: i8x16.relaxed_swizzle of two i8x16.splat.
const RELAXED_SIMD = new Uint8Array([
  0, 97, 115, 109, 1, 0, 0, 0, 1, 5, 1, 96, 0, 1, 123, 3, 2, 1, 0, 10, 15, 1, 13, 0, 65, 1, 253, 15,
  65, 2, 253, 15, 253, 128, 2, 11,
]);

/** The folder of the module for this browser. */
const build = () => (WebAssembly.validate(RELAXED_SIMD) ? "relaxed" : "simd");

/** Loads the module and the model on the calling thread. Without `wasm`, the module is fetched. */
export const model = async (files, { precision = "f32", wasm } = {}) => {
  const { default: init, Model } = await import(`./${build()}/encodle_wasm.js`);
  await init(wasm && { module_or_path: wasm });
  return new Model(files, precision);
};

/** The methods that a worker computes, and the values that it sends back. */
export const methods = {
  embed(model, texts, { prompt, longTexts = "truncate" } = {}) {
    const found = model.embed(texts, prompt, longTexts);
    const { vectors, truncated } = found;
    found.free();
    if (truncated.length > 0) {
      console.warn(`${truncated.length} of ${texts.length} texts truncated to ${model.maxSeqLength} tokens`);
    }
    return rows(vectors, model.dimension);
  },
  similarity(model, a, b) {
    const flat = (vectors) => {
      const values = new Float32Array(vectors.length * model.dimension);
      vectors.forEach((vector, row) => {
        if (vector.length !== model.dimension) {
          throw new Error(`expected vectors of ${model.dimension} values, got ${vector.length}`);
        }
        values.set(vector, row * model.dimension);
      });
      return values;
    };
    return rows(model.similarity(flat(a), flat(b)), b.length, a.length);
  },
  attention(model, text) {
    const found = model.attention(text);
    const { tokens, shape: [layers, heads], weights, truncated } = found;
    found.free();
    return { tokens, layers, heads, weights, truncated };
  },
  attentionPicture(model, text, { layer, head } = {}) {
    return model.attentionPicture(text, layer, head);
  },
};

/** The rows of a matrix, which may have no columns. */
const rows = (values, width, count = values.length / width) =>
  Array.from({ length: count }, (_, row) => values.subarray(row * width, (row + 1) * width));

export class Encoder {
  #send;
  #close;

  /** @private Use `Encoder.load`. */
  constructor({ dimension, maxSeqLength }, send, close) {
    this.dimension = dimension;
    this.maxSeqLength = maxSeqLength;
    this.#send = send;
    this.#close = close;
  }

  static async load(files, { worker = true, ...options } = {}) {
    if (!worker) {
      const loaded = await model(files, options);
      const send = async (method, args) => methods[method](loaded, ...args);
      return new Encoder(loaded, send, () => loaded.free());
    }
    const { send, close } = connect(new Worker(new URL("./worker.js", import.meta.url), { type: "module" }));
    try {
      return new Encoder(await send("load", [files, options]), send, close);
    } catch (error) {
      close();
      throw error;
    }
  }

  embed(texts, options) {
    return this.#send("embed", [texts, options]);
  }
  similarity(a, b) {
    return this.#send("similarity", [a, b]);
  }
  attention(text) {
    return this.#send("attention", [text]);
  }
  attentionPicture(text, options) {
    return this.#send("attentionPicture", [text, options]);
  }
  close() {
    this.#close();
  }
}

/** Sends calls to a worker, which answers them in order. After the worker has ended, calls are rejected. */
const connect = (worker) => {
  const waiting = [];
  let end; // the error of calls that the worker does not answer
  const failAll = (error) => {
    end = error;
    waiting.splice(0).forEach(({ reject }) => reject(error));
  };
  worker.onmessage = ({ data: { result, error } }) => {
    const { resolve, reject } = waiting.shift();
    error === undefined ? resolve(result) : reject(new Error(error));
  };
  worker.onerror = (event) => failAll(new Error(event.message ?? "the worker could not be started"));
  return {
    send: (method, args) =>
      new Promise((resolve, reject) => {
        if (end !== undefined) throw end;
        worker.postMessage({ method, args });
        waiting.push({ resolve, reject });
      }),
    close: () => {
      worker.terminate();
      failAll(new Error("the encoder was closed"));
    },
  };
};
