//! The number of threads to compute on.

use std::{env, thread};

/// The maximum number of threads per CPU. More threads use memory and do not compute faster.
const THREADS_PER_CPU: usize = 4;

/// The number of threads to compute on: the requested number, or else that of the environment
/// variable `RAYON_NUM_THREADS`, or else the number of CPUs that the process may use by its affinity
/// and its cgroup. It is at most 4 per CPU; if a larger number is requested, `warn` is called with a
/// message.
///
/// A value of the environment variable that is not a number of at least 1 is ignored. Embeddings do
/// not depend on the number of threads.
///
/// # Examples
/// ```
/// let cpus = std::thread::available_parallelism()?.get();
/// assert_eq!(encoder::threads(Some(1), |_| unreachable!()), 1);
/// let mut warning = String::new();
/// assert_eq!(encoder::threads(Some(70_000), |message| warning = message.to_string()), 4 * cpus);
/// assert!(warning.ends_with("threads instead of 70000: the maximum is 4 per CPU"));
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn threads(requested: Option<usize>, warn: impl FnOnce(&str)) -> usize {
    let from_environment =
        || env::var("RAYON_NUM_THREADS").ok()?.parse().ok().filter(|&threads: &usize| threads > 0);
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    let requested = requested.or_else(from_environment).unwrap_or(cpus);
    let max = cpus * THREADS_PER_CPU;
    if requested > max {
        warn(&format!(
            "using {max} threads instead of {requested}: the maximum is {THREADS_PER_CPU} per CPU"
        ));
    }
    requested.min(max)
}
