//! What two heads do to "I love AI": `cargo run --release --example one_head_at_a_time`.
//!
//! The projections are made for weights known beforehand: each word is a one-hot vector, its key
//! and its value are itself, and its query holds the logarithms of its weights.

use anyhow::Result;
use candle_core::{DType::F32, Device::Cpu, Tensor};
use candle_nn::VarBuilder;
use mha::scaled_dot_product_attention_with_weights as attend;
use mha::{AttentionConfig, AttentionMask, MultiHeadAttention, ProjectionBias};

fn main() -> Result<()> {
    // What each word (row) attends to (column) in each head; H = 2, D = 3, E = 6.
    let wanted = [
        Tensor::new(&[[0.1f32, 0.8, 0.1], [0.7, 0.2, 0.1], [0.3, 0.4, 0.3]], &Cpu)?,
        Tensor::new(&[[0.3f32, 0.3, 0.4], [0.1, 0.2, 0.7], [0.1, 0.8, 0.1]], &Cpu)?,
    ];
    let query = |w: &Tensor| (w.log()? * 3f64.sqrt())?.t()?.pad_with_zeros(1, 0, 3); // (D, E)
    let w_q = Tensor::cat(&[query(&wanted[0])?, query(&wanted[1])?], 0)?; // (E, E): both heads
    let (one, minus) = (Tensor::eye(3, F32, &Cpu)?, Tensor::eye(3, F32, &Cpu)?.neg()?);
    let w_k = Tensor::cat(&[&one, &one], 0)?.pad_with_zeros(1, 0, 3)?;
    let w_v = w_k.clone();
    let (sum, difference) = (Tensor::cat(&[&one, &one], 1)?, Tensor::cat(&[&one, &minus], 1)?);
    let w_o = (Tensor::cat(&[sum, difference], 0)? * 0.5)?;

    let names = ["query.weight", "key.weight", "value.weight", "output.weight"].map(String::from);
    let tensors = names.into_iter().zip([&w_q, &w_k, &w_v, &w_o].map(Tensor::clone)).collect();
    let config = AttentionConfig { bias: ProjectionBias::NONE, ..AttentionConfig::new(6, 2) };
    let vb = VarBuilder::from_tensors(tensors, F32, &Cpu);
    let attention = MultiHeadAttention::new(&config, vb)?;

    let words = Tensor::eye(6, F32, &Cpu)?.narrow(0, 0, 3)?; // I, love, AI: (T, E)
    let (x, mask) = (words.unsqueeze(0)?, AttentionMask::none());
    let (together, weights) = attention.forward_with_weights(&x, &x, &x, &mask)?;

    let mut heads = vec![];
    for (h, wanted) in wanted.iter().enumerate() {
        // W_h is the rows of the fused matrix that are this head's.
        let own = |w: &Tensor| words.matmul(&w.narrow(0, 3 * h, 3)?.t()?)?.reshape((1, 1, 3, 3));
        let (head, own) = attend(&own(&w_q)?, &own(&w_k)?, &own(&w_v)?, &mask, None)?;
        let (head, own) = (head.flatten_to(2)?, own.flatten_to(2)?); // (T, D), (T, S)
        println!("head {}: \"love\" attends {:.1?}", h + 1, own.get(1)?.to_vec1::<f32>()?);
        println!("        and becomes  {:.1?}", head.get(1)?.to_vec1::<f32>()?);
        assert_same(&own, wanted)?;
        assert_same(&own, &weights.get(0)?.get(h)?)?;
        heads.push(head);
    }
    let side_by_side = Tensor::cat(&heads, 1)?; // (T, H·D) = (T, E)
    println!("side by side: {:.1?}", side_by_side.get(1)?.to_vec1::<f32>()?);
    let merged = side_by_side.matmul(&w_o.t()?)?;
    println!("through W_O:  {:.2?}", merged.get(1)?.to_vec1::<f32>()?);
    assert_same(&merged, &together.get(0)?)
}

fn assert_same(a: &Tensor, b: &Tensor) -> Result<()> {
    let difference = (a - b)?.abs()?.max_all()?.to_scalar::<f32>()?;
    anyhow::ensure!(difference < 1e-6, "differs by {difference}");
    Ok(())
}
