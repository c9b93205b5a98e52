//! From scores of the next token to text: greedy, sampling and beam search, always with a cache.

use std::{cmp::Ordering, ops::ControlFlow};

use candle_core::{D, DType, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{BertDecoder, DecoderMemory, Error, Result};

/// How a decoder writes.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateConfig {
    /// The most tokens of a sequence, its beginning included.
    pub max_length: usize,
    /// What ends a sequence; it is part of it.
    pub eos_token_id: Option<u32>,
    /// How the next token is chosen.
    pub strategy: Strategy,
}

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq)]
pub enum Strategy {
    /// The most likely one.
    Greedy,
    /// At random, by likelihood.
    Sample {
        /// Scores are divided by it: below 1 the likely become likelier.
        temperature: f64,
        /// Only so many of the likeliest come into question.
        top_k: Option<usize>,
        /// Only the likeliest that together reach this probability come into question.
        top_p: Option<f64>,
        /// What the random numbers come from.
        seed: u64,
    },
    /// The likeliest whole sequence among those that a beam keeps.
    Beam {
        /// How many are kept.
        num_beams: usize,
        /// A sequence's log-probability is divided by its length to this power: above 0 longer
        /// ones win, below 0 shorter ones.
        length_penalty: f64,
        /// Stop once `num_beams` have ended, though an open one might become better.
        early_stopping: bool,
    },
}

impl GenerateConfig {
    /// Greedy, up to `max_length`.
    pub fn greedy(max_length: usize) -> Self {
        Self { max_length, eos_token_id: None, strategy: Strategy::Greedy }
    }

    fn check(&self) -> Result<()> {
        let refuse = |field, expected, got| Err(Error::Value { field, expected, got });
        match self.strategy {
            Strategy::Sample { temperature, .. }
                if !(temperature > 0.0 && temperature.is_finite()) =>
            {
                refuse(
                    "temperature",
                    "a number above 0 (greedy is a strategy of its own)",
                    temperature,
                )
            }
            Strategy::Sample { top_k: Some(0), .. } => refuse("top_k", "1 or more", 0.0),
            Strategy::Sample { top_p: Some(p), .. } if !(p > 0.0 && p <= 1.0) => {
                refuse("top_p", "more than 0, and at most 1", p)
            }
            Strategy::Beam { num_beams: 0, .. } => refuse("num_beams", "1 or more", 0.0),
            Strategy::Beam { length_penalty, .. } if !length_penalty.is_finite() => {
                refuse("length_penalty", "a finite number", length_penalty)
            }
            _ => Ok(()),
        }
    }
}

impl BertDecoder {
    /// What follows each prompt, the prompt included.
    ///
    /// # Shapes
    /// `prompts`: B of equal length, at least one token each; `memory`: of B sequences
    /// # Errors
    /// [`Error::Prompts`], [`Error::Value`], [`Error::TooLong`] if `max_length` exceeds the
    /// positions; [`Self::step`]'s.
    pub fn generate(
        &self,
        prompts: &[Vec<u32>],
        memory: Option<&DecoderMemory>,
        config: &GenerateConfig,
    ) -> Result<Vec<Vec<u32>>> {
        self.generate_with(prompts, memory, config, |_, _| ControlFlow::Continue(()))
    }

