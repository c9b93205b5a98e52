//! Generates text with a causal language model, such as Qwen3, Llama or Gemma 3:
//! `cargo run --release --example generate [FOLDER [TEXT]]`.
//!
//! FOLDER holds the model and its tokenizer. The default is a tiny model of the tests, whose weights
//! are random.

use std::{
    io::{Write, stdout},
    ops::ControlFlow,
    time::Instant,
};

use anyhow::{Result, ensure};
use candle_core::{D, Device::Cpu, Tensor};
use encoder::{CausalLm, GenerateConfig, LoadOptions, ModelFiles, TextTokenizer};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/decoders/rerank/qwen3");
const NEW_TOKENS: usize = 32;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().unwrap_or(TINY.into());
    let text = arguments.next().unwrap_or("Once upon a time".into());
    let (model, report) = CausalLm::from_dir(&folder, &LoadOptions::default())?;
    println!("{report}\n");
    let files = ModelFiles::dir(&folder)?;
    let tokenizer = TextTokenizer::from_files(&files, model.config())?;
    let prompt = tokenizer.encode(&[&text])?.remove(0).input_ids;
    ensure!(!prompt.is_empty(), "{text:?} has no tokens: expected at least one");

    // Each step computes one token; the keys and values of the earlier tokens are in a cache.
    let max_length = (prompt.len() + NEW_TOKENS).min(model.config().encoder.max_tokens());
    let config = GenerateConfig::greedy(max_length).with_eos_token_id(eos_token_id(&files)?);
    let mut ids = prompt.clone();
    let mut written = tokenizer.decode(&ids)?;
    print!("{written}");
    let start = Instant::now();
    let generated =
        model.generate_with(std::slice::from_ref(&prompt), None, &config, |_sequence, token| {
            ids.push(token);
            // A token may be a part of a character, which the next token completes.
            let text = tokenizer.decode(&ids).unwrap_or_default();
            if let Some(new) = text.strip_prefix(&written).filter(|new| !new.ends_with('\u{fffd}'))
            {
                print!("{new}");
                written = text;
            }
            match stdout().flush() {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            }
        })?;
    let (new, seconds) = (generated[0].len() - prompt.len(), start.elapsed().as_secs_f64());
    println!("\n\n{new} tokens in {seconds:.3} s, {:.1} per second", new as f64 / seconds);

    // One pass without a cache chooses the same tokens.
    let logits = model.forward(&Tensor::new(generated.clone(), &Cpu)?, None, None)?; // (1, T, V)
    let chosen = logits.squeeze(0)?.argmax(D::Minus1)?.to_vec1::<u32>()?; // (T,)
    ensure!(
        chosen[prompt.len() - 1..generated[0].len() - 1] == generated[0][prompt.len()..],
        "expected the tokens of a pass without a cache, {chosen:?}, got {:?}",
        generated[0]
    );
    Ok(())
}

/// The first `eos_token_id` of `config.json`, which may be one id, a list or null.
fn eos_token_id(files: &ModelFiles) -> Result<Option<u32>> {
    let config = files.need("config.json", "the token that ends a text")?;
    let config: serde_json::Value = serde_json::from_slice(&config)?;
    let eos = &config["eos_token_id"];
    let id = eos.as_u64().or_else(|| eos.get(0)?.as_u64());
    Ok(id.map(u32::try_from).transpose()?)
}
