//! Text generation with a key-value cache: greedy search, sampling and beam search.

use std::{cmp::Ordering, mem, ops::ControlFlow};

use candle_core::{DType, Tensor};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::{CausalLm, ConfigError, DecoderMemory, Error, InputError, Result};

/// Maximum number of beams of a batch, unless a sequence has more. It bounds the memory of the cache.
const MAX_BEAMS: usize = 256;

/// Settings of text generation.
///
/// # Examples
/// The expected tokens are those of transformers:
/// ```
/// use candle_core::{Device::Cpu, Tensor};
/// use encoder::{EncoderDecoder, GenerateConfig, LoadOptions, Strategy};
///
/// let dir = "../../tests/golden/bert2bert";
/// let (model, _) = EncoderDecoder::from_dir(dir, &LoadOptions::default())?;
/// let input_ids = Tensor::new(&[[36u32, 52, 9, 39, 22, 42, 34]], &Cpu)?; // (B, S)
/// let beam = Strategy::Beam { num_beams: 3, length_penalty: 1., early_stopping: false };
/// let config = GenerateConfig::greedy(8).with_strategy(beam);
/// assert_eq!(model.generate(&input_ids, None, &config)?, [[1, 28, 28, 43, 43, 28, 28, 28]]);
/// # Ok::<(), encoder::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct GenerateConfig {
    /// Maximum number of tokens of a sequence, prompt included.
    pub max_length: usize,
    /// The token that ends a sequence. It is included in the output.
    pub eos_token_id: Option<u32>,
    /// How the next token is chosen.
    pub strategy: Strategy,
}

/// How the next token is chosen.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Strategy {
    /// The most likely token.
    Greedy,
    /// A random token, drawn with the probabilities of the softmax.
    Sample {
        /// Divisor of the logits. Values below 1 favour likely tokens.
        temperature: f64,
        /// Number of most likely tokens to draw from; `None` for all.
        top_k: Option<usize>,
        /// Draw from the smallest set of most likely tokens whose total probability, among the
        /// `top_k` tokens, is at least `top_p` (nucleus sampling); `None` for all.
        top_p: Option<f64>,
        /// Seed of the random number generator.
        seed: u64,
    },
    /// Beam search: the most likely sequence found.
    Beam {
        /// Number of sequences that are kept in each step.
        num_beams: usize,
        /// The exponent p of a sequence's score, `log-probability / length^p`, where the length
        /// excludes the prompt. Values above 0 favour longer sequences, values below 0 shorter
        /// ones.
        length_penalty: f64,
        /// Stop when `num_beams` sequences have ended, even if an unfinished one could score
        /// higher.
        early_stopping: bool,
    },
}

impl GenerateConfig {
    /// Greedy search up to `max_length` tokens, with `eos_token_id: None`:
    /// [`CausalLm::generate`] then uses no end token, and [`crate::EncoderDecoder::generate`]
    /// uses the end token of the model's config.
    pub fn greedy(max_length: usize) -> Self {
        Self { max_length, eos_token_id: None, strategy: Strategy::Greedy }
    }

    fn check(&self) -> Result<()> {
        let invalid =
            |field, expected, got| Err(ConfigError::Value { field, expected, got }.into());
        match self.strategy {
            Strategy::Sample { temperature, .. }
                if !(temperature > 0.0 && temperature.is_finite()) =>
            {
                invalid(
                    "temperature",
                    "a finite number above 0 (use the greedy strategy for 0)",
                    temperature,
                )
            }
            Strategy::Sample { top_k: Some(0), .. } => invalid("top_k", "1 or more", 0.0),
            Strategy::Sample { top_p: Some(p), .. } if !(p > 0.0 && p <= 1.0) => {
                invalid("top_p", "more than 0, and at most 1", p)
            }
            Strategy::Beam { num_beams: 0, .. } => invalid("num_beams", "1 or more", 0.0),
            Strategy::Beam { length_penalty, .. } if !length_penalty.is_finite() => {
                invalid("length_penalty", "a finite number", length_penalty)
            }
            _ => Ok(()),
        }
    }

    /// This config with another strategy.
    pub fn with_strategy(self, strategy: Strategy) -> Self {
        Self { strategy, ..self }
    }

    /// This config with another `eos_token_id`.
    pub fn with_eos_token_id(self, eos_token_id: Option<u32>) -> Self {
        Self { eos_token_id, ..self }
    }
}

