//! The heat map of one attention matrix, labelled with its tokens.

use encoder::TextAttention;
use unicode_width::UnicodeWidthChar;

use crate::{
    Result,
    colour::colour,
    image::image,
    matrix::top_keys,
    text::{escaped, shortened},
};

/// The maximum number of tokens of a matrix that is drawn as one rectangle per cell, with the
/// cell's weight in a tooltip. A larger matrix is drawn as an image with a tooltip per query.
const MAX_TOKENS_WITH_CELLS: usize = 64;
/// The maximum number of tokens of a matrix whose cells contain their weights.
const MAX_TOKENS_WITH_NUMBERS: usize = 12;
/// The maximum number of characters of a token's label.
const MAX_LABEL_CHARS: usize = 20;

/// The SVG elements of a matrix, and the coordinates of its right and bottom edges.
pub struct HeatMap {
    pub elements: String,
    pub right: f64,
    pub bottom: f64,
}

/// The coordinates of the cells.
struct Grid {
    left: f64,
    top: f64,
    /// The side of a cell.
    cell: f64,
}

impl HeatMap {
    /// Draws a matrix with the top left corner of its labels at `(x, y)`.
    pub fn new(attention: &TextAttention, rows: &[Vec<f32>], x: f64, y: f64) -> Result<Self> {
        let TextAttention { queries, keys, .. } = attention;
        let tokens = queries.len().max(keys.len());
        let cell = match tokens {
            n if n <= MAX_TOKENS_WITH_NUMBERS => 48.0,
            n if n <= 32 => 24.0,
            n if n <= MAX_TOKENS_WITH_CELLS => 16.0,
            _ => (1024.0 / tokens as f64).max(4.0),
        };
        let (left, top) = (x + label_length(queries), y + label_length(keys));
        let grid = Grid { left, top, cell };
        let (width, height) = (keys.len() as f64 * cell, queries.len() as f64 * cell);
        let mut elements = labels(attention, &grid);
        if tokens > MAX_TOKENS_WITH_CELLS {
            let area = [left, top, width, height];
            elements += &image(rows, largest(rows), area, &peak(attention, rows))?;
            elements += &query_tooltips(attention, rows, &grid, width);
        } else {
            elements += &cells(attention, rows, &grid, tokens <= MAX_TOKENS_WITH_NUMBERS);
        }
        Ok(Self { elements, right: left + width, bottom: top + height })
    }
}

/// The estimated length in pixels of the longest label, with the gap between the label and the cells.
fn label_length(tokens: &[String]) -> f64 {
    // A control character is drawn as a dot.
    let columns = |token: &String| -> usize {
        token.chars().take(MAX_LABEL_CHARS).map(|c| c.width().unwrap_or(1)).sum()
    };
    12.0 + 7.5 * tokens.iter().map(columns).max().unwrap_or(0) as f64
}

/// The tokens beside the rows and above the columns. If the cells are smaller than 14 pixels, some
/// tokens are left out, so that labels are at least 14 pixels apart.
fn labels(attention: &TextAttention, grid: &Grid) -> String {
    let &Grid { left, top, cell } = grid;
    let step = (14.0 / cell).ceil() as usize;
    let label = |token: &String| escaped(&shortened(token, MAX_LABEL_CHARS));
    let mut elements = String::new();
    for (i, token) in attention.queries.iter().enumerate().step_by(step) {
        let (end, base) = (left - 6.0, top + (i as f64 + 0.5) * cell + 4.0);
        elements +=
            &format!("<text x=\"{end}\" y=\"{base}\" class=\"end\">{}</text>\n", label(token));
    }
    for (i, token) in attention.keys.iter().enumerate().step_by(step) {
        let (middle, base) = (left + (i as f64 + 0.5) * cell + 4.0, top - 6.0);
        elements += &format!(
            "<text transform=\"translate({middle} {base}) rotate(-90)\">{}</text>\n",
            label(token)
        );
    }
    elements
}

/// One transparent rectangle per query, with the keys of its largest weights in a tooltip.
fn query_tooltips(attention: &TextAttention, rows: &[Vec<f32>], grid: &Grid, width: f64) -> String {
    let &Grid { left, top, cell } = grid;
    let mut elements = String::new();
    for (i, (token, row)) in attention.queries.iter().zip(rows).enumerate() {
        let keys = top_keys(row).map(|key| format!("{} {:.3}", attention.keys[key], row[key]));
        let (y, keys) = (top + i as f64 * cell, keys.collect::<Vec<_>>().join(", "));
        elements += &format!(
            "<rect x=\"{left}\" y=\"{y}\" width=\"{width}\" height=\"{cell}\" \
             fill=\"transparent\" class=\"cell\"><title>{}: {}</title></rect>\n",
            escaped(token),
            escaped(&keys)
        );
    }
    elements
}

/// One rectangle per weight, with the weight in a tooltip and, if `numbers` is set, in the cell.
fn cells(attention: &TextAttention, rows: &[Vec<f32>], grid: &Grid, numbers: bool) -> String {
    let &Grid { left, top, cell } = grid;
    let (max, side) = (largest(rows), cell - 1.0);
    let mut elements = String::new();
    for (query, row) in rows.iter().enumerate() {
        for (key, &weight) in row.iter().enumerate() {
            let (x, y) = (left + key as f64 * cell, top + query as f64 * cell);
            let [r, g, b] = colour(weight / max);
            elements += &format!(
                "<rect x=\"{x}\" y=\"{y}\" width=\"{side}\" height=\"{side}\" \
                 fill=\"rgb({r},{g},{b})\" class=\"cell\"><title>{} → {}: {weight:.4}</title></rect>\n",
                escaped(&attention.queries[query]),
                escaped(&attention.keys[key])
            );
            if numbers {
                let text_colour = if weight / max > 0.3 { "#fff" } else { "#333" };
                let (middle, base) = (x + side / 2.0, y + side / 2.0 + 4.0);
                elements += &format!(
                    "<text x=\"{middle}\" y=\"{base}\" class=\"middle in\" style=\"fill:{text_colour}\">\
                     {weight:.2}</text>\n"
                );
            }
        }
    }
    elements
}

/// The largest weight, but at least [`f32::MIN_POSITIVE`], so that it can be a divisor.
pub fn largest(rows: &[Vec<f32>]) -> f32 {
    rows.iter().flatten().copied().fold(f32::MIN_POSITIVE, f32::max)
}

/// The query and the key with the largest weight, for a tooltip.
pub fn peak(attention: &TextAttention, rows: &[Vec<f32>]) -> String {
    let cells = rows.iter().enumerate();
    let cells = cells.flat_map(|(q, row)| row.iter().enumerate().map(move |(k, w)| (q, k, w)));
    match cells.max_by(|a, b| a.2.total_cmp(b.2)) {
        Some((query, key, weight)) => {
            let (query, key) = (&attention.queries[query], &attention.keys[key]);
            format!("largest weight {query} → {key}: {weight:.3}")
        }
        None => String::new(),
    }
}
