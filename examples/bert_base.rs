//! Loads a BERT model and prints its load report and output shapes:
//! `cargo run --release --example bert_base [FOLDER]`.
//!
//! FOLDER holds config.json and model.safetensors with Hugging Face's tensor names. The default is
//! BERT-base with random weights.

use anyhow::Result;
use candle_core::{DType, Device::Cpu, Tensor};
use candle_nn::{VarBuilder, VarMap};
use encoder::{BertConfig, EncoderModel, LoadOptions};
use mha::AttentionMask;

fn main() -> Result<()> {
    let model = match std::env::args().nth(1) {
        Some(folder) => {
            let (model, report) = EncoderModel::from_dir(folder, &LoadOptions::default())?;
            println!("{report}");
            model
        }
        None => {
            println!("no folder given: BERT-base with random weights");
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Cpu);
            EncoderModel::new(&BertConfig::bert_base().encoder_config(), true, vb)?
        }
    };
    let config = model.config();
    println!("{config:#?}");
    println!("head_dim: {}", config.attention()?.head_dim());

    // Two sequences of 6 and 4 tokens, padded to 6.
    let input_ids = Tensor::new(&[[1u32, 2, 3, 4, 5, 6], [7, 8, 9, 10, 0, 0]], &Cpu)?;
    let mask = AttentionMask::none().with_valid_lens(&Tensor::new(&[6u32, 4], &Cpu)?)?;
    let (out, all) = model.forward_all(&input_ids, None, &mask)?;
    println!("last_hidden_state: {:?}", out.last_hidden_state.dims());
    println!("pooler_output: {:?}", out.pooler_output.as_ref().map(Tensor::dims));
    println!(
        "hidden_states: {} of shape {:?}",
        all.hidden_states.len(),
        all.hidden_states[0].dims()
    );
    println!("attentions: {} of shape {:?}", all.attentions.len(), all.attentions[0].dims());
    Ok(())
}
