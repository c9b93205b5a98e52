//! Trains an encoder-decoder to sort digits: `cargo run --release --example sort_digits`.
//!
//! The trained model is saved to target/sort_digits, for the example bert2bert.

use anyhow::{Result, ensure};
use candle_core::{DType::F32, Device::Cpu, Tensor};
use candle_nn::{AdamW, Optimizer, ParamsAdamW, VarMap, loss::cross_entropy};
use encoder::{BertConfig, EncoderDecoder, EncoderDecoderConfig, GenerateConfig};
use rand::{Rng, SeedableRng, rngs::StdRng};

const START: u32 = 10; // tokens 0 to 9 are the digits
const END: u32 = 11;

fn main() -> Result<()> {
    let mut size = BertConfig::new(12, 64, 2, 4, 128); // vocabulary, E, layers, heads, F
    size.max_position_embeddings = 16;
    size.pad_token_id = None;
    let config = EncoderDecoderConfig::new(size.clone(), size, START, END);
    let (vars, init) = (VarMap::new(), mha::Init::Bert { initializer_range: 0.05 });
    let vb = init.var_builder(&vars, 1, F32, &Cpu);
    let model = EncoderDecoder::new(&config, vb.pp("encoder"), vb.pp("decoder"))?;

    let params = ParamsAdamW { lr: 1e-3, weight_decay: 0.0, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(vars.all_vars(), params)?;
    let mut rng = StdRng::seed_from_u64(1);
    let mut pair = || {
        let digits: Vec<u32> = (0..6).map(|_| rng.random_range(0..10)).collect();
        let mut sorted = digits.clone();
        sorted.sort();
        (digits, sorted)
    };
    let mut losses = vec![];
    for step in 1..=200 {
        let (digits, sorted): (Vec<_>, Vec<_>) = (0..64).map(|_| pair()).unzip();
        let input: Vec<_> = sorted.iter().map(|s| [&[START], &s[..]].concat()).collect();
        let target: Vec<_> = sorted.iter().flat_map(|s| [&s[..], &[END]].concat()).collect();
        let (digits, input) = (Tensor::new(digits, &Cpu)?, Tensor::new(input, &Cpu)?);
        let logits = model.forward(&digits, None, &input)?; // (B, T, vocabulary)
        let loss = cross_entropy(&logits.flatten_to(1)?, &Tensor::new(target, &Cpu)?)?;
        optimizer.backward_step(&loss)?;
        losses.push(loss.to_scalar::<f32>()?);
        if step == 1 || step % 50 == 0 {
            println!("step {step:3}: loss {:.3}", losses[step - 1]);
        }
    }
    ensure!(losses[0] > 2.0 && losses[199] < 0.1, "training did not converge: {losses:?}");

    let (digits, sorted): (Vec<_>, Vec<_>) = (0..200).map(|_| pair()).unzip();
    let generated =
        model.generate(&Tensor::new(digits.clone(), &Cpu)?, None, &GenerateConfig::greedy(8))?;
    println!("input {:?}, output {:?}", digits[0], &generated[0]);
    let is_correct = |(g, s): &(&Vec<u32>, &Vec<u32>)| g[1..] == [&s[..], &[END]].concat();
    let correct = generated.iter().zip(&sorted).filter(is_correct).count();
    println!("{correct} of 200 new sequences are sorted correctly");
    ensure!(correct >= 190, "expected at least 190 correct sequences, got {correct}");

    let tensors = vars
        .data()
        .lock()
        .unwrap()
        .iter()
        .map(|(k, v)| (k.clone(), v.as_tensor().clone()))
        .collect();
    EncoderDecoder::save("target/sort_digits", &config, &tensors)?;
    Ok(())
}
