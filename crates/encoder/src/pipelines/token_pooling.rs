//! Fewer vectors for a text: means of clusters of the vectors of its tokens.

use serde::Deserialize;

use crate::{
    Error, MultiVector, Result, TextRole,
    load::ModelFolder,
    pipelines::token_mask::{OneOrMany, applies},
};

/// Replaces vectors by the means of ⌊n / `pool_factor`⌋ clusters, of Ward's method on 1 − cosine:
/// `HierarchicalTokenPooling` of sentence-transformers.
///
/// # Source
/// Clavié et al. 2024, <https://arxiv.org/abs/2409.14683>.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct TokenPooling {
    #[serde(default = "one")]
    pool_factor: f64,
    /// Number of vectors at the beginning that stay as they are.
    #[serde(default = "one_token")]
    num_protected_tokens: usize,
    /// Whether all vectors are normalised at the end.
    #[serde(default)]
    normalize_embeddings: bool,
    tasks: Option<OneOrMany>,
}

fn one() -> f64 {
    1.0
}

fn one_token() -> usize {
    1
}

impl TokenPooling {
    /// Reads the `config.json` of the module.
    ///
    /// # Errors
    /// [`crate::ConfigError::Unsupported`] for a factor below 1.
    pub(crate) fn from_files(files: &ModelFolder) -> Result<Self> {
        let json = files.need_json("config.json", "the settings of HierarchicalTokenPooling")?;
        let pooling: Self = json.to()?;
        if pooling.pool_factor.is_nan() || pooling.pool_factor < 1.0 {
            let got = pooling.pool_factor;
            return Err(Error::unsupported(json.path(), "pool_factor", "at least 1", got));
        }
        Ok(pooling)
    }

    /// The vectors of a text after the pooling.
    pub(crate) fn forward(&self, x: MultiVector, role: TextRole) -> MultiVector {
        if !applies(self.tasks.as_ref(), role) {
            return x;
        }
        let dimension = x.dimension();
        let mut rows: Vec<Vec<f32>> = x.rows().map(<[f32]>::to_vec).collect();
        let mut pooled = rows.split_off(self.num_protected_tokens.min(rows.len()));
        let count = ((pooled.len() as f64 / self.pool_factor) as usize).max(1);
        if count < pooled.len() {
            pooled = means(&pooled, &ward_clusters(cosine_distances(&pooled), count));
        }
        rows.append(&mut pooled);
        if self.normalize_embeddings {
            rows.iter_mut().for_each(|row| normalize(row));
        }
        MultiVector::new(rows.concat(), dimension)
    }
}

/// Scales a vector to length 1.
fn normalize(x: &mut [f32]) {
    let length = x.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-12);
    x.iter_mut().for_each(|x| *x /= length);
}

/// The mean of the rows of each cluster, given the number of each row's cluster.
fn means(rows: &[Vec<f32>], clusters: &[usize]) -> Vec<Vec<f32>> {
    let count = clusters.iter().max().map_or(0, |last| last + 1);
    let mut sums = vec![(vec![0.0; rows[0].len()], 0.0); count];
    for (row, &cluster) in rows.iter().zip(clusters) {
        let (sum, n) = &mut sums[cluster];
        sum.iter_mut().zip(row).for_each(|(sum, x)| *sum += x);
        *n += 1.0;
    }
    let mean = |(sum, n): (Vec<f32>, f32)| sum.into_iter().map(|x| x / n).collect();
    sums.into_iter().map(mean).collect()
}

/// `1 − x·y`, within 0 to 2, of all pairs of rows of length 1.
fn cosine_distances(rows: &[Vec<f32>]) -> Distances {
    let dot = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| x * y).sum::<f32>();
    let pairs = (1..rows.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
    let distance = |(i, j): (usize, usize)| (1.0 - dot(&rows[i], &rows[j])).clamp(0.0, 2.0).into();
    Distances(pairs.map(distance).collect())
}

/// The distances of all pairs of n points: of (1, 0), (2, 0), (2, 1) and so on.
struct Distances(Vec<f64>);

impl Distances {
    fn get(&mut self, i: usize, j: usize) -> &mut f64 {
        let (small, large) = (i.min(j), i.max(j));
        &mut self.0[large * (large - 1) / 2 + small]
    }
}

/// A merge of two clusters. Below n, a number is that of a point; n + i is the cluster of the i-th
/// merge.
struct Merge {
    /// The smaller number first.
    parts: [usize; 2],
    height: f64,
}

