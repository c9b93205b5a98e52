//! Files of records to files of vectors.

use std::{
    path::{Path, PathBuf, absolute},
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use corpus::{EmbedRun, Event, OnInvalid, RecordSource, warnings};
use encoder::{EmbedOptions, Prompt};
use pyo3::prelude::*;

use crate::{
    embedder::Embedder,
    errors::error,
    model::named,
    pool::{SIGNAL_CHECK, Watch},
};

/// The outputs of the runs of this process, each with the stop flag of its run. A run holds its flag
/// until it ends.
static RUNS: Mutex<Vec<(PathBuf, Weak<AtomicBool>)>> = Mutex::new(vec![]);

/// The summary of a run: records read, vectors written, truncated texts, repeated texts, the skipped
/// records, and warnings.
type Summary = (u64, u64, u64, u64, Vec<String>, Vec<String>);

/// Embeds the records of a file and writes their vectors to another file. `on_skipped` is called
/// with the message of each skipped record when the chunk that contains the record has been
/// embedded, or cannot be read or tokenized.
#[pyfunction]
#[expect(clippy::too_many_arguments)]
pub fn embed_file(
    py: Python<'_>,
    embedder: &Embedder,
    input: String,
    output: String,
    input_format: Option<&str>,
    output_format: Option<&str>,
    field: Option<String>,
    dtype: &str,
    prompt: String,
    long_texts: &str,
    resume: bool,
    skip: bool,
    description: String,
    on_skipped: Py<PyAny>,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<Summary> {
    let mut source = RecordSource::file(&input);
    if let Some(format) = input_format {
        source = source.with_format(named("input_format", format)?);
    }
    if let Some(field) = field {
        source = source.with_field(field);
    }
    let stop = Arc::new(AtomicBool::new(false));
    let path = absolute(&output).map_err(error)?;
    let mut run = EmbedRun::new(source, output).map_err(error)?;
    run = run.with_resume(resume).with_model(description).with_stop(stop.clone());
    run = run.with_dtype(named("output_dtype", dtype)?);
    if let Some(format) = output_format {
        run = run.with_format(named("output_format", format)?);
    }
    if skip {
        run = run.on_invalid(OnInvalid::Skip);
    }
    let long_texts = named("long_texts", long_texts)?;
    let model = embedder.embedder.clone();
    let pool = embedder.pool.separate(py)?;
    RUNS.lock().unwrap_or_else(PoisonError::into_inner).push((path.clone(), Arc::downgrade(&stop)));
    // If this function returns early, as for KeyboardInterrupt, the guard sets `stop`, which ends
    // the run. `EmbedRun` does not read `Watch::stop`.
    let _guard = SetOnDrop(stop);
    pool.run(py, progress, move |watch| {
        let options = EmbedOptions::new().with_prompt(Prompt::Text(&prompt));
        let options = options.with_long_texts(long_texts);
        let (mut skipped, mut messages) = (vec![], vec![]);
        let on_event = |event: Event| match event {
            Event::Skipped(record) => {
                let message = record.to_string();
                // `None` if the interpreter is being shut down.
                Python::try_attach(|py| {
                    if let Err(error) = on_skipped.call1(py, (&message,)) {
                        error.write_unraisable(py, None);
                    }
                });
                skipped.push(message);
            }
            Event::WrittenAsText { field, reason, .. } => {
                messages.push(warnings::written_as_text(&input, field, reason));
            }
            Event::Progress { read, .. } => watch.done.store(read as usize, Ordering::Relaxed),
            _ => {}
        };
        wait_for_interrupted_runs(&path, watch);
        let summary = watch.compute(|| run.run(&*model, options, on_event)).map_err(error)?;
        let summary = summary.map_err(error)?;
        messages.extend(warnings::non_finite(&summary.non_finite));
        messages.extend(warnings::blank_lines(&input, summary.blank_lines));
        let (truncated, repeated) = (summary.truncated_texts, summary.repeated_texts);
        Ok((summary.read, summary.written, truncated, repeated, skipped, messages))
    })
}

/// Waits until the interrupted runs with this output have ended: a run ends after its current batch,
/// and until then it locks its temporary file.
fn wait_for_interrupted_runs(output: &Path, watch: &Watch) {
    let is_interrupted = || {
        let mut runs = RUNS.lock().unwrap_or_else(PoisonError::into_inner);
        runs.retain(|(_, stop)| stop.strong_count() > 0);
        runs.iter().any(|(path, stop)| {
            path == output && stop.upgrade().is_some_and(|stop| stop.load(Ordering::Relaxed))
        })
    };
    while !watch.stop.load(Ordering::Relaxed) && is_interrupted() {
        thread::sleep(SIGNAL_CHECK);
    }
}

/// Sets a flag when it is dropped.
struct SetOnDrop(Arc<AtomicBool>);

impl Drop for SetOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