    /// [`Self::generate`], and each token as it is chosen: `on_token` gets the sequence's number
    /// and the token, and may stop everything; sequences are then as far as they were. A beam's
    /// tokens come once it is chosen.
    ///
    /// # Errors
    /// as there.
    pub fn generate_with(
        &self,
        prompts: &[Vec<u32>],
        memory: Option<&DecoderMemory>,
        config: &GenerateConfig,
        mut on_token: impl FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<Vec<Vec<u32>>> {
        config.check()?;
        let max = self.config().max_position_embeddings;
        if config.max_length > max {
            return Err(Error::TooLong { got: config.max_length, max });
        }
        let length = prompts.first().map_or(0, Vec::len);
        if let Some(index) = prompts.iter().position(|p| p.is_empty() || p.len() != length) {
            return Err(Error::Prompts { index, got: prompts[index].len(), expected: length });
        }
        if prompts.is_empty() || length >= config.max_length {
            return Ok(prompts.to_vec());
        }
        if let &Strategy::Beam { num_beams, length_penalty, early_stopping } = &config.strategy {
            let mut written = vec![];
            for (i, prompt) in (0u32..).zip(prompts) {
                let memory = memory.map(|m| m.reorder(&vec![i; num_beams])).transpose()?;
                let search = BeamSearch { num_beams, length_penalty, early_stopping, config };
                let best = search.run(self, prompt, memory.as_ref())?;
                let stopped =
                    best[length..].iter().any(|&token| on_token(i as usize, token).is_break());
                written.push(best);
                if stopped {
                    written.extend_from_slice(&prompts[written.len()..]);
                    break;
                }
            }
            return Ok(written);
        }
        let known = |id: &u32| (*id as usize) < self.config().vocab_size;
        let pad = self.config().pad_token_id.filter(known).unwrap_or(0);
        let mut choose = Choice::new(&config.strategy);
        let mut written = prompts.to_vec();
        let mut open = vec![true; prompts.len()];
        let mut cache = self.cache(config.max_length);
        let mut next = prompts.to_vec();
        while open.contains(&true) {
            let logits = self.last_logits(&next, memory, &mut cache)?;
            next.clear();
            for (i, logits) in logits.into_iter().enumerate() {
                // A sequence that has ended goes through the motions, since its batch goes on.
                let token = if open[i] { choose.next(&logits)? } else { pad };
                next.push(vec![token]);
                if open[i] {
                    written[i].push(token);
                    open[i] =
                        Some(token) != config.eos_token_id && written[i].len() < config.max_length;
                    if on_token(i, token).is_break() {
                        return Ok(written);
                    }
                }
            }
        }
        Ok(written)
    }

    /// The scores after the last of `tokens` `(B, T)`, which come after those in the cache.
    fn last_logits(
        &self,
        tokens: &[Vec<u32>],
        memory: Option<&DecoderMemory>,
        cache: &mut crate::DecoderCache,
    ) -> Result<Vec<Vec<f32>>> {
        let ids = Tensor::new(tokens.to_vec(), self.device())?;
        let logits = self.step(&ids, None, memory, cache)?; // (B, T, V)
        let last = logits.narrow(1, ids.dim(1)? - 1, 1)?.squeeze(1)?;
        Ok(last.to_dtype(DType::F32)?.to_vec2()?)
    }
}

/// Greedy or sampling, with the state of its random numbers.
struct Choice {
    sampling: Option<(f64, Option<usize>, Option<f64>, ChaCha8Rng)>,
}

impl Choice {
    fn new(strategy: &Strategy) -> Self {
        let sampling = match *strategy {
            Strategy::Sample { temperature, top_k, top_p, seed } => {
                Some((temperature, top_k, top_p, ChaCha8Rng::seed_from_u64(seed)))
            }
            Strategy::Greedy | Strategy::Beam { .. } => None,
        };
        Self { sampling }
    }

