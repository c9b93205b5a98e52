//! The JavaScript class `Model`, on which `encodle.js` builds: a sentence embedding model whose files
//! are in memory. The methods compute on the calling thread.

use std::{fmt, result};

use encoder::{
    AttentionReader, EmbedOptions, Embedder, LoadOptions, ModelFiles, Precision, Prompt,
    TextAttention,
};
use js_sys::{Array, Object, Uint8Array};
use ops::CosineKernel;
use picture::HeadChoice;
use wasm_bindgen::prelude::*;

type Result<T> = result::Result<T, JsError>;

/// A sentence embedding model.
#[wasm_bindgen]
pub struct Model {
    embedder: Embedder,
}

/// The vectors of texts.
#[wasm_bindgen(getter_with_clone)]
pub struct Embeddings {
    /// The vectors of B texts, one after the other, `(B, E)`.
    pub vectors: Vec<f32>,
    /// The index of each text that was truncated.
    pub truncated: Vec<u32>,
}

/// The attention weights of a text.
#[wasm_bindgen(getter_with_clone)]
pub struct Attention {
    /// The T tokens, special tokens included.
    pub tokens: Vec<String>,
    /// L and H: the numbers of layers, and of heads in a layer.
    pub shape: Vec<u32>,
    /// The weight of each key for each query, `(L, H, T, T)`.
    pub weights: Vec<f32>,
    /// The number of tokens that truncation removed.
    pub truncated: usize,
}

fn js(error: impl fmt::Display) -> JsError {
    JsError::new(&error.to_string())
}

#[wasm_bindgen]
impl Model {
    /// Loads the model. `files` has the bytes of each file, as a `Uint8Array`, by its path in the
    /// model's folder, such as `1_Pooling/config.json`. `precision` is `f32`, `bf16` or `int8`.
    ///
    /// # Errors
    /// An error if a file is not a `Uint8Array`, or for another precision; the errors of
    /// [`Embedder::from_files`].
    #[wasm_bindgen(constructor)]
    pub fn new(files: &Object, precision: &str) -> Result<Model> {
        let read = |entry: JsValue| {
            let entry: Array = entry.unchecked_into();
            let path = entry.get(0).as_string().unwrap_or_default();
            match entry.get(1).dyn_into::<Uint8Array>() {
                Ok(bytes) => Ok((path, bytes.to_vec())),
                Err(_) => Err(js(format!("{path}: expected the file's bytes as a Uint8Array"))),
            }
        };
        let files = Object::entries(files).iter().map(read).collect::<Result<Vec<_>>>()?;
        let precision: Precision = precision.parse().map_err(js)?;
        let options = LoadOptions::default().with_precision(precision);
        let files = ModelFiles::memory("the model", files);
        Ok(Self { embedder: Embedder::from_files(&files, &options).map_err(js)? })
    }

    /// The vectors of texts. `prompt` is `query`, `document`, or the name of another prompt of the
    /// model; by default the model's default prompt. `long_texts` is `truncate`, `refuse` or
    /// `windows`.
    ///
    /// # Errors
    /// An error for another treatment of long texts; the errors of [`Embedder::embed_with`].
    pub fn embed(
        &self,
        texts: Vec<String>,
        prompt: Option<String>,
        long_texts: &str,
    ) -> Result<Embeddings> {
        let prompt = match prompt.as_deref() {
            None => Prompt::Default,
            Some("query") => Prompt::Query,
            Some("document") => Prompt::Document,
            Some(name) => Prompt::Named(name),
        };
        let long_texts = long_texts.parse().map_err(js)?;
        let options = EmbedOptions::new().with_prompt(prompt).with_long_texts(long_texts);
        let found = self.embedder.embed_with(&texts, options).map_err(js)?;
        let vectors = found.vectors.flatten_all().and_then(|vectors| vectors.to_vec1());
        let truncated = found.truncated.iter().map(|text| text.text as u32).collect();
        Ok(Embeddings { vectors: vectors.map_err(js)?, truncated })
    }

    /// The number of values of a vector, E.
    #[wasm_bindgen(getter)]
    pub fn dimension(&self) -> usize {
        self.embedder.dimension()
    }

    /// The maximum length of a text in tokens, special tokens included.
    #[wasm_bindgen(getter, js_name = maxSeqLength)]
    pub fn max_seq_length(&self) -> usize {
        self.embedder.tokenizer().max_seq_length()
    }

    /// The similarity of each of A vectors to each of B, by the function that the model's files name:
    /// the cosine, the dot product, or the negative Euclidean or Manhattan distance.
    ///
    /// # Shapes
    /// `a`: `(A, E)`; `b`: `(B, E)`; returns `(A, B)`
    /// # Errors
    /// An error if a length is not a multiple of the dimension E.
    pub fn similarity(&self, a: &[f32], b: &[f32]) -> Result<Vec<f32>> {
        let width = self.dimension();
        if let Some(values) = [a, b].iter().find(|values| values.len() % width != 0) {
            let got = values.len();
            return Err(js(format!("expected vectors of {width} values, got {got} values in all")));
        }
        let pairs = |similarity: fn(f32, f32) -> f32, end: fn(f32) -> f32| {
            let of = |x: &[f32], y: &[f32]| {
                end(x.iter().zip(y).map(|(&x, &y)| similarity(x, y)).sum::<f32>())
            };
            let rows = a.chunks_exact(width);
            rows.flat_map(|x| b.chunks_exact(width).map(move |y| of(x, y))).collect()
        };
        Ok(match self.embedder.similarity_fn_name() {
            "dot" => pairs(|x, y| x * y, |sum| sum),
            "euclidean" => pairs(|x, y| (x - y) * (x - y), |sum| -sum.sqrt()),
            "manhattan" => pairs(|x, y| (x - y).abs(), |sum| -sum),
            _ => CosineKernel::new().map_err(js)?.cosines(a, b, width),
        })
    }

    /// The attention weights of all layers and heads for a text.
    ///
    /// # Errors
    /// An error if the model is a table of token vectors; the errors of [`AttentionReader::read`].
    pub fn attention(&self, text: &str) -> Result<Attention> {
        let attention = self.read(text)?;
        let (layers, heads, _, _) = attention.weights.dims4().map_err(js)?;
        let weights = attention.weights.flatten_all().and_then(|weights| weights.to_vec1());
        Ok(Attention {
            shape: vec![layers as u32, heads as u32],
            weights: weights.map_err(js)?,
            truncated: attention.queries_truncated,
            tokens: attention.queries,
        })
    }

    /// An SVG of the attention: small images of all heads, and one head enlarged. By default it
    /// enlarges the mean of the heads of the last layer.
    ///
    /// # Errors
    /// The errors of [`Self::attention`] and [`picture::choose`].
    #[wasm_bindgen(js_name = attentionPicture)]
    pub fn attention_picture(
        &self,
        text: &str,
        layer: Option<usize>,
        head: Option<usize>,
    ) -> Result<String> {
        let attention = self.read(text)?;
        let head = head.map_or(HeadChoice::Mean, HeadChoice::One);
        let chosen = picture::choose(&attention, layer, head).map_err(js)?;
        picture::document(text, &attention, &chosen).map_err(js)
    }
}

impl Model {
    fn read(&self, text: &str) -> Result<TextAttention> {
        let model = self.embedder.encoder().map_err(js)?.clone();
        let reader = AttentionReader::from_encoder(model, self.embedder.tokenizer().clone());
        Ok(reader.read(text, None).map_err(js)?.swap_remove(0))
    }
}
