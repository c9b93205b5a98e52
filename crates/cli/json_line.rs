//! JSON lines.

use std::io::{self, Write};

use anyhow::Result;
use serde::Serialize;

/// Writes a value as one line of JSON.
pub fn write_line(out: &mut impl Write, value: &impl Serialize) -> Result<()> {
    serde_json::to_writer(&mut *out, value).map_err(io::Error::from)?;
    Ok(writeln!(out)?)
}
