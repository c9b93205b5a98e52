//! Generates text with an encoder-decoder:
//! `cargo run --release --example bert2bert [FOLDER [TEXT]]`.
//!
//! FOLDER holds a Hugging Face `EncoderDecoderModel` of two BERT models. If FOLDER has no
//! tokenizer.json, TEXT is a list of token ids separated by spaces. The defaults are the model that
//! the example sort_digits trains, and the ids `3 1 4 1 5 9`.

use std::{ops::ControlFlow, path::Path};

use anyhow::{Context, Result, ensure};
use candle_core::{Device::Cpu, Tensor};
use encoder::{EncoderDecoder, GenerateConfig, LoadOptions, ModelFiles, Strategy, TextTokenizer};

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().unwrap_or("target/sort_digits".into());
    let text = arguments.next().unwrap_or("3 1 4 1 5 9".into());
    ensure!(
        Path::new(&folder).is_dir(),
        "{folder} not found: expected the folder of an encoder-decoder; \
         `cargo run --release --example sort_digits` creates target/sort_digits"
    );
    let (model, report) = EncoderDecoder::from_dir(&folder, &LoadOptions::default())?;
    println!("{report}");

    let files = ModelFiles::dir(&folder)?;
    let tokenizer = if Path::new(&folder).join("tokenizer.json").exists() {
        Some(TextTokenizer::from_files(&files, &(&model.config().encoder).into())?)
    } else {
        None
    };
    let ids = match &tokenizer {
        Some(tokenizer) => tokenizer.encode(&[&text])?.remove(0).input_ids,
        None => {
            let ids = text.split_whitespace().map(str::parse).collect::<Result<Vec<u32>, _>>();
            ids.with_context(|| {
                format!("{text:?}: expected token ids, because {folder} has no tokenizer.json")
            })?
        }
    };
    let memory = model.memory(&Tensor::new(vec![ids], &Cpu)?, None)?;
    let prompt = vec![
        model.config().decoder_start_token_id.context("config has no decoder_start_token_id")?,
    ];

    let max_length = model.config().decoder.max_position_embeddings.min(64);
    let sample = Strategy::Sample { temperature: 0.8, top_k: Some(20), top_p: Some(0.9), seed: 1 };
    let beam = Strategy::Beam { num_beams: 4, length_penalty: 1.0, early_stopping: false };
    for (name, strategy) in [("greedy", Strategy::Greedy), ("sampled", sample), ("beam", beam)] {
        let eos_token_id = model.config().eos_token_id;
        let config = GenerateConfig::greedy(max_length)
            .with_eos_token_id(eos_token_id)
            .with_strategy(strategy);
        print!("{name}:");
        let generated = model.decoder().generate_with(
            std::slice::from_ref(&prompt),
            Some(&memory),
            &config,
            |_sequence, token| {
                print!(" {token}");
                ControlFlow::Continue(())
            },
        )?;
        println!();
        if let Some(tokenizer) = &tokenizer {
            println!("{}", tokenizer.decode(&generated[0])?);
        }
    }
    Ok(())
}