impl CausalLm {
    /// Generates a continuation of each prompt. The returned sequences include the prompts.
    ///
    /// # Shapes
    /// `prompts`: B prompts of equal length, at least one token each; `memory`: B sequences
    /// # Errors
    /// [`InputError::Prompts`] if a prompt is empty or not as long as the first prompt;
    /// [`Error::Attention`] if the memory has another number of sequences;
    /// [`ConfigError::Value`] for an invalid setting; [`InputError::TooLong`] if `max_length`
    /// exceeds [`EncoderConfig::max_tokens`](crate::EncoderConfig::max_tokens); [`Error::NonFiniteOutput`] if no token can be chosen; the
    /// errors of [`Self::step`].
    pub fn generate(
        &self,
        prompts: &[Vec<u32>],
        memory: Option<&DecoderMemory>,
        config: &GenerateConfig,
    ) -> Result<Vec<Vec<u32>>> {
        self.generate_with(prompts, memory, config, |_, _| ControlFlow::Continue(()))
    }

    /// [`Self::generate`] that calls `on_token` with the sequence's index and each chosen token.
    ///
    /// If `on_token` breaks, generation stops, and the sequences generated so far are returned. In
    /// beam search, `on_token` gets the tokens of a sequence when its search has finished; until
    /// then, the sequence is its prompt.
    ///
    /// # Errors
    /// The errors of [`Self::generate`].
    pub fn generate_with(
        &self,
        prompts: &[Vec<u32>],
        memory: Option<&DecoderMemory>,
        config: &GenerateConfig,
        mut on_token: impl FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<Vec<Vec<u32>>> {
        config.check()?;
        let max = self.model().config().max_tokens();
        if config.max_length > max {
            return Err(InputError::TooLong { got: config.max_length, max }.into());
        }
        let length = prompts.first().map_or(0, Vec::len);
        if let Some(index) = prompts.iter().position(|p| p.is_empty() || p.len() != length) {
            return Err(
                InputError::Prompts { index, got: prompts[index].len(), expected: length }.into()
            );
        }
        if prompts.is_empty() || length >= config.max_length {
            return Ok(prompts.to_vec());
        }
        if let Some(memory) = memory {
            memory.check_sequences(prompts.len())?;
        }
        let mut sequences = prompts.to_vec();
        if let Strategy::Beam { num_beams, length_penalty, early_stopping } = config.strategy {
            let beams = Beams { num_beams, length_penalty, early_stopping };
            let size = (MAX_BEAMS / num_beams).max(1);
            for (i, part) in sequences.chunks_mut(size).enumerate() {
                let indices: Vec<u32> = (0..part.len()).map(|j| (i * size + j) as u32).collect();
                let memory = memory.map(|memory| memory.reorder(&indices)).transpose()?;
                let mut on_token = |j, token| on_token(i * size + j, token);
                if self.beam_search(part, memory, config, beams, &mut on_token)?.is_break() {
                    break;
                }
            }
            return Ok(sequences);
        }
        let mut sampler = Sampler::new(&config.strategy);
        let mut active = vec![true; prompts.len()];
        let mut cache = self.cache(config.max_length);
        let mut next = prompts.to_vec();
        while active.contains(&true) {
            let logits = self.last_logits(&next, memory, &mut cache)?;
            next.clear();
            for (i, logits) in logits.chunks(logits.len() / prompts.len()).enumerate() {
                // An ended sequence stays in the batch. Its tokens are not used.
                let token = if active[i] { sampler.next(logits)? } else { 0 };
                next.push(vec![token]);
                if active[i] {
                    sequences[i].push(token);
                    active[i] = Some(token) != config.eos_token_id
                        && sequences[i].len() < config.max_length;
                    if on_token(i, token).is_break() {
                        return Ok(sequences);
                    }
                }
            }
        }
        Ok(sequences)
    }

    /// [`Self::generate_with`] by beam search, for `sequences` that are prompts. The beams of all are
    /// one batch.
    fn beam_search(
        &self,
        sequences: &mut [Vec<u32>],
        mut memory: Option<DecoderMemory>,
        config: &GenerateConfig,
        beams: Beams,
        on_token: &mut impl FnMut(usize, u32) -> ControlFlow<()>,
    ) -> Result<ControlFlow<()>> {
        let length = sequences[0].len();
        let searches = sequences.iter().map(|prompt| BeamSearch::new(prompt, beams, config));
        let mut searches: Vec<(usize, BeamSearch)> = searches.enumerate().collect();
        let mut cache = self.cache(config.max_length);
        let mut next = sequences.to_vec();
        while !searches.is_empty() {
            let logits = self.last_logits(&next, memory.as_ref(), &mut cache)?;
            let log_sums = ops::log_sum_exp(&logits, logits.len() / next.len())?;
            let (count, beams_of_each) = (searches.len(), next.len() / searches.len());
            let of_searches =
                logits.chunks(logits.len() / count).zip(log_sums.chunks(beams_of_each));
            // On this thread: to wait for rayon's workers would take longer.
            let steps = searches.iter_mut().zip(of_searches);
            let steps = steps.map(|((_, search), (logits, sums))| search.extend(logits, sums));
            let steps = steps.collect::<Result<Vec<_>>>()?;
            // The row of the cache that each running beam continues, and the sequences of the
            // memory whose search goes on.
            let (mut rows, mut unfinished) = (vec![], vec![]);
            let before = mem::take(&mut searches).into_iter().zip(steps);
            for (position, ((index, search), step)) in before.enumerate() {
                let Some(from) = step else {
                    let best = search.best()?;
                    let tokens = &best[length..];
                    let stopped = tokens.iter().any(|&token| on_token(index, token).is_break());
                    sequences[index] = best;
                    if stopped {
                        return Ok(ControlFlow::Break(()));
                    }
                    continue;
                };
                rows.extend(from.iter().map(|beam| (position * beams_of_each + beam) as u32));
                unfinished.push(position as u32);
                searches.push((index, search));
            }
            cache.reorder(&rows)?;
            if unfinished.len() < count {
                memory = memory.map(|memory| memory.reorder(&unfinished)).transpose()?;
            }
            let running = searches.iter().flat_map(|(_, search)| &search.running);
            next = running.map(|beam| beam.tokens[beam.tokens.len() - 1..].to_vec()).collect();
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Runs `tokens` `(B, T)` after the tokens in the cache, and returns the logits at the last
    /// token, `(B, vocab_size)`.
    fn last_logits(
        &self,
        tokens: &[Vec<u32>],
        memory: Option<&DecoderMemory>,
        cache: &mut crate::DecoderCache,
    ) -> Result<Vec<f32>> {
        let ids = Tensor::new(tokens.to_vec(), self.device())?;
        let logits = self.step_to_last(&ids, memory, cache)?;
        Ok(logits.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?)
    }
}

/// Chooses tokens greedily or by sampling.
struct Sampler {
    /// Temperature, top-k, top-p and the random number generator; `None` for greedy.
    sampling: Option<(f64, Option<usize>, Option<f64>, ChaCha8Rng)>,
}

impl Sampler {
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
        check_logits(logits)?;
        let Some((temperature, top_k, top_p, rng)) = &mut self.sampling else {
            // The first of equal maxima, as in torch.argmax.
            let best = order.into_iter().min_by(|&a, &b| descending(logits[a], logits[b]));
            return best.map(|token| token as u32).ok_or(Error::NonFiniteOutput);
        };
        order.sort_by(|&a, &b| descending(logits[a], logits[b]));
        order.truncate(top_k.unwrap_or(usize::MAX));
        let largest = f64::from(logits[order[0]]);
        let weight = |&token: &usize| ((f64::from(logits[token]) - largest) / *temperature).exp();
        let weights: Vec<f64> = order.iter().map(weight).collect();
        let nucleus = nucleus_size(&weights, top_p.unwrap_or(1.0));
        let mut point = rng.random::<f64>() * weights[..nucleus].iter().sum::<f64>();
        let chosen = weights[..nucleus].iter().position(|weight| {
            point -= weight;
            point < 0.0
        });
        Ok(order[chosen.unwrap_or(nucleus - 1)] as u32)
    }
}

/// Checks that the largest logit is finite and that no logit is NaN.
///
/// # Errors
/// [`Error::NonFiniteOutput`] if a logit is NaN or ∞, or all are −∞.
fn check_logits(logits: &[f32]) -> Result<()> {
    let has_nan = logits.iter().fold(false, |any, logit| any | logit.is_nan());
    if largest(logits).is_finite() && !has_nan { Ok(()) } else { Err(Error::NonFiniteOutput) }
}

/// The largest logit that is not NaN, or −∞. The maxima of 16 interleaved parts are independent, so
/// that the compiler uses vector instructions.
fn largest(logits: &[f32]) -> f32 {
    let mut maxima = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = logits.as_chunks::<16>();
    for chunk in chunks {
        maxima.iter_mut().zip(chunk).for_each(|(max, logit)| *max = max.max(*logit));
    }
    maxima.into_iter().chain(rest.iter().copied()).fold(f32::NEG_INFINITY, f32::max)
}

fn descending(a: f32, b: f32) -> Ordering {
    b.total_cmp(&a)
}

/// The smallest number of leading weights whose sum is at least the fraction `p` of the sum of all
/// weights. The weights are in descending order.
fn nucleus_size(weights: &[f64], p: f64) -> usize {
    let threshold = p * weights.iter().sum::<f64>();
    let mut sum = 0.0;
    let reached = weights.iter().position(|weight| {
        sum += weight;
        sum >= threshold
    });
    reached.map_or(weights.len(), |last| last + 1)
}

/// The settings of [`Strategy::Beam`].
#[derive(Clone, Copy)]
struct Beams {
    num_beams: usize,
    length_penalty: f64,
    early_stopping: bool,
}

/// Beam search for one sequence.
struct BeamSearch<'a> {
    beams: Beams,
    config: &'a GenerateConfig,
    prompt_length: usize,
    /// The prompt alone before the first step, `num_beams` sequences of equal length after it.
    running: Vec<Beam>,
    /// At most `num_beams`, best first.
    ended: Vec<Beam>,
}

/// A sequence and its score: the log-probability while it is running, and the length-penalised
/// log-probability after it has ended.
struct Beam {
    tokens: Vec<u32>,
    score: f64,
}

/// A running beam with one more token.
#[derive(Clone, Copy)]
struct Candidate {
    /// The index of the beam.
    from: usize,
    token: u32,
    /// The log-probability of the sequence with this token.
    score: f64,
}

impl<'a> BeamSearch<'a> {
    fn new(prompt: &[u32], beams: Beams, config: &'a GenerateConfig) -> Self {
        let running = vec![Beam { tokens: prompt.to_vec(), score: 0.0 }];
        Self { beams, config, prompt_length: prompt.len(), running, ended: vec![] }
    }

