//! Attention as a picture: all heads of all layers small, those chosen in full, with tokens and, under
//! the pointer, every weight. One file, in which nothing is fetched and nothing runs.

use anyhow::{Result, anyhow, ensure};
use base64::{Engine, prelude::BASE64_STANDARD};
use encoder::TextAttention;
use resvg::{tiny_skia, usvg};

use crate::attention::{Matrix, strongest};

/// Up to so many tokens a matrix is drawn cell by cell, each with its weight under the pointer.
const CELLS: usize = 64;
/// Up to so many the weights are written into the cells.
const NUMBERS: usize = 12;

/// From so many on an image with a palette is smaller than one without.
const PALETTE: u32 = 24;

/// Where there is a pointer.
const HINT: &str = "; point at a cell for its weight";
/// Fonts for labels, the first that is there.
const SANS_SERIF: [&str; 6] =
    ["Inter", "Segoe UI", "Helvetica", "Noto Sans", "DejaVu Sans", "Liberation Sans"];
/// Of a .png at most.
const MOST_PIXELS: f32 = 64e6;

/// Sizes in pixels.
const MARGIN: f64 = 24.0;
const THUMBNAIL: f64 = 64.0;
const GAP: f64 = 8.0;
const LABEL: f64 = 64.0;

/// From white over blue to nearly black, for a weight from 0 to 1: light colours differ the most, since
/// most weights are small.
pub fn color(weight: f32) -> [u8; 3] {
    const STOPS: [[f32; 3]; 4] =
        [[250., 252., 255.], [158., 202., 225.], [49., 130., 189.], [8., 29., 88.]];
    let at = weight.clamp(0.0, 1.0).sqrt() * 3.0;
    let (stop, between) = ((at as usize).min(2), at - (at as usize).min(2) as f32);
    std::array::from_fn(|i| {
        (STOPS[stop][i] + (STOPS[stop + 1][i] - STOPS[stop][i]) * between).round() as u8
    })
}

