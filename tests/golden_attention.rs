//! Compares outputs, weights and gradients of attention with `torch.nn.MultiheadAttention` and
//! `F.scaled_dot_product_attention`. The table of cases is the same as in tests/golden/generate.py.
//!
//! The tolerance is 1e-6, because outputs have values of about 1 and are sums of at most 307 f32
//! terms with weights that add up to 1.

use candle_core::{DType, Device::Cpu, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use mha::{
    AttentionConfig, AttentionMask, CausalSelfAttention, CrossAttention, MultiHeadAttention,
    ProjectionBias, scaled_dot_product_attention,
};

use crate::support::{Golden, assert_close};

type Result<T = ()> = anyhow::Result<T>;

struct Case {
    name: &'static str,
    config: AttentionConfig,
    /// Creates the mask from the golden file and the case's name.
    mask: fn(&Golden, &str) -> mha::Result<AttentionMask>,
}

fn none(_: &Golden, _: &str) -> mha::Result<AttentionMask> {
    Ok(AttentionMask::none())
}

fn causal(_: &Golden, _: &str) -> mha::Result<AttentionMask> {
    Ok(AttentionMask::causal(0))
}

fn padding(golden: &Golden, name: &str) -> mha::Result<AttentionMask> {
    AttentionMask::none().with_padding(golden.get(&format!("{name}.in.padding")))
}

fn valid_lens(golden: &Golden, name: &str) -> mha::Result<AttentionMask> {
    AttentionMask::none().with_valid_lens(golden.get(&format!("{name}.in.valid_lens")))
}

fn padding_causal(golden: &Golden, name: &str) -> mha::Result<AttentionMask> {
    AttentionMask::causal(0).with_padding(golden.get(&format!("{name}.in.padding")))
}

fn bias(golden: &Golden, name: &str) -> mha::Result<AttentionMask> {
    AttentionMask::none().with_bias(golden.get(&format!("{name}.in.bias")))
}

fn cases() -> Vec<Case> {
    let case = |name, config, mask| Case { name, config, mask };
    let heads = AttentionConfig::new;
    let other_widths = heads(12, 3).with_memory_widths(10, 14);
    let no_bias = heads(12, 3).with_bias(ProjectionBias::NONE);
    vec![
        case("self", heads(12, 3), none), // the simplest first
        case("padding", heads(32, 4), padding),
        case("padding", heads(32, 4), valid_lens),
        case("cross", heads(12, 3), padding),
        case("causal", heads(12, 3), causal),
        case("padding_causal", heads(12, 2), padding_causal),
        case("float_mask", heads(12, 3), bias),
        case("kdim_vdim", other_widths, padding),
        case("no_bias", no_bias, none),
        case("one_head", heads(12, 1), padding),
        case("long", heads(8, 2), padding),
    ]
}

fn inputs<'a>(golden: &'a Golden, name: &str) -> [&'a Tensor; 3] {
    ["query", "key", "value"].map(|input| golden.get(&format!("{name}.in.{input}")))
}

#[test]
fn multi_head_attention_equals_pytorch() -> Result {
    let golden = Golden::open("attention.safetensors")?;
    let vb = VarBuilder::from_tensors(golden.tensors(), DType::F32, &Cpu);
    for Case { name, config, mask } in cases() {
        let attention = MultiHeadAttention::new(&config, vb.pp(name))?;
        let [query, key, value] = inputs(&golden, name);
        let mask = mask(&golden, name)?;
        let expected = golden.get(&format!("{name}.out.output"));
        let plain = attention.forward(query, key, value, &mask)?;
        assert_close(name, &plain, expected, 1e-6);
        let (output, weights) = attention.forward_with_weights(query, key, value, &mask)?;
        assert_close(name, &output, expected, 1e-6);
        if let Some(expected) = golden.find(&format!("{name}.out.weights")) {
            assert_close(&format!("{name}, weights"), &weights, expected, 1e-6);
        }
    }
    Ok(())
}

#[test]
fn causal_and_cross_attention_equal_pytorch() -> Result {
    let golden = Golden::open("attention.safetensors")?;
    let vb = VarBuilder::from_tensors(golden.tensors(), DType::F32, &Cpu);

    let attention =
        CausalSelfAttention::new(&AttentionConfig::new(12, 2), vb.pp("padding_causal"))?;
    let [x, _, _] = inputs(&golden, "padding_causal");
    let (out, weights) =
        attention.forward_with_weights(x, Some(golden.get("padding_causal.in.padding")))?;
    assert_close("causal", &out, golden.get("padding_causal.out.output"), 1e-6);
    assert_close("causal weights", &weights, golden.get("padding_causal.out.weights"), 1e-6);

    // Two calls use the same memory.
    let attention = CrossAttention::new(&AttentionConfig::new(12, 3), vb.pp("cross"))?;
    let [query, encoder_output, _] = inputs(&golden, "cross");
    let memory = attention.memory(encoder_output)?;
    let padding = Some(golden.get("cross.in.padding"));
    let (out, weights) = attention.forward_with_weights(query, &memory, padding)?;
    assert_close("cross", &out, golden.get("cross.out.output"), 1e-6);
    assert_close("cross weights", &weights, golden.get("cross.out.weights"), 1e-6);
    let last = attention.forward(&query.narrow(1, 3, 1)?, &memory, padding)?;
    assert_close("cross, again", &last, &golden.get("cross.out.output").narrow(1, 3, 1)?, 1e-6);
    Ok(())
}

