//! Scaled frequencies of rotary position embedding, for sequences longer than those in training.
//! Peng et al. 2024, <https://arxiv.org/abs/2309.00071>, section 3.

use crate::{Error, Result};

/// How the frequencies of a [`Rotary`](crate::Rotary) are scaled.
///
/// Frequency i of a head of width D, with the base θ, the length L of the sequence and the factor
/// f:
///
/// | scaling | frequency, for i from 0 to D/2 − 1 |
/// |---|---|
/// | [`None`](Self::None) | `θ^(−2i/D)` |
/// | [`Linear`](Self::Linear) | `θ^(−2i/D) / f` |
/// | [`Ntk`](Self::Ntk) | `(θ·f)^(−2i/D) / f^(2/D)` |
/// | [`DynamicNtk`](Self::DynamicNtk) | `(θ·(f·L/trained − f + 1)^(D/(D−2)))^(−2i/D)` if L > `trained`, else `θ^(−2i/D)` |
///
/// # Numerics
/// Frequencies are computed in f32, as in transformers.
/// # Source
/// - `Linear`, `DynamicNtk`: `_compute_linear_scaling_rope_parameters` and
///   `_compute_dynamic_ntk_parameters` of transformers 5.23. There, L is the length of the longest
///   sequence of a batch; [`Rotary::of_mask`](crate::Rotary::of_mask) takes each sequence's own
///   length.
/// - `Ntk`: the code of the GTE models, after Su 2023, equation 6,
///   <https://kexue.fm/archives/9706>. transformers 5.23 has no such type. The frequencies of `Ntk`
///   with factor f and base θ are those of `Linear` with factor `f^(2/D)` and base `θ·f`, the
///   settings of checkpoints that transformers has converted.
///
/// # Examples
/// ```
/// use mha::RotaryScaling;
///
/// let of = |scaling: RotaryScaling, length| scaling.frequencies(10_000., 4, length);
/// assert_eq!(of(RotaryScaling::None, 9), [1., 0.01]);
/// assert_eq!(of(RotaryScaling::Linear { factor: 2. }, 9), [0.5, 0.005]);
/// assert_eq!(of(RotaryScaling::Ntk { factor: 4. }, 9), [0.5, 0.0025]); // √4 = 2
///
/// let dynamic = RotaryScaling::DynamicNtk { factor: 2., trained: 8 };
/// assert_eq!(of(dynamic, 8), [1., 0.01]);
/// assert_eq!(of(dynamic, 20), [1., 0.0025]); // (2·20/8 − 1)² = 16, √16 = 4
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub enum RotaryScaling {
    /// The frequencies are not scaled.
    #[default]
    None,
    /// All frequencies are divided by a factor.
    Linear {
        /// The factor f.
        factor: f64,
    },
    /// The lower a frequency, the larger its divisor: from `factor^(2/D)` to `factor`.
    Ntk {
        /// The factor f, which is the largest divisor.
        factor: f64,
    },
    /// In sequences of more than `trained` tokens, frequencies are divided by numbers that grow
    /// with the length. The highest frequency is not changed.
    DynamicNtk {
        /// The factor f of the formula. A larger factor gives a larger base.
        factor: f64,
        /// The maximum length L of a sequence whose frequencies are not scaled.
        trained: usize,
    },
}

impl RotaryScaling {
    /// The D/2 frequencies of a sequence of `length` tokens, in radians per position, from the
    /// highest to the lowest. `theta` is the base, `d` the width D of a head.
    pub fn frequencies(&self, theta: f64, d: usize, length: usize) -> Vec<f32> {
        let width = d as f32;
        let (theta, divisor) = match *self {
            Self::None => (theta as f32, 1.0),
            Self::Linear { factor } => (theta as f32, factor as f32),
            Self::Ntk { factor } => ((theta * factor) as f32, factor.powf(2.0 / d as f64) as f32),
            Self::DynamicNtk { .. } if !self.depends_on(length) => (theta as f32, 1.0),
            Self::DynamicNtk { factor, trained } => {
                let factor = factor as f32;
                let growth = factor * length as f32 / trained as f32 - (factor - 1.0);
                (theta as f32 * growth.powf(width / (width - 2.0)), 1.0)
            }
        };
        (0..d / 2).map(|i| 1.0 / theta.powf((2 * i) as f32 / width) / divisor).collect()
    }

