//! The worker for the Rust systems, ours and candle-transformers. The scripts beside this file
//! start it.
//!
//! `peers SYSTEM DTYPE` reads requests and writes answers as lines of JSON, like worker.py.
#![forbid(unsafe_code)]

use std::{
    collections::HashMap,
    io::BufRead,
    path::{Path, PathBuf},
    rc::Rc,
    time::Instant,
};

use anyhow::{Context, Result, bail, ensure};
use candle_core::{DType, Device::Cpu, Tensor, safetensors};
use candle_nn::VarBuilder;
use candle_transformers::models::bert as peer;
use encoder::{
    Embed, EmbedOptions, Embedder, EncoderDecoder, EncoderModel, GenerateConfig, LoadOptions,
    ModelFiles, MultiVectorEmbedder, PackedCache, Precision, Prompt, RaggedBatch, Reranker, Row,
    Search, SparseEmbedder, SparseIndexBuilder, SparseVector, Strategy,
};
use half::f16;
use mha::{AttentionMask, scaled_dot_product_attention};
use mha_kernels::{Isa, peak};
use ops::{MaxSim, VectorSlice};
use rayon::prelude::*;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

/// Sequences per padded batch for candle-transformers, as for the Python peers.
const PEER_BATCH: usize = 32;

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "lowercase")]
enum Request {
    /// Loads a model and prepares cases.
    Load { model: String, folder: PathBuf, cases: Vec<String> },
    /// Calls the case `warm_ups` times and measures the peak rate of the CPU, then times calls until
    /// they have taken `seconds` in total, but at least one call.
    Run { case: String, warm_ups: usize, seconds: f64 },
    /// Writes the output of a case to a .npy file.
    Output { case: String, path: PathBuf },
}

/// `call` is timed; `rows` converts its result to `(rows, width)`.
struct Case {
    call: Box<dyn Fn() -> Result<Vec<Tensor>>>,
    rows: Box<dyn Fn(Vec<Tensor>) -> Result<Tensor>>,
}

impl Case {
    fn new(
        call: impl Fn() -> Result<Vec<Tensor>> + 'static,
        rows: impl Fn(Vec<Tensor>) -> Result<Tensor> + 'static,
    ) -> Self {
        Self { call: Box::new(call), rows: Box::new(rows) }
    }

    /// A case with one output tensor, whose last dimension is the width.
    fn single(call: impl Fn() -> Result<Tensor> + 'static) -> Self {
        let rows = |x: Vec<Tensor>| Ok(x[0].flatten_to(x[0].rank() - 2)?);
        Self::new(move || Ok(vec![call()?]), rows)
    }
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [system, dtype] = &arguments[..] else { bail!("usage: peers SYSTEM DTYPE") };
    let mut cases = HashMap::new();
    for line in std::io::stdin().lock().lines() {
        let answer = serve(system, dtype, &line?, &mut cases);
        println!("{}", answer.unwrap_or_else(|error| json!({ "error": format!("{error:#}") })));
    }
    Ok(())
}

/// The precision with this name.
fn precision(name: &str) -> Result<Precision> {
    match name {
        "f32" => Ok(Precision::F32),
        "bf16" => Ok(Precision::Bf16),
        "int8" => Ok(Precision::Int8),
        _ => bail!("unknown dtype {name}: expected f32, bf16 or int8"),
    }
}