    fn next(&mut self, logits: &[f32]) -> Result<u32> {
        let mut order: Vec<usize> = (0..logits.len()).collect();
        check(logits)?;
        let Some((temperature, top_k, top_p, rng)) = &mut self.sampling else {
            // the first of equals, as torch.argmax
            let best = order.into_iter().min_by(|&a, &b| falling(logits[a], logits[b]));
            return best.map(|token| token as u32).ok_or(Error::NoScore);
        };
        order.sort_by(|&a, &b| falling(logits[a], logits[b]));
        order.truncate(top_k.unwrap_or(usize::MAX));
        let largest = f64::from(logits[order[0]]);
        let weight = |&token: &usize| ((f64::from(logits[token]) - largest) / *temperature).exp();
        let weights: Vec<f64> = order.iter().map(weight).collect();
        let nucleus = within_p(&weights, top_p.unwrap_or(1.0));
        let mut point = rng.random::<f64>() * weights[..nucleus].iter().sum::<f64>();
        let chosen = weights[..nucleus].iter().position(|weight| {
            point -= weight;
            point < 0.0
        });
        Ok(order[chosen.unwrap_or(nucleus - 1)] as u32)
    }
}

/// That there is a largest score to choose: no NaN, no ∞, not −∞ alone.
fn check(logits: &[f32]) -> Result<()> {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    match largest.is_finite() && !logits.iter().any(|logit| logit.is_nan()) {
        true => Ok(()),
        false => Err(Error::NoScore),
    }
}

fn falling(a: f32, b: f32) -> Ordering {
    b.total_cmp(&a)
}

/// How many of the weights, which fall, are needed to reach the share `p` of their sum.
fn within_p(weights: &[f64], p: f64) -> usize {
    let enough = p * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let reached = weights.iter().position(|weight| {
        sum += weight;
        sum >= enough
    });
    reached.map_or(weights.len(), |last| last + 1)
}

/// Beam search for one sequence.
struct BeamSearch<'a> {
    num_beams: usize,
    length_penalty: f64,
    early_stopping: bool,
    config: &'a GenerateConfig,
}

/// A sequence and its log-probability, or that divided by its length's power once it has ended.
#[derive(Clone)]
struct Beam {
    tokens: Vec<u32>,
    score: f64,
}

impl BeamSearch<'_> {
    fn run(
        &self,
        decoder: &BertDecoder,
        prompt: &[u32],
        memory: Option<&DecoderMemory>,
    ) -> Result<Vec<u32>> {
        let k = self.num_beams;
        let mut cache = decoder.cache(self.config.max_length);
        // At first all beams are the same: only one of them counts.
        let mut running = vec![Beam { tokens: prompt.to_vec(), score: f64::NEG_INFINITY }; k];
        running[0].score = 0.0;
        let mut next: Vec<Vec<u32>> = vec![prompt.to_vec(); k];
        let mut ended: Vec<Beam> = vec![];
        loop {
            let logits = decoder.last_logits(&next, memory, &mut cache)?;
            let mut candidates = self.candidates(&running, &logits)?; // the best 2·k, best first
            let length = running[0].tokens.len() + 1;
            let full = length >= self.config.max_length;
            let penalty =
                |length: usize| ((length - prompt.len()) as f64).powf(self.length_penalty);

            for (rank, (from, token, score)) in candidates.iter().enumerate() {
                let ends = full || Some(*token) == self.config.eos_token_id;
                if ends && rank < k {
                    let mut tokens = running[*from].tokens.clone();
                    tokens.push(*token);
                    ended.push(Beam { tokens, score: score / penalty(length) });
                }
            }
            ended.sort_by(|a, b| b.score.total_cmp(&a.score));
            ended.truncate(k);

            candidates.retain(|&(_, token, _)| Some(token) != self.config.eos_token_id);
            candidates.truncate(k);
            // The best open one, divided as if it ended now, no longer beats the worst ended one.
            let hopeless = match candidates.first() {
                None => true,
                Some(best) => {
                    ended.len() == k
                        && (self.early_stopping || best.2 / penalty(length) <= ended[k - 1].score)
                }
            };
            if full || hopeless {
                return ended.into_iter().next().map(|best| best.tokens).ok_or(Error::NoScore);
            }
            // A small vocabulary may not have as many: the rest are there, but do not count.
            let (from, token, _) = candidates[0];
            candidates.resize(k, (from, token, f64::NEG_INFINITY));
            cache.reorder(&candidates.iter().map(|c| c.0 as u32).collect::<Vec<_>>())?;
            running = candidates
                .iter()
                .map(|&(from, token, score)| {
                    let mut tokens = running[from].tokens.clone();
                    tokens.push(token);
                    Beam { tokens, score }
                })
                .collect();
            next = candidates.iter().map(|c| vec![c.1]).collect();
        }
    }

    /// The best continuations of all beams: from which, with what, and the log-probability.
    fn candidates(&self, running: &[Beam], logits: &[Vec<f32>]) -> Result<Vec<(usize, u32, f64)>> {
        let mut candidates = vec![];
        for (from, (beam, logits)) in running.iter().zip(logits).enumerate() {
            check(logits)?;
            let log_sum = log_sum_exp(logits)?;
            let scored = (0u32..)
                .zip(logits)
                .map(|(token, &logit)| (from, token, beam.score + f64::from(logit) - log_sum));
            candidates.extend(scored.filter(|c| c.2 > f64::NEG_INFINITY));
        }
        candidates.sort_by(|a, b| b.2.total_cmp(&a.2));
        candidates.truncate(2 * self.num_beams);
        Ok(candidates)
    }
}

