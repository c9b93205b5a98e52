//! Writes files atomically: to a temporary file first, which is then renamed.

use std::path::Path;

use crate::{Error, FileError, Result};

/// Creates a temporary file in the folder of `path`, calls `fill` with the temporary path, and
/// renames the file to `path` on success.
///
/// # Errors
/// [`FileError::Write`] with `path` if the file cannot be written or renamed.
pub(crate) fn write(path: &Path, fill: impl FnOnce(&Path) -> std::io::Result<()>) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    let written = temporary(folder).and_then(|file| {
        fill(file.path())?;
        file.persist(path)?;
        Ok(())
    });
    written.map_err(|source| {
        Error::File(FileError::Write { path: path.display().to_string(), source })
    })
}

/// Creates a temporary file with the permissions of an ordinary new file.
pub(super) fn temporary(folder: &Path) -> std::io::Result<tempfile::NamedTempFile> {
    temporary_with_prefix(folder, ".tmp")
}

/// [`temporary`], with a name that starts with `prefix`.
pub(super) fn temporary_with_prefix(
    folder: &Path,
    prefix: &str,
) -> std::io::Result<tempfile::NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(prefix);
    #[cfg(unix)] // tempfile's default is 0o600; the umask applies to 0o666
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    builder.tempfile_in(folder)
}
