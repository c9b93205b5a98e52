//! Scaled frequencies of rotary position embedding, for sequences longer than those in training.
//! Peng et al. 2024, <https://arxiv.org/abs/2309.00071>, section 3.

use libm::{log, pow, powf};

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
/// | [`Llama3`](Self::Llama3) | `θ^(−2i/D) · (r + (1 − r)/f)`, where r rises from 0 to 1 with `trained·θ^(−2i/D)/2π` |
/// | [`Yarn`](Self::Yarn) | `θ^(−2i/D) · (r + (1 − r)/f)`, where r falls from 1 to 0 with i |
///
/// `trained·θ^(−2i/D)/2π` is the number of turns of pair i over `trained` positions. The r of
/// `Llama3` is linear in it, 0 up to `low_freq_factor` turns and 1 from `high_freq_factor` turns. The
/// r of `Yarn` is linear in i, 1 up to the i of `beta_fast` turns and 0 from the i of `beta_slow`
/// turns.
///
/// # Numerics
/// Frequencies are computed in f32, as in transformers.
/// # Source
/// - `Linear`, `DynamicNtk`, `Llama3`, `Yarn`: `modeling_rope_utils.py` of transformers 5.23. For
///   `DynamicNtk`, L is the length of the longest sequence of a batch there;
///   [`Rotary::of_mask`](crate::Rotary::of_mask) takes each sequence's own length.
/// - `Yarn`: Peng et al. 2024, section 3.
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
    /// High frequencies are not scaled, low frequencies are divided by a factor, and those between
    /// by a smaller one (Llama 3.1).
    Llama3 {
        /// The factor f, which is the largest divisor.
        factor: f64,
        /// The largest number of turns of a frequency that is divided by `factor`.
        low_freq_factor: f64,
        /// The smallest number of turns of a frequency that is not scaled.
        high_freq_factor: f64,
        /// The length in positions over which turns are counted.
        trained: usize,
    },
    /// High frequencies are not scaled, low frequencies are divided by a factor, and those between
    /// by a smaller one. Queries and keys are multiplied by `attention_factor`.
    Yarn {
        /// The factor f, which is the largest divisor.
        factor: f64,
        /// The length in positions over which turns are counted.
        trained: usize,
        /// The number of turns from which frequencies are not scaled, 32 in the paper.
        beta_fast: f64,
        /// The number of turns up to which frequencies are divided by `factor`, 1 in the paper.
        beta_slow: f64,
        /// Whether the i of `beta_fast` is rounded down to an integer and that of `beta_slow` up.
        truncate: bool,
        /// The factor of the cosines and sines, `0.1·ln(f) + 1` in the paper.
        attention_factor: f64,
    },
}

