//! A text's embedding does not depend on the company it is in, to the bit.

use candle_core::{Device::Cpu, Tensor};
use encoder::Embedder;

use crate::support::{MINILM, golden, max_difference};

#[test]
fn batched_equals_alone() -> anyhow::Result<()> {
    let embedder = Embedder::from_dir(MINILM, &Cpu)?;
    let texts = std::fs::read_to_string(golden("sentences.txt"))?;
    let texts: Vec<&str> = texts.lines().collect();
    let alone = texts.iter().map(|text| embedder.embed(&[text]));
    let alone = Tensor::cat(&alone.collect::<Result<Vec<_>, _>>()?, 0)?;
    let together = embedder.embed(&texts)?;

    let reversed: Vec<&str> = texts.iter().rev().copied().collect();
    let order: Vec<u32> = (0..texts.len() as u32).rev().collect();
    let order = Tensor::from_slice(&order, texts.len(), &Cpu)?;
    let reversed = embedder.embed(&reversed)?.index_select(&order, 0)?;
    let in_pieces = Embedder::from_dir(MINILM, &Cpu)?.with_token_budget(30).embed(&texts)?;

    let one_thread = rayon::ThreadPoolBuilder::new().num_threads(1).build()?;
    let one_thread = one_thread.install(|| embedder.embed(&texts))?;

    for (company, got) in [
        ("all", together),
        ("reversed", reversed),
        ("in pieces", in_pieces),
        ("on one thread", one_thread),
    ] {
        assert_eq!(max_difference(&got, &alone)?, 0.0, "{company}");
    }
    Ok(())
}