#[test]
fn scaled_dot_product_attention_equals_pytorch() -> Result {
    let golden = Golden::open("attention.safetensors")?;
    let [q, k, v] = ["sdpa.q", "sdpa.k", "sdpa.v"].map(|name| golden.get(name));
    let none = AttentionMask::none();
    let keep = none.clone().with_keep(golden.get("sdpa.keep"))?;
    let bias = none.clone().with_bias(golden.get("sdpa.bias"))?;
    let first = |x: &Tensor, dim: usize, n: usize| x.narrow(dim, 0, n);
    let (few_k, few_v) = (first(k, 2, 5)?, first(v, 2, 5)?);
    let (grouped_k, grouped_v) = (first(k, 1, 2)?, first(v, 1, 2)?);
    for (name, k, v, mask, scale) in [
        ("sdpa.none", k, v, &none, None),
        ("sdpa.scale", k, v, &none, Some(0.3)),
        ("sdpa.keep.out", k, v, &keep, None), // the first query sees no key: zeros in PyTorch too
        ("sdpa.bias.out", k, v, &bias, None),
        ("sdpa.causal", &few_k, &few_v, &AttentionMask::causal(0), None),
        ("sdpa.grouped", &grouped_k, &grouped_v, &none, None),
    ] {
        let got = scaled_dot_product_attention(q, k, v, mask, scale)?;
        assert_close(name, &got, golden.get(name), 1e-6);
    }
    Ok(())
}

/// The gradients of `mean(output²)` with respect to all weights and the queries' hidden states. The
/// tolerance is 1e-5 times the largest gradient, at most 1e-5.
#[test]
fn gradients_equal_pytorch() -> Result {
    let golden = Golden::open("attention.safetensors")?;
    for name in ["self", "padding_causal", "cross", "kdim_vdim"] {
        let Case { config, mask, .. } = cases().into_iter().find(|case| case.name == name).unwrap();
        let vars = VarMap::new();
        let own = golden.tensors().into_iter().filter_map(|(tensor, value)| {
            Some((tensor.strip_prefix(&format!("{name}."))?.to_string(), value))
        });
        for (tensor, value) in own.filter(|(tensor, _)| !tensor.contains("in.")) {
            vars.data().lock().unwrap().insert(tensor, Var::from_tensor(&value)?);
        }
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Cpu);
        let attention = MultiHeadAttention::new(&config, vb)?;
        let [query, key, value] = inputs(&golden, name);
        let query = Var::from_tensor(query)?;
        let (key, value) = match name {
            "self" | "padding_causal" => (query.as_tensor(), query.as_tensor()),
            _ => (key, value),
        };
        let out = attention.forward(&query, key, value, &mask(&golden, name)?)?;
        let gradients = out.sqr()?.mean_all()?.backward()?;

        let mut tensors = attention.tensors()?;
        tensors.insert("in.query".into(), query.as_tensor().clone());
        let expected = |tensor: &str| golden.get(&format!("{name}.grad.{tensor}"));
        let largest = tensors.keys().map(|tensor| expected(tensor).abs()?.max_all()?.to_scalar());
        let largest = largest.collect::<candle_core::Result<Vec<f32>>>()?;
        let largest = largest.into_iter().fold(0.0, f32::max).min(1.0);
        for (tensor, value) in tensors {
            let expected = expected(&tensor);
            let got = gradients.get(&value).expect("a gradient");
            assert_close(
                &format!("{name}, gradient of {tensor}"),
                got,
                expected,
                1e-5 * f64::from(largest),
            );
        }
    }
    Ok(())
}