    /// Extends the running beams by a token, given the logits `(beams, vocab_size)` and
    /// [`ops::log_sum_exp`] of each beam's. Returns the index of the beam that each new one continues;
    /// `None` if the search has finished.
    fn extend(&mut self, logits: &[f32], log_sums: &[f64]) -> Result<Option<Vec<usize>>> {
        let k = self.beams.num_beams;
        let mut candidates = self.candidates(logits, log_sums)?; // the best 2·k, best first
        let length = self.running[0].tokens.len() + 1;
        let at_max_length = length >= self.config.max_length;
        let penalty = ((length - self.prompt_length) as f64).powf(self.beams.length_penalty);
        let ends = |token| Some(token) == self.config.eos_token_id;

        for &Candidate { from, token, score } in candidates.iter().take(k) {
            if at_max_length || ends(token) {
                let tokens = self.running[from].followed_by(token);
                self.ended.push(Beam { tokens, score: score / penalty });
            }
        }
        self.ended.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.ended.truncate(k);

        candidates.retain(|candidate| !ends(candidate.token));
        candidates.truncate(k);
        let Some(&best) = candidates.first() else { return Ok(None) };
        // Without `early_stopping`, the search is finished if k beams have ended and the best
        // running beam, if it ended now, would not score higher than the worst ended beam.
        let finished = self.ended.len() == k
            && (self.beams.early_stopping || best.score / penalty <= self.ended[k - 1].score);
        if at_max_length || finished {
            return Ok(None);
        }
        // A small vocabulary may give fewer than k candidates. The score −∞ excludes the copies
        // that fill the list.
        candidates.resize(k, Candidate { score: f64::NEG_INFINITY, ..best });
        let extended = |c: &Candidate| Beam {
            tokens: self.running[c.from].followed_by(c.token),
            score: c.score,
        };
        self.running = candidates.iter().map(extended).collect();
        Ok(Some(candidates.iter().map(|candidate| candidate.from).collect()))
    }

