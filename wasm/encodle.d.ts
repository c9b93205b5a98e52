/** How to load a model. */
export interface LoadOptions {
  /** The number format of the weights and the products; `"f32"` by default. */
  precision?: "f32" | "bf16" | "int8";
  /** Whether to compute in a web worker, so that the page does not wait; `true` by default. */
  worker?: boolean;
  /** The WebAssembly module; by default it is fetched from the package's folder. */
  wasm?: BufferSource | WebAssembly.Module;
}

/** How to embed texts. */
export interface EmbedOptions {
  /**
   * `"query"`, `"document"`, or the name of another prompt of the model's files. The default is the
   * default prompt of the files.
   */
  prompt?: string;
  /**
   * What happens to texts longer than `maxSeqLength`: they are truncated, with a warning on the
   * console; they are an error; or their vector is the average of those of windows. `"truncate"` by
   * default.
   */
  longTexts?: "truncate" | "refuse" | "windows";
}

/** The attention weights of a text of T tokens. */
export interface Attention {
  /** The tokens, special tokens included. */
  tokens: string[];
  layers: number;
  heads: number;
  /** The weight of each key for each query: layers × heads × T × T values. Each row sums to 1. */
  weights: Float32Array;
  /** The number of tokens that truncation removed. */
  truncated: number;
}

/** A sentence embedding model. Methods reject with an `Error` that names what was expected. */
export class Encoder {
  /**
   * Loads a model of sentence-transformers' layout. Nothing is downloaded but this package's module.
   *
   * @param files the bytes of each file by its path in the model's folder, such as
   *   `{"modules.json": ..., "1_Pooling/config.json": ..., "model.safetensors": ...}`
   */
  static load(files: Record<string, Uint8Array>, options?: LoadOptions): Promise<Encoder>;

  /** The number of values of a vector. */
  readonly dimension: number;
  /** The maximum length of a text in tokens, special tokens included. */
  readonly maxSeqLength: number;

  /** The vector of each text. A vector does not depend on the other texts. */
  embed(texts: string[], options?: EmbedOptions): Promise<Float32Array[]>;
  /**
   * The similarity of each vector of `a` to each of `b`, by the function that the model's files name:
   * the cosine, the dot product, or the negative Euclidean or Manhattan distance.
   */
  similarity(a: Float32Array[], b: Float32Array[]): Promise<Float32Array[]>;
  /** The attention weights of all layers and heads for a text. */
  attention(text: string): Promise<Attention>;
  /**
   * An SVG of the attention: small images of all heads, and one head enlarged; by default the mean of
   * the heads of the last layer.
   */
  attentionPicture(text: string, options?: { layer?: number; head?: number }): Promise<string>;
  /** Frees the model. Calls that wait, and later calls, are rejected. */
  close(): void;
}
