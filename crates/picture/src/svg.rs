//! The picture as SVG and in an HTML page.

use encoder::TextAttention;
use unicode_width::UnicodeWidthStr;

use crate::{
    Result,
    colour::colour,
    heat_map::{HeatMap, largest, peak},
    image::image,
    matrix::{Matrix, all_heads},
    text::{escaped, shortened},
};

/// The end of the caption. `encodle attention` removes it for a PNG, which has no tooltips.
pub const POINTER_HINT: &str = "; point at a cell or a head for weights";

// Sizes in pixels.
const MARGIN: f64 = 24.0;
const THUMBNAIL: f64 = 64.0;
const GAP: f64 = 8.0;
const LABEL: f64 = 64.0;
/// Width of the caption.
const CAPTION: f64 = 560.0;
/// Average width of a narrow character of the title. Wide characters, such as those of Chinese,
/// count twice.
const TITLE_CHARACTER: f64 = 9.5;

/// An HTML page with the picture.
pub fn html_page(title: &str, svg: &str) -> String {
    let title = escaped(title);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Attention: {title}</title>\n\
         <style>body {{ margin: 0; background: #fff; }} svg {{ max-width: none; }}</style>\n\
         {svg}</html>\n"
    )
}

/// The picture as an SVG document: all heads of `attention`, and the matrices of `chosen` enlarged.
///
/// # Errors
/// [`Error::Candle`](crate::Error::Candle) if the weights are not a `(L, H, T, S)` tensor of f32;
/// [`Error::Png`](crate::Error::Png) if a matrix cannot be encoded.
pub fn document(title: &str, attention: &TextAttention, chosen: &[Matrix]) -> Result<String> {
    let layers = all_heads(attention)?;
    let heads = layers.first().map_or(0, Vec::len);
    let mut body = String::new();
    let mut y = MARGIN + 20.0;
    let short = shortened(title, 90);
    body += &format!("<text x=\"{MARGIN}\" y=\"{y}\" class=\"title\">{}</text>\n", escaped(&short));
    y += 22.0;
    body += &format!(
        "<text x=\"{MARGIN}\" y=\"{y}\" class=\"note\">each row is a query, each column a key that it \
         attends to{POINTER_HINT}</text>\n"
    );
    y += 14.0;
    body += &legend(MARGIN, y);
    y += 52.0;

    let step = THUMBNAIL + GAP;
    for head in 0..heads {
        let x = MARGIN + LABEL + head as f64 * step + THUMBNAIL / 2.0;
        body += &format!("<text x=\"{x}\" y=\"{y}\" class=\"middle\">head {head}</text>\n");
    }
    y += GAP;
    for (layer, matrices) in layers.iter().enumerate() {
        let middle = y + THUMBNAIL / 2.0 + 4.0;
        body += &format!("<text x=\"{MARGIN}\" y=\"{middle}\">layer {layer}</text>\n");
        for (head, rows) in matrices.iter().enumerate() {
            let x = MARGIN + LABEL + head as f64 * step;
            let title = format!("layer {layer}, head {head}: {}", peak(attention, rows));
            body += &image(rows, 1.0, [x, y, THUMBNAIL, THUMBNAIL], &title)?;
        }
        y += step;
    }
    let text_width = CAPTION.max(TITLE_CHARACTER * short.width() as f64);
    let mut width = MARGIN * 2.0 + text_width.max(LABEL + heads as f64 * step);
    for matrix in chosen {
        y += 40.0;
        let (title, max) = (escaped(&matrix.title), largest(&matrix.rows));
        let decimals = if max < 0.1 { 4 } else { 2 };
        body += &format!("<text x=\"{MARGIN}\" y=\"{y}\" class=\"title\">{title}</text>\n");
        y += 20.0;
        body += &format!(
            "<text x=\"{MARGIN}\" y=\"{y}\" class=\"note\">the darkest colour is weight {max:.decimals$}</text>\n"
        );
        y += 12.0;
        let map = HeatMap::new(attention, &matrix.rows, MARGIN, y)?;
        body += &map.elements;
        width = width.max(map.right + MARGIN);
        y = map.bottom;
    }
    let height = y + MARGIN;
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
         viewBox=\"0 0 {width:.0} {height:.0}\" role=\"img\" aria-label=\"attention weights\">\n\
         <style>text {{ font: 12px system-ui, sans-serif; fill: #333; white-space: pre; }} \
         .title {{ font-size: 17px; font-weight: 600; }} .note {{ fill: #777; }} \
         .middle {{ text-anchor: middle; }} .end {{ text-anchor: end; }} \
         image {{ outline: 1px solid #ddd; }} .pixels {{ image-rendering: pixelated; }} \
         .cell:hover {{ stroke: #e6550d; stroke-width: 2; }} .in {{ pointer-events: none; }}</style>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n{body}</svg>\n"
    ))
}

/// The legend: the colours of the weights from 0 to 1, with labels.
fn legend(x: f64, y: f64) -> String {
    let mut elements = String::new();
    for i in 0..=50 {
        let (at, [r, g, b]) = (x + f64::from(i) * 4.0, colour(i as f32 / 50.0));
        elements += &format!(
            "<rect x=\"{at}\" y=\"{y}\" width=\"4.5\" height=\"10\" fill=\"rgb({r},{g},{b})\"/>\n"
        );
    }
    for (weight, label) in [(0.0, "0"), (0.25, "0.25"), (0.5, "0.5"), (1.0, "1")] {
        let (at, below) = (x + weight * 200.0 + 2.0, y + 24.0);
        elements +=
            &format!("<text x=\"{at}\" y=\"{below}\" class=\"middle note\">{label}</text>\n");
    }
    elements
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device::Cpu, Tensor};
    use encoder::AttentionKind;

    use super::*;

    #[test]
    fn titles_are_escaped() -> Result<()> {
        let attention = TextAttention {
            kind: AttentionKind::Encoder,
            queries: vec!["a".into()],
            keys: vec!["a".into()],
            weights: Tensor::ones((1, 1, 1, 1), DType::F32, &Cpu)?,
            queries_truncated: 0,
            keys_truncated: 0,
        };
        let chosen = [Matrix { title: "c < d".into(), rows: vec![vec![1.0]] }];
        let svg = document("a < b", &attention, &chosen)?;
        assert!(svg.contains("a &lt; b") && svg.contains("c &lt; d"), "{svg}");
        Ok(())
    }
}