    /// Checks that the numbers are positive.
    ///
    /// # Errors
    /// [`Error::Value`] for a factor that is not positive and finite; [`Error::Zero`] for a `trained`
    /// of 0.
    ///
    /// # Examples
    /// ```
    /// use mha::RotaryScaling;
    ///
    /// RotaryScaling::Linear { factor: 2. }.check()?;
    /// assert_eq!(
    ///     RotaryScaling::Linear { factor: 0. }.check().unwrap_err().to_string(),
    ///     "factor of the rotary scaling 0 is invalid: expected a positive number"
    /// );
    /// # Ok::<(), mha::Error>(())
    /// ```
    pub fn check(&self) -> Result<()> {
        let factor = match *self {
            Self::None => 1.0,
            Self::Linear { factor } | Self::Ntk { factor } | Self::DynamicNtk { factor, .. } => {
                factor
            }
        };
        if !(factor.is_finite() && factor > 0.0) {
            let (field, expected) = ("factor of the rotary scaling", "a positive number");
            return Err(Error::Value { field, expected, got: factor });
        }
        match self {
            Self::DynamicNtk { trained: 0, .. } => {
                Err(Error::Zero { field: "trained length of the rotary scaling" })
            }
            _ => Ok(()),
        }
    }

    /// Whether the frequencies of a sequence of `length` tokens depend on the length.
    pub(crate) fn depends_on(&self, length: usize) -> bool {
        matches!(*self, Self::DynamicNtk { trained, .. } if length > trained)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The frequencies in f64, by the formulas of the table.
    #[test]
    fn frequencies_match_their_formulas() {
        let (theta, d) = (20_000f64, 10);
        for (scaling, length, theta_of, divisor) in [
            (RotaryScaling::None, 5, theta, 1.0),
            (RotaryScaling::Linear { factor: 3.5 }, 5, theta, 3.5),
            (RotaryScaling::Ntk { factor: 8.0 }, 5, 8.0 * theta, 8f64.powf(0.2)),
            (RotaryScaling::DynamicNtk { factor: 2.0, trained: 6 }, 6, theta, 1.0),
            // The exponent D/(D−2) is 1.25, not 1.
            (
                RotaryScaling::DynamicNtk { factor: 2.0, trained: 6 },
                15,
                theta * 4f64.powf(1.25),
                1.0,
            ),
        ] {
            for (i, got) in scaling.frequencies(theta, d, length).into_iter().enumerate() {
                let expected = theta_of.powf(-2.0 * i as f64 / d as f64) / divisor;
                // A few roundings in f32.
                let difference = (f64::from(got) / expected - 1.0).abs();
                assert!(difference < 1e-6, "{scaling:?} {length}, {i}: {got} {expected}");
            }
        }
    }

    /// The documentation of `Ntk` states the largest and the smallest divisor.
    #[test]
    fn ntk_divides_the_lowest_frequency_by_the_factor() {
        let (plain, scaled) = [RotaryScaling::None, RotaryScaling::Ntk { factor: 8.0 }]
            .map(|scaling| scaling.frequencies(500.0, 6, 1))
            .into();
        let divisors: Vec<f32> = plain.iter().zip(scaled).map(|(a, b)| a / b).collect();
        assert!((divisors[0] - 2.0).abs() < 1e-5 && (divisors[2] - 8.0).abs() < 1e-4);
    }

    #[test]
    fn heads_of_width_2_have_the_frequency_1_for_every_base() {
        let scaling = RotaryScaling::DynamicNtk { factor: 2.0, trained: 6 };
        assert_eq!(scaling.frequencies(1000.0, 2, 60), [1.0]);
    }
}