impl RotaryScaling {
    /// The D/2 frequencies of a sequence of `length` tokens, in radians per position, from the
    /// highest to the lowest. `theta` is the base, `d` the width D of a head.
    pub fn frequencies(&self, theta: f64, d: usize, length: usize) -> Vec<f32> {
        let width = d as f32;
        let plain = |theta: f32| (0..d / 2).map(move |i| 1.0 / powf(theta, (2 * i) as f32 / width));
        let (theta, divisor) = match *self {
            Self::None => (theta as f32, 1.0),
            Self::Linear { factor } => (theta as f32, factor as f32),
            Self::Ntk { factor } => ((theta * factor) as f32, pow(factor, 2.0 / d as f64) as f32),
            Self::DynamicNtk { .. } if !self.depends_on(length) => (theta as f32, 1.0),
            Self::DynamicNtk { factor, trained } => {
                let factor = factor as f32;
                let growth = factor * length as f32 / trained as f32 - (factor - 1.0);
                (theta as f32 * powf(growth, width / (width - 2.0)), 1.0)
            }
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, trained } => {
                let [factor, low, high] =
                    [factor, low_freq_factor, high_freq_factor].map(|x| x as f32);
                return plain(theta as f32)
                    .map(|frequency| {
                        let turns = trained as f32 * frequency / std::f32::consts::TAU;
                        let unscaled = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                        (1.0 - unscaled) * frequency / factor + unscaled * frequency
                    })
                    .collect();
            }
            Self::Yarn { factor, trained, beta_fast, beta_slow, truncate, .. } => {
                // The i, not an integer, of the frequency that makes this number of turns.
                let index = |turns: f64| {
                    let length = trained as f64 / (turns * std::f64::consts::TAU);
                    d as f64 * log(length) / (2.0 * log(theta))
                };
                let (mut first, mut last) = (index(beta_fast), index(beta_slow));
                if truncate {
                    (first, last) = (first.floor(), last.ceil());
                }
                let (first, mut last) = (first.max(0.0), last.min(d as f64 - 1.0));
                if first == last {
                    last += 0.001; // as in transformers; the ramp would divide by 0
                }
                let ramp =
                    |i: usize| ((i as f32 - first as f32) / (last - first) as f32).clamp(0.0, 1.0);
                let factor = factor as f32;
                let scaled = |(i, frequency): (usize, f32)| {
                    frequency / factor * ramp(i) + frequency * (1.0 - ramp(i))
                };
                return plain(theta as f32).enumerate().map(scaled).collect();
            }
        };
        plain(theta).map(|frequency| frequency / divisor).collect()
    }

    /// The factor of the cosines and sines, which is 1 unless the scaling is `Yarn`.
    pub(crate) fn attention_factor(&self) -> f64 {
        match *self {
            Self::Yarn { attention_factor, .. } => attention_factor,
            _ => 1.0,
        }
    }

    /// Checks that the numbers are positive.
    ///
    /// # Errors
    /// [`Error::Value`] for a number that is not positive and finite, for a `high_freq_factor` that is
    /// not above `low_freq_factor`, and for a `beta_fast` below `beta_slow`; [`Error::Zero`] for a
    /// `trained` of 0.
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
        let (factor, trained): (f64, Option<usize>) = match *self {
            Self::None => return Ok(()),
            Self::Linear { factor } | Self::Ntk { factor } => (factor, None),
            Self::DynamicNtk { factor, trained }
            | Self::Llama3 { factor, trained, .. }
            | Self::Yarn { factor, trained, .. } => (factor, Some(trained)),
        };
        let positive = |field, got: f64| {
            let expected = "a positive number";
            if got.is_finite() && got > 0.0 {
                Ok(())
            } else {
                Err(Error::Value { field, expected, got })
            }
        };
        positive("factor of the rotary scaling", factor)?;
        if trained == Some(0) {
            return Err(Error::Zero { field: "trained length of the rotary scaling" });
        }
        match *self {
            Self::Llama3 { low_freq_factor, high_freq_factor, .. } => {
                positive("low_freq_factor of the rotary scaling", low_freq_factor)?;
                let (field, got) = ("high_freq_factor of the rotary scaling", high_freq_factor);
                if got.is_finite() && got > low_freq_factor {
                    return Ok(());
                }
                Err(Error::Value { field, expected: "a number above low_freq_factor", got })
            }
            Self::Yarn { beta_fast, beta_slow, attention_factor, .. } => {
                positive("attention_factor of the rotary scaling", attention_factor)?;
                positive("beta_slow of the rotary scaling", beta_slow)?;
                let (field, got) = ("beta_fast of the rotary scaling", beta_fast);
                if got.is_finite() && got >= beta_slow {
                    return Ok(());
                }
                Err(Error::Value { field, expected: "a number of at least beta_slow", got })
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

    /// Pair i makes 100·θ^(−i/4)/2π turns over 100 positions: 15.9, 5.03, 1.59 and 0.503 for θ = 100.
    #[test]
    fn llama3_and_yarn_divide_frequencies_by_their_number_of_turns() {
        let divisors = |scaling: RotaryScaling| -> Vec<f32> {
            let plain = RotaryScaling::None.frequencies(100.0, 8, 1);
            plain.iter().zip(scaling.frequencies(100.0, 8, 1)).map(|(a, b)| a / b).collect()
        };
        let (factor, trained) = (4.0, 100);
        let (low_freq_factor, high_freq_factor) = (1.0, 9.0);
        let llama3 =
            divisors(RotaryScaling::Llama3 { factor, low_freq_factor, high_freq_factor, trained });
        // Of 5.03 turns, the part (5.03 − 1)/(9 − 1) = 0.504 is not scaled.
        let expected = [1.0, 1.0 / (0.504 + 0.496 / 4.0), 1.0 / (0.0739 + 0.9261 / 4.0), 4.0];
        assert!(llama3.iter().zip(expected).all(|(x, y)| (x - y).abs() < 3e-3), "{llama3:?}");

        let (attention_factor, beta_fast, beta_slow) = (1.0, 8.0, 1.0);
        let yarn = |truncate| {
            divisors(RotaryScaling::Yarn {
                factor,
                trained,
                beta_fast,
                beta_slow,
                truncate,
                attention_factor,
            })
        };
        // 8 turns are at i = 4·ln(100/16π)/ln 100 = 0.597, one turn at i = 2.404.
        let part = |i: f32, first: f32, last: f32| {
            let r = 1.0 - ((i - first) / (last - first)).clamp(0.0, 1.0);
            1.0 / (r + (1.0 - r) / 4.0)
        };
        for (truncate, first, last) in [(false, 0.597, 2.404), (true, 0.0, 3.0)] {
            let got = yarn(truncate);
            let expected = [0., 1., 2., 3.].map(|i| part(i, first, last));
            assert!(got.iter().zip(expected).all(|(x, y)| (x - y).abs() < 3e-3), "{got:?}");
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
