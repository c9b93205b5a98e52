//! Checks an output path before the output is computed.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::{Error, Result};

/// The file that the output replaces or creates: `path`, or its target if `path` is a symbolic
/// link.
///
/// # Errors
/// - [`Error::OutputNotAFile`] for a directory, a device or a path without a file name
/// - [`Error::DanglingLink`] for a symbolic link to a missing file
/// - [`Error::NoDirectory`] if the directory of `path` does not exist
/// - [`Error::Write`] if the target of a symbolic link exists, but its path cannot be resolved
///
/// # Examples
/// ```
/// use std::path::Path;
///
/// assert_eq!(corpus::output_path(Path::new("new.npy"))?, Path::new("new.npy"));
/// let error = corpus::output_path(Path::new("missing/new.npy")).unwrap_err();
/// assert!(matches!(error, corpus::Error::NoDirectory { .. }));
/// # Ok::<(), corpus::Error>(())
/// ```
pub fn output_path(path: &Path) -> Result<PathBuf> {
    let not_a_file = |got| Error::OutputNotAFile { path: path.to_path_buf(), got };
    if let Ok(found) = fs::metadata(path) {
        if !found.is_file() {
            return Err(not_a_file(if found.is_dir() {
                "a directory"
            } else {
                "not a regular file"
            }));
        }
        let resolved = if path.is_symlink() { fs::canonicalize(path) } else { Ok(path.into()) };
        return resolved.map_err(|source| Error::Write { path: path.to_path_buf(), source });
    }
    if path.is_symlink() {
        return Err(Error::DanglingLink { path: path.to_path_buf() });
    }
    if path.file_name().is_none() {
        return Err(not_a_file("not a file name"));
    }
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    if directory.is_some_and(|directory| !directory.is_dir()) {
        return Err(Error::NoDirectory { path: path.to_path_buf() });
    }
    Ok(path.to_path_buf())
}