fn serve(
    system: &str,
    dtype: &str,
    line: &str,
    cases: &mut HashMap<String, Case>,
) -> Result<Value> {
    match serde_json::from_str(line)? {
        Request::Load { model, folder, cases: names } => {
            let (hf, precision) = (folder.join("hf"), precision(dtype)?);
            let computes_in_f32 =
                system == "candle" || ["search", "sparse-search", "max-sim"].contains(&&model[..]);
            ensure!(
                precision == Precision::F32 || !computes_in_f32,
                "{system} computes {model} in f32 only: got {dtype}"
            );
            let options = LoadOptions::default().with_precision(precision);
            let options = match system {
                "ours-packed" => options.with_cache(PackedCache::new(folder.join("packed"))),
                _ => options,
            };
            *cases = match (system, &model[..]) {
                ("ours", "minilm" | "static") => embeddings(&hf, &names, &options)?,
                ("ours" | "ours-packed", "qwen3-0.6b") => embeddings(&hf, &names, &options)?,
                ("ours", "rerank") => rerank(&folder.join("reranker"), &names, &options)?,
                ("ours", "attention") => attention(&hf, &names, precision)?,
                ("ours", "search") => search(&folder, &names)?,
                ("ours", "sparse-search") => sparse_search(&folder, &names)?,
                ("ours", "splade") => splade(&hf, &names, precision)?,
                ("ours", "colbert") => colbert(&hf, &names, precision)?,
                ("ours", "max-sim") => max_sim(&folder, &names)?,
                ("ours", "bert2bert") => generate(&hf, &names, &options)?,
                ("ours", _) => hidden_states(&hf, &names, precision)?,
                ("candle", "bert-base") => candle(&hf, &names)?,
                _ => bail!("{system} does not support {model}"),
            };
            Ok(json!({}))
        }
        Request::Run { case, warm_ups, seconds } => {
            let call = &cases.get(&case).context("no such case")?.call;
            let (_, compute_type) = precision(dtype)?.on(&Cpu)?;
            for _ in 0..warm_ups {
                call()?;
            }
            let isa = Isa::get()?;
            let peak_rate = (0..3).map(|_| peak(isa, compute_type)).fold(0.0, f64::max);
            let mut ms: Vec<f64> = vec![];
            while ms.is_empty() || ms.iter().sum::<f64>() < seconds * 1e3 {
                let start = Instant::now();
                call()?;
                ms.push(start.elapsed().as_secs_f64() * 1e3);
            }
            Ok(json!({ "ms": ms, "peak_rate": peak_rate }))
        }
        Request::Output { case, path } => {
            let case = cases.get(&case).context("no such case")?;
            (case.rows)((case.call)()?)?.to_dtype(DType::F32)?.write_npy(path)?;
            Ok(json!({}))
        }
    }
}

type Sequences = Vec<Vec<u32>>;

fn inputs<T: DeserializeOwned>(
    hf: &Path,
    names: &[String],
) -> Result<impl Iterator<Item = (String, T)>> {
    let mut all: HashMap<String, T> =
        serde_json::from_slice(&std::fs::read(hf.join("cases.json"))?)?;
    let chosen = names.iter().map(|name| {
        let input = all.remove(name).with_context(|| format!("no case {name}"))?;
        Ok((name.clone(), input))
    });
    Ok(chosen.collect::<Result<Vec<_>>>()?.into_iter())
}

/// Sequences of equal length are passed as one tensor, sequences of different lengths as a ragged
/// batch.
fn hidden_states(
    hf: &Path,
    names: &[String],
    precision: Precision,
) -> Result<HashMap<String, Case>> {
    let model =
        Rc::new(EncoderModel::from_dir(hf, &LoadOptions::default().with_precision(precision))?.0);
    let case = |(name, sequences): (String, Sequences)| {
        let model = model.clone();
        let case = if sequences.iter().all(|s| s.len() == sequences[0].len()) {
            let ids = Tensor::new(sequences, &Cpu)?;
            let mask = AttentionMask::none();
            Case::single(move || Ok(model.forward(&ids, None, &mask)?.last_hidden_state))
        } else {
            let mut batch = RaggedBatch::default();
            for ids in &sequences {
                batch.push(ids, &vec![0; ids.len()])?;
            }
            Case::single(move || Ok(model.forward_ragged(&batch)?))
        };
        Ok((name, case))
    };
    inputs(hf, names)?.map(case).collect()
}

fn embeddings(hf: &Path, names: &[String], options: &LoadOptions) -> Result<HashMap<String, Case>> {
    let embedder = Rc::new(Embedder::from_dir(hf, options)?);
    let case = |(name, texts): (String, Vec<String>)| {
        let embedder = embedder.clone();
        (name, Case::single(move || Ok(embedder.embed(&texts)?)))
    };
    Ok(inputs(hf, names)?.map(case).collect())
}

#[derive(Deserialize)]
struct RerankRequest {
    query: String,
    documents: Vec<String>,
}

