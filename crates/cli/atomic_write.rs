//! Files that are written completely or not at all.

use std::{
    fs,
    io::{BufWriter, Write},
    path::Path,
};

use anyhow::{Result, anyhow};
use tempfile::NamedTempFile;

/// Writes a temporary file in the directory of `path`, and renames it to `path` on success. The
/// permissions of a file that is replaced are kept.
pub fn atomic_write(
    path: &Path,
    content: impl FnOnce(&mut BufWriter<&mut NamedTempFile>) -> Result<()>,
) -> Result<()> {
    let directory = match path.parent() {
        Some(directory) if !directory.as_os_str().is_empty() => directory,
        _ => Path::new("."),
    };
    let mut builder = tempfile::Builder::new();
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666)); // minus the umask
    let write = || {
        let mut file = builder.tempfile_in(directory)?;
        let mut out = BufWriter::new(&mut file);
        content(&mut out)?;
        out.flush()?;
        drop(out);
        if let Ok(replaced) = fs::metadata(path) {
            file.as_file().set_permissions(replaced.permissions())?;
        }
        file.persist(path)?;
        Ok(())
    };
    write().map_err(|error: anyhow::Error| anyhow!("{} cannot be written: {error}", path.display()))
}