    /// The best `2·num_beams` continuations of all beams, best first. Of equal scores, the first
    /// beam and the lowest token are first.
    fn candidates(&self, logits: &[f32], log_sums: &[f64]) -> Result<Vec<Candidate>> {
        /// Logits that are skipped together if the largest one is not among the best.
        const LOGITS: usize = 64;
        let count = 2 * self.beams.num_beams;
        let mut best: Vec<Candidate> = vec![];
        let mut worst = f64::NEG_INFINITY; // scores up to this one are not among the best
        let of_beams = logits.chunks(logits.len() / self.running.len()).zip(log_sums);
        for (from, (beam, (logits, log_sum))) in self.running.iter().zip(of_beams).enumerate() {
            if !log_sum.is_finite() {
                return Err(Error::NonFiniteOutput);
            }
            let score_of = |logit: f32| beam.score + f64::from(logit) - log_sum;
            for (tokens, logits) in (0u32..).step_by(LOGITS).zip(logits.chunks(LOGITS)) {
                if score_of(largest(logits)) <= worst {
                    continue;
                }
                for (token, &logit) in (tokens..).zip(logits) {
                    let score = score_of(logit);
                    if score > worst {
                        let at = best.partition_point(|candidate| candidate.score >= score);
                        best.insert(at, Candidate { from, token, score });
                        best.truncate(count);
                        if best.len() == count {
                            worst = best[count - 1].score;
                        }
                    }
                }
            }
        }
        Ok(best)
    }