/// The scores of the documents in rerank.json: in one request, or in a request per document.
fn rerank(folder: &Path, names: &[String], options: &LoadOptions) -> Result<HashMap<String, Case>> {
    let model = Rc::new(Reranker::from_files(&ModelFiles::dir(folder)?, options)?);
    let request: Rc<RerankRequest> =
        Rc::new(serde_json::from_slice(&std::fs::read(folder.join("rerank.json"))?)?);
    let case = |name: &String| {
        let size = match name.as_str() {
            "one request" => request.documents.len(),
            "a request per document" => 1,
            _ => bail!("no case {name}"),
        };
        let (model, request) = (model.clone(), request.clone());
        let case = Case::single(move || {
            let requests = request.documents.chunks(size);
            let scores = requests.map(|part| Ok(model.rank(&request.query, part, None)?.scores));
            Ok(Tensor::new(scores.collect::<Result<Vec<_>>>()?.concat(), &Cpu)?.unsqueeze(1)?)
        });
        Ok((name.clone(), case))
    };
    names.iter().map(case).collect()
}

/// Case N generates `length` tokens for each of the `sequences` in cases.json, by beam search with N
/// beams.
fn generate(hf: &Path, names: &[String], options: &LoadOptions) -> Result<HashMap<String, Case>> {
    #[derive(Deserialize)]
    struct Input {
        sequences: Sequences,
        length: usize,
    }
    let Input { sequences, length } =
        serde_json::from_slice(&std::fs::read(hf.join("cases.json"))?)?;
    let model = Rc::new(EncoderDecoder::from_dir(hf, options)?.0);
    let ids = Tensor::new(sequences, &Cpu)?;
    let case = |name: &String| {
        let num_beams = name.parse()?;
        let strategy = Strategy::Beam { num_beams, length_penalty: 1.0, early_stopping: false };
        let config = GenerateConfig::greedy(1 + length).with_strategy(strategy);
        let (model, ids) = (model.clone(), ids.clone());
        let call = move || Ok(Tensor::new(model.generate(&ids, None, &config)?, &Cpu)?);
        Ok((name.clone(), Case::single(call)))
    };
    names.iter().map(case).collect()
}

fn attention(hf: &Path, names: &[String], precision: Precision) -> Result<HashMap<String, Case>> {
    let dtype = match precision {
        Precision::F32 => DType::F32,
        Precision::Bf16 => DType::BF16,
        _ => bail!("attention is computed in f32 or bf16: got {precision:?}"),
    };
    let case = |name: &String| {
        let mut tensors = safetensors::load(hf.join(format!("{name}.safetensors")), &Cpu)?;
        for tensor in tensors.values_mut() {
            *tensor = tensor.to_dtype(dtype)?;
        }
        let mask = AttentionMask::none();
        let case = Case::single(move || {
            let [q, k, v] = ["q", "k", "v"].map(|name| &tensors[name]);
            Ok(scaled_dot_product_attention(q, k, v, &mask, None)?)
        });
        Ok((name.clone(), case))
    };
    names.iter().map(case).collect()
}

/// Case N finds the ten nearest rows of corpus.npy for each of the first N rows of queries.npy.
fn search(folder: &Path, names: &[String]) -> Result<HashMap<String, Case>> {
    let corpus: Rc<[f32]> =
        Tensor::read_npy(folder.join("corpus.npy"))?.flatten_all()?.to_vec1()?.into();
    let queries = Tensor::read_npy(folder.join("queries.npy"))?.to_vec2()?;
    let case = |name: &String| {
        let search = Search::new(&queries[..name.parse()?], 10)?;
        let corpus = corpus.clone();
        let case = Case::single(move || {
            let hits = search.scan(0, &corpus)?.into_hits();
            let rows = hits.iter().map(|hits| hits.iter().map(|hit| hit.row as u32));
            Ok(Tensor::new(rows.map(Iterator::collect).collect::<Vec<Vec<u32>>>(), &Cpu)?)
        });
        Ok((name.clone(), case))
    };
    names.iter().map(case).collect()
}

