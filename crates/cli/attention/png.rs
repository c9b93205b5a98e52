//! Converts the SVG picture to PNG.

use anyhow::{Result, anyhow, ensure};
use resvg::{
    tiny_skia,
    usvg::{
        self,
        fontdb::{Family, Query},
    },
};

use picture::POINTER_HINT;

/// Fonts for labels. The first installed one is used.
const SANS_SERIF: [&str; 6] =
    ["Inter", "Segoe UI", "Helvetica", "Noto Sans", "DejaVu Sans", "Liberation Sans"];
/// Maximum number of pixels of a PNG, before both sides are rounded up.
const MAX_PIXELS: f32 = 64e6;

/// Renders an SVG document at twice its size, or at a smaller scale if the picture would have more
/// than [`MAX_PIXELS`].
///
/// # Errors
/// If no font is installed, if usvg refuses the document (for example one with more than 1,000,000
/// elements), or if the picture cannot be allocated or encoded.
pub fn render(svg: &str) -> Result<Vec<u8>> {
    let mut options = usvg::Options::default();
    let fonts = options.fontdb_mut();
    fonts.load_system_fonts();
    ensure!(
        !fonts.is_empty(),
        "no font found for the labels: expected an installed font; install one, or write .svg or \
         .html"
    );
    let names: Vec<&String> =
        fonts.faces().flat_map(|face| face.families.iter().map(|(name, _)| name)).collect();
    if let Some(name) = SANS_SERIF.iter().find(|known| names.iter().any(|name| name == *known)) {
        fonts.set_sans_serif_family(*name);
    } else {
        // Labels whose font family is not installed are not drawn. Without a font of the default
        // families, use the first installed font.
        let family = Query { families: &[Family::SansSerif, Family::Serif], ..Query::default() };
        let first = fonts.faces().next().and_then(|face| face.families.first());
        if let (None, Some((name, _))) = (fonts.query(&family), first) {
            let name = name.clone();
            fonts.set_sans_serif_family(name);
        }
    }
    let tree = usvg::Tree::from_str(&svg.replace(POINTER_HINT, ""), &options)?;
    let size = tree.size();
    let scale = (MAX_PIXELS / (size.width() * size.height())).sqrt().min(2.0);
    let pixels = |side: f32| (side * scale).ceil() as u32;
    let mut pixmap = tiny_skia::Pixmap::new(pixels(size.width()), pixels(size.height()))
        .ok_or_else(|| {
            anyhow!("cannot allocate a picture of {} × {}", size.width(), size.height())
        })?;
    resvg::render(&tree, tiny_skia::Transform::from_scale(scale, scale), &mut pixmap.as_mut());
    Ok(pixmap.encode_png()?)
}
