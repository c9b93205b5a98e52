//! Computes the attention of two heads over "I love AI", step by step:
//! `cargo run --release --example one_head_at_a_time`.
//!
//! The projections are constructed so that the attention weights are known. Each word is a one-hot
//! vector. In each head, the key and the value of a word are one-hot too, and the query of a word is
//! √D times the logarithms of the word's attention weights.

use anyhow::Result;
use candle_core::{DType::F32, Device::Cpu, Tensor};
use candle_nn::VarBuilder;
use mha::scaled_dot_product_attention_with_weights as attend;
use mha::{AttentionConfig, AttentionMask, MultiHeadAttention, ProjectionBias};

fn main() -> Result<()> {
    // The attention weights of each query (row) and key (column) per head; H = 2, D = 3, E = 6.
    let expected = [
        Tensor::new(&[[0.1f32, 0.8, 0.1], [0.7, 0.2, 0.1], [0.3, 0.4, 0.3]], &Cpu)?,
        Tensor::new(&[[0.3f32, 0.3, 0.4], [0.1, 0.2, 0.7], [0.1, 0.8, 0.1]], &Cpu)?,
    ];
    let query = |w: &Tensor| (w.log()? * 3f64.sqrt())?.t()?.pad_with_zeros(1, 0, 3); // (D, E)
    let w_q = Tensor::cat(&[query(&expected[0])?, query(&expected[1])?], 0)?; // (E, E): both heads
    let (eye, minus_eye) = (Tensor::eye(3, F32, &Cpu)?, Tensor::eye(3, F32, &Cpu)?.neg()?);
    let w_k = Tensor::cat(&[&eye, &eye], 0)?.pad_with_zeros(1, 0, 3)?;
    let w_v = w_k.clone();
    let (sum, difference) = (Tensor::cat(&[&eye, &eye], 1)?, Tensor::cat(&[&eye, &minus_eye], 1)?);
    let w_o = (Tensor::cat(&[sum, difference], 0)? * 0.5)?;

    let names = ["query.weight", "key.weight", "value.weight", "output.weight"].map(String::from);
    let tensors = names.into_iter().zip([&w_q, &w_k, &w_v, &w_o].map(Tensor::clone)).collect();
    let config = AttentionConfig::new(6, 2).with_bias(ProjectionBias::NONE);
    let vb = VarBuilder::from_tensors(tensors, F32, &Cpu);
    let attention = MultiHeadAttention::new(&config, vb)?;

    let words = Tensor::eye(6, F32, &Cpu)?.narrow(0, 0, 3)?; // I, love, AI: (T, E)
    let (x, mask) = (words.unsqueeze(0)?, AttentionMask::none());
    let (output, weights) = attention.forward_with_weights(&x, &x, &x, &mask)?;

    let mut heads = vec![];
    for (h, expected) in expected.iter().enumerate() {
        // The projection of head h: rows 3h to 3h + 2 of a weight that holds both heads.
        let project =
            |w: &Tensor| words.matmul(&w.narrow(0, 3 * h, 3)?.t()?)?.reshape((1, 1, 3, 3));
        let (head, head_weights) =
            attend(&project(&w_q)?, &project(&w_k)?, &project(&w_v)?, &mask, None)?;
        let head = head.flatten_to(2)?; // (T, D)
        let head_weights = head_weights.flatten_to(2)?; // (T, S)
        let weights_of_love = head_weights.get(1)?.to_vec1::<f32>()?;
        println!("head {}: weights of \"love\" {weights_of_love:.1?}", h + 1);
        println!("        output of \"love\"  {:.1?}", head.get(1)?.to_vec1::<f32>()?);
        assert_close(&head_weights, expected)?;
        assert_close(&head_weights, &weights.get(0)?.get(h)?)?;
        heads.push(head);
    }
    let concatenated = Tensor::cat(&heads, 1)?; // (T, H·D) = (T, E)
    println!("concatenated heads: {:.1?}", concatenated.get(1)?.to_vec1::<f32>()?);
    let merged = concatenated.matmul(&w_o.t()?)?;
    println!("output projection:  {:.2?}", merged.get(1)?.to_vec1::<f32>()?);
    assert_close(&merged, &output.get(0)?)
}

fn assert_close(a: &Tensor, b: &Tensor) -> Result<()> {
    let differences = (a - b)?.abs()?.flatten_all()?.to_vec1::<f32>()?;
    match differences.into_iter().find(|difference| difference.is_nan() || *difference >= 1e-6) {
        Some(got) => anyhow::bail!("expected differences below 1e-6, got {got}"),
        None => Ok(()),
    }
}