/// NaN and ∞ in a key that is hidden from every query.
#[test]
fn hidden_keys_do_not_affect_gradients() -> Result {
    let q = Var::from_tensor(&Tensor::new(&[[[[1f32, 2.], [3., 4.]]]], &Cpu)?)?;
    let k = Tensor::new(&[[[[1f32, -1.], [f32::NAN, f32::INFINITY], [2., 1.]]]], &Cpu)?;
    let padding = Tensor::new(&[[1u8, 0, 1]], &Cpu)?;
    let gradient = |k: &Tensor, mask: &AttentionMask| {
        let out = scaled_dot_product_attention(&q, k, k, mask, None)?;
        let gradients = out.sqr()?.sum_all()?.backward()?;
        mha::Result::Ok(gradients.get(&q).expect("a gradient").clone())
    };
    let got = gradient(&k, &AttentionMask::none().with_padding(&padding)?)?;
    let visible = Tensor::cat(&[k.narrow(2, 0, 1)?, k.narrow(2, 2, 1)?], 2)?;
    let expected = gradient(&visible, &AttentionMask::none())?;
    assert_close("gradient", &got, &expected, 1e-6);
    // Other parts of a mask that hide the key from every query.
    let keep = AttentionMask::none().with_keep(&Tensor::new(&[[1u8, 0, 1]], &Cpu)?)?;
    let hidden = Tensor::new(&[[0f32, f32::NEG_INFINITY, 0.]], &Cpu)?;
    let bias = AttentionMask::none().with_bias(&hidden)?;
    for mask in [keep, bias] {
        assert_close("gradient", &gradient(&k, &mask)?, &expected, 1e-6);
    }
    Ok(())
}

/// Four query heads share two key-value heads. Key 1 is hidden from both heads of the first group,
/// and from one head of the second.
#[test]
fn keys_hidden_from_all_heads_of_a_group_do_not_affect_gradients() -> Result {
    let wave = |n: usize, dims: [usize; 4]| -> Result<Tensor> {
        Ok((Tensor::arange(0f32, n as f32, &Cpu)? * 0.7)?.sin()?.reshape(&dims)?)
    };
    let q = Var::from_tensor(&wave(16, [1, 4, 2, 2])?)?;
    let finite = wave(12, [1, 2, 3, 2])?;
    let head = finite.narrow(1, 0, 1)?;
    let nan = Tensor::full(f32::NAN, (1, 1, 1, 2), &Cpu)?;
    let head = Tensor::cat(&[&head.narrow(2, 0, 1)?, &nan, &head.narrow(2, 2, 1)?], 2)?;
    let k = Tensor::cat(&[head, finite.narrow(1, 1, 1)?], 1)?;
    let keep = Tensor::new(&[[[1u8, 0, 1]], [[1, 0, 1]], [[1, 0, 1]], [[1, 1, 1]]], &Cpu)?;
    let mask = AttentionMask::none().with_keep(&keep)?; // (H, 1, S)
    let gradient = |k: &Tensor| {
        let out = scaled_dot_product_attention(&q, k, &finite, &mask, None)?;
        let gradients = out.sqr()?.sum_all()?.backward()?;
        mha::Result::Ok(gradients.get(&q).expect("a gradient").clone())
    };
    assert_close("gradient", &gradient(&k)?, &gradient(&finite)?, 1e-6);
    Ok(())
}

/// The masks, the shared heads and the cache of candle-nn, as in the comparison table of mha's
/// documentation.
#[test]
fn candle_nn_attention_matches_the_comparison_table() -> Result {
    use candle_nn::attention::{AttnMask, flash_attn};

    // The inputs are (B, S, H, D), the output is (B, H, S, D).
    let attend = |q: &Tensor, k: &Tensor, v: &Tensor, mask| {
        flash_attn::<f32>(q, k, v, 1.0, mask, None, None)
    };
    let q = Tensor::new(&[[[[1f32, 2.]], [[3., 4.]]]], &Cpu)?; // two queries, one head
    let k = Tensor::new(&[[[[1f32, 0.]], [[f32::NAN, 1.]]]], &Cpu)?;
    let v = Tensor::new(&[[[[5f32, 6.]], [[f32::NAN, 8.]]]], &Cpu)?;
    let hidden = f32::NEG_INFINITY;
    let mask = Tensor::new(&[[0f32, hidden], [hidden, hidden]], &Cpu)?;
    let out = attend(&q, &k, &v, AttnMask::Mask(mask))?.flatten_all()?.to_vec1::<f32>()?;
    assert_eq!(
        out,
        [5., 6., 0., 0.],
        "hidden NaN keys do not affect the output; a query with no visible key gives zeros"
    );

    let causal =
        attend(&q, &v, &v, AttnMask::causal_with_offset(0))?.flatten_all()?.to_vec1::<f32>()?;
    assert_eq!(causal[..2], [5., 6.], "the first query sees only the first key");

    // Two query heads share one key-value head.
    let two = Tensor::cat(&[&q, &q], 2)?;
    let k = Tensor::new(&[[[[1f32, 0.]], [[0., 1.]]]], &Cpu)?;
    let one = attend(&q, &k, &k, AttnMask::None)?;
    let shared = attend(&two, &k, &k, AttnMask::None)?;
    assert_eq!(
        shared.narrow(1, 1, 1)?.flatten_all()?.to_vec1::<f32>()?,
        one.flatten_all()?.to_vec1::<f32>()?
    );

    let mut cache = candle_nn::kv_cache::KvCache::new(1, 1);
    cache.append(&k, &k)?;
    assert_eq!(cache.current_seq_len(), 2, "the cache grows beyond its capacity of 1");
    Ok(())
}