/// A page around the picture.
pub fn html(
    title: &str,
    attention: &TextAttention,
    layers: &[Vec<Vec<Vec<f32>>>],
    chosen: &[Matrix],
) -> Result<String> {
    let (title_text, picture) = (escaped(title), svg(title, attention, layers, chosen)?);
    Ok(format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>Attention: {title_text}</title>\n\
         <style>body {{ margin: 0; background: #fff; }} svg {{ max-width: none; }}</style>\n\
         {picture}</html>\n"
    ))
}

/// The picture alone.
pub fn svg(
    title: &str,
    attention: &TextAttention,
    layers: &[Vec<Vec<Vec<f32>>>],
    chosen: &[Matrix],
) -> Result<String> {
    let heads = layers.first().map_or(0, Vec::len);
    let mut body = String::new();
    let mut y = MARGIN + 20.0;
    let short = shortened(title, 90);
    body += &format!("<text x=\"{MARGIN}\" y=\"{y}\" class=\"title\">{}</text>\n", escaped(&short));
    y += 22.0;
    body += &format!(
        "<text x=\"{MARGIN}\" y=\"{y}\" class=\"note\">rows are queries, columns the keys that they \
         attend to{HINT}</text>\n"
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
    let mut width = MARGIN * 2.0 + LABEL + heads as f64 * step;
    for matrix in chosen {
        y += 40.0;
        let (title, most) = (&matrix.title, most(&matrix.rows));
        body += &format!("<text x=\"{MARGIN}\" y=\"{y}\" class=\"title\">{title}</text>\n");
        y += 20.0;
        body += &format!(
            "<text x=\"{MARGIN}\" y=\"{y}\" class=\"note\">here the darkest is {most:.2}</text>\n"
        );
        y += 12.0;
        let (drawn, right, bottom) = full(attention, &matrix.rows, MARGIN, y)?;
        body += &drawn;
        width = width.max(right + MARGIN);
        y = bottom;
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

/// The picture of [`svg`] as pixels, two for each of its own where that are not too many.
pub fn png(svg: &str) -> Result<Vec<u8>> {
    let mut options = usvg::Options::default();
    let fonts = options.fontdb_mut();
    fonts.load_system_fonts();
    ensure!(
        !fonts.is_empty(),
        "labels need a font: expected one to be installed, or .svg or .html"
    );
    let names: Vec<&String> =
        fonts.faces().flat_map(|face| face.families.iter().map(|(name, _)| name)).collect();
    if let Some(name) = SANS_SERIF.iter().find(|known| names.iter().any(|name| name == *known)) {
        fonts.set_sans_serif_family(*name);
    }
    let tree = usvg::Tree::from_str(&svg.replace(HINT, ""), &options)?;
    let size = tree.size();
    let scale = (MOST_PIXELS / (size.width() * size.height())).sqrt().min(2.0);
    let pixels = |side: f32| (side * scale).ceil() as u32;
    let mut drawn = tiny_skia::Pixmap::new(pixels(size.width()), pixels(size.height()))
        .ok_or_else(|| anyhow!("a picture of {} × {} is too large", size.width(), size.height()))?;
    resvg::render(&tree, tiny_skia::Transform::from_scale(scale, scale), &mut drawn.as_mut());
    Ok(drawn.encode_png()?)
}

/// What the colours stand for.
fn legend(x: f64, y: f64) -> String {
    let mut drawn = String::new();
    for i in 0..=50 {
        let (at, [r, g, b]) = (x + f64::from(i) * 4.0, color(i as f32 / 50.0));
        drawn += &format!(
            "<rect x=\"{at}\" y=\"{y}\" width=\"4.5\" height=\"10\" fill=\"rgb({r},{g},{b})\"/>\n"
        );
    }
    for (weight, label) in [(0.0, "0"), (0.25, "0.25"), (0.5, "0.5"), (1.0, "1")] {
        let (at, below) = (x + weight * 200.0 + 2.0, y + 24.0);
        drawn += &format!("<text x=\"{at}\" y=\"{below}\" class=\"middle note\">{label}</text>\n");
    }
    drawn
}

/// The largest weight.
fn most(rows: &[Vec<f32>]) -> f32 {
    rows.iter().flatten().copied().fold(f32::MIN_POSITIVE, f32::max)
}

/// The pair of tokens with the largest weight.
fn peak(attention: &TextAttention, rows: &[Vec<f32>]) -> String {
    let cells = rows.iter().enumerate();
    let cells = cells.flat_map(|(q, row)| row.iter().enumerate().map(move |(k, w)| (q, k, w)));
    match cells.max_by(|a, b| a.2.total_cmp(b.2)) {
        Some((query, key, weight)) => {
            let (query, key) = (&attention.queries[query], &attention.keys[key]);
            format!("most from {query} to {key}, {weight:.3}")
        }
        None => String::new(),
    }
}

/// A matrix in full, and where it ends to the right and below.
fn full(
    attention: &TextAttention,
    rows: &[Vec<f32>],
    x: f64,
    y: f64,
) -> Result<(String, f64, f64)> {
    let TextAttention { queries, keys, .. } = attention;
    let (n, most) = (queries.len().max(keys.len()), most(rows));
    let cell = match n {
        0..=NUMBERS => 48.0,
        13..=32 => 24.0,
        33..=CELLS => 16.0,
        _ => (1024.0 / n as f64).max(4.0),
    };
    // Labels that do not run into each other.
    let every = (14.0 / cell).ceil() as usize;
    let room = |tokens: &[String]| {
        let widest = tokens.iter().map(|token| token.chars().count()).max().unwrap_or(0).min(20);
        12.0 + 7.5 * widest as f64
    };
    let (left, top) = (x + room(queries), y + room(keys));
    let name = |token: &String| escaped(&shortened(token, 20));
    let mut drawn = String::new();
    for (i, token) in queries.iter().enumerate().step_by(every) {
        let (end, base) = (left - 6.0, top + (i as f64 + 0.5) * cell + 4.0);
        drawn += &format!("<text x=\"{end}\" y=\"{base}\" class=\"end\">{}</text>\n", name(token));
    }
    for (i, token) in keys.iter().enumerate().step_by(every) {
        let (at, over) = (left + (i as f64 + 0.5) * cell + 4.0, top - 6.0);
        drawn += &format!(
            "<text transform=\"translate({at} {over}) rotate(-90)\">{}</text>\n",
            name(token)
        );
    }
    let (width, height) = (keys.len() as f64 * cell, queries.len() as f64 * cell);
    if n > CELLS {
        drawn += &image(rows, most, [left, top, width, height], &peak(attention, rows))?;
        for (i, (token, row)) in queries.iter().zip(rows).enumerate() {
            let most = strongest(row).map(|key| format!("{} {:.3}", keys[key], row[key]));
            let (at, most) = (top + i as f64 * cell, most.collect::<Vec<_>>().join(", "));
            drawn += &format!(
                "<rect x=\"{left}\" y=\"{at}\" width=\"{width}\" height=\"{cell}\" \
                 fill=\"transparent\" class=\"cell\"><title>{}: {}</title></rect>\n",
                escaped(token),
                escaped(&most)
            );
        }
        return Ok((drawn, left + width, top + height));
    }
    for (query, row) in rows.iter().enumerate() {
        for (key, &weight) in row.iter().enumerate() {
            let (at_x, at_y) = (left + key as f64 * cell, top + query as f64 * cell);
            let [r, g, b] = color(weight / most);
            let side = cell - 1.0;
            drawn += &format!(
                "<rect x=\"{at_x}\" y=\"{at_y}\" width=\"{side}\" height=\"{side}\" \
                 fill=\"rgb({r},{g},{b})\" class=\"cell\"><title>{} → {}: {weight:.4}</title></rect>\n",
                escaped(&queries[query]),
                escaped(&keys[key])
            );
            if n <= NUMBERS {
                let ink = if weight / most > 0.3 { "#fff" } else { "#333" };
                let (middle, base) = (at_x + side / 2.0, at_y + side / 2.0 + 4.0);
                drawn += &format!(
                    "<text x=\"{middle}\" y=\"{base}\" class=\"middle in\" style=\"fill:{ink}\">\
                     {weight:.2}</text>\n"
                );
            }
        }
    }
    Ok((drawn, left + width, top + height))
}

/// A matrix as pixels, a weight each, the darkest for `most`; `place` is x, y, width and height.
fn image(rows: &[Vec<f32>], most: f32, place: [f64; 4], title: &str) -> Result<String> {
    let [x, y, width, height] = place;
    let (high, wide) = (rows.len() as u32, rows.first().map_or(0, Vec::len) as u32);
    let mut file = vec![];
    let mut encoder = png::Encoder::new(&mut file, wide, high);
    encoder.set_compression(png::Compression::High);
    let weights = rows.iter().flatten().map(|&weight| (weight / most).clamp(0.0, 1.0));
    let pixels: Vec<u8> = if high.max(wide) < PALETTE {
        encoder.set_color(png::ColorType::Rgb);
        weights.flat_map(color).collect()
    } else {
        // As finely for small weights as the colours change there.
        let palette = (0..=255u8).flat_map(|i| color((f32::from(i) / 255.0).powi(2)));
        encoder.set_color(png::ColorType::Indexed);
        encoder.set_palette(palette.collect::<Vec<u8>>());
        weights.map(|weight| (weight.sqrt() * 255.0).round() as u8).collect()
    };
    encoder.write_header()?.write_image_data(&pixels)?;
    let class = if f64::from(wide) <= width { " class=\"pixels\"" } else { "" };
    Ok(format!(
        "<image x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"{class} \
         preserveAspectRatio=\"none\" href=\"data:image/png;base64,{}\"><title>{}</title></image>\n",
        BASE64_STANDARD.encode(&file),
        escaped(title)
    ))
}

fn shortened(text: &str, most: usize) -> String {
    match text.chars().count() > most {
        true => text.chars().take(most - 1).chain(['…']).collect(),
        false => text.to_string(),
    }
}

/// For XML, without the control characters that it cannot have.
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => escaped.push('·'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_darken_with_the_weight() {
        let light = |weight| color(weight).into_iter().map(u32::from).sum::<u32>();
        let weights: Vec<u32> = (0..=100).map(|i| light(i as f32 / 100.0)).collect();
        assert!(weights.is_sorted_by(|a, b| a > b), "{weights:?}");
        assert_eq!(color(f32::INFINITY), color(1.0));
    }

    #[test]
    fn tokens_cannot_break_the_picture() {
        assert_eq!(escaped("<a & \"b\"\u{1}\u{ffff}>"), "&lt;a &amp; &quot;b&quot;··&gt;");
    }
}
