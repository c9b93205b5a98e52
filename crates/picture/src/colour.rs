//! The colour of a weight.

/// The colour of a weight, or of a weight divided by the largest weight of its matrix: 0 is almost
/// white, 1 is dark blue. The position on the colour scale is the square root of the weight,
/// because most weights are small.
pub fn colour(weight: f32) -> [u8; 3] {
    const STOPS: [[f32; 3]; 4] =
        [[250., 252., 255.], [158., 202., 225.], [49., 130., 189.], [8., 29., 88.]];
    let at = weight.clamp(0.0, 1.0).sqrt() * 3.0;
    let (stop, between) = ((at as usize).min(2), at - (at as usize).min(2) as f32);
    std::array::from_fn(|i| {
        (STOPS[stop][i] + (STOPS[stop + 1][i] - STOPS[stop][i]) * between).round() as u8
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colours_darken_with_the_weight() {
        let brightness = |weight| colour(weight).into_iter().map(u32::from).sum::<u32>();
        let all: Vec<u32> = (0..=100).map(|i| brightness(i as f32 / 100.0)).collect();
        assert!(all.is_sorted_by(|a, b| a > b), "{all:?}");
        assert_eq!(colour(f32::INFINITY), colour(1.0));
    }
}
