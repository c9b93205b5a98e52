//! Fusion of rankings of the same rows, such as those of a dense and of a sparse search.

use std::collections::BTreeMap;

use super::search::Hit;

/// Reciprocal rank fusion: the rows of all rankings with the score `Σ 1 / (k + rank)` over the
/// rankings that have the row, in descending order of the score, equal scores in ascending order of
/// row. Ranks are counted from 1. The scores of the rankings have no influence, and neither has the
/// order of the rankings.
///
/// Each ranking has a row at most once.
///
/// # Numerics
/// Scores are summed and compared in f64, and rounded to f32 in the result.
///
/// # Source
/// Cormack, Clarke and Büttcher 2009, <https://doi.org/10.1145/1571941.1572114>, with k = 60.
///
/// # Examples
/// ```
/// use encoder::{Hit, reciprocal_rank_fusion};
///
/// let hit = |row, score| Hit { row, score };
/// let dense = [hit(4, 0.9), hit(7, 0.8), hit(2, 0.1)];
/// let sparse = [hit(7, 21.0), hit(5, 3.0)];
/// let fused = reciprocal_rank_fusion([&dense[..], &sparse[..]], 60);
/// assert_eq!(fused.iter().map(|hit| hit.row).collect::<Vec<_>>(), [7, 4, 5, 2]);
/// assert_eq!(fused[0].score, 1.0 / 61.0 + 1.0 / 62.0);
/// ```
pub fn reciprocal_rank_fusion<'a>(
    rankings: impl IntoIterator<Item = &'a [Hit]>,
    k: u32,
) -> Vec<Hit> {
    let mut ranks: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for ranking in rankings {
        for (rank, hit) in (1..).zip(ranking) {
            ranks.entry(hit.row).or_default().push(rank);
        }
    }
    let score = |(row, mut ranks): (u64, Vec<usize>)| {
        ranks.sort_unstable(); // the sum of the same ranks is the same number
        (row, ranks.into_iter().map(|rank| 1.0 / (f64::from(k) + rank as f64)).sum::<f64>())
    };
    let mut scores: Vec<(u64, f64)> = ranks.into_iter().map(score).collect(); // ascending rows
    scores.sort_by(|a, b| b.1.total_cmp(&a.1)); // stable
    scores.into_iter().map(|(row, score)| Hit { row, score: score as f32 }).collect()
}
