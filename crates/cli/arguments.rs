//! Parsers of argument values, and errors of arguments.

use std::{fmt::Display, str::FromStr};

use clap::{
    builder::{PossibleValue, PossibleValuesParser, TypedValueParser},
    error::ErrorKind,
};
use encoder::Choice;

/// The name of a value of a setting.
pub fn choice<T: Choice + Send + Sync>() -> impl TypedValueParser<Value = T> {
    let value = |value: &T| PossibleValue::new(value.name()).help(value.help());
    named_values(T::ALL.iter().map(value)).try_map(|name| T::from_name(&name))
}

/// One of these names.
pub fn named_values(values: impl Iterator<Item = PossibleValue>) -> PossibleValuesParser {
    PossibleValuesParser::new(values)
}

/// A count of at least 1.
pub fn positive<T: FromStr + PartialOrd + From<u8>>(text: &str) -> Result<T, String> {
    let count = text.parse().ok().filter(|count| *count >= T::from(1));
    count.ok_or_else(|| "expected a whole number of at least 1".to_string())
}

/// A finite number.
pub fn finite(text: &str) -> Result<f32, String> {
    let number = text.parse().ok().filter(|number: &f32| number.is_finite());
    number.ok_or_else(|| "expected a finite number".to_string())
}

/// The error of arguments that do not fit together. `main` exits with 2, as for the errors that
/// clap finds.
pub fn usage_error(message: impl Display) -> anyhow::Error {
    clap::Error::raw(ErrorKind::ArgumentConflict, message).into()
}
