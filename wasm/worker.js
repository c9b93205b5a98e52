// Computes the calls of `Encoder` in order, so that the page does not wait.

import { methods, model } from "./encodle.js";

let loaded;
let previous = Promise.resolve();

const answer = async ({ data: { method, args } }) => {
  try {
    if (method === "load") {
      loaded = await model(...args);
      postMessage({ result: { dimension: loaded.dimension, maxSeqLength: loaded.maxSeqLength } });
    } else {
      postMessage({ result: methods[method](loaded, ...args) });
    }
  } catch (error) {
    postMessage({ error: error.message });
  }
};

onmessage = (event) => {
  previous = previous.then(() => answer(event));
};