/// The number of each point's cluster: the points are merged by Ward's method into at most `count`
/// clusters. The numbers are in the order of SciPy's `fcluster`, which walks the tree of merges.
fn ward_clusters(distances: Distances, count: usize) -> Vec<usize> {
    let merges = ward_merges(distances);
    let n = merges.len() + 1;
    // Merges of equal height are undone together, so that there may be fewer clusters.
    let limit = merges[n - 1 - count].height;
    let (mut labels, mut next) = (vec![0; n], 0);
    // A merge, whether it is within a cluster, and whether its parts have been visited.
    let mut stack = vec![(n - 2, false, false)];
    while let Some((merge, is_within, is_visited)) = stack.pop() {
        let Merge { parts, height } = &merges[merge];
        let is_cluster = is_within || *height <= limit;
        if is_visited {
            for &point in parts.iter().filter(|part| **part < n) {
                next += usize::from(!is_cluster);
                labels[point] = next - 1;
            }
            continue;
        }
        next += usize::from(is_cluster && !is_within);
        stack.push((merge, is_within, true));
        let inner = parts.iter().rev().filter(|part| **part >= n);
        stack.extend(inner.map(|part| (part - n, is_cluster, false)));
    }
    labels
}

/// The merges of Ward's method in ascending order of height, found by chains of nearest neighbours.
///
/// # Source
/// Müllner 2011, <https://arxiv.org/abs/1109.2378>, section 3.2; compare SciPy's `linkage`.
fn ward_merges(mut distances: Distances) -> Vec<Merge> {
    let n = (1..).find(|n| n * (n - 1) / 2 == distances.0.len()).expect("a triangle of distances");
    let mut sizes = vec![1.0; n]; // 0 for a cluster that was merged into another
    let (mut merges, mut chain) = (vec![], Vec::<usize>::new());
    while merges.len() + 1 < n {
        if chain.is_empty() {
            chain.extend(sizes.iter().position(|&size| size > 0.0));
        }
        let (x, y, height) = loop {
            let x = chain[chain.len() - 1];
            // The previous cluster of the chain wins ties, so that the chain has no circles.
            let previous = chain.len().checked_sub(2).map(|i| chain[i]);
            let mut nearest = previous.map(|y| (y, *distances.get(x, y)));
            for i in (0..n).filter(|&i| sizes[i] > 0.0 && i != x) {
                let distance = *distances.get(x, i);
                if nearest.is_none_or(|(_, least)| distance < least) {
                    nearest = Some((i, distance));
                }
            }
            let (y, height) = nearest.expect("there are two clusters");
            if Some(y) == previous {
                break (x.min(y), x.max(y), height);
            }
            chain.push(y);
        };
        chain.truncate(chain.len() - 2);
        let (of_x, of_y) = (sizes[x], sizes[y]);
        (sizes[x], sizes[y]) = (0.0, of_x + of_y); // y becomes the union
        for i in (0..n).filter(|&i| sizes[i] > 0.0 && i != y) {
            let (to_x, to_y) = (*distances.get(i, x), *distances.get(i, y));
            // In the order of SciPy's operations, which decides ties.
            let share = 1.0 / (of_x + of_y + sizes[i]);
            let sum = (sizes[i] + of_x) * share * to_x * to_x
                + (sizes[i] + of_y) * share * to_y * to_y
                - sizes[i] * share * height * height;
            *distances.get(i, y) = sum.sqrt();
        }
        merges.push((x, y, height));
    }
    merges.sort_by(|a, b| a.2.total_cmp(&b.2)); // stable
    // The number of the cluster that contains each point.
    let mut cluster: Vec<usize> = (0..n).collect();
    let number = merges.into_iter().enumerate().map(|(i, (x, y, height))| {
        let (a, b) = (cluster[x], cluster[y]);
        cluster.iter_mut().filter(|own| **own == a || **own == b).for_each(|own| *own = n + i);
        Merge { parts: [a.min(b), a.max(b)], height }
    });
    number.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected numbers are those of SciPy's `fcluster(linkage(x, "ward"), t, "maxclust")`.
    #[test]
    fn clusters_are_those_of_scipy() {
        let x = [0.0f64, 9.0, 1.0, 8.5, 4.0, 20.0, 0.4];
        let pairs = (1..x.len()).flat_map(|i| (0..i).map(move |j| (i, j)));
        let distances: Vec<f64> = pairs.map(|(i, j)| (x[i] - x[j]).abs()).collect();
        for (count, expected) in EXPECTED {
            assert_eq!(ward_clusters(Distances(distances.clone()), count), expected, "{count}");
        }
    }

    const EXPECTED: [(usize, [usize; 7]); 6] = [
        (1, [0, 0, 0, 0, 0, 0, 0]),
        (2, [0, 0, 0, 0, 0, 1, 0]),
        (3, [1, 0, 1, 0, 1, 2, 1]),
        (4, [1, 0, 1, 0, 2, 3, 1]),
        (5, [1, 0, 2, 0, 3, 4, 1]),
        (6, [2, 0, 3, 1, 4, 5, 2]),
    ];
}