fn log_sum_exp(logits: &[f32]) -> Result<f64> {
    let logits = Tensor::new(logits, &candle_core::Device::Cpu)?.to_dtype(DType::F64)?;
    Ok(logits.log_sum_exp(D::Minus1)?.to_scalar::<f64>()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nucleus_is_the_fewest_that_reach_p() {
        let weights = [0.5, 0.3, 0.15, 0.05];
        assert_eq!([0.4, 0.5, 0.6, 0.95, 1.0].map(|p| within_p(&weights, p)), [1, 1, 2, 3, 4]);
    }

    #[test]
    fn sampling_follows_the_probabilities_it_is_left_with() -> Result<()> {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY, 1f32.ln()];
        let draw = |top_k, top_p, seed| -> Result<[u32; 4]> {
            let mut choice =
                Choice::new(&Strategy::Sample { temperature: 1.0, top_k, top_p, seed });
            let mut counts = [0; 4];
            for _ in 0..4000 {
                counts[choice.next(&logits)? as usize] += 1;
            }
            Ok(counts)
        };
        let counts = draw(None, None, 1)?;
        assert!(counts[2] == 0 && counts[1].abs_diff(2000) < 150, "{counts:?}");
        assert_eq!(draw(None, None, 1)?, counts);
        assert_ne!(draw(None, None, 2)?, counts);
        assert_eq!(draw(Some(1), None, 1)?, [0, 4000, 0, 0]);
        assert_eq!(draw(None, Some(0.5), 1)?, [0, 4000, 0, 0]);
        let two = draw(Some(2), None, 1)?;
        assert!(two[3] == 0 && two[1].abs_diff(2667) < 150, "{two:?}"); // the first of equals stays
        Ok(())
    }

    #[test]
    fn scores_that_say_nothing_are_an_error() {
        let mut greedy = Choice::new(&Strategy::Greedy);
        assert_eq!(greedy.next(&[f32::NEG_INFINITY, 1.0]).unwrap(), 1);
        for bad in [[0.0, f32::NAN], [0.0, f32::INFINITY], [f32::NEG_INFINITY; 2]] {
            assert!(matches!(greedy.next(&bad), Err(Error::NoScore)), "{bad:?}");
        }
    }

    #[test]
    fn settings_that_mean_nothing_are_refused() {
        let sample =
            |temperature, top_k, top_p| Strategy::Sample { temperature, top_k, top_p, seed: 0 };
        let beam = |num_beams, length_penalty| Strategy::Beam {
            num_beams,
            length_penalty,
            early_stopping: false,
        };
        for (strategy, expected) in [
            (sample(0.0, None, None), "temperature 0 cannot be"),
            (sample(1.0, Some(0), None), "top_k 0 cannot be"),
            (sample(1.0, None, Some(1.5)), "top_p 1.5 cannot be"),
            (beam(0, 1.0), "num_beams 0 cannot be"),
            (beam(2, f64::NAN), "length_penalty NaN cannot be"),
        ] {
            let config = GenerateConfig { strategy, ..GenerateConfig::greedy(5) };
            let error = config.check().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
