//! Writes files whole: to a temporary name first, then renamed.

use std::path::Path;

use crate::{Error, Result};

/// Writes a file to a temporary name in its folder, and renames it when `fill` has succeeded.
///
/// # Errors
/// [`Error::Io`] naming `path`.
pub(crate) fn write(path: &Path, fill: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let written = temporary(folder).and_then(|file| {
        fill(file.path())?;
        file.persist(path)?;
        Ok(())
    });
    written.map_err(|source| Error::Io { path: path.display().to_string(), source })
}

/// A temporary file, to become one that others can read too.
pub(super) fn temporary(folder: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)] // as any file is made; the process's mask takes away from it
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}
