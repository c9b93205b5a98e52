//! Tokens with which several sequences begin, such as the instruction of queries, or the template
//! and the query of a reranker. In a causal model, their keys and values do not depend on the rest
//! of a sequence, so that they are computed once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::{Result, block::Prefix};

/// Maximum size in bytes of the keys and values of the prefixes that a model keeps.
const MAX_BYTES: usize = 128 << 20;

/// The number of tokens whose computation costs as much as the additional matrix products of a
/// group: the weights are read once more, for few rows.
const COST: usize = 64;

/// The least number of tokens of a kept prefix that a single sequence is computed after.
const MIN_TOKENS: usize = 8;

/// Sequences that are computed together.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// The indices of the sequences.
    pub(crate) sequences: Vec<usize>,
    /// The number of tokens at the beginning of all of them that are computed once.
    pub(crate) prefix: usize,
}

/// Divides sequences into groups, so that the fewest tokens are computed. `max[i]` is the maximum
/// number of tokens of sequence i in a prefix. Sequences without a group are not returned.
pub(crate) fn groups(sequences: &[&[u32]], max: &[usize]) -> Vec<Group> {
    let n = sequences.len();
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by_key(|&i| sequences[i]);
    // Sequences with a common beginning are neighbours in this order. `best[i]` is the largest
    // number of tokens that groups of the sequences from position i on save, with the end and the
    // prefix of the first group; a group of one sequence saves nothing.
    let mut best = vec![(0, n, 0); n + 1];
    for i in (0..n).rev() {
        best[i] = (best[i + 1].0, i + 1, 0);
        let (mut prefix, mut last) = (max[order[i]], sequences[order[i]]);
        for j in i + 1..n {
            let next = sequences[order[j]];
            prefix = prefix.min(max[order[j]]).min(common(last, next));
            last = next;
            if prefix == 0 {
                break;
            }
            let saved = best[j + 1].0 + ((j - i) * prefix).saturating_sub(COST);
            if saved > best[i].0 {
                best[i] = (saved, j + 1, prefix);
            }
        }
    }
    let (mut groups, mut start) = (vec![], 0);
    while start < n {
        let (_, end, prefix) = best[start];
        if prefix > 0 {
            groups.push(Group { sequences: order[start..end].to_vec(), prefix });
        }
        start = end;
    }
    groups
}

/// The number of equal tokens at the beginning of both sequences.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// The prefixes that a model has used last, at most [`MAX_BYTES`] of them. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefixCache(Arc<Mutex<Vec<Entry>>>);

#[derive(Debug)]
struct Entry {
    tokens: Vec<u32>,
    prefix: Prefix,
}

impl PrefixCache {
    /// The maximum number of tokens of a prefix whose keys and values take `bytes` per token.
    pub(crate) fn max_tokens(bytes: usize) -> usize {
        MAX_BYTES / bytes.max(1)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of tokens at the beginning of `tokens` for which keys and values are kept; 0 if
    /// they are fewer than [`MIN_TOKENS`].
    pub(crate) fn kept(&self, tokens: &[u32]) -> usize {
        let longest = self.lock().iter().map(|entry| common(&entry.tokens, tokens)).max();
        longest.filter(|&longest| longest >= MIN_TOKENS).unwrap_or(0)
    }

    /// The keys and values of a beginning of `tokens`, with which `sequences` sequences begin.
    /// `compute` computes those that are not kept. A kept beginning that is a little shorter is
    /// returned in place of the whole if this computes fewer tokens.
    ///
    /// # Errors
    /// The errors of `compute`.
    pub(crate) fn get(
        &self,
        tokens: &[u32],
        sequences: usize,
        compute: impl FnOnce(&[u32]) -> Result<Prefix>,
    ) -> Result<Prefix> {
        {
            let mut entries = self.lock();
            let longest = (0..entries.len()).max_by_key(|&i| common(&entries[i].tokens, tokens));
            if let Some(i) = longest {
                let length = common(&entries[i].tokens, tokens);
                if length > 0 && (tokens.len() - length) * sequences <= tokens.len() {
                    let entry = entries.remove(i);
                    let prefix = entry.prefix.first(length);
                    entries.push(entry); // the last one is the one used last
                    return prefix;
                }
            }
        }
        let prefix = compute(tokens)?;
        let mut entries = self.lock();
        entries.retain(|entry| entry.tokens != tokens); // another thread may have added it
        entries.push(Entry { tokens: tokens.to_vec(), prefix: prefix.clone() });
        let mut bytes: usize = entries.iter().map(|entry| entry.prefix.bytes()).sum();
        while bytes > MAX_BYTES {
            bytes -= entries.remove(0).prefix.bytes();
        }
        Ok(prefix)
    }
}

#[cfg(test)]
mod tests {
    use candle_core::{DType, Device};
    use candle_nn::{VarBuilder, VarMap};
    use mha::{Init, RotaryScaling};

    use super::*;
    use crate::{EncoderConfig, EncoderModel, Positions, RaggedBatch, RotaryPositions};

    fn found(sequences: &[&[u32]], max: usize) -> Vec<(Vec<usize>, usize)> {
        let max: Vec<usize> = sequences.iter().map(|x| max.min(x.len() - 1)).collect();
        groups(sequences, &max).into_iter().map(|group| (group.sequences, group.prefix)).collect()
    }

