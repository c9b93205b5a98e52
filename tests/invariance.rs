//! A text's embedding does not depend on the company it is in.

use candle_core::{Device::Cpu, Tensor};
use encoder::Embedder;

use crate::support::{MINILM, golden, max_difference};

/// The measured difference is 0 on x86-64 with AVX2 and two threads. But candle's products may sum
/// in another order where a batch has more rows, so what is asserted is eight times f32's spacing
/// at 0.05, the size of a component.
const BOUND: f64 = 3e-7;

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

    for (company, got) in [("all", together), ("reversed", reversed), ("in pieces", in_pieces)] {
        let difference = max_difference(&got, &alone)?;
        println!("{company} against alone: largest difference {difference:.1e}");
        assert!(difference <= BOUND, "{company}: {difference:e}");
    }
    Ok(())
}