/// Case `build` builds the index of the rows of corpus-*.npy; case N finds the ten best rows for each
/// of the first N rows of queries-*.npy.
fn sparse_search(folder: &Path, names: &[String]) -> Result<HashMap<String, Case>> {
    let corpus: Rc<[SparseVector]> = sparse_vectors(folder, "corpus")?.into();
    let queries = sparse_vectors(folder, "queries")?;
    let dimension = 1 + corpus.iter().flat_map(|row| &row.indices).max().map_or(0, |&i| i as usize);
    let build = move || -> Result<_> {
        let mut index = SparseIndexBuilder::new(dimension, 0);
        corpus.iter().try_for_each(|row| index.push(&row.indices, &row.values))?;
        Ok(index.build())
    };
    let index = Rc::new(build()?);
    let build = Rc::new(build);
    let case = |name: &String| {
        if name == "build" {
            let build = build.clone();
            let case = Case::single(move || Ok(Tensor::new(build()?.len() as u32, &Cpu)?));
            return Ok((name.clone(), case));
        }
        let (index, queries) = (index.clone(), queries[..name.parse()?].to_vec());
        let case = Case::single(move || {
            let hits = index.search(&queries, 10)?;
            let rows = hits.iter().map(|hits| hits.iter().map(|hit| hit.row as u32));
            Ok(Tensor::new(rows.map(Iterator::collect).collect::<Vec<Vec<u32>>>(), &Cpu)?)
        });
        Ok((name.clone(), case))
    };
    names.iter().map(case).collect()
}

/// The rows of NAME-offsets.npy, NAME-indices.npy and NAME-values.npy.
fn sparse_vectors(folder: &Path, name: &str) -> Result<Vec<SparseVector>> {
    let read = |part| Tensor::read_npy(folder.join(format!("{name}-{part}.npy")));
    let (offsets, indices) = (read("offsets")?.to_vec1::<u32>()?, read("indices")?.to_vec1()?);
    let values = read("values")?.to_vec1()?;
    let row = |ends: &[u32]| {
        let range = ends[0] as usize..ends[1] as usize;
        SparseVector::new(indices[range.clone()].to_vec(), values[range].to_vec())
    };
    Ok(offsets.windows(2).map(row).collect())
}

/// The sparse vectors of texts.
fn splade(hf: &Path, names: &[String], precision: Precision) -> Result<HashMap<String, Case>> {
    let options = LoadOptions::default().with_precision(precision);
    let model = Rc::new(SparseEmbedder::from_dir(hf, &options)?);
    let case = |(name, texts): (String, Vec<String>)| {
        let model = model.clone();
        let call = move || {
            let vectors = model.embed(&texts, EmbedOptions::new())?;
            let mut dense = vec![0f32; vectors.len() * model.dimension()];
            for (row, vector) in dense.chunks_mut(model.dimension()).zip(&vectors) {
                for (&index, &value) in vector.indices.iter().zip(&vector.values) {
                    row[index as usize] = value;
                }
            }
            Ok(Tensor::from_vec(dense, (vectors.len(), model.dimension()), &Cpu)?)
        };
        (name, Case::single(call))
    };
    Ok(inputs(hf, names)?.map(case).collect())
}

/// The vectors of the tokens of the case `query` or `document`, as texts of this name.
fn colbert(hf: &Path, names: &[String], precision: Precision) -> Result<HashMap<String, Case>> {
    let options = LoadOptions::default().with_precision(precision);
    let model = Rc::new(MultiVectorEmbedder::from_dir(hf, &options)?);
    let case = |(name, texts): (String, Vec<String>)| {
        let (model, prompt) = (model.clone(), name.clone());
        let call = move || {
            let options = EmbedOptions::new().with_prompt(Prompt::Named(&prompt));
            let vectors = model.embed(&texts, options)?;
            let values: Vec<f32> = vectors.iter().flat_map(Row::values).copied().collect();
            let rows = values.len() / model.dimension();
            Ok(Tensor::from_vec(values, (rows, model.dimension()), &Cpu)?)
        };
        (name, Case::single(call))
    };
    Ok(inputs(hf, names)?.map(case).collect())
}