    /// `length` tokens that all begin with `start`, then `end`.
    fn sequence(start: u32, length: usize, end: u32) -> Vec<u32> {
        (0..length as u32).map(|i| start + i).chain([end]).collect()
    }

    #[test]
    fn sequences_with_a_long_common_beginning_are_one_group() {
        let [a, b, c] = [1, 2, 3].map(|end| sequence(100, 80, end));
        let other = sequence(900, 80, 1);
        let all = [&a[..], &other, &b, &c];
        assert_eq!(found(&all, 1000), [(vec![0, 2, 3], 80)]);
        assert_eq!(found(&all, 40), [(vec![0, 2, 3], 40)]); // 80 tokens saved
        assert_eq!(found(&all, 20), []); // 40 tokens would be saved
        assert_eq!(found(&[&a, &a], 1000), [(vec![0, 1], 80)]); // the last token is left
    }

    /// A causal model with random weights.
    fn model() -> Result<EncoderModel> {
        let mut config = EncoderConfig::new(50, 24, 3, 6, 40);
        config.causal = true;
        config.num_key_value_heads = Some(2);
        config.embeddings.type_vocab_size = None;
        let rotary = RotaryPositions { theta: 1000.0, scaling: RotaryScaling::None };
        config.positions = Positions::Rotary(vec![rotary; 3]);
        config.attention_windows = vec![None, Some(5), None];
        let (init, vars) = (Init::Bert { initializer_range: 0.5 }, VarMap::new());
        EncoderModel::new(&config, false, init.var_builder(&vars, 1, DType::F32, &Device::Cpu))?;
        // Candle's operations compute tensors that autograd tracks; their sums depend on the batch.
        let vars = vars.data().lock().unwrap();
        let untracked = vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor()));
        let weights = VarBuilder::from_tensors(untracked.collect(), DType::F32, &Device::Cpu);
        EncoderModel::new(&config, false, weights)
    }

    #[test]
    fn common_tokens_are_computed_once_and_kept() -> Result<()> {
        let model = model()?;
        let common: Vec<u32> = (0..60).map(|i| i % 50).collect();
        let mut batch = RaggedBatch::default();
        for end in [&[1][..], &[2, 3, 4], &[7, 7, 7, 7, 7, 7, 7], &[2, 9]] {
            batch.push(&[&common[..], end].concat(), &vec![0; 60 + end.len()])?;
        }
        let last: Vec<usize> = (0..4).map(|i| batch.sequence(i).len() - 1).collect();
        let expected = model.forward_ragged(&batch)?.to_vec2::<f32>()?;
        let got = model.forward_ragged_at(&batch, &last, None)?.to_vec2::<f32>()?;
        let rows = batch.offsets()[1..].iter().map(|end| expected[end - 1].clone());
        assert_eq!(got, rows.collect::<Vec<_>>());
        assert_eq!(model.prefixes().kept(batch.sequence(0)), 60);

        // A sequence with a prompt keeps its tokens, and a later one finds them.
        let prompted: Vec<u32> = (0..30).map(|i| 49 - i).collect();
        let mut alone = RaggedBatch::default();
        alone.push(&prompted, &[0; 30])?;
        let expected = model.forward_ragged(&alone)?.to_vec2::<f32>()?;
        for kept in [0, 12] {
            assert_eq!(model.prefixes().kept(&prompted), kept);
            let got = model.forward_ragged_at(&alone, &[29], Some(&[12]))?;
            assert_eq!(got.to_vec2::<f32>()?[0], expected[29]);
        }
        Ok(())
    }

    #[test]
    fn the_prefixes_used_last_are_kept_within_the_limit() -> Result<()> {
        let (model, cache) = (model()?, PrefixCache::default());
        let tokens = |first: u32| (0..20).map(|i| (first + i) % 50).collect::<Vec<u32>>();
        let one = model.prefix(&tokens(0))?;
        assert_eq!(one.bytes(), 20 * model.config().key_value_bytes());
        let limit = MAX_BYTES / one.bytes();
        let layers = |n: usize| Prefix::repeated(&one, n);
        // Each of these has a third of the limit.
        for first in [0, 1, 2, 0, 3] {
            cache.get(&tokens(first), 1, |_| Ok(layers(limit / 3)))?;
        }
        assert_eq!([0, 1, 2, 3].map(|first| cache.kept(&tokens(first))), [20, 0, 20, 20]);
        cache.get(&tokens(4), 1, |_| Ok(layers(limit + 1)))?;
        assert_eq!([0, 2, 3, 4].map(|first| cache.kept(&tokens(first))), [0; 4]);
        Ok(())
    }

    #[test]
    fn a_longer_prefix_of_some_is_used_if_it_saves_more() {
        let [a, b] = [1, 2].map(|end| sequence(100, 100, end));
        let long = |end: u32| [&sequence(100, 100, 5)[..], &sequence(500, 90, end)].concat();
        let [c, d] = [1, 2].map(long);
        // One group of four saves 300 tokens. Two groups of two save 100 and 191, and cost more.
        assert_eq!(found(&[&a, &b, &c, &d], 1000), [(vec![0, 1, 2, 3], 100)]);
        let long = |end: u32| [&sequence(100, 100, 5)[..], &sequence(500, 300, end)].concat();
        let [c, d] = [1, 2].map(long);
        assert_eq!(found(&[&a, &b, &c, &d], 1000), [(vec![0, 1], 100), (vec![2, 3], 401)]);
    }
}