    /// The best sequence that has ended.
    fn best(self) -> Result<Vec<u32>> {
        let best = self.ended.into_iter().next();
        best.map(|beam| beam.tokens).ok_or(Error::NonFiniteOutput)
    }
}

impl Beam {
    /// The sequence with another token at its end.
    fn followed_by(&self, token: u32) -> Vec<u32> {
        let mut tokens = self.tokens.clone();
        tokens.push(token);
        tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nucleus_is_the_smallest_set_that_reaches_p() {
        let weights = [0.5, 0.3, 0.15, 0.05];
        assert_eq!([0.4, 0.5, 0.6, 0.95, 1.0].map(|p| nucleus_size(&weights, p)), [1, 1, 2, 3, 4]);
    }

    #[test]
    fn samples_follow_the_filtered_probabilities() -> Result<()> {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY, 1f32.ln()];
        let draw = |top_k, top_p, seed| -> Result<[u32; 4]> {
            let mut sampler =
                Sampler::new(&Strategy::Sample { temperature: 1.0, top_k, top_p, seed });
            let mut counts = [0; 4];
            for _ in 0..4000 {
                counts[sampler.next(&logits)? as usize] += 1;
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
        // Of the two equal logits, top-k keeps the first.
        assert!(two[3] == 0 && two[1].abs_diff(2667) < 150, "{two:?}");
        Ok(())
    }

    #[test]
    fn logits_with_nan_or_an_infinite_maximum_are_an_error() {
        let mut greedy = Sampler::new(&Strategy::Greedy);
        assert_eq!(greedy.next(&[f32::NEG_INFINITY, 1.0]).unwrap(), 1);
        for bad in [[0.0, f32::NAN], [0.0, f32::INFINITY], [f32::NEG_INFINITY; 2]] {
            assert!(matches!(greedy.next(&bad), Err(Error::NonFiniteOutput)), "{bad:?}");
        }
    }

    #[test]
    fn beams_with_logits_that_are_not_finite_are_an_error() -> Result<()> {
        const INFINITY: f32 = f32::INFINITY;
        let config = GenerateConfig::greedy(5);
        let beams = Beams { num_beams: 1, length_penalty: 1.0, early_stopping: false };
        let search = BeamSearch::new(&[0], beams, &config);
        let candidates = |logits: [f32; 3]| -> Result<Vec<u32>> {
            let candidates = search.candidates(&logits, &ops::log_sum_exp(&logits, 3)?)?;
            Ok(candidates.iter().map(|candidate| candidate.token).collect())
        };
        assert_eq!(candidates([1.0, -INFINITY, 2.0])?, [2, 0]);
        for bad in [[0.0, f32::NAN, 1.0], [0.0, INFINITY, 1.0], [-INFINITY; 3]] {
            assert!(matches!(candidates(bad), Err(Error::NonFiniteOutput)), "{bad:?}");
        }
        Ok(())
    }

    #[test]
    fn invalid_settings_are_rejected() {
        let sample =
            |temperature, top_k, top_p| Strategy::Sample { temperature, top_k, top_p, seed: 0 };
        let beam = |num_beams, length_penalty| Strategy::Beam {
            num_beams,
            length_penalty,
            early_stopping: false,
        };
        for (strategy, expected) in [
            (sample(0.0, None, None), "temperature 0 is invalid"),
            (sample(1.0, Some(0), None), "top_k 0 is invalid"),
            (sample(1.0, None, Some(1.5)), "top_p 1.5 is invalid"),
            (beam(0, 1.0), "num_beams 0 is invalid"),
            (beam(2, f64::NAN), "length_penalty NaN is invalid"),
        ] {
            let config = GenerateConfig::greedy(5).with_strategy(strategy);
            let error = config.check().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