/// Case `scores` is the MaxSim of query.npy `(Q, E)` and each document of corpus.npy, which has the
/// same number of vectors for each, `(B, T, E)` in f16. Case `read` reads the corpus from memory.
fn max_sim(folder: &Path, names: &[String]) -> Result<HashMap<String, Case>> {
    let corpus = Tensor::read_npy(folder.join("corpus.npy"))?;
    let (b, t, e) = corpus.dims3()?;
    let corpus: Rc<[f16]> = corpus.flatten_all()?.to_vec1()?.into();
    let query = Tensor::read_npy(folder.join("query.npy"))?.flatten_all()?.to_vec1::<f32>()?;
    let max_sim = Rc::new(MaxSim::new(&query, e)?);
    let offsets: Rc<[usize]> = (0..=b).map(|document| document * t).collect();
    let case = |name: &String| {
        let (corpus, max_sim, offsets) = (corpus.clone(), max_sim.clone(), offsets.clone());
        let case = match name.as_str() {
            "scores" => Case::single(move || {
                let scores = max_sim.scores(VectorSlice::F16(&corpus), &offsets);
                Ok(Tensor::new(scores, &Cpu)?.unsqueeze(0)?)
            }),
            "read" => Case::single(move || {
                let words: &[u64] = bytemuck::cast_slice(&corpus);
                let sums = words.par_chunks(1 << 16).map(|words| words.iter().sum::<u64>() as f64);
                Ok(Tensor::new(&[[sums.sum::<f64>()]], &Cpu)?)
            }),
            _ => bail!("no case {name}"),
        };
        Ok((name.clone(), case))
    };
    names.iter().map(case).collect()
}

/// candle-transformers on padded batches of similar length.
fn candle(hf: &Path, names: &[String]) -> Result<HashMap<String, Case>> {
    let config: peer::Config = serde_json::from_slice(&std::fs::read(hf.join("config.json"))?)?;
    let tensors = safetensors::load(hf.join("model.safetensors"), &Cpu)?;
    let vb = VarBuilder::from_tensors(tensors, DType::F32, &Cpu);
    let model = Rc::new(peer::BertModel::load(vb, &config)?);
    let case = |(name, sequences): (String, Sequences)| {
        let model = model.clone();
        let mut order: Vec<usize> = (0..sequences.len()).collect();
        order.sort_by_key(|&i| sequences[i].len());
        let batches = order.chunks(PEER_BATCH).map(|batch| padded(batch, &sequences));
        let batches = batches.collect::<Result<Vec<_>>>()?;
        let call = move || {
            let forward = |(ids, types, mask): &(Tensor, Tensor, Option<Tensor>)| {
                Ok(model.forward(ids, types, mask.as_ref())?)
            };
            batches.iter().map(forward).collect()
        };
        let rows = move |outputs: Vec<Tensor>| {
            let mut of_sequence = vec![None; sequences.len()];
            for (batch, output) in order.chunks(PEER_BATCH).zip(&outputs) {
                for (row, &i) in batch.iter().enumerate() {
                    of_sequence[i] = Some(output.get(row)?.narrow(0, 0, sequences[i].len())?);
                }
            }
            let of_sequence: Vec<Tensor> = of_sequence.into_iter().flatten().collect();
            ensure!(of_sequence.len() == sequences.len());
            Ok(Tensor::cat(&of_sequence, 0)?)
        };
        Ok((name, Case::new(call, rows)))
    };
    inputs(hf, names)?.map(case).collect()
}

/// Ids and token types `(B, T)` of the sequences in `batch`, and a mask, 1 = a token, if there is
/// padding.
fn padded(batch: &[usize], sequences: &Sequences) -> Result<(Tensor, Tensor, Option<Tensor>)> {
    let t = batch.iter().map(|&i| sequences[i].len()).max().context("an empty batch")?;
    let filled = |value: &dyn Fn(u32) -> u32| -> Result<Tensor> {
        let row = |&i: &usize| {
            let mut row: Vec<u32> = sequences[i].iter().map(|&id| value(id)).collect();
            row.resize(t, 0);
            row
        };
        Ok(Tensor::new(batch.iter().map(row).collect::<Vec<_>>(), &Cpu)?)
    };
    let padding = batch.iter().any(|&i| sequences[i].len() < t);
    let mask = padding.then(|| filled(&|_| 1)).transpose()?;
    Ok((filled(&|id| id)?, filled(&|_| 0)?, mask))
}
