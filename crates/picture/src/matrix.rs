//! The attention weights of heads.

use std::{result, str::FromStr};

use encoder::TextAttention;

use crate::{Error, Result};

/// The number of keys shown per query if the terminal or the picture has no room for all.
const TOP_KEYS: usize = 5;

/// The weights of one head, or their mean over the heads of a layer, `(T, S)`.
pub struct Matrix {
    /// The layer and the head, such as `layer 5, head 3`.
    pub title: String,
    /// One row per query, with the weight of each key.
    pub rows: Vec<Vec<f32>>,
}

/// The heads of a layer to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadChoice {
    /// Every head.
    All,
    /// The mean of the heads.
    Mean,
    /// The head of this number, from 0.
    One(usize),
}

/// Parses a number, `all` or `mean`.
impl FromStr for HeadChoice {
    type Err = String;

    fn from_str(name: &str) -> result::Result<Self, String> {
        match name {
            "all" => Ok(Self::All),
            "mean" => Ok(Self::Mean),
            number => {
                let number = number.parse().map(Self::One);
                number
                    .map_err(|_| "expected the number of a head (from 0), all or mean".to_string())
            }
        }
    }
}

/// The weights of all heads, `(L, H, T, S)`.
///
/// # Errors
/// [`Error::Candle`] if the weights are not a `(L, H, T, S)` tensor of f32.
pub fn all_heads(attention: &TextAttention) -> Result<Vec<Vec<Vec<Vec<f32>>>>> {
    let layers = 0..attention.weights.dim(0)?;
    Ok(layers
        .map(|layer| attention.weights.get(layer)?.to_vec3())
        .collect::<result::Result<_, _>>()?)
}

/// The matrices of the chosen heads of a layer. If `layer` is `None`, the last layer is used.
///
/// # Errors
/// [`Error::NoLayerOrHead`] if the layer or the head does not exist; [`Error::Candle`] if the
/// weights are not a `(L, H, T, S)` tensor of f32.
pub fn choose(
    attention: &TextAttention,
    layer: Option<usize>,
    head: HeadChoice,
) -> Result<Vec<Matrix>> {
    let (layers, heads, _, _) = attention.weights.dims4()?;
    let check = |name, number: usize, count: usize| {
        if number < count {
            Ok(number)
        } else {
            Err(Error::NoLayerOrHead { name, got: number, max: count.saturating_sub(1) })
        }
    };
    let layer = check("layer", layer.unwrap_or(layers.saturating_sub(1)), layers)?;
    let weights = attention.weights.get(layer)?; // (H, T, S)
    let one = |head: usize| {
        let title = format!("layer {layer}, head {head}");
        Ok(Matrix { title, rows: weights.get(head)?.to_vec2()? })
    };
    match head {
        HeadChoice::All => (0..heads).map(one).collect(),
        HeadChoice::One(head) => Ok(vec![one(check("head", head, heads)?)?]),
        HeadChoice::Mean => {
            let title = format!("layer {layer}, mean of {heads} heads");
            Ok(vec![Matrix { title, rows: weights.mean(0)?.to_vec2()? }])
        }
    }
}

/// The keys with the five largest weights of a query, in descending order of weight.
pub fn top_keys(row: &[f32]) -> impl Iterator<Item = usize> {
    let mut keys: Vec<usize> = (0..row.len()).collect();
    keys.sort_by(|&a, &b| row[b].total_cmp(&row[a]));
    keys.into_iter().take(TOP_KEYS)
}
