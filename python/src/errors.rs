//! The exception and the warnings of the package.

use std::fmt::Display;

use pyo3::{create_exception, exceptions::PyException, prelude::*};

create_exception!(
    encodle,
    EncodleError,
    PyException,
    "An error of the library. The message says what happened, what was expected and, where \
     possible, what to do."
);

/// Converts an error of the library. The exception has the error's message.
pub fn error(error: impl Display) -> PyErr {
    EncodleError::new_err(error.to_string())
}

/// Logs a warning with the Python logger `encodle`.
pub fn log_warning(warning: &str) {
    // `None` if the interpreter is being shut down.
    Python::try_attach(|py| {
        let logger = py.import("logging").and_then(|m| m.call_method1("getLogger", ("encodle",)));
        let logged = logger.and_then(|logger| logger.call_method1("warning", ("%s", warning)));
        logged.map(drop).unwrap_or_else(|error| error.write_unraisable(py, None));
    });
}
