//! The exception of the package.

use std::fmt::Display;

use pyo3::{PyErr, create_exception, exceptions::PyException};

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
