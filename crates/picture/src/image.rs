//! A matrix as a PNG image inside an SVG.

use base64::{Engine, prelude::BASE64_STANDARD};

use crate::{Result, colour::colour, text::escaped};

/// Images with at least this many rows or columns use a palette, because they are then smaller than
/// RGB images.
const MIN_PALETTE_SIDE: u32 = 24;

/// An SVG image element with one pixel per weight. The weight `max` has the darkest colour. `area`
/// is x, y, width and height.
pub fn image(rows: &[Vec<f32>], max: f32, area: [f64; 4], title: &str) -> Result<String> {
    let [x, y, width, height] = area;
    let (n_rows, n_columns) = (rows.len() as u32, rows.first().map_or(0, Vec::len) as u32);
    let mut file = vec![];
    let mut encoder = png::Encoder::new(&mut file, n_columns, n_rows);
    encoder.set_compression(png::Compression::High);
    let weights = rows.iter().flatten().map(|&weight| (weight / max).clamp(0.0, 1.0));
    let pixels: Vec<u8> = if n_rows.max(n_columns) < MIN_PALETTE_SIDE {
        encoder.set_color(png::ColorType::Rgb);
        weights.flat_map(colour).collect()
    } else {
        // Like the position on the colour scale, the palette index is proportional to the square
        // root of the weight, so that small weights keep distinct colours.
        let palette = (0..=255u8).flat_map(|i| colour((f32::from(i) / 255.0).powi(2)));
        encoder.set_color(png::ColorType::Indexed);
        encoder.set_palette(palette.collect::<Vec<u8>>());
        weights.map(|weight| (weight.sqrt() * 255.0).round() as u8).collect()
    };
    encoder.write_header()?.write_image_data(&pixels)?;
    let class = if f64::from(n_columns) <= width { " class=\"pixels\"" } else { "" };
    Ok(format!(
        "<image x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"{class} \
         preserveAspectRatio=\"none\" href=\"data:image/png;base64,{}\"><title>{}</title></image>\n",
        BASE64_STANDARD.encode(&file),
        escaped(title)
    ))
}
