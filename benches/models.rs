//! Benchmarks in f32, bf16 and int8: BERT-base with random weights on a ragged batch, and
//! all-MiniLM-L6-v2 from texts to vectors. Run with
//! `cargo bench -p encodle-benches --bench models`. An item is a token for BERT-base and a text for
//! MiniLM.

use std::{collections::HashMap, sync::LazyLock};

use candle_core::{DType, Device::Cpu, Tensor};
use candle_nn::{VarBuilder, VarMap};
use divan::{Bencher, black_box, counter::ItemsCount};
use encoder::{BertConfig, Embedder, EncoderModel, LoadOptions, Precision, RaggedBatch};
use mha::Init;
use mha_kernels::Isa;

const PRECISIONS: [Precision; 3] = [Precision::F32, Precision::Bf16, Precision::Int8];
const SIZES: [(usize, usize); 3] = [(1, 128), (8, 128), (1, 512)];

fn main() {
    let isa = Isa::get().expect("MHA_ISA names an instruction set of this machine");
    println!("{} on {} threads", isa.name(), rayon::current_num_threads());
    divan::main();
}

#[track_caller]
fn assert_finite(x: &Tensor, dims: [usize; 2]) {
    assert_eq!(x.dims(), dims);
    let x = x.flatten_all().and_then(|x| x.to_vec1::<f32>()).expect("f32");
    assert!(
        x.iter().all(|x| x.is_finite()) && x.iter().any(|&x| x != 0.0),
        "the output is finite and not zero"
    );
}

/// Initial weights of BERT-base, detached from autograd, since tracked weights cannot be bf16 or
/// int8.
static WEIGHTS: LazyLock<HashMap<String, Tensor>> = LazyLock::new(|| {
    let vars = VarMap::new();
    let vb = Init::Bert { initializer_range: 0.02 }.var_builder(&vars, 1, DType::F32, &Cpu);
    EncoderModel::new(&BertConfig::bert_base().encoder_config(), false, vb)
        .expect("the sizes are consistent");
    let vars = vars.data().lock().expect("the lock is not poisoned");
    vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect()
});

fn bert_base(bencher: Bencher, precision: Precision, (sequences, tokens): (usize, usize)) {
    let (dtype, compute_type) = precision.on(&Cpu).expect("the CPU supports every precision");
    assert_eq!(dtype, DType::F32);
    let mut config = BertConfig::bert_base();
    config.compute_type = compute_type;
    let vb = VarBuilder::from_tensors(WEIGHTS.clone(), dtype, &Cpu);
    let model =
        EncoderModel::new(&config.encoder_config(), false, vb).expect("the sizes are consistent");

    let mut batch = RaggedBatch::default();
    for first in (0..sequences).map(|i| i * tokens) {
        let id = |i| (i * 7919 % config.vocab_size) as u32;
        let ids: Vec<u32> = (first..first + tokens).map(id).collect();
        batch.push(&ids, &vec![0; tokens]).expect("each id has a token type");
    }
    let run =
        || model.forward_ragged(black_box(&batch)).expect("the ids are below the vocabulary size");
    assert_finite(&run(), [sequences * tokens, config.hidden_size]);
    bencher.counter(ItemsCount::new(sequences * tokens)).bench(run);
}

#[divan::bench(args = SIZES)]
fn bert_base_f32(bencher: Bencher, size: (usize, usize)) {
    bert_base(bencher, Precision::F32, size);
}

#[divan::bench(args = SIZES)]
fn bert_base_bf16(bencher: Bencher, size: (usize, usize)) {
    bert_base(bencher, Precision::Bf16, size);
}

#[divan::bench(args = SIZES)]
fn bert_base_int8(bencher: Bencher, size: (usize, usize)) {
    bert_base(bencher, Precision::Int8, size);
}

#[divan::bench(args = PRECISIONS)]
fn minilm(bencher: Bencher, precision: Precision) {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../weights/all-MiniLM-L6-v2");
    let embedder = Embedder::from_dir(dir, &LoadOptions::default().with_precision(precision))
        .expect("the model loads");
    let texts: Vec<&str> = include_str!("../tests/golden/sentences.txt").lines().collect();
    let run = || embedder.embed(black_box(&texts)).expect("the texts have tokens");
    assert_finite(&run(), [texts.len(), embedder.dimension()]);
    bencher.counter(ItemsCount::new(texts.len())).bench(run);
}
