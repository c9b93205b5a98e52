//! Attention weights as numbers, in CSV and JSON.

use std::io::Write;

use anyhow::Result;
use encoder::{AttentionKind, TextAttention};
use serde::Serialize;

use crate::json_line::write_line;

/// The object that [`write_json`] writes.
#[derive(Serialize)]
struct Weights<'a> {
    tokens: &'a [String],
    /// The tokens that serve as keys, if they differ from the queries (cross-attention).
    #[serde(skip_serializing_if = "Option::is_none")]
    keys: Option<&'a Vec<String>>,
    /// `(L, H, T, S)`
    weights: &'a [Vec<Vec<Vec<f32>>>],
}

/// Writes one JSON object. `weights` is `(L, H, T, S)`.
pub fn write_json(
    out: &mut impl Write,
    attention: &TextAttention,
    weights: &[Vec<Vec<Vec<f32>>>],
) -> Result<()> {
    let keys = Some(&attention.keys).filter(|_| attention.kind == AttentionKind::Cross);
    write_line(out, &Weights { tokens: &attention.queries, keys, weights })
}

/// Writes one CSV row per weight. `weights` is `(L, H, T, S)`.
pub fn write_csv(
    out: &mut impl Write,
    attention: &TextAttention,
    weights: &[Vec<Vec<Vec<f32>>>],
) -> Result<()> {
    let quoted = |token: &String| format!("\"{}\"", token.replace('"', "\"\""));
    let queries: Vec<String> = attention.queries.iter().map(quoted).collect();
    let keys: Vec<String> = attention.keys.iter().map(quoted).collect();
    writeln!(out, "layer,head,query,query_token,key,key_token,weight")?;
    for (layer, heads) in weights.iter().enumerate() {
        for (head, rows) in heads.iter().enumerate() {
            for (query, row) in rows.iter().enumerate() {
                for (key, weight) in row.iter().enumerate() {
                    let (query_token, key_token) = (&queries[query], &keys[key]);
                    writeln!(
                        out,
                        "{layer},{head},{query},{query_token},{key},{key_token},{weight}"
                    )?;
                }
            }
        }
    }
    Ok(())
}
