//! Messages on standard error, and whether an output is coloured; errors and warnings of the
//! library `corpus` in terms of the command's options.

use std::io::{self, IsTerminal, Write};

use anyhow::anyhow;
use corpus::{
    Error, InputError, InvalidRecord, InvalidRecordKind, NonFinite, OutputError, ResumeError,
    VectorsError, warnings,
};
use encoder::SparseVectorError;

use crate::fit::harmless;

/// Whether to write colours to an output. A variable `NO_COLOR` that is not empty disables them.
pub fn is_colored(output: &impl IsTerminal) -> bool {
    output.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// The line that is printed for an error.
pub fn error_line(error: &anyhow::Error) -> String {
    let text = error.to_string();
    let first = text.lines().next().unwrap_or_default(); // candle's errors may carry a backtrace
    let advice = error.downcast_ref().map_or("", advice);
    format!("{first}{advice}")
}

/// The same error without the advice to use `--input-format`, for commands without this option.
pub fn without_input_format(error: Error) -> anyhow::Error {
    match error {
        Error::Input(InputError::UnsupportedExtension { .. } | InputError::NoFields { .. }) => {
            anyhow!("{error}")
        }
        error => error.into(),
    }
}

/// The end of an error message that names the options that resolve the error.
fn advice(error: &Error) -> &'static str {
    match error {
        Error::Input(error) => match error {
            InputError::UnsupportedExtension { .. } => {
                "; if the content has one of these formats, name the format with --input-format"
            }
            InputError::NoFields { .. } => ", or --input-format",
            InputError::NoColumn { expected, .. } if expected == "embedding" => "",
            InputError::NoColumn { .. } | InputError::NotText { .. } => {
                "; name the text column with --field"
            }
            _ => "",
        },
        Error::InvalidRecord(InvalidRecord { kind: InvalidRecordKind::NoField { .. }, .. }) => {
            "; name the text field with --field"
        }
        Error::Output(OutputError::OutputExtension { .. }) => ", or --format",
        Error::Vectors(VectorsError::InvalidRow { source, .. }) => match **source {
            encoder::Error::Input(encoder::InputError::SparseRow {
                source: SparseVectorError::Index { .. },
                ..
            }) => "; set --model to the model that embedded the corpus",
            _ => "",
        },
        Error::Resume(error) => match error {
            ResumeError::OtherRun { .. } => ", or start again without --resume",
            ResumeError::RunStateVersion { .. }
            | ResumeError::InputShorter { .. }
            | ResumeError::InputChanged { .. }
            | ResumeError::InputGrew { .. } => "; start again without --resume",
            _ => "",
        },
        _ => "",
    }
}

/// Prints a message to standard error. A closed or full standard error is ignored, so that it does
/// not end a run whose output is complete.
pub fn print(message: &str) {
    let _ = writeln!(io::stderr(), "encodle: {}", harmless(message));
}

/// Whether the error depends on the command line only, so that the exit code is 2.
pub fn is_usage_error(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(
            Error::Input(InputError::NoFields { .. })
                | Error::Output(
                    OutputError::OutputExtension { .. } | OutputError::JsonlDtype { .. }
                )
        )
    )
}

/// Prints a warning for each column with values that were written as null.
pub fn warn_non_finite(columns: &NonFinite) {
    for message in warnings::non_finite(columns) {
        print(&message);
    }
}

/// Prints how many blank lines of an input were skipped.
pub fn warn_blank_lines(input: &str, count: u64) {
    if let Some(message) = warnings::blank_lines(input, count) {
        print(&message);
    }
}
